"""`twostep bench engine --batching …`: the same requests through one engine, batched in three ways. The first is what the workers do; the
others are what serving systems did before, built here only to be compared with.

    continuous   a request joins the next step with a free seat, and leaves with its last token (Yu et al.: Orca, 2022)
    dynamic      what waits, up to N, or when the oldest has waited for the time-out, runs as one batch to the end of its longest answer
    static       N requests make a batch, which runs to the end of its longest answer

    static, N = 2    |a a a a a a a a|c c .|              c waits for a's end, and for d to arrive
                     |b b            |d d d|
    continuous       |a a a a a a a a|
                     |b b|c c|d d d|

Dynamic and static ones are flattered: a row whose answer has ended costs nothing more, prompts are chunked and mixed as in the workers, and
every token counts when it is there, not at the end of its batch. What differs is who may begin, and when.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from twostep.engine.batch import Runner
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.types import EngineRequest
from twostep.errors import InternalError, SetupError
from twostep.lab.bench.room import check_blocks, check_context
from twostep.sampling_params import SamplingParams

# So that rounding never makes a wait of none.
_LEAST_SLEEP_S = 1e-5


class Batching(Enum):
    CONTINUOUS = "continuous"
    DYNAMIC = "dynamic"
    STATIC = "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`batch`: sequences at once. `timeout_s`: of dynamic batching."""

    batching: Batching
    batch: int
    timeout_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingLoad:
    """Requests that arrive by a Poisson process of `rate` a second; infinite: all at once. Answers have 1 to 2 * `output_tokens` - 1
    tokens, all equally likely, or with `even` exactly `output_tokens`."""

    num_requests: int
    rate: float
    prompt_tokens: int
    output_tokens: int
    even: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """`at_s` since the start."""

    at_s: float
    request: EngineRequest


@dataclass(slots=True)
class RequestTimes:
    """Seconds since the start: its arrival, and each of its tokens."""

    arrived_s: float
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.arrived_s

    @property
    def latency_s(self) -> float:
        return self.tokens_s[-1] - self.arrived_s

    @property
    def longest_gap_s(self) -> float:
        """0 for an answer of one token."""
        return max((b - a for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingResult:
    """`times` in the order of arrival; `seconds` from the first arrival to the last token."""

    rule: Rule
    load: BatchingLoad
    times: Sequence[RequestTimes]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(times.tokens_s) for times in self.times) / self.seconds

    @property
    def requests_per_s(self) -> float:
        return len(self.times) / self.seconds


def num_to_start(rule: Rule, waiting_since: Sequence[float], now: float, *, num_active: int, more_come: bool) -> int:
    """How many of those that wait, first come first, begin now. `num_active`: begun and not ended; `more_come`: whether others arrive
    later. Pure."""
    if rule.batching is Batching.CONTINUOUS:
        return min(len(waiting_since), max(0, rule.batch - num_active))
    if num_active or not waiting_since:
        return 0
    if len(waiting_since) >= rule.batch:
        return rule.batch
    timed_out = rule.batching is Batching.DYNAMIC and now - waiting_since[0] >= rule.timeout_s
    return len(waiting_since) if timed_out or not more_come else 0


def arrivals_of(load: BatchingLoad, vocab_size: int) -> list[Arrival]:
    rng = random.Random(load.seed)
    at_s, arrivals = 0.0, []
    for i in range(load.num_requests):
        if i and load.rate < math.inf:
            at_s += rng.expovariate(load.rate)
        num_tokens = load.output_tokens if load.even else rng.randint(1, 2 * load.output_tokens - 1)
        request = EngineRequest(
            seq_id=f"bench-{i}",
            token_ids=[rng.randrange(vocab_size) for _ in range(load.prompt_tokens)],
            num_prompt_tokens=load.prompt_tokens,
            sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
        )
        arrivals.append(Arrival(at_s, request))
    return arrivals


def run_load(
    runner: Runner,
    load: BatchingLoad,
    rule: Rule,
    budget: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> BatchingResult:
    """`budget`: tokens of a step. Raises SetupError for loads that cannot be run."""
    _check(runner, load, rule)
    engine = Engine(
        runner,
        EngineConfig(
            max_num_batched_tokens=max(budget, rule.batch),
            max_num_seqs=rule.batch,
            max_waiting=rule.batch,
            enable_prefix_caching=False,
            hash_unit=runner.kv_shape.block_size,
        ),
    )
    coming = deque(arrivals_of(load, runner.vocab_size))
    times = {arrival.request.seq_id: RequestTimes(arrival.at_s) for arrival in coming}
    waiting: deque[Arrival] = deque()
    num_active = 0
    began = clock()
    while coming or waiting or num_active:
        now = clock() - began
        while coming and coming[0].at_s <= now:
            waiting.append(coming.popleft())
        since = [arrival.at_s for arrival in waiting]
        for _ in range(num_to_start(rule, since, now, num_active=num_active, more_come=bool(coming))):
            engine.submit(waiting.popleft().request)
            num_active += 1
        if not num_active:
            sleep(max(_LEAST_SLEEP_S, _next_change(rule, coming, waiting) - now))
            continue
        output = engine.step()
        if output.failures:
            raise InternalError(output.failures[0].message)
        now = clock() - began
        for token in output.tokens:
            times[token.seq_id].tokens_s.append(now)
            num_active -= token.finish_reason is not None
    engine.settle_launched()
    return BatchingResult(rule=rule, load=load, times=list(times.values()), seconds=clock() - began)


def _next_change(rule: Rule, coming: Sequence[Arrival], waiting: Sequence[Arrival]) -> float:
    """Returns when a request may begin next, though none does now."""
    changes = [coming[0].at_s] if coming else []
    if waiting and rule.batching is Batching.DYNAMIC:
        changes.append(waiting[0].at_s + rule.timeout_s)
    return min(changes)


def _check(runner: Runner, load: BatchingLoad, rule: Rule) -> None:
    if min(load.num_requests, load.prompt_tokens, load.output_tokens, rule.batch) < 1 or not load.rate > 0 or not rule.timeout_s >= 0:
        raise SetupError("requests, tokens, batch and rate must be above 0, and the time-out not below")
    total = load.prompt_tokens + (load.output_tokens if load.even else 2 * load.output_tokens - 1)
    check_context(load.prompt_tokens, total - load.prompt_tokens, runner.max_model_len)
    check_blocks(rule.batch, total, block_size=runner.kv_shape.block_size, num_blocks=runner.kv_shape.num_blocks)
