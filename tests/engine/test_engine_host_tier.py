"""Prefixes that the pool gave up and the host kept: tokens stay right, every row is accounted for, and no step waits for a copy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_helpers import KEY, VOCAB, HookedRunner, answer_of, assert_idle, drain, engine_of, hooked, ids_of, make_request, move_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.engine.block_pool import BlockPool
from twostep.engine.engine import Engine
from twostep.engine.fake import FakeRunner
from twostep.engine.host_copies import HostSlabs
from twostep.engine.host_tier import HostTier
from twostep.engine.sequence import EngineSequence, SequenceState, make_sequence
from twostep.engine.types import EngineRequest, StepOutput
from twostep.errors import InternalError
from twostep.prefix import prefix_hashes

CONTEXT, BLOCK = 64, 4
PLENTY = 1 << 30


BLOCK_BYTES = HookedRunner(num_blocks=1, block_size=BLOCK).kv_shape.block_bytes


def make_engine(*, num_blocks: int = 16, host_blocks: int = 1000, **config: Any) -> Engine:
    runner = HookedRunner(num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB, max_model_len=CONTEXT)
    # Whatever is cached is saved before the next step is planned, so that nothing is lost to steps that take much at once.
    return engine_of(runner, **({"host_cache_bytes": host_blocks * BLOCK_BYTES, "host_ahead_share": 1.0} | config))


def ask(engine: Engine, request: EngineRequest) -> list[StepOutput]:
    """Has a request answered, rightly, and returns the steps that it took."""
    engine.submit(request)
    tokens, steps = drain(engine)
    assert ids_of(tokens[request.seq_id]) == answer_of(request, CONTEXT)
    return steps


def in_host(engine: Engine, prompt: Sequence[int]) -> int:
    """Returns how many of the prompt's blocks the host tier has."""
    return len(set(prefix_hashes(KEY, prompt, BLOCK)) & set(engine.host_prefixes()))


def fail_back(where: str) -> None:
    if where == "back":
        raise RuntimeError("the bus is gone")


# ---- right tokens ---------------------------------------------------------------------------------------------------


def test_many_prompts_on_a_thread_of_copies() -> None:
    """The thread copies while steps run; who is first is open, the tokens are not."""
    engine = make_engine(num_blocks=20, max_num_seqs=4, max_waiting=1000, look_ahead=True)
    work = [make_request(f"r{i}", [*[(7 * (i % 12)) % 90] * 25, i], max_tokens=4) for i in range(150)]
    tokens: dict[str, list[int]] = {request.seq_id: [] for request in work}
    engine.host_copies.start()
    try:
        for request in work:
            engine.submit(request)
        while engine.stats().num_running + engine.stats().num_waiting:
            assert engine.wait_for_work(60.0)
            for token in engine.step().tokens:
                tokens[token.seq_id].append(token.token_id)
            engine.check_integrity()
    finally:
        engine.host_copies.stop(60.0)
    assert tokens == {request.seq_id: answer_of(request, CONTEXT) for request in work}
    assert engine.stats().num_host_hit_tokens > 0
    assert_idle(engine)


def evicted(engine: Engine, prompt: Sequence[int]) -> None:
    """Computes a prompt and then others until only the host has it."""
    ask(engine, make_request(f"first{prompt[0]}", prompt, max_tokens=1))
    for i in range(4):
        ask(engine, make_request(f"other{prompt[0]}-{i}", [i + 1] * 50, max_tokens=2))
    assert not set(prefix_hashes(KEY, prompt, BLOCK)) & set(engine.cached_prefixes())
    assert in_host(engine, prompt) == len(prompt) // BLOCK


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize(("more", "num_loaded", "num_computed"), [([7], 40, 2), ([], 36, 4)])
def test_what_the_pool_gave_up_comes_back_from_the_host(more: list[int], num_loaded: int, num_computed: int, look_ahead: bool) -> None:
    """40 tokens are there; of a prompt that is there to its end, the last block is computed."""
    engine = make_engine(num_blocks=16, look_ahead=look_ahead)
    prompt = list(range(100, 140))
    evicted(engine, prompt)
    before = engine.stats()
    assert before.num_host_hit_tokens == 0
    steps = ask(engine, make_request("b", [*prompt, *more, *more], max_tokens=3))
    stats = engine.stats()
    assert stats.num_host_hit_tokens == stats.num_hit_tokens - before.num_hit_tokens == num_loaded
    assert sum(step.num_prefill_tokens for step in steps) == num_computed
    assert hooked(engine).num_back == num_loaded // BLOCK
    ask(engine, make_request("c", [*prompt, *more, *more], max_tokens=3))
    assert engine.stats().num_host_hit_tokens == num_loaded, "now it is in the pool again"


def test_a_reservation_is_told_what_the_host_has() -> None:
    """Decode role: only what follows is moved there, and a commit need not wait for the copy."""
    engine, source = make_engine(), make_engine(num_blocks=64)
    prompt = list(range(300, 341))
    evicted(engine, prompt)
    request = make_request("b", prompt, max_tokens=6)
    source.submit(request, hold=True)
    first = source.step().tokens[0].token_id
    engine.host_copies.start()
    gate = threading.Event()
    hooked(engine).copying = lambda where: gate.wait(60.0) if where == "back" else None
    try:
        reservation = engine.reserve(request)
        assert reservation.num_cached_tokens == 40
        data = np.empty((1, BLOCK_BYTES), np.uint8)
        source.runner.read_blocks(source.block_ids("b")[10:], data)
        FakeRunner.write_blocks(hooked(engine), reservation.block_ids[10:], data)
        engine.commit("b", [first])
        assert not set(prefix_hashes(KEY, prompt, BLOCK)) & set(engine.cached_prefixes()), "nothing of it is there for others yet"
        assert not engine.step().tokens
        assert not engine.wait_for_work(0.0), "the engine's thread sleeps until the copy is there"
        assert engine.stats().stalled_s > 0, "and that counts as work"
        engine.check_integrity()
        gate.set()
        assert engine.wait_for_work(60.0)
    finally:
        gate.set()
        engine.host_copies.stop(60.0)
    tokens, _ = drain(engine)
    assert [first, *ids_of(tokens["b"])] == answer_of(request, CONTEXT)
    assert engine.stats().num_host_hit_tokens == 40
    assert_idle(engine)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed_first", [False, True])
def test_a_reservation_whose_copy_fails_is_computed(committed_first: bool) -> None:
    engine, source = make_engine(), make_engine(num_blocks=64)
    prompt = list(range(300, 341))
    evicted(engine, prompt)
    request = make_request("b", prompt, max_tokens=6)
    source.submit(request, hold=True)
    first = source.step().tokens[0].token_id
    reservation = engine.reserve(request)
    move_blocks(source, source.block_ids("b")[10:], engine, reservation.block_ids[10:])
    hooked(engine).copying = fail_back
    if committed_first:
        engine.commit("b", [first])
    assert engine.host_copies.copy_all()
    assert in_host(engine, prompt) == 0, "what cannot be read is not found again"
    engine.check_integrity()
    if not committed_first:
        engine.commit("b", [first])
    tokens, steps = drain(engine)
    assert [first, *ids_of(tokens["b"])] == answer_of(request, CONTEXT)
    assert sum(step.num_prefill_tokens for step in steps) == 42
    assert not any(step.progress for step in steps), "the prompt was computed elsewhere as far as others know"
    assert engine.stats().num_host_hit_tokens == 0
    assert_idle(engine)


@pytest.mark.parametrize("fails", ["memory", "copy"])
def test_a_host_without_memory_and_a_copy_that_fails_cost_nothing_but_time(fails: str) -> None:
    engine = make_engine()
    prompt = list(range(300, 341))
    if fails == "copy":
        evicted(engine, prompt)
        hooked(engine).copying = fail_back
    else:

        def refuse(count: int) -> npt.NDArray[np.uint8]:
            raise MemoryError

        hooked(engine).new_host_blocks = refuse  # type: ignore[method-assign]
        ask(engine, make_request("a", prompt, max_tokens=1))
    steps = ask(engine, make_request("b", [*prompt, 5], max_tokens=3))
    assert engine.stats().num_host_hit_tokens == 0
    assert steps[0].progress[0].num_cached_tokens == (40 if fails == "memory" else 0)
    assert_idle(engine)


@pytest.mark.parametrize("committed", [False, True])
def test_cancelled_while_it_is_copied(committed: bool) -> None:
    engine = make_engine()
    prompt = list(range(300, 341))
    evicted(engine, prompt)
    cancelled: list[str] = []

    def copying(where: str) -> None:
        if where == "back" and not cancelled:
            cancelled.append("b")
            assert engine.cancel("b")
            engine.check_integrity()

    hooked(engine).copying = copying
    if committed:
        engine.reserve(make_request("b", prompt, max_tokens=6))
    else:
        engine.submit(make_request("b", [*prompt, 5], max_tokens=6))
    tokens, _ = drain(engine)
    assert cancelled
    assert "b" not in tokens
    assert_idle(engine)
    ask(engine, make_request("c", [*prompt, 5], max_tokens=3))


def test_it_does_not_give_way_while_it_is_copied_but_afterwards() -> None:
    """An older sequence needs the blocks of one that is being loaded: it gets them when the copy is done."""
    engine = make_engine(num_blocks=20)
    prompt = list(range(300, 341))
    evicted(engine, prompt)
    work = [make_request("old", [5, 6, 7], max_tokens=55), make_request("b", [*prompt, 5], max_tokens=20)]
    engine.submit(work[0])
    collected: dict[str, list[int]] = {"old": [], "b": []}
    engine.host_copies.start()
    gate = threading.Event()
    hooked(engine).copying = lambda where: gate.wait(60.0) if where == "back" else None
    try:
        for number in range(400):
            if number == 2:
                engine.submit(work[1])
            if number > 100:
                gate.set()
            elif number > 50:
                assert len(collected["old"]) < 55
                assert not engine.wait_for_work(0.0), "it waits, and nothing spins"
            for token in engine.step().tokens:
                collected[token.seq_id].append(token.token_id)
            engine.check_integrity()
            if number > 100 and not engine.wait_for_work(60.0 if sum(map(len, collected.values())) < 75 else 0.0):
                break
    finally:
        gate.set()
        engine.host_copies.stop(60.0)
    assert engine.stats().num_preemptions
    assert collected == {request.seq_id: answer_of(request, CONTEXT) for request in work}
    assert_idle(engine)


# ---- bookkeeping -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 19), max_size=20, unique=True))
def test_rows_in_slabs_hold_what_was_put_there(rows: list[int]) -> None:
    """Slabs of three rows. A block holds its number; copies go out from one and back to another."""
    runner = HookedRunner(num_blocks=40, block_size=BLOCK)
    runner.write_blocks(range(20), np.repeat(np.arange(20, dtype=np.uint8)[:, None], BLOCK_BYTES, axis=1))
    slabs = HostSlabs(runner, rows_per_slab=3)
    blocks = list(range(len(rows)))
    slabs.copy_out(blocks, rows)
    slabs.copy_back(rows, range(20, 20 + len(rows)))
    found = np.empty((len(rows), BLOCK_BYTES), np.uint8)
    runner.read_blocks(range(20, 20 + len(rows)), found)
    assert found[:, 0].tolist() == blocks


def number(i: int) -> bytes:
    return i.to_bytes(16, "little")


def full_pool(num_blocks: int = 64, num_rows: int = 100) -> tuple[BlockPool, HostTier, list[int]]:
    """All its blocks hold one chain, number(0) at its head, and are owned."""
    pool = BlockPool(num_blocks, block_size=4, hash_unit=8)
    tier = HostTier(pool, num_rows)
    blocks = pool.allocate(num_blocks)
    for i, block in enumerate(blocks):
        pool.register(block, number(i), i)
    return pool, tier, blocks


def save(tier: HostTier) -> list[bytes]:
    """Hashes of what is saved now."""
    saves = tier.take_saves(1000)
    tier.saved(saves, ok=True)
    tier.check_integrity([])
    assert not tier.has_copies
    return [save.digest for save in saves]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 32), st.integers(0, 4)), max_size=40))
def test_as_many_as_are_saved_ahead_can_always_be_given_out_without_a_loss(turns: list[tuple[int, int]]) -> None:
    """However often heads of the chain are used again, in whatever order: what is given out next is what was saved."""
    pool, tier, blocks = full_pool(num_blocks=32)
    pool.free(blocks)
    for length, count in turns:
        save(tier)
        given_out = [pool.hash_of(block) for block in pool.cached()[: max(0, count - pool.num_free)]]
        assert all(digest is not None and tier.lookup([digest], 0) for digest in given_out)
        pool.free(pool.allocate(count))
        found = pool.lookup([number(i) for i in range(length)])
        pool.share(found)
        pool.free(found)
        tier.check_integrity([])


def waiting_sequence(seq_id: str, blocks: Sequence[int]) -> EngineSequence:
    request = make_request(seq_id, [1, 2, 3])
    sequence = make_sequence(
        request, hold=False, state=SequenceState.WAITING, vocab_size=VOCAB, max_model_len=CONTEXT, block_size=BLOCK, prefix_caching=True
    )
    sequence.blocks = [list(blocks)]
    return sequence


def test_a_row_that_is_being_read_is_not_given_away() -> None:
    pool, tier, blocks = full_pool(num_blocks=16, num_rows=2)
    pool.free(blocks)
    assert sorted(save(tier)) == [number(14), number(15)]
    (target,) = pool.allocate(1)
    sequence = waiting_sequence("a", [target])
    tier.load(sequence, 0, 1, [[number(15)]], is_new=True)
    load = tier.take_load()
    assert load is not None
    (row,) = load.rows
    for _ in range(6):
        pool.allocate(2)
        saves = tier.take_saves(1000)
        assert saves
        assert row not in [save.row for save in saves]
        tier.saved(saves, ok=True)
        tier.check_integrity([sequence])
    assert tier.lookup([number(15)], 0)
    tier.loaded(load, ok=True)
    assert tier.lookup([number(15)], 0)
    tier.check_integrity([])


@pytest.mark.parametrize("meanwhile", ["withdrawn", "given out", "given out and computed again"])
def test_a_block_that_changed_while_it_was_copied_out_is_not_kept(meanwhile: str) -> None:
    pool, tier, blocks = full_pool(num_blocks=1)
    pool.free(blocks)
    saves = tier.take_saves(9)
    assert [save.digest for save in saves] == [number(0)]
    if meanwhile == "withdrawn":
        pool.withdraw([number(0)])
        tier.withdraw([number(0)])
    else:
        pool.allocate(1)
        if meanwhile == "given out and computed again":
            pool.register(0, number(0), 0)
    tier.saved(saves, ok=True)
    assert not tier.lookup([number(0)], 0)
    tier.check_integrity([])


def test_what_is_being_copied_out_is_not_copied_twice() -> None:
    pool, tier, blocks = full_pool(num_blocks=16)
    pool.free(blocks)
    saves = tier.take_saves(1)
    pool.share([saves[0].block])
    pool.free([saves[0].block])
    pool.share(blocks[:-2])  # it is among the next to be given out again
    assert saves[0].digest not in [save.digest for save in tier.take_saves(9)]


def test_an_engine_whose_copying_thread_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what waits for a copy would wait for ever, while others go on."""
    engine = make_engine()

    def lose(*_: Any) -> None:
        raise AssertionError("the books are wrong")

    monkeypatch.setattr(HostTier, "take_load", lose)
    monkeypatch.setattr(HostTier, "has_copies", True)
    engine.host_copies.start()
    try:
        assert engine.wait_for_work(60.0)
        with pytest.raises(InternalError):
            engine.step()
    finally:
        engine.host_copies.stop(60.0)
