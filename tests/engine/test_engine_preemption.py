"""Pools too small for all: the last to come gives way, tokens stay right, and all get done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine_helpers import VOCAB, HookedRunner, answer_of, assert_idle, drain, engine_of, hooked, ids_of, make_request, move_blocks
from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.engine import Engine
from twostep.engine.host_memory import HostRows, HostSlabs
from twostep.engine.preemption import PreemptionMode, PreemptionRates, cheaper_to_swap, watermark
from twostep.engine.sequence import SavedBlocks
from twostep.engine.swap_space import SwapSpace
from twostep.engine.types import EngineRequest, TokenOutput
from twostep.errors import InternalError, ResourceExhausted

CONTEXT, BLOCK = 64, 4
BLOCK_BYTES = HookedRunner(num_blocks=1, block_size=BLOCK).kv_shape.block_bytes
PLENTY = 1 << 30


def make_engine(*, num_blocks: int = 16, **options: Any) -> Engine:
    return engine_of(HookedRunner(num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB, max_model_len=CONTEXT), **options)


def six() -> list[EngineRequest]:
    """Six sequences of up to 44 tokens: on 16 blocks of 4, four at most have room at their ends."""
    return [make_request(f"r{i}", [i, 7, 2, 5], max_tokens=40) for i in range(6)]


def assert_answered(requests: Sequence[EngineRequest], tokens: dict[str, list[TokenOutput]]) -> None:
    for request in requests:
        assert ids_of(tokens[request.seq_id]) == answer_of(request, CONTEXT)
        assert [token.position for token in tokens[request.seq_id]] == list(range(len(tokens[request.seq_id])))


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_both_ways_are_taken(mode: PreemptionMode, look_ahead: bool) -> None:
    engine = make_engine(preemption_mode=mode, swap_bytes=PLENTY, look_ahead=look_ahead, enable_prefix_caching=False)
    for request in six():
        engine.submit(request)
    tokens, steps = drain(engine)
    assert_answered(six(), tokens)
    assert_idle(engine)
    last = [max(step.step for step in steps if any(token.seq_id == request.seq_id for token in step.tokens)) for request in six()]
    assert last == sorted(last), "who came first never gives way to who came later"
    stats = engine.stats()
    assert stats.num_preemptions >= 3
    assert (stats.swapped_bytes > 0) == (mode is PreemptionMode.SWAP)


def test_what_swaps_is_computed_once() -> None:
    """Copied back bit for bit: no token's KV is computed a second time."""
    computed = {}
    for mode in (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP):
        engine = make_engine(preemption_mode=mode, swap_bytes=PLENTY, enable_prefix_caching=False)
        for request in six():
            engine.submit(request)
        _, steps = drain(engine)
        computed[mode] = sum(step.num_prefill_tokens + step.num_decode_tokens for step in steps)
    assert computed[PreemptionMode.SWAP] == 6 * 43
    assert computed[PreemptionMode.RECOMPUTE] > 6 * 43


def test_what_is_found_again_comes_back_for_nothing() -> None:
    """Two sequences with one long prompt: the second one's share of it stays owned by the first, and only the rest is copied back."""
    prompt = list(range(40))
    engine = make_engine(num_blocks=18, preemption_mode=PreemptionMode.SWAP, swap_bytes=PLENTY)
    work = [make_request(name, [*prompt, i], max_tokens=20) for i, name in enumerate("ab")]
    for request in work:
        engine.submit(request)
    tried = hooked(engine).num_back
    tokens, _ = drain(engine)
    assert_answered(work, tokens)
    assert engine.stats().num_preemptions >= 1
    assert 0 < hooked(engine).num_back - tried < 10 * engine.stats().num_preemptions, "ten blocks of the prompt are shared"


@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_copy_back_that_fails_ends_its_step_and_leaves_nothing(look_ahead: bool) -> None:
    engine = make_engine(preemption_mode=PreemptionMode.SWAP, swap_bytes=PLENTY, look_ahead=look_ahead)

    def copying(where: str) -> None:
        if where == "back":
            hooked(engine).copying = None
            raise RuntimeError("the bus is gone")

    hooked(engine).copying = copying
    work = {request.seq_id: request for request in six()}
    for request in work.values():
        engine.submit(request)
    failed: set[str] = set()
    tokens: dict[str, list[int]] = {name: [] for name in work}
    for _ in range(500):
        output = engine.step()
        engine.check_integrity()
        failed |= {failure.seq_id for failure in output.failures}
        for token in output.tokens:
            tokens[token.seq_id].append(token.token_id)
    assert failed
    for name, request in work.items():
        assert tokens[name] == answer_of(request, CONTEXT)[: len(tokens[name])]
        assert len(tokens[name]) == 40 or name in failed
    assert_idle(engine)


@pytest.mark.parametrize("fails", ["memory", "copy"])
def test_what_cannot_be_copied_out_is_computed_again(fails: str) -> None:
    """The host may have no memory, from the start on, and a copy may fail."""
    runner = HookedRunner(num_blocks=16, block_size=BLOCK, vocab_size=VOCAB, max_model_len=CONTEXT)

    def refuse(what: object) -> Any:
        if fails == "memory" or what == "out":
            raise MemoryError

    if fails == "memory":
        runner.new_host_blocks = refuse  # type: ignore[method-assign]
    else:
        runner.copying = refuse
    engine = engine_of(runner, swap_bytes=PLENTY, preemption_mode=PreemptionMode.SWAP)
    for request in six():
        engine.submit(request)
    tokens, _ = drain(engine)
    assert_answered(six(), tokens)
    assert engine.stats().num_preemptions
    assert_idle(engine)


@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_copies_are_tried_before_the_first_choice(mode: PreemptionMode) -> None:
    """By a clock that goes on a second each time it is read: a try of 16 blocks out and back takes one."""
    times = iter(range(100))
    runner = HookedRunner(num_blocks=16, block_size=BLOCK)
    swap = SwapSpace(runner, mode=mode, num_bytes=PLENTY, clock=lambda: float(next(times)))
    tried = mode is not PreemptionMode.RECOMPUTE
    assert swap.rates.copy_bytes_per_s == (32 * BLOCK_BYTES if tried else PreemptionRates().copy_bytes_per_s)
    assert swap.swapped_bytes == 0
    swap.check_integrity([])
    with pytest.raises(InternalError):
        swap.check_integrity([SavedBlocks(rows=[3], num_tokens=BLOCK)])


@pytest.mark.parametrize("where", ["out", "back"])
def test_cancelled_while_being_copied(where: str) -> None:
    engine = make_engine(preemption_mode=PreemptionMode.SWAP, swap_bytes=PLENTY)
    work = six()
    cancelled: list[str] = []

    def copying(direction: str) -> None:
        if direction == where and not cancelled:
            cancelled.append("r5")
            assert engine.cancel("r5")
            engine.check_integrity()

    hooked(engine).copying = copying
    for request in work:
        engine.submit(request)
    tokens, _ = drain(engine)
    assert cancelled
    assert_answered(work[:5], tokens)
    assert_idle(engine)


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_a_handed_over_sequence_goes_on_by_itself(mode: PreemptionMode) -> None:
    """Decode role: committed sequences give way and come back without the prefill worker; new reservations are refused meanwhile."""
    engine = make_engine(preemption_mode=mode, swap_bytes=PLENTY, look_ahead=True, max_num_batched_tokens=8)
    work = [make_request(f"r{i}", [i, 7, 2, 5, i], max_tokens=40) for i in range(4)]
    source = make_engine(num_blocks=64)
    tokens: dict[str, list[int]] = {}
    for request in work:
        source.submit(request, hold=True)
        tokens[request.seq_id] = [source.step().tokens[0].token_id]
        reservation = engine.reserve(request)
        assert len(reservation.block_ids) == 2, "blocks for the prompt, no more"
        move_blocks(source, source.block_ids(request.seq_id), engine, reservation.block_ids)
        engine.commit(request.seq_id, tokens[request.seq_id])
    refused = 0
    for number in range(500):
        output = engine.step()
        engine.check_integrity()
        assert not output.failures
        assert not output.progress, "the prompt was computed elsewhere"
        for token in output.tokens:
            assert token.position == len(tokens[token.seq_id])
            tokens[token.seq_id].append(token.token_id)
        if engine.stats().num_waiting:
            with pytest.raises(ResourceExhausted):
                engine.reserve(make_request(f"late{number}", [1]))
            refused += 1
    assert refused
    assert engine.stats().num_preemptions
    for request in work:
        assert tokens[request.seq_id] == answer_of(request, CONTEXT)
    assert_idle(engine)


# ---- policy ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**6), st.integers(1, 10**11), st.floats(1, 1e6), st.floats(1, 1e12))
def test_the_cheaper_way_is_chosen(num_tokens: int, num_bytes: int, prefill: float, copy: float) -> None:
    rates = PreemptionRates(prefill, copy)
    swap = cheaper_to_swap(num_tokens=num_tokens, num_bytes=num_bytes, rates=rates)
    assert swap == (2 * num_bytes * prefill < num_tokens * copy) or 2 * num_bytes / copy == pytest.approx(num_tokens / prefill)
    if swap:
        assert cheaper_to_swap(num_tokens=num_tokens + 1, num_bytes=num_bytes, rates=rates), "more to compute makes it no dearer"


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.001, 10)), max_size=50), st.integers(1, 10**6), st.floats(0.001, 10))
def test_rates_follow_what_is_measured(before: list[tuple[int, float]], amount: int, seconds: float) -> None:
    rates = PreemptionRates()
    for count, time in before:
        rates = rates.with_prefill(count, time).with_copy(count, time)
    for _ in range(60):
        rates = rates.with_prefill(amount, seconds).with_copy(amount, seconds)
    assert rates.prefill_tokens_per_s == pytest.approx(amount / seconds, rel=1e-2, abs=1.0)
    assert rates.copy_bytes_per_s == pytest.approx(amount / seconds, rel=1e-2, abs=10.0)
    assert rates.with_copy(0, 1.0) == rates.with_prefill(5, 0.0) == rates


@given(st.integers(1, 10**6), st.integers(0, 500), st.integers(0, 500))
def test_the_watermark_leaves_room_to_grow_and_no_more(num_blocks: int, num_growing: int, more: int) -> None:
    wanted = num_growing + (more if num_growing else 0)
    mark = watermark(num_blocks=num_blocks, num_growing=num_growing, num_wanted=wanted)
    assert num_growing <= mark <= wanted
    assert mark <= max(num_growing, num_blocks // 100 + 1)


@given(st.lists(st.integers(-6, 9), max_size=40), st.integers(0, 20))
def test_host_rows_are_bounded_and_hold_what_was_put_there(changes: list[int], num_rows: int) -> None:
    """Takes and gives at random; slabs of three rows. A block holds its number; copies go out from one and back to another."""
    runner = HookedRunner(num_blocks=40, block_size=BLOCK)
    made: list[int] = []
    new_host_blocks = runner.new_host_blocks
    runner.new_host_blocks = lambda count: (made.append(count), new_host_blocks(count))[1]  # type: ignore[method-assign]
    size = runner.kv_shape.block_bytes
    runner.write_blocks(range(20), np.repeat(np.arange(20, dtype=np.uint8)[:, None], size, axis=1))
    rows, slabs = HostRows(num_rows), HostSlabs(runner, rows_per_slab=3)
    held: list[tuple[list[int], list[int]]] = []
    for number, change in enumerate(changes):
        if change >= 0:
            taken = rows.take(change)
            assert (taken is None) == (change > num_rows - sum(len(r) for r, _ in held))
            if taken is None:
                continue
            blocks = [(number + i) % 20 for i in range(change)]
            slabs.copy_out(blocks, taken)
            held.append((taken, blocks))
        elif held:
            rows.give(held.pop(change % len(held))[0])
        for taken, blocks in held:
            slabs.copy_back(taken, range(20, 20 + len(taken)))
            found = np.empty((len(taken), size), np.uint8)
            runner.read_blocks(range(20, 20 + len(taken)), found)
            assert found[:, 0].tolist() == blocks
        assert rows.num_used == sum(len(r) for r, _ in held)
    assert len(made) * 3 < num_rows + 3
