"""Conversations of 40 turns: every turn finds all that was computed before it, answers included, to the last full block."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from engine_helpers import assert_idle, expected_answer, make_request

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.fake import FakeRunner
from twostep.engine.types import EngineRequest

VOCAB, CONTEXT, BLOCK, TURNS = 1000, 1024, 16, 40


@dataclass
class Conversation:
    """Its turns so far, and how many of its tokens have KV somewhere: all but the last one sampled."""

    name: str
    rng: random.Random
    history: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_turns: int = 0

    def next_turn(self) -> EngineRequest:
        """All that was said before, and some words more."""
        prompt = self.history + [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, 14))]
        request = make_request(f"{self.name}-{self.num_turns}", prompt, max_tokens=self.rng.randrange(2, 14))
        self.num_turns += 1
        return request

    def answered(self, request: EngineRequest, answer: list[int]) -> None:
        assert answer == expected_answer(request, vocab_size=VOCAB, max_model_len=CONTEXT)[0]
        self.num_prompt_tokens = request.num_prompt_tokens
        self.history = [*request.token_ids, *answer]

    @property
    def num_computed(self) -> int:
        return max(0, len(self.history) - 1)


def full(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


def make_engine(num_blocks: int, *, host_blocks: int = 0, look_ahead: bool = False) -> Engine:
    runner = FakeRunner(num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB, max_model_len=CONTEXT)
    host_cache_bytes = host_blocks * runner.kv_shape.block_bytes
    config = EngineConfig(
        max_num_batched_tokens=256, hash_unit=4 * BLOCK, host_cache_bytes=host_cache_bytes, host_ahead_share=1.0, look_ahead=look_ahead
    )
    return Engine(runner, config)


def answer(engine: Engine, request: EngineRequest) -> list[int]:
    tokens: list[int] = []
    while (output := engine.step()).num_prefill_tokens + output.num_decode_tokens:
        tokens += [token.token_id for token in output.tokens]
    engine.check_integrity()
    assert len(tokens) <= request.sampling.max_tokens
    return tokens


def test_a_decode_worker_finds_the_answers_it_gave() -> None:
    """Prompts computed on one worker, answers on another: the first finds the prompts, the second prompts and answers, so that nothing but
    the new words moves."""
    prefill, decode = make_engine(400), make_engine(400)
    talk = Conversation("c", random.Random(5))
    moved = 0
    announced: set[bytes] = set()
    for _ in range(TURNS):
        request = talk.next_turn()
        before = prefill.stats().num_hit_tokens
        prefill.submit(request, hold=True)
        first: list[int] = []
        while not first:
            first = [token.token_id for token in prefill.step().tokens]
        assert prefill.stats().num_hit_tokens - before == full(talk.num_prompt_tokens)
        reservation = decode.reserve(request)
        assert reservation.num_cached_tokens == full(talk.num_computed)
        skip = reservation.num_cached_tokens // BLOCK
        source = prefill.block_ids(request.seq_id)
        data = np.empty((len(source) - skip, prefill.runner.kv_shape.block_bytes), np.uint8)
        prefill.runner.read_blocks(source[skip:], data)
        decode.runner.write_blocks(reservation.block_ids[skip:], data)
        moved += len(source) - skip
        decode.commit(request.seq_id, first)
        prefill.release(request.seq_id)
        talk.answered(request, first + answer(decode, request))
        announced |= set(decode.take_prefix_delta().added)
    assert moved < 2 * TURNS
    assert len(announced) == talk.num_computed // (4 * BLOCK), "blocks of answers are announced like those of prompts"
    assert_idle(prefill)
    assert_idle(decode)


def test_what_does_not_fit_the_pool_is_found_in_the_host() -> None:
    """Four conversations that take turns over a pool for hardly more than one: hits are those of a pool without bounds."""
    engine = make_engine(CONTEXT // BLOCK, host_blocks=1000)
    talks = [Conversation(f"c{i}", random.Random(i)) for i in range(4)]
    num_hits = 0
    for _ in range(TURNS):
        for talk in talks:
            request = talk.next_turn()
            num_hits += full(talk.num_computed)
            engine.submit(request)
            talk.answered(request, answer(engine, request))
    stats = engine.stats()
    assert stats.num_hit_tokens == num_hits
    assert stats.num_host_hit_tokens > num_hits / 3, "the pool alone has a fraction of it"
    assert_idle(engine)
