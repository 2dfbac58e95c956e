"""Classes of requests in the engine: who goes first, how batch work gives way and comes back, and what a long wait changes. Every token is
the one worked out by hand, whatever gave way in between."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from engine_helpers import VOCAB, HookedRunner, answer_of, assert_idle, drain, engine_of, make_request

from twostep.engine.engine import Engine
from twostep.engine.types import EngineRequest, StepOutput
from twostep.errors import ResourceExhausted, SetupError
from twostep.request_class import RequestClass
from twostep.step_curve import FIRST_GAP_SHARE, StepCurve

INTERACTIVE, STANDARD, BATCH = RequestClass
CONTEXT, BLOCK = 200, 4
_seeds = itertools.count(1)


class Clock:
    """Stands still until a test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_engine(*, num_blocks: int = 100, clock: Callable[[], float] | None = None, **config: Any) -> Engine:
    runner = HookedRunner(num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB, max_model_len=CONTEXT)
    defaults: dict[str, Any] = {"max_num_batched_tokens": 20, "max_num_seqs": 4, "look_ahead": False, "clock": clock or Clock()}
    return engine_of(runner, **(defaults | config))


def request(seq_id: str, request_class: RequestClass, num_tokens: int, *, max_tokens: int = 4, **options: Any) -> EngineRequest:
    first = 7 * next(_seeds)
    tokens = [(first + 3 * i) % VOCAB for i in range(num_tokens)]
    return make_request(seq_id, tokens, max_tokens=max_tokens, request_class=request_class, ignore_eos=True, **options)


class Run:
    """Steps an engine and keeps what it said."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: dict[str, EngineRequest] = {}
        self.got: dict[str, list[int]] = {}

    def submit(self, *requests: EngineRequest) -> None:
        for one in requests:
            self.requests[one.seq_id] = one
            self.engine.submit(one)

    def step(self) -> StepOutput:
        output = self.engine.step()
        self.engine.check_integrity()
        self._note(output)
        return output

    def tokens(self) -> set[str]:
        """Returns the sequences that get a token in the next step."""
        return {token.seq_id for token in self.step().tokens}

    def finish(self) -> None:
        _, steps = drain(self.engine)
        for output in steps:
            self._note(output)
        for seq_id, one in self.requests.items():
            assert self.got[seq_id] == answer_of(one, CONTEXT)
        assert_idle(self.engine)

    def _note(self, output: StepOutput) -> None:
        assert not output.failures
        for token in output.tokens:
            self.got.setdefault(token.seq_id, []).append(token.token_id)


# ---- order ----------------------------------------------------------------------------------------------------------


def test_the_more_urgent_first_and_first_come_first_served_within_a_class() -> None:
    run = Run(make_engine(max_num_seqs=1))
    order = [("b0", BATCH), ("s0", STANDARD), ("b1", BATCH), ("i0", INTERACTIVE), ("s1", STANDARD), ("i1", INTERACTIVE)]
    run.submit(*(request(name, known, 10, max_tokens=1) for name, known in order))
    firsts = [next(iter(run.tokens())) for _ in order]
    assert firsts == ["i0", "i1", "s0", "s1", "b0", "b1"]
    run.finish()


def test_an_interactive_prompt_goes_before_a_standard_one_that_is_half_computed() -> None:
    run = Run(make_engine())
    run.submit(request("s", STANDARD, 50))
    run.step()
    run.submit(request("i", INTERACTIVE, 25))
    assert [(p.seq_id, p.num_computed_tokens) for p in run.step().progress] == [("i", 20)]
    assert {(p.seq_id, p.num_computed_tokens) for p in run.step().progress} == {("i", 25), ("s", 35)}
    run.finish()


def test_urgent_prompts_are_not_refused_for_batch_ones_that_wait() -> None:
    engine = make_engine(max_waiting=2)
    run = Run(engine)
    run.submit(request("b0", BATCH, 5), request("b1", BATCH, 5))
    with pytest.raises(ResourceExhausted):
        engine.submit(request("b2", BATCH, 5))
    run.submit(request("s0", STANDARD, 5), request("i0", INTERACTIVE, 5))
    with pytest.raises(ResourceExhausted):
        engine.submit(request("i1", INTERACTIVE, 5))
    run.finish()


# ---- giving way -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look_ahead", [False, True])
def test_budget_batch_decodes_and_prompts_give_way_to_a_prompt_and_go_on_after_it(look_ahead: bool) -> None:
    run = Run(make_engine(look_ahead=look_ahead))
    run.submit(request("d", STANDARD, 5, max_tokens=30), request("b0", BATCH, 6, max_tokens=30), request("b1", BATCH, 100))
    for _ in range(3):
        run.step()
    assert run.tokens() >= {"d", "b0"}
    run.submit(request("s", STANDARD, 57))
    if look_ahead:
        run.step()  # launched before
    for computed in (19, 38, 57):
        output = run.step()
        assert [(p.seq_id, p.num_computed_tokens) for p in output.progress] == [("s", computed)], "b1 gets no tokens"
        assert {token.seq_id for token in output.tokens} == {"d"} | ({"s"} if computed == 57 else set()), "b0 is passed over"
    assert run.tokens() == {"d", "s", "b0"}
    assert run.engine.stats().num_preemptions == 0
    run.finish()


@pytest.mark.parametrize("look_ahead", [False, True])
def test_seats_batch_sequences_take_none_from_others(look_ahead: bool) -> None:
    run = Run(make_engine(look_ahead=look_ahead))
    run.submit(*(request(f"b{i}", BATCH, 4, max_tokens=40) for i in range(4)))
    run.step()
    run.step()
    run.submit(*(request(f"s{i}", STANDARD, 4, max_tokens=8) for i in range(5)))
    if look_ahead:
        run.step()
    assert run.tokens() == {"s0", "s1", "s2", "s3"}, "within one step, and no more than max_num_seqs in it"
    assert run.tokens() == {"s0", "s1", "s2", "s3"}
    stats = run.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (8, 1, 0)
    run.finish()


@pytest.mark.parametrize("look_ahead", [False, True])
def test_blocks_the_batch_sequences_that_came_last_are_preempted(look_ahead: bool) -> None:
    run = Run(make_engine(num_blocks=30, max_num_batched_tokens=60, look_ahead=look_ahead))
    run.submit(*(request(f"b{i}", BATCH, 36, max_tokens=12) for i in range(3)))
    while len(run.tokens()) < 2:
        pass
    run.submit(request("s", STANDARD, 50))
    for _ in range(3):
        run.step()
        if "s" in run.got:
            break
    assert "s" in run.got, "one step to be told, one in flight, one for the prompt"
    assert 1 <= run.engine.stats().num_preemptions <= 2
    assert len(run.got["b0"]) > 1
    run.finish()


def test_blocks_for_several_urgent_prompts_come_free_at_once() -> None:
    run = Run(make_engine(num_blocks=30, max_num_batched_tokens=100, look_ahead=True))
    run.submit(*(request(f"b{i}", BATCH, 36, max_tokens=12) for i in range(3)))
    while len(run.tokens()) < 2:
        pass
    run.submit(*(request(f"s{i}", STANDARD, 28) for i in range(3)))
    for _ in range(3):
        run.step()
    assert {"s0", "s1", "s2"} <= run.got.keys()
    run.finish()


def test_blocks_that_batch_sequences_share_come_free_with_the_last_of_them() -> None:
    run = Run(make_engine(num_blocks=30, max_num_batched_tokens=100))
    for i in range(2):
        run.submit(make_request(f"b{i}", [*range(60), i], max_tokens=30, request_class=BATCH))
        run.step()
    run.submit(request("s", STANDARD, 90))
    assert run.tokens() == {"s"}
    run.finish()


def test_none_is_preempted_for_what_will_not_fit_all_the_same() -> None:
    engine = make_engine(num_blocks=30, max_num_batched_tokens=60)
    run = Run(engine)
    run.submit(request("s0", STANDARD, 70, max_tokens=40))
    run.step()
    run.submit(request("b", BATCH, 20, max_tokens=40))
    while "b" not in run.got:
        run.step()
    run.submit(request("s1", STANDARD, 90))
    for _ in range(5):
        assert run.tokens() == {"s0", "b"}
    assert engine.stats().num_preemptions == 0
    run.finish()


# ---- reservations ---------------------------------------------------------------------------------------------------


def test_a_reservation_gets_the_blocks_of_batch_sequences_after_a_step() -> None:
    engine = make_engine(num_blocks=30, max_num_batched_tokens=60, look_ahead=True)
    run = Run(engine)
    run.submit(request("b0", BATCH, 40, max_tokens=40), request("b1", BATCH, 40, max_tokens=40))
    while run.tokens() != {"b0", "b1"}:
        pass
    wanted = request("s", STANDARD, 60, max_tokens=4)
    with pytest.raises(ResourceExhausted) as refused:
        engine.reserve(wanted)
    assert refused.value.retry_after_s
    with pytest.raises(ResourceExhausted):
        engine.reserve(request("b2", BATCH, 4))
    run.step()
    run.step()
    reservation = engine.reserve(wanted)
    assert len(reservation.block_ids) == 15
    assert engine.stats().num_preemptions == 1
    assert engine.cancel("s")
    run.finish()


def test_a_reservation_may_take_all_that_batch_sequences_have() -> None:
    engine = make_engine(num_blocks=12, max_num_batched_tokens=60)
    run = Run(engine)
    run.submit(request("b", BATCH, 20, max_tokens=20))
    run.step()
    assert len(engine.reserve(request("s", STANDARD, 48, max_tokens=1)).block_ids) == 12
    engine.cancel("s")
    run.finish()


def test_batch_sequences_take_no_seats_from_reservations_but_standard_ones_do() -> None:
    engine = make_engine()
    run = Run(engine)
    run.submit(*(request(f"b{i}", BATCH, 4, max_tokens=20) for i in range(4)))
    run.step()
    with pytest.raises(ResourceExhausted):
        engine.reserve(request("b4", BATCH, 4))
    for i in range(4):
        engine.reserve(request(f"s{i}", STANDARD, 4))
    with pytest.raises(ResourceExhausted):
        engine.reserve(request("i", INTERACTIVE, 4))
    for i in range(4):
        engine.cancel(f"s{i}")
    run.finish()


def test_what_is_kept_for_a_reservation_is_kept_for_a_second() -> None:
    clock = Clock()
    engine = make_engine(num_blocks=30, max_num_batched_tokens=60, look_ahead=True, clock=clock)
    run = Run(engine)
    run.submit(request("d", STANDARD, 4, max_tokens=40), request("b", BATCH, 60, max_tokens=10))
    while run.tokens() != {"d", "b"}:
        pass
    with pytest.raises(ResourceExhausted):
        engine.reserve(request("s", STANDARD, 48, max_tokens=1))
    run.step()
    assert [run.tokens() for _ in range(4)] == [{"d"}] * 4
    clock.now += 1.1
    assert {"d", "b"} in [run.tokens() for _ in range(4)]
    run.finish()


def test_what_is_kept_for_a_reservation_that_never_comes_keeps_no_device_idle() -> None:
    engine = make_engine(num_blocks=30, max_num_batched_tokens=60, look_ahead=True)
    run = Run(engine)
    run.submit(request("b0", BATCH, 90, max_tokens=20))
    while run.tokens() != {"b0"}:
        pass
    with pytest.raises(ResourceExhausted):
        engine.reserve(request("s", STANDARD, 60))
    for _ in range(3):
        run.step()
    run.finish()


# ---- waiting --------------------------------------------------------------------------------------------------------


def test_a_batch_decode_that_prompts_leave_nothing_waits_so_long_and_no_longer() -> None:
    clock = Clock()
    run = Run(make_engine(num_blocks=500, max_num_seqs=16, ageing_s=2.0, clock=clock))
    run.submit(request("b", BATCH, 10, max_tokens=5))
    run.step()
    times: list[float] = []
    for i in range(60):
        run.submit(request(f"s{i}", STANDARD, 40, max_tokens=1))
        if "b" in run.tokens():
            times.append(clock.now)
        clock.now += 0.1
    assert times == pytest.approx([2.1, 2.2, 2.3, 2.4]), "passed over for two seconds, then standard"
    run.finish()


def test_time_in_which_it_is_served_makes_a_sequence_no_more_urgent() -> None:
    clock = Clock()
    run = Run(make_engine(num_blocks=500, max_num_seqs=16, ageing_s=2.0, clock=clock))
    run.submit(request("s", STANDARD, 20, max_tokens=1), request("b", BATCH, 10, max_tokens=60))
    assert run.tokens() == {"s"}
    clock.now += 1.0
    assert run.tokens() == {"b"}
    clock.now += 10.0
    assert run.tokens() == {"b"}
    run.submit(request("t", STANDARD, 40, max_tokens=1))
    assert [run.tokens(), run.tokens()] == [set(), {"t"}], "b waited for a second in all, and is passed over"
    run.finish()


def test_a_batch_prompt_pushed_out_again_and_again_gets_done() -> None:
    """Each standard prompt needs all blocks; in the pauses the batch prompt never gets to its end."""
    clock = Clock()
    run = Run(make_engine(num_blocks=30, max_num_batched_tokens=20, ageing_s=1.0, clock=clock))
    run.submit(request("b", BATCH, 90, max_tokens=10, key=b""))
    i = 0
    for _ in range(400):
        if run.engine.stats().num_waiting < 2:
            run.submit(request(f"s{i}", STANDARD, 100, max_tokens=2, key=b""))
            i += 1
        run.step()
        clock.now += 0.1
        if len(run.got.get("b", [])) == 10:
            break
    assert len(run.got["b"]) == 10
    assert clock.now < 10
    run.finish()


# ---- time -----------------------------------------------------------------------------------------------------------

# 1 ms, and 0.1 ms for each token.
CURVE = StepCurve(fixed_s=1e-3, per_row_s=1e-4)


def chunks(run: Run, clock: Clock | None = None) -> list[int]:
    """With a clock, every step takes 2 ms."""
    sizes = []
    while (output := run.step()).num_prefill_tokens:
        sizes.append(output.num_prefill_tokens)
        if clock is not None:
            clock.now += 2e-3
    return sizes


@pytest.mark.parametrize("how", ["max_step_s", "tpot_s", "gap_s", "reserved"])
def test_prompts_beside_decodes_are_cut_to_the_time_that_a_step_may_take(how: str) -> None:
    """By what was promised to some, and by the worker's own bound for those who were promised nothing."""
    clock = Clock()
    run = Run(make_engine(clock=clock, max_num_batched_tokens=100, max_step_s=2e-3 if how == "max_step_s" else 5e-3, min_chunk_tokens=2))
    # The last token of two leaves nothing to make up: the pace alone counts.
    promised = {"tpot_s": {"tpot_s": 2e-3 / 0.95}, "gap_s": {"gap_s": 2e-3 / 0.6 + 1e-9}}.get(how, {})
    run.submit(request("d", STANDARD, 5, max_tokens=2 if how == "tpot_s" else 40, **promised))
    run.submit(request("e", STANDARD, 5, max_tokens=40, tpot_s=1.0) if how != "max_step_s" else request("e", STANDARD, 5, max_tokens=40))
    run.step()
    if how == "reserved":
        run.engine.reserve(request("r", STANDARD, 5, gap_s=2e-3 / FIRST_GAP_SHARE + 1e-9))
    run.engine.set_curve(CURVE)
    run.submit(request("p", STANDARD, 30))
    if how == "tpot_s":
        assert chunks(run, clock) == [8, 22], "d has ended, and e has time"
    elif how == "gap_s":
        assert chunks(run, clock) == [2, 8, 8, 8, 4], "the first one's first step leaves room for the least chunk"
    else:
        assert chunks(run, clock) == [8, 8, 8, 6], "1 ms and ten rows of which two are decodes"
    run.engine.cancel("r")
    run.engine.set_curve(None)
    run.submit(request("q", STANDARD, 30))
    assert chunks(run) == [30]
    run.finish()


def test_the_bound_of_a_sequence_that_is_to_come_ends_with_its_reservation() -> None:
    run = Run(make_engine(max_num_batched_tokens=100, min_chunk_tokens=2))
    run.engine.set_curve(CURVE)
    coming = request("r", STANDARD, 5, gap_s=2e-3 / FIRST_GAP_SHARE + 1e-9)
    run.engine.reserve(coming)
    run.submit(request("p", STANDARD, 60, max_tokens=1))
    assert run.step().num_prefill_tokens == 10, "nobody decodes, and yet 2 ms"
    assert run.engine.stats().max_step_s == pytest.approx(2e-3)
    run.engine.cancel("r")
    assert run.step().num_prefill_tokens == 50
    assert run.engine.stats().max_step_s == 0
    run.finish()


def test_chunks_are_no_smaller_than_what_a_mixed_step_takes_anyway() -> None:
    run = Run(make_engine(max_num_batched_tokens=100, max_step_s=2e-3, min_chunk_tokens=2))
    run.submit(request("d", STANDARD, 5, max_tokens=40))
    run.step()
    run.engine.set_curve(dataclasses.replace(CURVE, mixed_s=3e-3))
    run.submit(request("p", STANDARD, 30))
    assert chunks(run) == [19, 11], "1 ms and twenty rows of which one is a decode"
    run.finish()


def test_a_promise_is_kept_beside_prompts_whose_steps_are_long_whatever_they_hold() -> None:
    """A step without prompts takes 1.1 ms, one with any 3: there is room for a chunk in every third one or so."""
    clock = Clock()
    run = Run(make_engine(clock=clock, max_num_batched_tokens=20, min_chunk_tokens=2))
    run.submit(request("d", STANDARD, 5, max_tokens=60, tpot_s=2e-3))
    run.step()
    curve = dataclasses.replace(CURVE, mixed_s=3e-3)
    run.engine.set_curve(curve)
    # Without a curve its pace would count from the first step that is planned with one.
    run.submit(*(request(f"p{i}", STANDARD, 70, max_tokens=1) for i in range(4)))
    sizes = []
    while len(sizes) < 59:
        output = run.step()
        sizes.append(output.num_prefill_tokens)
        clock.now += curve.step_s(output.workload)
    assert clock.now <= 2e-3 * len(sizes)
    assert sum(sizes) == 280
    assert min([size for size in sizes if size][:-1]) >= 9, "what fits in 3 ms, each time, or is left of a prompt"
    run.finish()


def test_without_decodes_prompts_fill_the_budget() -> None:
    run = Run(make_engine(max_num_batched_tokens=100, max_step_s=2e-3))
    run.engine.set_curve(CURVE)
    run.submit(request("p", STANDARD, 150), request("b", BATCH, 30))
    assert chunks(run) == [100, 80]
    run.finish()


def test_a_bound_that_the_decodes_alone_exceed_leaves_a_least_chunk_for_urgent_prompts_only() -> None:
    run = Run(make_engine(max_num_batched_tokens=100, max_step_s=1e-3, min_chunk_tokens=7))
    run.submit(request("d", STANDARD, 5, max_tokens=60))
    run.step()
    run.engine.set_curve(CURVE)
    run.submit(request("p", INTERACTIVE, 20, max_tokens=1), request("q", STANDARD, 9, max_tokens=1), request("b", BATCH, 9))
    assert chunks(run) == [7, 7, 6, 7, 2]
    assert run.engine.stats().num_waiting == 1, "the batch prompt waits"
    assert run.tokens() == {"d"}
    run.finish()


def test_batch_decodes_are_passed_over_while_they_would_make_a_step_too_long() -> None:
    run = Run(make_engine(max_num_batched_tokens=100, max_step_s=1.3e-3, max_num_seqs=8))
    run.submit(request("d", STANDARD, 5, max_tokens=20), *(request(f"b{i}", BATCH, 5, max_tokens=20) for i in range(4)))
    run.step()
    run.engine.set_curve(CURVE)
    for _ in range(19):
        assert run.tokens() == {"d", "b0", "b1"}
    assert run.tokens() == {"b2", "b3"}, "no gap is at stake any more"
    run.finish()


@pytest.mark.parametrize("config", [{"max_step_s": -1.0}, {"ageing_s": 0.0}, {"min_chunk_tokens": 0}])
def test_bounds_that_make_no_sense_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=next(iter(config))):
        make_engine(**config)
