"""Keeps what an operator looks for when clients complain: requests under way, those that ended last, those that kept their clients waiting
longest of late, and what each tenant uses. Names, figures and workers: never a prompt, an answer or a message of an error, which may quote
a prompt.

wait    the longest time in which a client got nothing: until the first token, between two tokens, or until it was given up. A long answer
        is not slow for being long.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from router.request.report import RequestReport, span_parts
from router.waiting.fair_queue import Quota
from twostep.process.tracing import trace_id_of
from twostep.request_class import RequestClass

MAX_RECENT = 100
MAX_SLOWEST = 20
MAX_SHOWN = 50
# How far back the slowest ones reach, and over how long tenants' tokens are counted.
SLOWEST_S = 600.0
MINUTE_S = 60.0
_STEP_S = 60.0

# As the page gets it: plain values by name.
Described = Mapping[str, Any]


class RequestBook:
    """begin() and ended() around each request, tick() once a second. All on the event loop; times are seconds of `clock`."""

    def __init__(self, quota: Quota, *, clock: Callable[[], float] = time.monotonic, unix: Callable[[], float] = time.time) -> None:
        self._quota, self._clock, self._unix = quota, clock, unix
        self._live: dict[int, RequestReport] = {}
        self._recent: deque[Described] = deque(maxlen=MAX_RECENT)
        # By steps of a minute, the newest last: the slowest of each.
        self._slow: deque[tuple[int, list[Described]]] = deque(maxlen=int(SLOWEST_S / _STEP_S) + 1)
        self._counted: dict[int, int] = {}  # tokens of live requests that their tenants' minutes hold already
        self._ticks: deque[tuple[float, Counter[str]]] = deque()
        self._since_tick: Counter[str] = Counter()
        self._minute: Counter[str] = Counter()

    def begin(self, report: RequestReport) -> None:
        self._live[id(report)] = report

    def ended(self, report: RequestReport) -> None:
        """Notes that a request has ended and its status is known. A request that could not even be read is not kept: whoever sends many of
        them would push out all others."""
        self._count(report)
        self._live.pop(id(report), None)
        self._counted.pop(id(report), None)
        if report.job is None:
            return
        described = self._described(report)
        self._recent.append(described)
        if report.request_class is not RequestClass.BATCH:
            self._note_slow(described)

    def tick(self) -> None:
        """Counts the tokens of the second that was: less than a millisecond for a thousand requests."""
        for report in self._live.values():
            self._count(report)
        now = self._clock()
        self._ticks.append((now, self._since_tick))
        self._minute.update(self._since_tick)
        self._since_tick = Counter()
        while self._ticks[0][0] <= now - MINUTE_S:
            self._minute.subtract(self._ticks.popleft()[1])
        if any(not tokens for tokens in self._minute.values()):
            self._minute = +self._minute

    def requests(self) -> dict[str, Any]:
        """Returns {"num_live", "live", "recent", "slowest"}: under way the longest silent first, ended the newest first, slow the slowest
        first."""
        return {
            "num_live": len(self._live),
            "live": [self._described(report) for report in heapq.nsmallest(MAX_SHOWN, self._live.values(), key=_heard_of)],
            "recent": list(reversed(self._recent)),
            "slowest": self._slowest(),
        }

    def tenants(self) -> dict[str, Any]:
        """Returns {"num_tenants", "tenants"}, those with most to do first. `share`: of the system, among those that have requests now;
        `tokens`: of prompts that were computed and answers, here in the last minute."""
        running, waiting = Counter[str](), Counter[str]()
        for report in self._live.values():
            if report.job is not None:
                (running if report.placed else waiting)[report.job.tenant] += 1
        weights = {name: self._quota.weight(name) for name in running | waiting}
        total = sum(weights.values())
        used = self._minute + self._since_tick
        names = {*weights, *used}
        shown: list[dict[str, Any]] = [
            {
                "tenant": name,
                "running": running[name],
                "waiting": waiting[name],
                "tokens": used[name],
                "weight": self._quota.weight(name),
                "share": weights[name] / total if name in weights else None,
            }
            for name in names
        ]
        busiest = heapq.nlargest(MAX_SHOWN, shown, key=lambda each: (each["tokens"], each["running"] + each["waiting"], each["tenant"]))
        limits = {"max_inflight": self._quota.max_inflight, "max_waiting": self._quota.max_waiting}
        return {"num_tenants": len(names), "tenants": busiest, **limits}

    # ---- the parts ---------------------------------------------------------------------------------------------------------

    def _note_slow(self, described: Described) -> None:
        step = int(self._clock() // _STEP_S)
        if not self._slow or self._slow[-1][0] != step:
            self._slow.append((step, []))
        kept = self._slow[-1][1]
        kept.append(described)
        if len(kept) > 2 * MAX_SLOWEST:
            kept[:] = _slowest_of(kept)

    def _slowest(self) -> list[Described]:
        oldest = int((self._clock() - SLOWEST_S) // _STEP_S)
        return _slowest_of(described for step, kept in self._slow if step >= oldest for described in kept)

    def _count(self, report: RequestReport) -> None:
        if report.job is None:
            return
        tokens = max(0, report.num_output_tokens) + (0 if report.first_token_at is None else report.num_prompt_tokens)
        more = tokens - self._counted.get(id(report), 0)
        if more > 0:
            self._counted[id(report)] = tokens
            self._since_tick[report.job.tenant] += more

    def _described(self, report: RequestReport) -> Described:
        """Describes a request that has ended, or one as far as it is."""
        now = self._clock()
        silent_s = now - _heard_of(report)
        first_s = now - report.started if report.ttft_s is None else report.ttft_s
        trace_id = trace_id_of(report.metadata) if report.span is None or report.span.recording else ""
        job = report.job
        return {
            "request_id": report.request_id,
            "trace_id": trace_id,
            "tenant": "" if job is None else job.tenant,
            "request_class": report.class_name,
            "status": report.status,
            "began_unix_s": self._unix() - (now - report.started),
            "total_s": now - report.started,
            "wait_s": max(first_s, report.longest_gap_s, 0.0 if report.status == "OK" else silent_s),
            "silent_s": silent_s,
            "ttft_s": report.ttft_s,
            "longest_gap_s": report.longest_gap_s,
            "prompt_tokens": report.num_prompt_tokens,
            "cached_tokens": report.cached_tokens,
            "output_tokens": max(0, report.num_output_tokens),
            "attempts": report.attempts,
            "prefill_worker": report.transfer.prefill_worker,
            "decode_worker": report.transfer.decode_worker,
            "transport": report.transfer.transport,
            "why": "" if report.placement is None else report.placement.why,
            "predicted_ttft_s": None if report.placement is None else report.placement.predicted_ttft_s,
            "phases": {part.name: max(0.0, part.end - part.start) for part in span_parts(report, now)},
        }


def _heard_of(report: RequestReport) -> float:
    """Returns when its client got something last."""
    return report.started if report.last_token_at is None else report.last_token_at


def _slowest_of(requests: Iterable[Described]) -> list[Described]:
    return heapq.nlargest(MAX_SLOWEST, requests, key=lambda each: float(each["wait_s"]))
