"""Helpers of the engine's tests: requests, the answer worked out by hand, and hooks into the fake device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from twostep.engine.batch import Batch, InFlight, LayerRange, Sampled
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.fake import FakeRunner, fake_next_token, state_after
from twostep.engine.proposer import Proposer
from twostep.engine.types import EngineRequest, FinishReason, StepOutput, TokenOutput
from twostep.request_class import RequestClass
from twostep.sampling_params import SamplingParams

KEY = b"a tenant's key"
VOCAB = 1000


def make_request(
    seq_id: str,
    token_ids: Sequence[int],
    *,
    max_tokens: int = 8,
    num_prompt_tokens: int | None = None,
    eos: frozenset[int] = frozenset(),
    key: bytes = KEY,
    request_class: RequestClass = RequestClass.STANDARD,
    tpot_s: float | None = None,
    gap_s: float | None = None,
    **sampling: Any,
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
    return EngineRequest(
        seq_id=seq_id,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=params,
        eos_token_ids=eos,
        prefix_key=key,
        request_class=request_class,
        tpot_s=tpot_s,
        gap_s=gap_s,
    )


def expected_answer(
    request: EngineRequest, *, vocab_size: int, max_model_len: int, window: int = 0, stateful: bool = False, **groups: int
) -> tuple[list[int], FinishReason]:
    """All tokens still to come for a request, by the rules and without any engine. `groups`: as FakeRunner has them."""
    params = request.sampling
    stop = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_token_ids))
    tokens = list(request.token_ids)
    answer: list[int] = []
    # The sum that fake_next_token takes, token by token.
    total = sum(token * (i + 1) for i, token in enumerate(tokens))
    state = state_after(0, tokens) if stateful else 0
    while True:
        position = len(tokens) - request.num_prompt_tokens
        attended = fake_next_token(tokens, vocab_size, window, **groups) if window else total + len(tokens)
        token = (attended + state) % vocab_size
        while token in stop and position < params.min_tokens:
            token = (token + 1) % vocab_size
        tokens.append(token)
        total += token * len(tokens)
        state = state_after(state, [token]) if stateful else 0
        answer.append(token)
        if token in stop:
            return answer, FinishReason.STOP
        if position + 1 >= params.max_tokens or len(tokens) >= max_model_len:
            return answer, FinishReason.LENGTH


def answer_of(request: EngineRequest, context: int = 1 << 20) -> list[int]:
    return expected_answer(request, vocab_size=VOCAB, max_model_len=context)[0]


def ids_of(tokens: Sequence[TokenOutput]) -> list[int]:
    return [token.token_id for token in tokens]


class Clock:
    """In place of the module `time`: seconds pass when a thread sleeps or works."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


class HookedRunner(FakeRunner):
    """A fake device that calls `during` in the middle of every run, after the KV was written, `launching` at every launch, `copying` before
    blocks are copied "out" or "back", and, where it marks layers, `computing` before each of them."""

    during: Callable[[Batch], object] | None = None
    computing: Callable[[int], object] | None = None
    launching: Callable[[Batch], object] | None = None
    copying: Callable[[str], object] | None = None
    # Blocks copied out of the pool and back.
    num_out = num_back = 0

    def launch(self, batch: Batch) -> InFlight:
        if self.launching is not None:
            self.launching(batch)
        return super().launch(batch)

    def run(self, batch: Batch) -> Sampled:
        if batch.state_sources is not None and batch.state_tables is not None:
            # In no order within a step.
            written = batch.state_tables.reshape(-1)
            assert len(np.unique(written)) == len(written), "two sequences leave their states in one place"
            moved = batch.state_sources[(batch.state_sources != batch.state_tables).any(1)]
            assert not np.isin(moved, written).any(), "a state is read while another takes its place"
        sampled = super().run(batch)
        if self.during is not None:
            self.during(batch)
        return sampled

    def _compute(self, layer: int, seconds: float) -> None:
        super()._compute(layer, seconds)
        if self.computing is not None:
            self.computing(layer)

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        if self.copying is not None:
            self.copying("out")
        self.num_out += len(block_ids)
        super().read_blocks(block_ids, out, layers)

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        if self.copying is not None:
            self.copying("back")
        self.num_back += len(block_ids)
        super().write_blocks(block_ids, data, layers)


def engine_of(
    runner: FakeRunner, *, clock: Callable[[], float] = time.monotonic, proposer: Proposer | None = None, **config: Any
) -> Engine:
    return Engine(runner, EngineConfig(**({"hash_unit": runner.kv_shape.block_size} | config)), clock=clock, proposer=proposer)


class KnowingProposer(Proposer):
    """Drafts what the fake device will sample, each token with this probability, and else another one: as many as it may, if `tireless`, or
    some of them."""

    def __init__(self, vocab_size: int, rate: float, seed: int = 0, window: int = 0, *, tireless: bool = False, **groups: int) -> None:
        self._vocab_size = vocab_size
        self._rate = rate
        self._window = window
        self._groups = groups
        self._tireless = tireless
        self._rng = random.Random(seed)
        self.known: set[str] = set()
        self.num_asked = 0

    def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        self.known.add(seq_id)
        self.num_asked += 1
        drafts: list[int] = []
        for _ in range(most if self._tireless else self._rng.randrange(most + 1)):
            token = fake_next_token([*tokens, *drafts], self._vocab_size, self._window, **self._groups)
            drafts.append(token if self._rng.random() < self._rate else self._rng.randrange(self._vocab_size))
        return drafts

    def forget(self, seq_id: str) -> None:
        self.known.discard(seq_id)


def hooked(engine: Engine) -> HookedRunner:
    assert isinstance(engine.runner, HookedRunner)
    return engine.runner


def hand_over(source: Engine, target: Engine, request: EngineRequest) -> tuple[int, int]:
    """Computes the prompt there and commits it here, as the workers do, in one go: returns the first token and how many blocks moved."""
    reservation = target.reserve(request)
    source.submit(request, hold=True)
    tokens, _ = drain(source)
    first = tokens[request.seq_id][0].token_id
    shape = source.runner.kv_shape
    skip = shape.order(len(request.token_ids)).before(reservation.num_cached_tokens // shape.block_size)
    blocks = source.block_ids(request.seq_id)[skip:]
    move_blocks(source, blocks, target, reservation.block_ids[skip : skip + len(blocks)])
    target.commit(request.seq_id, [first])
    source.release(request.seq_id)
    return first, len(blocks)


def move_blocks(source: Engine, from_blocks: Sequence[int], target: Engine, to_blocks: Sequence[int]) -> None:
    data = np.empty((len(from_blocks), source.runner.kv_shape.block_bytes), np.uint8)
    source.runner.read_blocks(from_blocks, data)
    target.runner.write_blocks(to_blocks, data)


def owned(engine: Engine) -> int:
    """Returns how many blocks sequences and steps own."""
    stats = engine.stats()
    return stats.num_blocks - stats.num_available_blocks


def drain(engine: Engine, *, max_steps: int = 10_000) -> tuple[dict[str, list[TokenOutput]], list[StepOutput]]:
    """Steps until a step is empty, with integrity checked after each."""
    tokens: dict[str, list[TokenOutput]] = {}
    steps: list[StepOutput] = []
    for _ in range(max_steps):
        output = engine.step()
        engine.check_integrity()
        if not output.num_prefill_tokens + output.num_decode_tokens:
            return tokens, steps
        steps.append(output)
        for token in output.tokens:
            tokens.setdefault(token.seq_id, []).append(token)
    raise AssertionError(f"no end after {max_steps} steps")


def assert_idle(engine: Engine) -> None:
    """Nothing is owned, nothing is queued, nothing counts as stalled."""
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_reserved, stats.num_held) == (0, 0, 0, 0), stats
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks, stats
    assert stats.stalled_s == 0.0
