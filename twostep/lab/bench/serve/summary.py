"""All figures of one run, out of its records. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twostep.lab.bench.serve.causes import CauseFigures, by_cause, first_token_parts, long_gaps, parts_at, second_token_parts
from twostep.lab.bench.serve.metrics import Distribution, Goodput, LatencyTargets, gaps_s, goodput, latency_of
from twostep.lab.bench.serve.record import REFUSED, RequestRecord


@dataclass(frozen=True, slots=True)
class Window:
    """A span of a run, in seconds since its start; the end does not belong to it."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def __contains__(self, at_s: float) -> bool:
        return self.start_s <= at_s < self.end_s


@dataclass(frozen=True, slots=True)
class Windows:
    """`arrivals`: in which measured requests came; goodput and the offered rate refer to it. `busy`: in which work is counted;
    throughput refers to it. They differ only where a number of requests, not a duration, ends the run."""

    arrivals: Window
    busy: Window

    @classmethod
    def of_duration(cls, warmup_s: float, duration_s: float) -> Windows:
        """Both are the duration after the warm-up: in a steady state as much work flows in at its start as flows out at its end."""
        window = Window(warmup_s, warmup_s + duration_s)
        return cls(window, window)

    @classmethod
    def of_requests(cls, records: Sequence[RequestRecord], *, open_loop: bool) -> Windows:
        """A run of n measured requests. Busy: first sending to last end. Arrivals: in open loop, n times the mean gap between arrivals
        (100 requests, one every 0.6 s, are a minute's); else, or if all came at once, or of conversations, whose later turns come when
        answers allow, the busy window."""
        measured = [r for r in records if r.measured]
        if not measured:
            return cls(Window(0.0, 0.0), Window(0.0, 0.0))
        busy = Window(
            min((r.sent_s for r in measured if not math.isnan(r.sent_s)), default=0.0),
            # The last end belongs to it.
            math.nextafter(max((r.ended_s for r in measured if not math.isnan(r.ended_s)), default=0.0), math.inf),
        )
        came = sorted(r.scheduled_s for r in measured)
        if not open_loop or any(r.turn for r in measured) or len(came) < 2 or came[-1] == came[0]:
            return cls(busy, busy)
        span = came[-1] - came[0]
        return cls(Window(came[0], came[0] + span * len(came) / (len(came) - 1)), busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Work that got done within the window, of whichever request, over its length."""

    window_s: float
    requests_per_s: float  # answers completed
    input_tokens_per_s: float  # prompt tokens, cached ones included, of the requests whose first token came
    output_tokens_per_s: float
    mean_concurrency: float  # requests under way, on average over the window (from sending to end)

    @property
    def requests_per_minute(self) -> float:
        return self.requests_per_s * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    num_requests: int  # measured ones; figures below are theirs, unless they say otherwise
    num_completed: int
    num_refused: int
    errors: dict[str, int]  # requests that were not answered, refusals included, by kind
    error_messages: dict[str, str]  # one message of each kind
    offered_rate: float  # requests that came, per second
    throughput: Throughput
    goodput: Goodput | None  # None: no targets were given
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    longest_gap_s: Distribution
    e2e_s: Distribution
    user_tokens_per_s: Distribution
    """1 / TPOT: the speed at which one user's answer runs. Its slow end is at the low percentiles: `min`, not `max`."""
    tokens_per_message: Distribution
    """Above 1, ITL, which is between messages, is longer than TPOT, which is of tokens."""
    prompt_tokens: Distribution
    output_tokens: Distribution
    cached_share: float  # prompt tokens that came out of a cache / all prompt tokens, where the server tells
    phases_s: dict[str, Distribution]
    first_token_parts_s: dict[str, dict[str, float]]  # of TTFT's percentiles, by part
    second_token_parts_s: dict[str, dict[str, float]]  # of the first gap's
    gaps_by_cause: dict[str, CauseFigures]  # each request's longest gap, and all above the target
    slip_s: Distribution


def summarize(
    records: Sequence[RequestRecord],
    windows: Windows,
    *,
    targets: LatencyTargets | None = None,
    num_gpus: int | None = None,
) -> Summary:
    measured = [r for r in records if r.measured]
    latencies = [latency_of(r) for r in measured]
    done = [latency for latency in latencies if latency is not None]
    completed = [r for r in measured if r.completed]
    errors = Counter(r.error for r in measured if r.error)
    good = goodput(latencies, targets, windows.arrivals.length_s, num_gpus) if targets else None
    answered = [r for r in completed if r.times_s]
    bound_s = None if targets is None or targets.gap_ms is None else targets.gap_ms / 1e3
    prompts = sum(r.prompt_tokens for r in completed)
    return Summary(
        num_requests=len(measured),
        num_completed=len(completed),
        num_refused=errors[REFUSED],
        errors=dict(errors.most_common()),
        error_messages={r.error: r.message for r in reversed(measured) if r.error},
        offered_rate=len(measured) / windows.arrivals.length_s if windows.arrivals.length_s > 0 else math.nan,
        throughput=throughput(records, windows.busy),
        goodput=good,
        ttft_s=Distribution.of(x.ttft_s for x in done),
        tpot_s=Distribution.of(_there(x.tpot_s for x in done)),
        itl_s=Distribution.of(gap for r in completed for gap in gaps_s(r.times_s)),
        longest_gap_s=Distribution.of(_there(x.longest_gap_s for x in done)),
        e2e_s=Distribution.of(x.e2e_s for x in done),
        user_tokens_per_s=Distribution.of(1 / x.tpot_s for x in done if x.tpot_s),
        tokens_per_message=Distribution.of(n for r in completed for n in r.num_tokens),
        prompt_tokens=Distribution.of(r.prompt_tokens for r in completed),
        output_tokens=Distribution.of(r.output_tokens for r in completed),
        cached_share=sum(r.cached_tokens for r in completed) / prompts if prompts else math.nan,
        phases_s=_phases(completed),
        first_token_parts_s=parts_at(answered, first_token_parts),
        second_token_parts_s=parts_at([r for r in answered if len(r.times_s) > 1], second_token_parts),
        gaps_by_cause=by_cause(gap for r in completed for gap in long_gaps(r, bound_s)),
        slip_s=Distribution.of(r.slip_s for r in records if not math.isnan(r.sent_s)),
    )


def throughput(records: Iterable[RequestRecord], window: Window) -> Throughput:
    """All records count, warm-up's too: what the machine did in the window is what it can do."""
    requests = prompts = tokens = 0
    under_way = 0.0
    for r in records:
        if math.isnan(r.sent_s):
            continue
        if not math.isnan(r.ended_s):
            requests += r.completed and r.ended_s in window
            under_way += max(0.0, min(r.ended_s, window.end_s) - max(r.sent_s, window.start_s))
        if r.times_s and r.times_s[0] in window:
            prompts += r.prompt_tokens
        tokens += sum(n for at, n in zip(r.times_s, r.num_tokens, strict=True) if at in window)
    length = window.length_s
    if length <= 0:
        nan = math.nan
        return Throughput(window_s=0.0, requests_per_s=nan, input_tokens_per_s=nan, output_tokens_per_s=nan, mean_concurrency=nan)
    return Throughput(
        window_s=length,
        requests_per_s=requests / length,
        input_tokens_per_s=prompts / length,
        output_tokens_per_s=tokens / length,
        mean_concurrency=under_way / length,
    )


def _phases(completed: Sequence[RequestRecord]) -> dict[str, Distribution]:
    names: dict[str, None] = dict.fromkeys(name for r in completed for name in r.phases or ())
    return {name: Distribution.of(_there((r.phases or {}).get(name) for r in completed)) for name in names}


def _there(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
