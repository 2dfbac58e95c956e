"""Holds the demand on a deployment, as its routers meter it: totals by window and router in Redis. Torch-free and protobuf-free.

twostep:v1:demand:{window}    hash: router id -> DemandTotals as JSON, signed, of that router in that window of WINDOW_S seconds of
                              Redis' clock

Totals, never increments: an exchange that broke may be repeated as it is, and a router that dies takes nothing away. One that leaves
says so in its last word: of one that falls silent without it, it is unknown whether it is gone or serves on, cut off from Redis.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from twostep.cluster.signed import Signer
from twostep.errors import Unauthenticated

WINDOW_S = 5
# What was asked for in a window is still read so long, to learn lengths of answers from.
KEPT_WINDOWS = 24
TTL_S = (KEPT_WINDOWS + 2) * WINDOW_S
# How late a router's totals of a window may come: it writes once a second, and clocks differ.
LATE_S = 1.5
# Routers of one deployment: fields beyond are not read.
MAX_ROUTERS = 1024
# No router counts more in a window: a total that says so is damaged.
_MAX_TOTAL = 1 << 62


def demand_key(window: int) -> str:
    return f"twostep:v1:demand:{window}"


def window_of(unix_s: float) -> int:
    """Returns the window that an instant lies in."""
    return int(unix_s // WINDOW_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandTotals:
    """Counts the demand on one router in one window. Each event is counted when it happens, so that a request may be offered in one window
    and end in another: means divide what belongs together."""

    # Requests that came, with their prompts: those among them too that were then refused.
    requests: int = 0
    prompt_tokens: int = 0
    # Refused, or out of time, before any worker had begun with them.
    refused: int = 0
    # Those that got a first token; of their prompts, what was found in prefix caches.
    started: int = 0
    started_prompt_tokens: int = 0
    cached_tokens: int = 0
    uncached_squares: int = 0  # sum of the squares of what was not found
    # Ended, whole or not, after a first token.
    ended: int = 0
    output_tokens: int = 0
    # Answers held to a target, and those that kept it. A refused request has not kept its time to the first token.
    ttft_total: int = 0
    ttft_met: int = 0
    tpot_total: int = 0
    tpot_met: int = 0
    # Waiting in the router as it last wrote: not a total.
    queued: int = 0
    # 1: it leaves, and this is its last word.
    left: int = 0
    # Of those that came, the ones that name a time to their first token: they are refused rather than late.
    promised: int = 0

    def to_json(self) -> str:
        return json.dumps(list(dataclasses.astuple(self)), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> DemandTotals | None:
        """Reads totals; None for what makes no sense. Fields that a newer router has more are passed over; those that an older one has not
        are 0."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= _MAX_TOTAL for value in values):
            return None
        return cls(**dict(zip(_NAMES, values, strict=False)))

    def __add__(self, other: DemandTotals) -> DemandTotals:
        return DemandTotals(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})


_NAMES = tuple(field.name for field in dataclasses.fields(DemandTotals))
NOTHING = DemandTotals()


def signed_totals(signer: Signer, window: int, router_id: str, totals: DemandTotals) -> str:
    """Returns totals as the router writes them."""
    return signer.sign_value(totals.to_json(), str(window), router_id)


def said_in(signer: Signer, window: int, fields: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Returns what routers of this deployment wrote in `window`, without the signatures. Leaves out what is not signed by them."""
    found = {}
    for router, text in fields.items():
        try:
            found[router] = signer.read_value(text, str(window), router.decode(errors="replace"))
        except Unauthenticated:
            continue
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Holds the demand on all routers together: `recent` of the last windows that are over, `kept` of all windows that are kept. `seconds`
    is the time that `recent` covers: windows in which any router wrote. 0: no router has written anything, which is not the same as no
    demand. `silent`: routers that have written of late, do not any more, and did not say that they leave."""

    recent: DemandTotals = NOTHING
    seconds: float = 0.0
    kept: DemandTotals = NOTHING
    queued: int = 0
    num_routers: int = 0
    silent: tuple[str, ...] = ()


def windows_to_read(now_s: float) -> list[int]:
    """Returns the windows, the oldest first; the last one is not over yet."""
    last = window_of(now_s)
    return list(range(last - KEPT_WINDOWS, last + 1))


def demand_of(fields: Mapping[int, Mapping[bytes, bytes]], *, now_s: float, span_s: float) -> Demand:
    """Returns the demand from the hashes of windows_to_read. `recent` is of the last `span_s` seconds before those that may still change;
    one window at least. Damaged fields are passed over."""
    last_over = window_of(now_s - LATE_S) - 1
    first = last_over - max(1, round(span_s / WINDOW_S)) + 1
    kept, recent = NOTHING, NOTHING
    seen = 0
    # The newest word of each router that it has said of late: one that is gone has nothing waiting.
    queued: dict[bytes, int] = {}
    unheard: set[bytes] = set()
    for window in sorted(fields):
        said = list(_known(fields[window].items()))
        for router, totals in said:
            kept += totals
            if totals.left or window >= last_over:
                unheard.discard(router)
            else:
                unheard.add(router)
            if window >= last_over:
                queued[router] = totals.queued
        if said and first <= window <= last_over:
            seen += 1
            for _, totals in said:
                recent += totals
    return Demand(
        recent=recent,
        seconds=float(seen * WINDOW_S),
        kept=kept,
        queued=sum(queued.values()),
        num_routers=len(queued),
        silent=tuple(sorted(router.decode(errors="replace") for router in unheard)),
    )


def _known(fields: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, DemandTotals]]:
    for number, (router, text) in enumerate(fields):
        totals = DemandTotals.from_json(text)
        if totals is not None and number < MAX_ROUTERS:
            yield router, totals
