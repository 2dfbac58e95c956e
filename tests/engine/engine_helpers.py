"""What the engine's tests share: requests, the answer worked out by hand, and hooks into the fake device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twostep.engine.batch import Batch, InFlight, Sampled
from twostep.engine.engine import Engine
from twostep.engine.fake import FakeRunner, fake_next_token
from twostep.engine.types import EngineRequest, FinishReason, StepOutput, TokenOutput
from twostep.request_class import RequestClass
from twostep.sampling_params import SamplingParams

KEY = b"a tenant's key"


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
    )


def expected_answer(request: EngineRequest, *, vocab_size: int, max_model_len: int) -> tuple[list[int], FinishReason]:
    """All tokens still to come for a request, by the rules and without any engine."""
    params = request.sampling
    stop = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_token_ids))
    tokens = list(request.token_ids)
    answer: list[int] = []
    while True:
        position = len(tokens) - request.num_prompt_tokens
        token = fake_next_token(tokens, vocab_size)
        while token in stop and position < params.min_tokens:
            token = (token + 1) % vocab_size
        tokens.append(token)
        answer.append(token)
        if token in stop:
            return answer, FinishReason.STOP
        if position + 1 >= params.max_tokens or len(tokens) >= max_model_len:
            return answer, FinishReason.LENGTH


class HookedRunner(FakeRunner):
    """A fake device that calls `during` in the middle of every run, after the KV was written, `launching` at every launch, and, where it
    marks layers, `computing` before each of them."""

    during: Callable[[Batch], object] | None = None
    computing: Callable[[int], object] | None = None
    launching: Callable[[Batch], object] | None = None
    copies = 0

    def launch(self, batch: Batch) -> InFlight:
        if self.launching is not None:
            self.launching(batch)
        return super().launch(batch)

    def run(self, batch: Batch) -> Sampled:
        sampled = super().run(batch)
        if self.during is not None:
            self.during(batch)
        return sampled

    def _compute(self, layer: int, seconds: float) -> None:
        super()._compute(layer, seconds)
        if self.computing is not None:
            self.computing(layer)

    def copy_block(self, source: int, target: int) -> None:
        self.copies += 1
        super().copy_block(source, target)


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
