"""Tenants' quotas: their shares of the system, and bounds on each. And what an answer of theirs is expected to cost."""

from __future__ import annotations

import argparse
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_MIN_WEIGHT, _MAX_WEIGHT = 1e-6, 1e6  # counters are tokens by weight: beyond these, a request is no longer seen in them
_MAX_TENANTS = 4096
# Before anything is known of a tenant: about what clients ask for.
_FIRST_GUESS_TOKENS = 256.0
# Weight of the newest answer in a tenant's mean.
_NEWEST = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Shares are relative: a tenant of weight 2 gets twice the tokens of one of weight 1 while both want more than there is. The bounds are
    requests of one tenant on this router: served at once, and waiting (0: no more than all tenants' together)."""

    weights: Mapping[str, float] = field(default_factory=dict)
    max_inflight: int = 0
    max_waiting: int = 0

    def weight(self, tenant: str) -> float:
        """Returns 1 for a tenant that is not named."""
        return self.weights.get(tenant, 1.0)


EVERYBODY_ALIKE = Quota()


def tenant_weights(text: str) -> dict[str, float]:
    """Type of --tenant-weights: `name=weight` behind commas, or a file with one a line (`#` begins a comment)."""
    path = Path(text)
    try:
        if "=" not in text or path.is_file():
            entries = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
        else:
            entries = [entry.strip() for entry in text.split(",")]
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither name=weight,... nor a readable file: {error}") from None
    weights: dict[str, float] = {}
    for entry in filter(None, entries):
        name, _, number = (part.strip() for part in entry.rpartition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not _MIN_WEIGHT <= weight <= _MAX_WEIGHT:
            raise argparse.ArgumentTypeError(f"{entry!r}: write name=weight, the weight a number from {_MIN_WEIGHT:g} to {_MAX_WEIGHT:g}")
        if name in weights:
            raise argparse.ArgumentTypeError(f"tenant {name!r} has two weights; give it one")
        weights[name] = weight
    return weights


class OutputLengths:
    """Learns how long each tenant's answers are, by a moving mean: queueing reckons with it until an answer is there. Bounded: the
    tenant that was not seen for longest is forgotten."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, float] = OrderedDict()

    def expected(self, tenant: str, max_tokens: int) -> int:
        """Tokens of the next answer, at least one."""
        return max(1, min(max_tokens, round(self._means.get(tenant, _FIRST_GUESS_TOKENS))))

    def observe(self, tenant: str, num_tokens: int) -> None:
        mean = self._means.pop(tenant, float(num_tokens))
        self._means[tenant] = mean + _NEWEST * (num_tokens - mean)
        if len(self._means) > _MAX_TENANTS:
            self._means.popitem(last=False)
