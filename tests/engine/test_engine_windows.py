"""Sequences whose tokens see the last so many keys alone, in all layers or in some: blocks behind these are free while it goes on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from engine_helpers import VOCAB, HookedRunner, assert_idle, drain, engine_of, expected_answer, hand_over, ids_of, make_request, owned
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.engine.engine import Engine
from twostep.engine.types import EngineRequest

CONTEXT, BLOCK, WINDOW = 200, 4, 10
# Blocks that a decoding sequence owns at most of a group with a window: what is in reach, begun and ended anywhere, and one more.
MOST = WINDOW // BLOCK + 3
# Groups of layers, and how many of them have windows.
GROUPS = [(1, 1), (2, 1), (4, 3), (3, 1)]


def make_engine(*, num_blocks: int, window: int = WINDOW, groups: tuple[int, int] = (1, 1), **options: Any) -> Engine:
    sizes = {"num_blocks": num_blocks, "block_size": BLOCK, "vocab_size": VOCAB, "max_model_len": CONTEXT}
    num_groups, num_windowed = groups
    return engine_of(HookedRunner(**sizes, window=window, num_groups=num_groups, num_windowed=num_windowed), **options)


def answer_of(request: EngineRequest, window: int = WINDOW, groups: tuple[int, int] = (1, 1)) -> list[int]:
    num_groups, num_windowed = groups
    options = {"window": window, "num_groups": num_groups, "num_windowed": num_windowed}
    return expected_answer(request, vocab_size=VOCAB, max_model_len=CONTEXT, **options)[0]


def most_owned(num_tokens: int, groups: tuple[int, int]) -> int:
    """Blocks that a sequence of so many tokens owns at most."""
    num_groups, num_windowed = groups
    return -(-num_tokens // BLOCK) * (num_groups - num_windowed) + MOST * num_windowed


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("key", [b"", b"a tenant's key"])
def test_a_sequence_owns_what_is_in_reach(key: bytes, look_ahead: bool, groups: tuple[int, int]) -> None:
    engine = make_engine(num_blocks=50 * groups[0], groups=groups, look_ahead=look_ahead, max_num_batched_tokens=16)
    request = make_request("r", range(60), max_tokens=100, key=key)
    engine.submit(request)
    got = []
    while (output := engine.step()).num_prefill_tokens + output.num_decode_tokens:
        engine.check_integrity()
        got += ids_of(output.tokens)
        # With look-ahead, one token more is under way.
        assert not got or owned(engine) <= most_owned(61 + len(got), groups)
    assert got == answer_of(request, groups=groups)
    assert_idle(engine)


def test_a_long_prompt_leaves_blocks_behind_while_it_is_computed() -> None:
    engine = make_engine(num_blocks=100, groups=(2, 1), max_num_batched_tokens=16)
    engine.submit(make_request("r", range(160), max_tokens=5))
    counts = [owned(engine) for _ in range(10) if engine.step()]
    # Chunks of 16 tokens: four blocks of the group with the window each.
    assert counts[-1] == 40 + 3
    assert all(before - after == 4 for before, after in pairwise(counts[1:-1]))


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


@pytest.mark.parametrize("groups", GROUPS)
def test_what_is_in_reach_is_handed_over(groups: tuple[int, int]) -> None:
    """Other prompts may begin as it does, and not go on so far."""
    num_groups, num_windowed = groups
    sizes = {"num_blocks": 50 * num_groups, "groups": groups}
    source, target = make_engine(**sizes, max_num_batched_tokens=16), make_engine(**sizes)
    held, request = (make_request(seq_id, range(90), max_tokens=60) for seq_id in ("held", "r"))
    source.submit(held, hold=True)
    drain(source)
    # The next token sees those from 81 on, which is in block 20 of 23.
    in_reach = 23 * (num_groups - num_windowed) + 3 * num_windowed
    assert owned(source) == len(source.block_ids("held")) == in_reach
    source.release("held")
    first, num_moved = hand_over(source, target, request)
    assert num_moved == in_reach
    assert owned(target) <= most_owned(91, groups)
    tokens, _ = drain(target)
    assert [first, *ids_of(tokens["r"])] == answer_of(request, groups=groups)
    assert_idle(source)
    assert_idle(target)
    # What is there of the groups with windows is the end of what was computed last.
    longer = make_request("longer", [*request.token_ids, *answer_of(request, groups=groups)], max_tokens=20)
    again = make_request("again", range(90), max_tokens=5)
    found = target.reserve(longer).num_cached_tokens
    assert found == 148
    target.cancel("longer")
    first, num_moved = hand_over(source, target, longer)
    # Of 150 tokens the last block, which is not full.
    assert num_moved == num_groups
    tokens, _ = drain(target)
    assert [first, *ids_of(tokens["longer"])] == answer_of(longer, groups=groups)
    first, _ = hand_over(source, target, again)
    tokens, _ = drain(target)
    assert [first, *ids_of(tokens["again"])] == answer_of(again, groups=groups)


@pytest.mark.parametrize("groups", GROUPS)
def test_a_prefix_is_found_with_what_its_next_token_sees(groups: tuple[int, int]) -> None:
    """A hit at the end of what was computed needs no more of a window than that; one further ahead needs what was left there."""
    engine = make_engine(num_blocks=60 * groups[0], groups=groups, max_num_batched_tokens=16)
    first = make_request("first", range(100), max_tokens=1)
    engine.submit(first)
    drain(engine)
    shorter, longer = (make_request(str(length), range(length), max_tokens=20) for length in (50, 120))
    for request in (longer, shorter):
        engine.submit(request)
        tokens, steps = drain(engine)
        assert ids_of(tokens[request.seq_id]) == answer_of(request, groups=groups)
        # As long as nothing is evicted, what was left behind is found, too.
        assert sum(step.num_prefill_tokens for step in steps) == len(request.token_ids) - min(100, (len(request.token_ids) - 1) // 4 * 4)
    # Now all that was left longest ago goes.
    engine.submit(make_request("other", [7] * 150, max_tokens=40))
    drain(engine)
    for request in (longer, shorter):
        again = make_request(f"{request.seq_id} again", request.token_ids, max_tokens=20)
        engine.submit(again)
        tokens, _ = drain(engine)
        assert ids_of(tokens[again.seq_id]) == answer_of(again, groups=groups)
    assert_idle(engine)


@pytest.mark.parametrize("groups", GROUPS)
def test_what_comes_back_from_the_host_is_what_is_in_reach(groups: tuple[int, int]) -> None:
    num_groups, num_windowed = groups
    sizes = HookedRunner(num_blocks=1, block_size=BLOCK).kv_shape
    host = {"host_cache_bytes": 400 * sizes.block_bytes, "host_ahead_share": 1.0}
    engine = make_engine(num_blocks=50 * num_groups, groups=groups, max_num_batched_tokens=16, **host)
    first = make_request("first", range(120), max_tokens=8)
    engine.submit(first)
    drain(engine)
    # It takes all that the pool has.
    other = make_request("other", [7] * 190, max_tokens=8)
    engine.submit(other)
    drain(engine)
    before = engine.stats()
    longer = make_request("longer", [*first.token_ids, *answer_of(first, groups=groups)], max_tokens=20)
    engine.submit(longer)
    tokens, steps = drain(engine)
    assert ids_of(tokens["longer"]) == answer_of(longer, groups=groups)
    after = engine.stats()
    assert after.num_host_hit_tokens - before.num_host_hit_tokens == 124
    assert sum(step.num_prefill_tokens for step in steps) == 4
    # Of 31 blocks, of groups with windows those that token 124 sees: from 115 on.
    num_copied = 31 * (num_groups - num_windowed) + 3 * num_windowed
    assert_idle(engine)
    saved = engine.stats().swapped_bytes - before.swapped_bytes
    assert saved >= num_copied * sizes.block_bytes


@settings(max_examples=60)
@given(
    groups=st.sampled_from(GROUPS),
    window=st.integers(1, 40),
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=5),
    spare=st.integers(0, 20),
    budget=st.sampled_from([3, 16, 200]),
    host=st.booleans(),
    remote=st.booleans(),
)
def test_tokens_are_right_whatever_is_found_again(
    groups: tuple[int, int],
    window: int,
    prompts: list[tuple[int, int, int]],
    spare: int,
    budget: int,
    host: bool,
    remote: bool,
) -> None:
    """Prompts that share prefixes, whose heads may be gone before their tails, in a pool with room for one and a few blocks. `remote`: they
    are computed by another engine."""
    sizes = HookedRunner(num_blocks=1, block_size=BLOCK).kv_shape
    options = {"host_cache_bytes": 100 * sizes.block_bytes, "host_ahead_share": 1.0} if host else {}
    made = {"num_blocks": 39 * groups[0] + spare, "window": window, "groups": groups, "max_num_batched_tokens": budget}
    engine, source = make_engine(**made, look_ahead=True, **options), make_engine(**made)
    for turn in range(2):
        requests = [
            make_request(f"{turn}-{i}", [base * 100 + place for place in range(length)], max_tokens=most)
            for i, (base, length, most) in enumerate(prompts)
        ]
        got: dict[str, list[int]] = {request.seq_id: [] for request in requests}
        for request in requests:
            if remote and request.sampling.max_tokens > 1:
                first, _ = hand_over(source, engine, request)
                got[request.seq_id].append(first)
                assert_idle(source)
                drained, _ = drain(engine)
                got[request.seq_id] += ids_of(drained[request.seq_id])
            else:
                engine.submit(request)
        tokens, _ = drain(engine)
        for request in requests:
            assert got[request.seq_id] + ids_of(tokens.get(request.seq_id, [])) == answer_of(request, window, groups)
    assert_idle(engine)
