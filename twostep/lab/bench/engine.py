"""`twostep bench engine`: one engine on one device, no network. Each batch is run twice, so that neither phase disturbs the other:

    prefill   B prompts at once, each held after its first token      |<---- TTFT of each ---->|
    decode    the same prompts again, prefilled unmeasured; then B tokens a step to the end    |<- TPOT: time between steps ->|

Prompts are random and nothing is cached. Times are those of the host: a token counts when its step's output is there.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from twostep.engine.batch import Runner
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.types import EngineRequest, StepOutput
from twostep.errors import InternalError, SetupError
from twostep.lab.bench.roofline import Bound, DeviceLimits, ModelShape, Work
from twostep.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    batch: int
    prompt_tokens: int
    output_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """One phase of a scenario."""

    tokens: int
    seconds: float
    mfu: float
    mbu: float
    bound: Bound
    floor_s: float  # of a step, for decode; of the whole phase, for prefill

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    scenario: Scenario
    ttft_s: Sequence[float]  # of each prompt, in the order they came
    tpot_s: Sequence[float]  # of each step in which all sequences decode
    prefill: PhaseResult
    decode: PhaseResult


def run_scenario(runner: Runner, shape: ModelShape, limits: DeviceLimits, scenario: Scenario, budget: int) -> ScenarioResult:
    """Raises SetupError if the pool cannot hold the scenario at once."""
    check_room(runner, scenario)
    config = EngineConfig(
        max_num_batched_tokens=max(budget, scenario.batch),
        max_num_seqs=scenario.batch,
        max_waiting=scenario.batch,
        enable_prefix_caching=False,
        hash_unit=runner.kv_shape.block_size,
    )
    requests = _requests(scenario, runner.vocab_size)
    ttft, num_steps, prefill_s = _prefill(Engine(runner, config), requests)
    contexts, gaps, num_tokens, decode_s = _decode(Engine(runner, config), requests)
    if not gaps:
        raise SetupError(f"no step decoded all {scenario.batch} sequences; give more --output-tokens, or a smaller --batch-size")
    num_prompt_tokens = scenario.batch * scenario.prompt_tokens
    tpot = statistics.median(gaps)
    return ScenarioResult(
        scenario=scenario,
        ttft_s=ttft,
        tpot_s=gaps,
        prefill=_phase(
            shape.prefill([scenario.prompt_tokens] * scenario.batch, num_steps),
            limits,
            work_s=prefill_s,
            tokens=num_prompt_tokens,
            seconds=prefill_s,
        ),
        decode=_phase(
            shape.decode([round(statistics.fmean(contexts))] * scenario.batch), limits, work_s=tpot, tokens=num_tokens, seconds=decode_s
        ),
    )


def _prefill(engine: Engine, requests: Sequence[EngineRequest]) -> tuple[list[float], int, float]:
    """Time to each first token, number of steps, seconds."""
    ttft: list[float] = []
    num_steps = 0
    began = time.perf_counter()
    for request in requests:
        engine.submit(request, hold=True)
    while len(ttft) < len(requests):
        output = _step(engine)
        num_steps += output.num_prefill_tokens > 0
        ttft += [time.perf_counter() - began] * len(output.tokens)
    seconds = time.perf_counter() - began
    for request in requests:
        engine.release(request.seq_id)
    engine.settle_launched()
    return ttft, num_steps, seconds


def _decode(engine: Engine, requests: Sequence[EngineRequest]) -> tuple[list[int], list[float], int, float]:
    """Context and duration of each step in which all decode, tokens of all steps, seconds."""
    for request in requests:
        engine.submit(request)
    lengths = {request.seq_id: len(request.token_ids) for request in requests}
    waiting = set(lengths)
    while waiting:
        output = _step(engine)
        for token in output.tokens:
            waiting.discard(token.seq_id)
            lengths[token.seq_id] += 1
    contexts, gaps, num_tokens = [], [], 0
    began = last = time.perf_counter()
    while engine.stats().num_running:
        output = _step(engine)
        now = time.perf_counter()
        num_tokens += len(output.tokens)
        if len(output.tokens) == len(requests):
            contexts.append(round(statistics.fmean(lengths.values())))
            gaps.append(now - last)
        for token in output.tokens:
            lengths[token.seq_id] += 1
        last = now
    return contexts, gaps, num_tokens, last - began


def _step(engine: Engine) -> StepOutput:
    output = engine.step()
    if output.failures:
        raise InternalError(output.failures[0].message)
    return output


def _phase(work: Work, limits: DeviceLimits, *, work_s: float, tokens: int, seconds: float) -> PhaseResult:
    """`work` took `work_s`; the phase as a whole made `tokens` in `seconds`."""
    return PhaseResult(
        tokens=tokens,
        seconds=seconds,
        mfu=work.mfu(work_s, limits),
        mbu=work.mbu(work_s, limits),
        bound=work.bound(limits),
        floor_s=work.floor_s(limits),
    )


def _requests(scenario: Scenario, vocab_size: int) -> list[EngineRequest]:
    rng = random.Random(scenario.seed)
    params = SamplingParams(max_tokens=scenario.output_tokens, temperature=scenario.temperature, seed=scenario.seed, ignore_eos=True)
    return [
        EngineRequest(
            seq_id=f"bench-{i}",
            token_ids=[rng.randrange(vocab_size) for _ in range(scenario.prompt_tokens)],
            num_prompt_tokens=scenario.prompt_tokens,
            sampling=params,
        )
        for i in range(scenario.batch)
    ]


def check_context(prompt_tokens: int, output_tokens: int, longest: int) -> None:
    """`longest`: tokens of the model's context. Raises SetupError."""
    if prompt_tokens + output_tokens > longest:
        raise SetupError(
            f"{prompt_tokens} + {output_tokens} tokens are more than the model's context of {longest}; "
            "lower --input-tokens or --output-tokens"
        )


def check_room(runner: Runner, scenario: Scenario) -> None:
    """Raises SetupError if the pool cannot hold the scenario at once."""
    check_context(scenario.prompt_tokens, scenario.output_tokens, runner.max_model_len)
    shape = runner.kv_shape
    needed = scenario.batch * -(-(scenario.prompt_tokens + scenario.output_tokens) // shape.block_size)
    if needed > shape.num_blocks:
        raise SetupError(
            f"a batch of {scenario.batch} needs {needed} KV blocks and the pool has {shape.num_blocks}; give a smaller --batch-size, "
            "fewer tokens, or --kv-cache-memory-bytes"
        )
