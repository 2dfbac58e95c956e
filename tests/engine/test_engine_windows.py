"""Sequences whose tokens see the last so many keys alone: blocks behind these are free while the sequence goes on."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import VOCAB, HookedRunner, assert_idle, drain, engine_of, expected_answer, hand_over, ids_of, make_request, owned
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.engine.engine import Engine
from twostep.engine.types import EngineRequest

CONTEXT, BLOCK, WINDOW = 200, 4, 10
# Blocks that a decoding sequence owns at most: what is in reach, begun and ended anywhere, and one more.
MOST = WINDOW // BLOCK + 3


def make_engine(*, num_blocks: int, window: int = WINDOW, **options: Any) -> Engine:
    sizes = {"num_blocks": num_blocks, "block_size": BLOCK, "vocab_size": VOCAB, "max_model_len": CONTEXT}
    return engine_of(HookedRunner(**sizes, window=window), **options)


def answer_of(request: EngineRequest, window: int = WINDOW) -> list[int]:
    return expected_answer(request, vocab_size=VOCAB, max_model_len=CONTEXT, window=window)[0]


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("key", [b"", b"a tenant's key"])
def test_a_sequence_owns_what_is_in_reach(key: bytes, look_ahead: bool) -> None:
    engine = make_engine(num_blocks=50, look_ahead=look_ahead, max_num_batched_tokens=16)
    request = make_request("r", range(60), max_tokens=100, key=key)
    engine.submit(request)
    got, most = [], 0
    while (output := engine.step()).num_prefill_tokens + output.num_decode_tokens:
        engine.check_integrity()
        got += ids_of(output.tokens)
        most = max(most, owned(engine) if got else 0)
    assert got == answer_of(request)
    assert most <= MOST
    assert_idle(engine)


def test_more_sequences_run_at_once() -> None:
    """Four answers of 160 tokens on 50 blocks, one of which takes 41 from its beginning to its end."""
    requests = [make_request(f"r{i}", [i, 7, 2, 5], max_tokens=160) for i in range(4)]
    preempted = []
    for window in (0, WINDOW):
        engine = make_engine(num_blocks=50, window=window)
        for request in requests:
            engine.submit(request)
        tokens, _ = drain(engine)
        assert all(ids_of(tokens[request.seq_id]) == answer_of(request, window) for request in requests)
        assert_idle(engine)
        preempted.append(engine.stats().num_preemptions)
    assert preempted[0]
    assert not preempted[1]


def test_what_is_handed_over_stays_whole() -> None:
    """Other prompts may begin as it does, and not go on so far."""
    source, target = make_engine(num_blocks=50, max_num_batched_tokens=16), make_engine(num_blocks=50)
    held, request = (make_request(seq_id, range(90), max_tokens=60) for seq_id in ("held", "r"))
    source.submit(held, hold=True)
    drain(source)
    assert owned(source) == len(source.block_ids("held")) == -(-90 // BLOCK)
    source.release("held")
    first, _ = hand_over(source, target, request)
    tokens, _ = drain(target)
    assert [first, *ids_of(tokens["r"])] == answer_of(request)
    assert_idle(source)
    assert_idle(target)


@settings(max_examples=30)
@given(
    window=st.integers(1, 40),
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=5),
    spare=st.integers(0, 20),
    budget=st.sampled_from([3, 16, 200]),
    host=st.booleans(),
)
def test_tokens_are_right_whatever_is_found_again(
    window: int, prompts: list[tuple[int, int, int]], spare: int, budget: int, host: bool
) -> None:
    """Prompts that share prefixes, whose heads may be gone before their tails, in a pool with room for one and a few blocks."""
    sizes = HookedRunner(num_blocks=1, block_size=BLOCK).kv_shape
    options = {"host_cache_bytes": 100 * sizes.block_bytes, "host_ahead_share": 1.0} if host else {}
    engine = make_engine(num_blocks=38 + spare, window=window, max_num_batched_tokens=budget, look_ahead=True, **options)
    for turn in range(2):
        requests = [
            make_request(f"{turn}-{i}", [base * 100 + place for place in range(length)], max_tokens=most)
            for i, (base, length, most) in enumerate(prompts)
        ]
        for request in requests:
            engine.submit(request)
        tokens, _ = drain(engine)
        for request in requests:
            assert ids_of(tokens[request.seq_id]) == answer_of(request, window)
    assert_idle(engine)
