"""Models that keep a state of each sequence find a prefix as far as a state was kept: at the ends of prompts, where prompts part, at the
ends of answers. The fake device's tokens depend on the state's bytes, so that a wrong one gives wrong tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine_helpers import VOCAB, HookedRunner, assert_idle, drain, engine_of, expected_answer, hand_over, ids_of, make_request, owned
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.engine.engine import Engine
from twostep.engine.types import EngineRequest
from twostep.request_class import RequestClass

CONTEXT, BLOCK, UNIT, STATE = 256, 4, 8, 3


def make_engine(*, num_blocks: int = 200, num_state_blocks: int = STATE, **options: Any) -> Engine:
    runner = HookedRunner(
        num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB, max_model_len=CONTEXT, num_state_blocks=num_state_blocks
    )
    return engine_of(runner, hash_unit=UNIT, **options)


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def answer_of(request: EngineRequest) -> list[int]:
    return expected_answer(request, vocab_size=VOCAB, max_model_len=CONTEXT, stateful=True)[0]


def ask(engine: Engine, seq_id: str, prompt: Sequence[int], **options: Any) -> tuple[int, list[int]]:
    """Returns how many of the prompt's tokens were found, and the right answer."""
    request = make_request(seq_id, prompt, **({"max_tokens": 2} | options))
    before = engine.stats().num_hit_tokens
    engine.submit(request)
    tokens, _ = drain(engine)
    assert ids_of(tokens[seq_id]) == answer_of(request)
    assert_idle(engine)
    return engine.stats().num_hit_tokens - before, answer_of(request)


@pytest.mark.parametrize("look_ahead", [False, True])
@given(length=st.integers(1, 60), budget=st.sampled_from([1, 5, 8, 200]))
@settings(max_examples=20)
def test_a_prompt_is_found_up_to_the_last_boundary_before_its_last_token(look_ahead: bool, length: int, budget: int) -> None:
    engine = make_engine(look_ahead=look_ahead, max_num_batched_tokens=budget)
    assert ask(engine, "a", words(length, 1), max_tokens=1)[0] == 0
    assert ask(engine, "b", words(length, 1), max_tokens=1)[0] == (length - 1) // UNIT * UNIT


def test_routers_are_told_of_boundaries_with_a_state_alone() -> None:
    engine = make_engine()
    ask(engine, "a", words(45, 1), max_tokens=1)
    delta = engine.take_prefix_delta()
    assert len(delta.added) == 1, "40 tokens; the five boundaries before have KV alone"
    assert list(delta.added) == list(engine.cached_prefixes())


@pytest.mark.parametrize("look_ahead", [False, True])
def test_many_begin_from_one_state_at_once(look_ahead: bool) -> None:
    engine = make_engine(look_ahead=look_ahead)
    shared = words(25, 0)
    ask(engine, "first", shared)
    requests = [make_request(f"{i}", [*shared, *words(9, i)], max_tokens=20) for i in range(5)]
    for request in requests:
        engine.submit(request)
    engine.step()
    assert engine.stats().num_hit_tokens == 5 * 24
    tokens, _ = drain(engine)
    for request in requests:
        assert ids_of(tokens[request.seq_id])[-1] == answer_of(request)[-1]
    assert_idle(engine)


@pytest.mark.parametrize("look_ahead", [False, True])
def test_what_two_prompts_share_is_found_by_the_third(look_ahead: bool) -> None:
    engine = make_engine(look_ahead=look_ahead)
    shared = words(30, 0)
    found = [ask(engine, f"{i}", [*shared, *words(20, i)])[0] for i in range(1, 5)]
    assert found == [0, 0, 24, 24]


@pytest.mark.parametrize("look_ahead", [False, True])
def test_the_next_turn_of_a_chat_goes_on_where_the_answer_ended(look_ahead: bool) -> None:
    engine = make_engine(look_ahead=look_ahead)
    prompt = words(11, 1)
    for turn in range(4):
        found, answer = ask(engine, f"{turn}", prompt, max_tokens=30, ignore_eos=True)
        assert found == (0 if not turn else (len(prompt) - 5 - 1) // UNIT * UNIT)
        prompt = [*prompt, *answer, *words(5, turn)]
    # Those at the ends of four prompts and of four answers: none in the midst of an answer.
    assert len(engine.cached_prefixes()) <= 8


def test_one_that_gave_way_comes_back_at_the_last_state_that_is_left() -> None:
    """It has 12 blocks and 3 of its state when it gives way, and states are kept at 16 and 40 tokens. For the urgent prompt's 13 blocks the
    latter goes, as any tail does first."""
    engine = make_engine(num_blocks=26, max_num_batched_tokens=64)
    slow = make_request("slow", words(20, 1), max_tokens=40, ignore_eos=True, request_class=RequestClass.BATCH)
    engine.submit(slow)
    tokens: list[int] = []
    while len(tokens) < 25:
        tokens += ids_of(engine.step().tokens)
    urgent = make_request("urgent", words(40, 2), max_tokens=1, request_class=RequestClass.INTERACTIVE)
    engine.submit(urgent)
    rest, steps = drain(engine)
    assert engine.stats().num_preemptions == 1
    assert ids_of(rest["urgent"]) == answer_of(urgent)
    assert [*tokens, *ids_of(rest["slow"])] == answer_of(slow)
    assert sum(step.num_prefill_tokens for step in steps) <= 40 + 45 - 16


@pytest.mark.parametrize("look_ahead", [False, True])
def test_where_there_is_no_room_nothing_is_kept_and_nobody_waits(look_ahead: bool) -> None:
    """40 tokens take 10 blocks, and the state 3."""
    engine = make_engine(num_blocks=13 + STATE - 1, look_ahead=look_ahead)
    assert ask(engine, "a", words(39, 1), max_tokens=1)[0] == 0
    assert engine.cached_prefixes() == []
    engine = make_engine(num_blocks=13 + STATE, look_ahead=look_ahead)
    assert ask(engine, "a", words(39, 1), max_tokens=1)[0] == 0
    assert len(engine.cached_prefixes()) == 1


def test_a_state_that_there_is_no_room_to_leave_is_taken_by_one_alone() -> None:
    # Three prompts of 11 blocks, 10 of them shared, with 3 for each state: 2 too few for the one that is kept to stay.
    engine = make_engine(num_blocks=11 + STATE + 2 * (1 + STATE) + 2)
    requests = [make_request(name, words(43, 1), max_tokens=1) for name in "abc"]
    engine.submit(requests[0], hold=True)
    tokens, _ = drain(engine)
    assert len(engine.cached_prefixes()) == 1
    for request in requests[1:]:
        engine.submit(request)
    tokens |= drain(engine)[0]
    assert engine.cached_prefixes() == []
    assert (engine.stats().num_hit_tokens, engine.stats().num_waiting) == (40, 1), "the other one has no room to begin anew"
    assert engine.release("a")
    tokens |= drain(engine)[0]
    assert [ids_of(tokens[request.seq_id]) for request in requests] == [answer_of(request) for request in requests]
    assert_idle(engine)


def test_a_state_that_is_taken_is_new_content() -> None:
    """Its generations tell readers that do not own the blocks that they have changed."""
    engine = make_engine(num_blocks=11 + STATE)
    request = make_request("a", words(40, 1), max_tokens=1)
    engine.submit(request, hold=True)
    drain(engine)
    state = list(engine.block_ids("a"))[-STATE:]
    read = engine.generations(state)
    assert engine.release("a")
    assert len(engine.cached_prefixes()) == 1, "the prompt ends at a boundary: its state is kept where it is"
    assert engine.generations(state) == read
    assert ask(engine, "b", [*request.token_ids, 5], max_tokens=1)[0] == 40
    assert all(now != then for now, then in zip(engine.generations(state), read, strict=True))


def test_a_reservation_shares_kv_without_a_state() -> None:
    source, target = make_engine(), make_engine()
    request = make_request("a", words(45, 1), max_tokens=3)
    first, num_moved = hand_over(source, target, request)
    assert num_moved == 12 + STATE
    tokens, _ = drain(target)
    assert [first, *ids_of(tokens["a"])] == answer_of(request)
    assert target.cached_prefixes() == [], "it computed three tokens, beyond no boundary"
    again = make_request("b", words(45, 1), max_tokens=3)
    first, num_moved = hand_over(source, target, again)
    assert num_moved == 1 + STATE
    tokens, _ = drain(target)
    assert [first, *ids_of(tokens["b"])] == answer_of(again)
    assert source.stats().num_hit_tokens == 40
    assert_idle(source)
    assert_idle(target)


def test_a_state_that_was_not_confirmed_is_nobody_s() -> None:
    """All of the prompt's KV is there and its state is not, which comes with a hand-over that turns out to be of something else."""
    source, target = make_engine(), make_engine()
    hand_over(source, target, make_request("a", words(45, 1), max_tokens=3))
    drain(target)
    prompt = words(45, 1)[:40]
    reservation = target.reserve(make_request("b", prompt, max_tokens=5))
    assert reservation.num_cached_tokens == len(prompt)
    wrong = np.full((STATE, target.runner.kv_shape.block_bytes), 9, np.uint8)
    target.runner.write_blocks(reservation.block_ids[-STATE:], wrong)
    target.commit("b", [5], confirmed=False)
    target.cancel("b")
    ask(target, "c", [*prompt, 5, 6], max_tokens=4)


def test_without_prefix_caching_nothing_is_kept() -> None:
    engine = make_engine(enable_prefix_caching=False)
    ask(engine, "a", words(45, 1))
    assert ask(engine, "b", words(45, 1))[0] == 0
    assert engine.stats().num_cached_blocks == 0
    assert owned(engine) == 0


def test_prompts_that_differ_in_their_key_share_nothing() -> None:
    engine = make_engine()
    ask(engine, "a", words(45, 1), key=b"one")
    assert ask(engine, "b", words(45, 1), key=b"two")[0] == 0


def test_host_memory_holds_no_prefix_of_such_a_model() -> None:
    engine = make_engine(host_cache_bytes=1 << 20)
    assert engine.num_host_blocks == 0
    for i in range(20):
        ask(engine, f"{i}", words(100, i))
    assert engine.host_prefixes() == []


@given(
    lengths=st.lists(st.tuples(st.integers(1, UNIT), st.integers(1, 60), st.booleans()), min_size=1, max_size=6),
    num_blocks=st.integers(20, 90),
    look_ahead=st.booleans(),
    budget=st.sampled_from([1, 3, 200]),
    late=st.integers(0, 30),
)
@settings(max_examples=60, deadline=None)
def test_nobody_waits_or_gives_way_for_a_state(
    lengths: list[tuple[int, int, bool]], num_blocks: int, look_ahead: bool, budget: int, late: int
) -> None:
    """Beside an engine whose sequences come to no boundary, until one of that engine's gives way: what is found when it comes back is no
    loss. The prompts are too short for one of their own."""
    engines = [
        engine_of(
            HookedRunner(num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB, max_model_len=CONTEXT, num_state_blocks=STATE),
            hash_unit=unit,
            look_ahead=look_ahead,
            max_num_batched_tokens=budget,
        )
        for unit in (UNIT, 2 * CONTEXT)
    ]
    requests = [
        make_request(
            f"{i}",
            words(prompt, i),
            max_tokens=answer,
            ignore_eos=True,
            request_class=RequestClass.BATCH if is_batch else RequestClass.STANDARD,
        )
        for i, (prompt, answer, is_batch) in enumerate(lengths)
    ]
    # A step that is in flight when a request comes may take room that it has not seen anyone want.
    last = requests.pop() if not look_ahead else None
    for step in range(500):
        for engine in engines:
            for request in requests if not step else [last] if step == late and last is not None else []:
                engine.submit(request)
        told = [(output.step, list(output.tokens), output.workload) for output in (engine.step() for engine in engines)]
        given_way = [engine.stats().num_preemptions for engine in engines]
        if given_way[1]:
            assert given_way[0] <= given_way[1]
            return
        assert given_way[0] == 0
        assert told[0] == told[1]
        if step > late and not told[0][1] and not engines[0].wait_for_work(0.0):
            return
