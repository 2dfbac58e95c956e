"""Pools too small for everybody: who came last gives way, tokens stay right, and everybody gets done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_helpers import HookedRunner, assert_idle, drain, expected_answer, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.host_memory import HostRows, HostSlabs
from twostep.engine.preemption import PreemptionMode, PreemptionRates, cheaper_to_swap, watermark
from twostep.engine.sequence import SequenceState
from twostep.engine.types import EngineRequest, TokenOutput
from twostep.errors import ResourceExhausted
from twostep.model.runner.model_runner import ModelRunner
from twostep.prefix import PrefixHasher
from twostep.sampling_params import SamplingParams

VOCAB, CONTEXT, BLOCK = 1000, 64, 4
PLENTY = 1 << 30


class SwappingRunner(HookedRunner):
    """Calls `copying` before blocks are copied out or back."""

    copying: Callable[[str], object] | None = None

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> None:
        if self.copying is not None:
            self.copying("out")
        super().read_blocks(block_ids, out)

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        if self.copying is not None:
            self.copying("back")
        super().write_blocks(block_ids, data)


def make_engine(*, num_blocks: int = 16, **config: Any) -> Engine:
    runner = SwappingRunner(num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB, max_model_len=CONTEXT)
    return Engine(runner, EngineConfig(**({"hash_unit": BLOCK} | config)))


def runner_of(engine: Engine) -> SwappingRunner:
    assert isinstance(engine.runner, SwappingRunner)
    return engine.runner


def answer_of(request: EngineRequest) -> list[int]:
    return expected_answer(request, vocab_size=VOCAB, max_model_len=CONTEXT)[0]


def assert_answered(requests: Sequence[EngineRequest], tokens: dict[str, list[TokenOutput]]) -> None:
    for request in requests:
        assert [token.token_id for token in tokens[request.seq_id]] == answer_of(request)
        assert [token.position for token in tokens[request.seq_id]] == list(range(len(tokens[request.seq_id])))


def assert_the_oldest_runs(engine: Engine) -> None:
    """Of prompts submitted here, the one that came first never gives way. (A later one may give way before one that came after it, if that
    one would free no blocks of its own.) The sequences' states are nowhere told."""
    sequences = engine._scheduler._sequences.values()
    running = [s.arrival for s in sequences if s.state is SequenceState.RUNNING]
    preempted = [s.arrival for s in sequences if s.state is SequenceState.PREEMPTED]
    assert not preempted or min(running, default=1 << 60) < min(preempted) or not engine.stats().num_running


def assert_findable_from_the_start(engine: Engine, request: EngineRequest, answer: Sequence[int]) -> None:
    """Of a chain of blocks, what is known is a head: nothing is registered that no lookup can reach."""
    hasher = PrefixHasher(request.prefix_key, BLOCK)
    hasher.extend([*request.token_ids, *answer])
    found = engine._pool.lookup(hasher.hashes)
    assert not any(digest in engine._pool._block_of for digest in hasher.hashes[len(found) :])


MODES = st.sampled_from(list(PreemptionMode))


@st.composite
def requests(draw: st.DrawFn) -> EngineRequest:
    shared = draw(st.sampled_from([[], [3] * 9, [1, 2, 3, 4, 5, 6, 7, 8]]))
    tokens = shared + draw(st.lists(st.integers(0, 99), min_size=1, max_size=10))
    return make_request(
        "",
        tokens,
        max_tokens=draw(st.sampled_from([1, 5, 20, 40, 40])),
        eos=frozenset(range(0, VOCAB, draw(st.sampled_from([40, VOCAB])))),
        key=draw(st.sampled_from([b"", b"one", b"one"])),
        ignore_eos=draw(st.booleans()),
    )


@settings(max_examples=120, deadline=None)
@given(data=st.data(), mode=MODES, look_ahead=st.booleans(), swap_blocks=st.sampled_from([0, 5, 1000]))
def test_tokens_are_those_of_a_large_pool(data: st.DataObject, mode: PreemptionMode, look_ahead: bool, swap_blocks: int) -> None:
    """Random arrivals and cancels; the fake's tokens come out of the blocks, so that a block lost or mixed up shows."""
    engine = make_engine(
        num_blocks=data.draw(st.integers(CONTEXT // BLOCK, 20), "blocks"),
        max_num_batched_tokens=data.draw(st.sampled_from([3, 16, 64]), "budget"),
        max_num_seqs=data.draw(st.sampled_from([2, 8, 16]), "seats"),
        preemption_mode=mode,
        look_ahead=look_ahead,
        swap_bytes=swap_blocks * runner_bytes(),
    )
    submitted: dict[str, EngineRequest] = {}
    tokens: dict[str, list[TokenOutput]] = {}
    cancelled: set[str] = set()
    arrivals = data.draw(st.lists(st.one_of(requests(), st.integers(0, 20)), min_size=8, max_size=30), "arrivals")
    for event in arrivals:
        if isinstance(event, int):
            if submitted and event < 3:
                seq_id = sorted(submitted)[event % len(submitted)]
                if engine.cancel(seq_id):
                    cancelled.add(seq_id)
            for token in engine.step().tokens:
                assert token.seq_id not in cancelled
                tokens.setdefault(token.seq_id, []).append(token)
        else:
            request = make_request(
                f"r{len(submitted)}",
                event.token_ids,
                max_tokens=event.sampling.max_tokens,
                eos=event.eos_token_ids,
                key=event.prefix_key,
                ignore_eos=event.sampling.ignore_eos,
            )
            engine.submit(request)
            submitted[request.seq_id] = request
        engine.check_integrity()
        assert_the_oldest_runs(engine)
    output = engine.step()
    while output.num_prefill_tokens + output.num_decode_tokens:
        for token in output.tokens:
            tokens.setdefault(token.seq_id, []).append(token)
        engine.check_integrity()
        assert_the_oldest_runs(engine)
        output = engine.step()
    for seq_id, request in submitted.items():
        got = [token.token_id for token in tokens.get(seq_id, [])]
        assert got == (answer_of(request)[: len(got)] if seq_id in cancelled else answer_of(request))
        assert_findable_from_the_start(engine, request, got)
    assert_idle(engine)
    assert engine._swap._rows.num_used == 0


def runner_bytes() -> int:
    return SwappingRunner(num_blocks=1, block_size=BLOCK).kv_shape.block_bytes


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_both_ways_are_taken(mode: PreemptionMode, look_ahead: bool) -> None:
    """Six sequences of up to 44 tokens on 16 blocks of 4: four at most have room at their ends."""
    engine = make_engine(preemption_mode=mode, swap_bytes=PLENTY, look_ahead=look_ahead, enable_prefix_caching=False)
    work = [make_request(f"r{i}", [i, 7, 2, 5], max_tokens=40) for i in range(6)]
    for request in work:
        engine.submit(request)
    tokens, _ = drain(engine)
    assert_answered(work, tokens)
    assert_idle(engine)
    stats = engine.stats()
    assert stats.num_preemptions >= 3
    assert (stats.swapped_bytes > 0) == (mode is PreemptionMode.SWAP)
    assert engine._swap._rows.num_used == 0


def test_what_swaps_is_computed_once() -> None:
    """Copied back bit for bit: no token's KV is computed a second time."""
    computed = {}
    for mode in (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP):
        engine = make_engine(preemption_mode=mode, swap_bytes=PLENTY, enable_prefix_caching=False)
        for i in range(6):
            engine.submit(make_request(f"r{i}", [i, 7, 2, 5], max_tokens=40))
        _, steps = drain(engine)
        computed[mode] = sum(step.num_prefill_tokens + step.num_decode_tokens for step in steps)
    assert computed[PreemptionMode.SWAP] == 6 * 43
    assert computed[PreemptionMode.RECOMPUTE] > 6 * 43


def test_what_is_found_again_comes_back_for_nothing() -> None:
    """Two sequences with one long prompt: the second one's share of it stays owned by the first, and only the rest is copied back."""
    prompt = list(range(40))
    engine = make_engine(num_blocks=18, preemption_mode=PreemptionMode.SWAP, swap_bytes=PLENTY)
    copied: list[int] = []
    work = [make_request(name, [*prompt, i], max_tokens=20) for i, name in enumerate("ab")]
    for request in work:
        engine.submit(request)
    runner = runner_of(engine)
    inner = runner.write_blocks
    runner.write_blocks = lambda ids, data: (copied.append(len(ids)), inner(ids, data))[1]  # type: ignore[method-assign]
    tokens, _ = drain(engine)
    assert_answered(work, tokens)
    assert engine.stats().num_preemptions >= 1
    assert copied
    assert max(copied) <= 6, "ten blocks of the prompt are shared"


@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_copies_are_tried_before_the_first_choice(mode: PreemptionMode) -> None:
    """The engine's own clock: each try of 16 blocks out and back takes a second."""
    times = iter(range(100))
    config = EngineConfig(hash_unit=BLOCK, preemption_mode=mode, swap_bytes=PLENTY)
    engine = Engine(HookedRunner(num_blocks=16, block_size=BLOCK), config, clock=lambda: float(next(times)))
    tried = mode is not PreemptionMode.RECOMPUTE
    assert engine._swap.rates.copy_bytes_per_s == (32 * runner_bytes() if tried else PreemptionRates().copy_bytes_per_s)
    assert engine._swap.swapped_bytes == engine._swap._rows.num_used == 0


def test_an_engine_starts_where_the_host_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: SwappingRunner, count: int) -> npt.NDArray[np.uint8]:
        raise MemoryError

    monkeypatch.setattr(SwappingRunner, "new_host_blocks", refuse)
    engine = make_engine(swap_bytes=PLENTY, preemption_mode=PreemptionMode.SWAP)
    work = [make_request(f"r{i}", [i, 7, 2, 5], max_tokens=40) for i in range(6)]
    for request in work:
        engine.submit(request)
    tokens, _ = drain(engine)
    assert_answered(work, tokens)
    assert engine.stats().num_preemptions
    assert_idle(engine)


def test_a_copy_that_fails_is_computed_again() -> None:
    engine = make_engine(preemption_mode=PreemptionMode.SWAP, swap_bytes=PLENTY)

    def copying(where: str) -> None:
        if where == "out":
            raise RuntimeError("the host has no memory")

    runner_of(engine).copying = copying
    work = [make_request(f"r{i}", [i, 7, 2, 5], max_tokens=40) for i in range(6)]
    for request in work:
        engine.submit(request)
    tokens, _ = drain(engine)
    assert_answered(work, tokens)
    assert engine.stats().num_preemptions
    assert_idle(engine)
    assert engine._swap._rows.num_used == 0


@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_copy_back_that_fails_ends_its_step_and_leaves_nothing(look_ahead: bool) -> None:
    engine = make_engine(preemption_mode=PreemptionMode.SWAP, swap_bytes=PLENTY, look_ahead=look_ahead)

    def copying(where: str) -> None:
        if where == "back":
            runner_of(engine).copying = None
            raise RuntimeError("the bus is gone")

    runner_of(engine).copying = copying
    work = {f"r{i}": make_request(f"r{i}", [i, 7, 2, 5], max_tokens=40) for i in range(6)}
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
        assert tokens[name] == answer_of(request)[: len(tokens[name])]
        assert len(tokens[name]) == 40 or name in failed
    assert_idle(engine)
    assert engine._swap._rows.num_used == 0


@pytest.mark.parametrize("where", ["out", "back"])
def test_cancelled_while_being_copied(where: str) -> None:
    engine = make_engine(preemption_mode=PreemptionMode.SWAP, swap_bytes=PLENTY)
    work = [make_request(f"r{i}", [i, 7, 2, 5], max_tokens=40) for i in range(6)]
    cancelled: list[str] = []

    def copying(direction: str) -> None:
        if direction == where and not cancelled:
            cancelled.append("r5")
            assert engine.cancel("r5")
            engine.check_integrity()

    runner_of(engine).copying = copying
    for request in work:
        engine.submit(request)
    tokens, _ = drain(engine)
    assert cancelled
    assert_answered(work[:5], tokens)
    assert_idle(engine)
    assert engine._swap._rows.num_used == 0


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
        held = source.block_ids(request.seq_id)
        data = np.empty((len(held), runner_bytes()), np.uint8)
        source.runner.read_blocks(held, data)
        engine.runner.write_blocks(reservation.block_ids, data)
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
            with pytest.raises(ResourceExhausted, match="room to go on"):
                engine.reserve(make_request(f"late{number}", [1]))
            refused += 1
    assert refused
    assert engine.stats().num_preemptions
    for request in work:
        assert tokens[request.seq_id] == answer_of(request)
    assert_idle(engine)


def test_waiting_for_a_reservation_is_no_work() -> None:
    """All blocks are somebody's who does not give way: the engine's thread sleeps, and goes on when one comes free."""
    engine = make_engine(num_blocks=17)
    request = make_request("a", [1, 2, 3], max_tokens=30)
    engine.submit(request)
    tokens = [engine.step().tokens[0].token_id]
    engine.reserve(make_request("b", [5] * 56, max_tokens=1))
    engine.reserve(make_request("c", [6] * 3, max_tokens=1))
    while engine.wait_for_work(0.0):
        tokens += [token.token_id for token in engine.step().tokens]
        engine.check_integrity()
    assert engine.stats().num_free_blocks == 0
    assert engine.stats().stalled_s == 0.0
    assert len(tokens) < 30
    engine.cancel("b")
    assert engine.wait_for_work(0.0)
    rest, _ = drain(engine)
    assert tokens + [token.token_id for token in rest["a"]] == answer_of(request)
    engine.cancel("c")
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
    runner = SwappingRunner(num_blocks=40, block_size=BLOCK)
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


# ---- a real model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_a_model_s_tokens_are_those_of_a_large_pool(tiny_llama_dir: Path, mode: PreemptionMode) -> None:
    """float32, greedy and sampled with penalties: chunks, batch mix and copies change, tokens do not."""
    work = []
    for i in range(6):
        drawn = {"temperature": 0.9, "top_p": 0.9, "seed": i, "frequency_penalty": 0.5} if i % 2 else {"temperature": 0.0}
        params = SamplingParams(max_tokens=40, ignore_eos=True, **drawn)
        tokens = [(7 * i + k * k) % 500 for k in range(4 + 3 * i)]
        work.append(EngineRequest(seq_id=f"r{i}", token_ids=tokens, num_prompt_tokens=len(tokens), sampling=params, prefix_key=b"key"))
    answers = []
    for num_blocks in (200, 20):
        runner = ModelRunner(tiny_llama_dir, num_blocks=num_blocks, block_size=BLOCK, max_model_len=64)
        config = EngineConfig(
            max_num_batched_tokens=24, max_num_seqs=6, hash_unit=BLOCK, look_ahead=True, preemption_mode=mode, swap_bytes=PLENTY
        )
        engine = Engine(runner, config)
        answers.append([[token.token_id for token in tokens] for tokens in generate(engine, work)])
        assert bool(engine.stats().num_preemptions) == (num_blocks == 20)
        assert_idle(engine)
    assert answers[0] == answers[1]
