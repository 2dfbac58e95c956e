"""Tells where the time of requests went: phases up to the second token, and a cause for each long gap. Pure.

The client's times say how long, the router's account (End.phases, End.gaps) says why. What of a time the router's account does not have
is between router and client. A server that tells nothing leaves all of it unexplained.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from twostep.lab.bench.serve.metrics import Distribution, gaps_s
from twostep.lab.bench.serve.record import RequestRecord

# In the order in which they happen.
FIRST_TOKEN_PARTS = {
    "wait": "in the router's queues, for a place or for a worker",
    "route": "tokenize, look up prefixes, place, reserve",
    "queue": "in the worker that computes the prompt",
    "prefill": "the prompt is computed",
    "network": "to the router, and the first token's way back to the client",
    "untold": "the server does not tell",
}
SECOND_TOKEN_PARTS = {
    "publish": "rest of the KV cache, after the first token",
    "fetch": "what the decode worker had not taken by then",
    "first_decode": "until the decode worker's first token",
    "other": "between, and the token's way to the client",
    "untold": "the server does not tell",
}
CAUSES = {
    "hand-over": "first to second token: the KV cache was on its way",
    "mixed step": "the step computed prompt tokens of others too",
    "decode step": "the step was slow, with nothing but tokens in it",
    "preempted": "steps ran without this sequence: preempted or swapped out",
    "between steps": "no step ran: the engine was held up",
    "worker late": "from the end of the step to the connection: the worker's host",
    "to the router": "network, or the router's event loop",
    "to the client": "router, network, or the load generator itself",
    "migration": "a worker was lost; the answer went on at another",
    "replay": "a connection broke, and was open again",
    "untold": "the server does not tell",
}
_PARTS = {
    "hand_over_s": "hand-over",
    "migration_s": "migration",
    "replay_s": "replay",
    "late_s": "worker late",
    "network_s": "to the router",
}
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
# A percentile's parts are the means over the requests about it, so many of all to each side.
_ABOUT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class LongGap:
    """One gap of one request: `ended_s` in seconds since the run's start, `parts_s` by cause, together not more than the gap."""

    request: int
    position: int  # of the token that ended it
    ended_s: float
    gap_s: float
    cause: str
    parts_s: Mapping[str, float] = field(repr=False)
    prompt_tokens: int = 0  # in the step that computed the token
    decodes: int = 0
    steps_missed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseFigures:
    count: int
    sum_s: float
    p50_s: float
    p99_s: float
    max_s: float


def long_gaps(record: RequestRecord, bound_s: float | None) -> list[LongGap]:
    """Returns a request's gaps above the bound, and its longest in any case, by position."""
    gaps = gaps_s(record.times_s)
    if not record.completed or not gaps:
        return []
    longest = max(range(len(gaps)), key=gaps.__getitem__)
    usual_s = statistics.median_low(sorted(gaps)[:-1] or [0.0])  # of the others
    # The first position of each message.
    begins = [0, *accumulate(record.num_tokens)]
    told: dict[int, list[Mapping[str, float]]] = defaultdict(list)
    for gap in record.gaps:
        told[bisect_right(begins, gap["position"]) - 1].append(gap)
    # The router tells of the longest ones: any other was no longer there than the shortest of these.
    untold_s = min((gap["gap_s"] for gap in record.gaps), default=None)
    wanted = [i for i, gap_s in enumerate(gaps) if i == longest or (bound_s is not None and gap_s > bound_s)]
    return [_explained(record, i + 1, gaps[i], usual_s, told.get(i + 1, ()), untold_s, begins[i + 1]) for i in wanted]


def _explained(
    record: RequestRecord,
    message: int,
    gap_s: float,
    usual_s: float,
    told: Sequence[Mapping[str, float]],
    untold_s: float | None,
    position: int,
) -> LongGap:
    """`told`: of the tokens that came in the message. The cause is the largest part, of the step what is beyond the usual gap."""
    facts = max(told, key=lambda gap: gap["gap_s"], default={})
    prompt_tokens, missed = int(facts.get("prompt_tokens", 0)), int(facts.get("steps_missed", 0))
    step = "mixed step" if prompt_tokens else "decode step"
    parts: dict[str, float] = defaultdict(float)
    for gap in told:
        for name, cause in _PARTS.items():
            parts[cause] += gap.get(name, 0.0)
        parts[step] += gap.get("step_s", 0.0)
        parts["preempted" if missed else "between steps"] += gap.get("outside_s", 0.0)
    known_s = sum(gap["gap_s"] for gap in told) if told else (gap_s if untold_s is None else min(gap_s, untold_s))
    parts["untold"] += max(0.0, known_s - sum(parts.values()))
    parts["to the client"] += gap_s - known_s
    usually = step if told else "untold"
    beyond = {cause: seconds - usual_s * (cause == usually) for cause, seconds in parts.items()}
    return LongGap(
        request=record.index,
        position=position,
        ended_s=record.times_s[message],
        gap_s=gap_s,
        cause=max(beyond, key=beyond.__getitem__),
        parts_s={cause: seconds for cause, seconds in parts.items() if seconds > 0},
        prompt_tokens=prompt_tokens,
        decodes=int(facts.get("decodes", 0)),
        steps_missed=missed,
    )


def by_cause(gaps: Iterable[LongGap]) -> dict[str, CauseFigures]:
    """Returns the causes that there were, in the order of CAUSES."""
    times: dict[str, list[float]] = {cause: [] for cause in CAUSES}
    for gap in gaps:
        times[gap.cause].append(gap.gap_s)
    figures = {cause: Distribution.of(found) for cause, found in times.items() if found}
    return {c: CauseFigures(count=d.count, sum_s=d.mean * d.count, p50_s=d.p50, p99_s=d.p99, max_s=d.max) for c, d in figures.items()}


def first_token_parts(record: RequestRecord) -> dict[str, float]:
    """Returns the parts of the client's TTFT, seconds by name, as far as the server tells."""
    ttft_s, phases = record.times_s[0] - record.sent_s, record.phases
    if not phases:
        return {"untold": ttft_s}
    told = {name: phases.get(f"{name}_s", 0.0) for name in ("wait", "route", "queue", "prefill")}
    told["route"] = max(0.0, told["route"] - told["wait"])
    return told | {"network": max(0.0, ttft_s - sum(told.values()))}


def second_token_parts(record: RequestRecord) -> dict[str, float]:
    """Returns the parts of the client's first gap, likewise."""
    gap_s, phases = record.times_s[1] - record.times_s[0], record.phases
    if not phases:
        return {"untold": gap_s}
    told: dict[str, float] = {}
    left_s = gap_s
    for name in ("publish", "fetch", "first_decode"):
        told[name] = min(left_s, phases.get(f"{name}_s", 0.0))
        left_s -= told[name]
    return told | {"other": left_s}


def parts_at(records: Sequence[RequestRecord], parts_of: Callable[[RequestRecord], dict[str, float]]) -> dict[str, dict[str, float]]:
    """Returns the parts of the median, the 95th and the 99th percentile: the means over the requests about it."""
    ordered = sorted(map(parts_of, records), key=lambda parts: sum(parts.values()))
    if not ordered:
        return {}
    found = {}
    for name, share in SHARES.items():
        at, about = round(share * (len(ordered) - 1)), round(_ABOUT * len(ordered))
        near = ordered[max(0, at - about) : at + about + 1]
        found[name] = {part: sum(parts.get(part, 0.0) for parts in near) / len(near) for part in dict.fromkeys(chain(*near))}
    return found
