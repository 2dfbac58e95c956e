"""Launching step n+1 while step n is in flight changes nothing but when the host works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from engine_helpers import (
    VOCAB,
    HookedRunner,
    KnowingProposer,
    answer_of,
    assert_idle,
    drain,
    engine_of,
    hooked,
    ids_of,
    make_request,
    owned,
)

from twostep.engine.batch import Batch, InFlight, Sampled
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.proposer import DraftTime, WantedDrafts
from twostep.engine.types import FinishReason
from twostep.pooling import Pooling
from twostep.settings.speculative import SpeculativeConfig
from twostep.step_curve import StepCurve

CONTEXT = 128
THREE = SpeculativeConfig(method="ngram", num_speculative_tokens=3)


def make_engine(*, look_ahead: bool = True, num_blocks: int = 64, **options: Any) -> Engine:
    runner = HookedRunner(num_blocks=num_blocks, block_size=4, vocab_size=VOCAB, max_model_len=CONTEXT)
    return engine_of(runner, look_ahead=look_ahead, **options)


class Journal(HookedRunner):
    """Notes launches and results in the order they come."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.events: list[str] = []
        self.count = 0

    def launch(self, batch: Batch) -> InFlight:
        self.count += 1
        number, step = self.count, super().launch(batch)
        self.events.append(f"launch {number}")
        journal = self.events

        class Step:
            def result(self) -> Sampled:
                journal.append(f"result {number}")
                return step.result()

        return Step()


def test_a_step_is_launched_before_the_result_of_the_last_is_waited_for() -> None:
    runner = Journal(num_blocks=8, block_size=4, vocab_size=VOCAB, max_model_len=CONTEXT)
    engine = Engine(runner, EngineConfig(hash_unit=4, look_ahead=True))
    engine.submit(make_request("a", [5, 7, 2], max_tokens=3))
    outputs = [engine.step() for _ in range(3)]
    assert runner.events == ["launch 1", "launch 2", "result 1", "launch 3", "result 2", "result 3"]
    assert [output.step for output in outputs] == [1, 2, 3]
    assert [len(output.tokens) for output in outputs] == [1, 1, 1], "a step's tokens are out as soon as its result is"
    assert_idle(engine)


def num_ahead(journal: Journal) -> int:
    """Steps that were launched before the result of the one before them was there."""
    at = {event: place for place, event in enumerate(journal.events)}
    return sum(at[f"launch {number + 1}"] < at[f"result {number}"] for number in range(1, journal.count))


class Timed(KnowingProposer):
    """A model: it proposes what it was told to prepare."""

    time = DraftTime(1e-5, 1e-5)
    wanted = 0

    def prepare(self, wanted: Sequence[WantedDrafts], most_rows: int) -> None:
        self.wanted = sum(each.num_tokens for each in wanted)

    def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        return super().propose(seq_id, tokens, self.wanted)


@pytest.mark.parametrize(("rate", "computes", "ahead"), [(0.0, False, True), (0.0, True, True), (1.0, False, True), (1.0, True, False)])
def test_a_step_waits_for_the_one_before_it_only_where_a_model_s_drafts_are_worth_it(rate: float, computes: bool, ahead: bool) -> None:
    runner = Journal(num_blocks=80, block_size=4, vocab_size=VOCAB, max_model_len=300)
    engine = engine_of(
        runner,
        look_ahead=True,
        speculative=THREE,
        proposer=(Timed if computes else KnowingProposer)(VOCAB, rate, tireless=True),
    )
    engine.set_curve(StepCurve(fixed_s=0.001, per_row_s=0.0002))
    request = make_request("a", [5, 7, 2], max_tokens=200)
    engine.submit(request)
    tokens, steps = drain(engine)
    assert ids_of(tokens["a"]) == answer_of(request, 300)
    assert len(steps) > 190 if rate == 0.0 else len(steps) < 60, len(steps)
    assert num_ahead(runner) > 0.8 * len(steps) if ahead else num_ahead(runner) < 10


def test_drafts_that_never_come_are_seldom_waited_for() -> None:
    """A model that is asked each time, and has nothing."""

    class Silent(Timed):
        def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
            return ()

    runner = Journal(num_blocks=80, block_size=4, vocab_size=VOCAB, max_model_len=300)
    engine = engine_of(runner, look_ahead=True, speculative=THREE, proposer=Silent(VOCAB, 1.0))
    engine.set_curve(StepCurve(fixed_s=0.001, per_row_s=0.0002))
    engine.submit(make_request("a", [5, 7, 2], max_tokens=250))
    drain(engine)
    assert num_ahead(runner) > 220


def test_a_proposer_that_has_given_up_is_not_waited_for() -> None:
    class Failed(Timed):
        failed = True

    runner = Journal(num_blocks=80, block_size=4, vocab_size=VOCAB, max_model_len=300)
    engine = engine_of(runner, look_ahead=True, speculative=THREE, proposer=Failed(VOCAB, 1.0))
    engine.set_curve(StepCurve(fixed_s=0.001, per_row_s=0.0002))
    engine.submit(make_request("a", [5, 7, 2], max_tokens=100))
    drain(engine)
    assert num_ahead(runner) == 99


def test_a_prompt_to_be_embedded_is_nobody_to_draft_for() -> None:
    """As long as the context: no token comes after it."""
    runner = Journal(num_blocks=80, block_size=4, vocab_size=VOCAB, max_model_len=64)
    engine = engine_of(runner, look_ahead=True, speculative=THREE, proposer=Timed(VOCAB, 1.0))
    engine.set_curve(StepCurve(fixed_s=0.001, per_row_s=0.0002))
    engine.submit(replace(make_request("a", list(range(64)), max_tokens=1), pooling=Pooling.LAST))
    _, steps = drain(engine)
    assert any(step.pooled for step in steps)


def test_drafts_begin_as_soon_as_they_are_right_and_end_when_they_are_not() -> None:
    """Found out from what is proposed and not computed, while steps are planned ahead."""

    class Fitful(KnowingProposer):
        def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
            right = super().propose(seq_id, tokens, most)
            return right if 60 <= len(tokens) < 120 else [(token + 1) % VOCAB for token in right]

    runner = Journal(num_blocks=80, block_size=4, vocab_size=VOCAB, max_model_len=300)
    engine = engine_of(runner, look_ahead=True, speculative=THREE, proposer=Fitful(VOCAB, 1.0, tireless=True))
    engine.set_curve(StepCurve(fixed_s=0.001, per_row_s=0.0002))
    request = make_request("a", [5, 7, 2], max_tokens=200)
    engine.submit(request)
    tokens, steps = drain(engine)
    assert ids_of(tokens["a"]) == answer_of(request, 300)
    assert 10 < sum(step.num_decode_tokens > 1 for step in steps) < 35
    assert num_ahead(runner) > 90


def test_look_ahead_is_the_runner_s_choice_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for overlaps in (False, True):
        monkeypatch.setattr(Journal, "overlaps", overlaps)
        runner = Journal(num_blocks=8, block_size=4)
        engine = Engine(runner, EngineConfig(hash_unit=4))
        generate(engine, [make_request("a", [5], max_tokens=2)])
        assert (runner.events[1] == "launch 2") is overlaps


def test_what_a_stop_id_ends_is_computed_once_more_and_dropped() -> None:
    request = make_request("a", [5, 7, 2], max_tokens=50)
    stop = answer_of(request, CONTEXT)[2]
    engine = make_engine()
    engine.submit(make_request("a", [5, 7, 2], max_tokens=50, stop_token_ids=(stop,)))
    for _ in range(2):
        assert engine.step().tokens[0].finish_reason is None
    last = engine.step()
    assert (last.tokens[0].token_id, last.tokens[0].finish_reason) == (stop, FinishReason.STOP)
    engine.check_integrity()
    assert owned(engine) == 2, "3 + 3 tokens: the device may still write there"
    assert engine.wait_for_work(0.0), "the launched step is to be settled"
    assert engine.stats().num_running == 0
    dropped = engine.step()
    assert (list(dropped.tokens), dropped.num_decode_tokens) == ([], 1)
    assert_idle(engine)
    assert not engine.wait_for_work(0.0)


def test_a_cancelled_sequence_keeps_its_blocks_until_its_last_step_is_settled() -> None:
    engine = make_engine()
    engine.submit(make_request("a", [5, 7, 2], max_tokens=6))
    engine.step()
    taken: list[int] = []

    def during(batch: Batch) -> None:
        if not taken:
            assert engine.cancel("a")
        taken.append(owned(engine))
        engine.check_integrity()

    hooked(engine).during = during
    outputs = [engine.step(), engine.step()]
    assert taken == [2, 2], "owned during both steps it was in"
    assert not any(output.tokens for output in outputs)
    assert_idle(engine)


def test_nothing_is_carried_from_a_launch_that_failed() -> None:
    engine = make_engine()
    batches: list[Batch] = []

    def launching(batch: Batch) -> None:
        batches.append(batch)
        if len(batches) == 2:
            raise RuntimeError("on purpose")

    hooked(engine).launching = launching
    engine.submit(make_request("a", [5, 7, 2], max_tokens=6))
    assert [len(engine.step().failures) for _ in range(2)] == [0, 1]
    assert [batch.carried is not None for batch in batches] == [False, True], "what was to go on is over, and never launched again"
    assert_idle(engine)


def test_settle_launched_leaves_nothing_in_flight() -> None:
    engine = make_engine()
    request = make_request("a", [1, 2, 3])
    engine.submit(request)
    tokens = [*engine.step().tokens, *(token for output in engine.settle_launched() for token in output.tokens)]
    assert engine.settle_launched() == []
    rest, _ = drain(engine)
    assert ids_of([*tokens, *rest["a"]]) == answer_of(request, CONTEXT)
