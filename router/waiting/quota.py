"""Tenants' quotas: their shares of the system, and bounds on each. And what an answer of theirs is expected to cost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

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
