"""A draft model beside the engine: what it computes of whom, that it never costs, and that nobody learns of its troubles. Time is counted
by the fake devices' own clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine_helpers import HookedRunner, answer_of, assert_idle, drain, engine_of, hand_over, ids_of, make_request

from twostep.engine import scheduler
from twostep.engine.batch import Batch, Sampled
from twostep.engine.draft_model import DraftModel
from twostep.engine.engine import Engine
from twostep.engine.model_proposer import RoundTime
from twostep.engine.proposer import LEAST_CAUGHT_UP, MOST_CAUGHT_UP, WantedDrafts
from twostep.engine.types import EngineRequest
from twostep.errors import SetupError
from twostep.settings.speculative import SpeculativeConfig
from twostep.step_curve import GAP_SHARE, StepCurve

VOCAB = 1000
STEP_S, ROW_S = 0.010, 0.0001


class Surprising(HookedRunner):
    """A fake device that samples another token at each third place of an answer."""

    surprises = False

    def run(self, batch: Batch) -> Sampled:
        sampled = super().run(batch)
        if not self.surprises:
            return sampled
        rows = zip(sampled.token_ids, batch.sampling, strict=True)
        return replace(sampled, token_ids=[(token + (row.position % 3 == 2)) % VOCAB for token, row in rows])


class Devices:
    """A served model and its draft, which share a clock. The draft is the served model itself, unless it sees only a `window`."""

    def __init__(
        self,
        *,
        draft_s: float = 0.001,
        draft_row_s: float = 0.00001,
        blocks: int = 600,
        window: int = 0,
        context: int = 3000,
        **engine: Any,
    ) -> None:
        self.now = 0.0
        self.draft_s = 0.0
        self.batches: list[Batch] = []
        self.served = self.runner(600, 0, 3000, STEP_S, ROW_S)
        self.runner_of_draft = self.runner(blocks, window, context, draft_s, draft_row_s)
        self.model = DraftModel(self.runner_of_draft, max_num_seqs=16, clock=self.clock)
        self.runner_of_draft.during = self.batches.append
        config = SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=4)
        bounds = {"max_num_batched_tokens": 512, "max_num_seqs": 32, "clock": self.clock, "speculative": config} | engine
        self.engine = engine_of(self.served, proposer=self.model, **bounds)

    def runner(self, num_blocks: int, window: int, context: int, step_s: float, row_s: float) -> Surprising:
        return Surprising(
            num_blocks=num_blocks,
            block_size=16,
            vocab_size=VOCAB,
            max_model_len=context,
            window=window,
            step_s=step_s,
            per_token_s=row_s,
            clock=self.clock,
            sleep=self.sleep,
        )

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def calibrated(self) -> Devices:
        self.engine.set_curve(StepCurve(fixed_s=STEP_S, per_row_s=ROW_S))
        return self

    def answer(self, *requests: EngineRequest) -> float:
        """Returns how long it takes; every token must be right."""
        began = self.now
        for request in requests:
            self.engine.submit(request)
        tokens, _ = drain(self.engine)
        for request in requests:
            assert ids_of(tokens[request.seq_id]) == answer_of(request, 3000)
        assert_idle(self.engine)
        return self.now - began


def alone(*requests: EngineRequest) -> float:
    """How long they take without drafts."""
    devices = Devices(speculative=None).calibrated()
    return devices.answer(*requests)


def test_the_served_model_itself_is_always_right() -> None:
    devices = Devices()
    devices.answer(make_request("a", [5, 6, 7], max_tokens=101))
    stats = devices.engine.stats()
    assert stats.num_drafted == stats.num_accepted == (20, 20, 20, 20)
    # The prompt, and after that five tokens a step.
    assert stats.steps == 1 + 20
    # Each round computes what the one before it said, and what the served model added.
    assert all(len(batch.token_ids) <= 3 for batch in devices.batches[1:])


def test_behind_a_wrong_draft_it_goes_on_from_what_came() -> None:
    """Of the KV that it computed of drafts, what came is kept, and only that: each third token is another one, and the others are right."""
    got = []
    for devices in (Devices(), Devices(speculative=None)):
        devices.served.surprises = True
        devices.engine.submit(make_request("a", [5, 6, 7], max_tokens=101))
        tokens, _ = drain(devices.engine)
        got.append(ids_of(tokens["a"]))
        if sum(devices.engine.stats().num_drafted):
            # From one surprise to the next is one step: two drafts that are right, and the surprise.
            assert devices.engine.stats().steps <= 2 + 34
            # Four rounds each, of a token.
            assert sum(len(batch.token_ids) for batch in devices.batches) <= 4 * 36 + 3
    assert got[0] == got[1]


def test_what_it_was_not_asked_for_it_catches_up_with() -> None:
    """Its last draft was wrong, then steps had none: the KV of what it drafted there is another token's."""
    devices = Devices()
    engine = devices.engine
    engine.submit(make_request("a", [5, 6, 7], max_tokens=101))
    for _ in range(4):
        devices.served.surprises = True
        engine.set_curve(None)
        engine.step()
        engine.set_curve(StepCurve(fixed_s=0.0, per_row_s=1.0))
        for _ in range(5):
            engine.step()
        devices.served.surprises = False
        engine.set_curve(None)
        before = engine.stats()
        engine.step()
        after = engine.stats()
        assert sum(after.num_accepted) == sum(before.num_accepted) + 4


def test_a_draft_that_was_accepted_wrongly_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests see it."""
    monkeypatch.setattr(scheduler, "num_sampled", lambda sequence, drafted, token_ids: len(drafted) + 1)
    devices = Devices(window=3)
    devices.engine.submit(request := make_request("a", [5, 6, 7], max_tokens=20))
    tokens, _ = drain(devices.engine)
    assert ids_of(tokens["a"])[:20] != answer_of(request)


def test_what_is_cheap_and_right_makes_answers_faster() -> None:
    request = make_request("a", [5, 6, 7], max_tokens=200)
    assert Devices().calibrated().answer(request) < alone(request) / 3


@pytest.mark.parametrize("draft", [{"draft_s": STEP_S}, {"draft_s": 0.5}, {"window": 3}, {"window": 3, "draft_s": 0.005}])
@pytest.mark.parametrize("num_requests", [1, 6, 30])
def test_what_does_not_pay_costs_next_to_nothing(draft: dict[str, Any], num_requests: int) -> None:
    """It takes as long as the served model, or is always wrong."""
    requests = [make_request(f"r{i}", [i + 5, 6, 7], max_tokens=300) for i in range(num_requests)]
    devices = Devices(**draft).calibrated()
    # The first token of each is drafted to find out.
    first_s = 3 * draft.get("draft_s", 0.001) if devices.model.time.fixed_s < STEP_S else 0.0
    assert devices.answer(*requests) < 1.02 * alone(*requests) + first_s


def test_a_short_answer_to_a_long_prompt_is_not_drafted() -> None:
    """What the draft model would have to compute first takes longer than the answer."""
    requests = [make_request("a", [5] * 2000, max_tokens=12)]
    devices = Devices(draft_row_s=0.0005).calibrated()
    # It knows by then what it takes.
    devices.answer(make_request("b", [7] * 40, max_tokens=100))
    assert devices.answer(*requests) < 1.02 * alone(*requests)


def test_a_long_answer_to_a_long_prompt_is() -> None:
    request = make_request("a", [5] * 2000, max_tokens=400)
    devices = Devices(draft_row_s=0.00002).calibrated()
    assert devices.answer(request) < alone(request) / 2
    # Nobody waits long for what it has to catch up with.
    assert max(len(batch.token_ids) for batch in devices.batches) <= MOST_CAUGHT_UP + 1


def test_several_catch_up_one_after_the_other() -> None:
    devices = Devices(draft_row_s=0.00002).calibrated()
    devices.answer(*(make_request(f"r{i}", [i + 5] * 700, max_tokens=300) for i in range(3)))
    assert sum(devices.engine.stats().num_accepted) > 600
    assert max(len(batch.token_ids) for batch in devices.batches) <= MOST_CAUGHT_UP + 3


def test_a_promised_pace_is_kept_while_it_catches_up() -> None:
    """What it takes, and the step behind it, are together no longer than a step may be."""
    gap_s = 0.024
    devices = Devices(draft_row_s=0.00003).calibrated()
    engine = devices.engine
    engine.submit(make_request("promised", [5, 6, 7], max_tokens=400, gap_s=gap_s, speculate=False))
    for _ in range(20):
        engine.step()
    engine.submit(make_request("long", [5] * 1500, max_tokens=300))
    took = []
    while engine.stats().num_running > 1 or engine.stats().num_waiting:
        began = devices.now
        if not engine.step().num_prefill_tokens:
            took.append(devices.now - began)
    assert max(took) <= GAP_SHARE * gap_s
    assert sum(len(batch.token_ids) for batch in devices.batches) > 1500
    assert sum(engine.stats().num_accepted) > 50


def test_not_even_to_find_out_whether_it_pays_is_a_pace_broken() -> None:
    devices = Devices(context=1900, draft_row_s=0.0).calibrated()
    engine = devices.engine
    engine.submit(make_request("a", [5, 6, 7], max_tokens=2900))
    for _ in range(20):
        engine.step()
    assert devices.batches
    # From now on it is slow, which it takes some rounds to believe.
    devices.runner_of_draft.step_s = 0.1
    for _ in range(60):
        engine.step()
    engine.submit(make_request("promised", [5, 6, 7], max_tokens=1300, gap_s=0.030, speculate=False))
    for _ in range(2):
        engine.step()
    num_batches = len(devices.batches)
    for _ in range(1200):
        engine.step()
    assert len(devices.batches) == num_batches
    for _ in range(200):
        engine.step()
    assert len(devices.batches) > num_batches


def test_what_pays_later_is_found_out() -> None:
    devices = Devices(window=3).calibrated()
    devices.answer(*(make_request(f"r{i}", [i + 5, 6, 7], max_tokens=200) for i in range(3)))
    devices.runner_of_draft._windows = [0]  # from now on it is right
    request = make_request("later", [5, 6, 7], max_tokens=1500)
    assert devices.answer(request) < alone(request) / 2


def test_a_small_pool_drafts_for_as_many_as_fit() -> None:
    devices = Devices(blocks=10)
    devices.answer(*(make_request(f"r{i}", [i + 5] * 20, max_tokens=60) for i in range(6)))
    stats = devices.engine.stats()
    assert stats.num_drafted == stats.num_accepted
    assert sum(stats.num_drafted) > 40
    devices.model.prepare([], 0)
    assert devices.model.num_free_blocks == 10


def test_beyond_its_context_it_is_silent() -> None:
    devices = Devices(context=50)
    devices.answer(make_request("a", [5] * 10, max_tokens=100), make_request("b", [5] * 60, max_tokens=100))
    stats = devices.engine.stats()
    assert stats.num_drafted == stats.num_accepted
    assert 20 <= sum(stats.num_drafted) <= 50
    assert max(int(batch.seq_lens.max()) for batch in devices.batches) <= 50


@pytest.mark.parametrize("at", range(6))
def test_requests_learn_nothing_of_its_failure(at: int, caplog: pytest.LogCaptureFixture) -> None:
    devices = Devices()

    def fail(batch: Batch) -> None:
        devices.batches.append(batch)
        if len(devices.batches) > at:
            raise RuntimeError("out of memory")

    devices.runner_of_draft.during = fail
    devices.answer(*(make_request(f"r{i}", [i + 5] * 20, max_tokens=60) for i in range(3)))
    assert devices.engine.stats().drafting_failed
    assert len(devices.batches) == at + 1
    assert len([record for record in caplog.records if "draft model" in record.message]) == 1
    devices.answer(make_request("later", [5, 6, 7], max_tokens=20))


def test_where_it_has_no_token_it_is_silent() -> None:
    devices = Devices()
    devices.runner_of_draft.broken = True
    devices.answer(make_request("a", [5, 6, 7], max_tokens=20))
    assert not sum(devices.engine.stats().num_drafted)
    devices.runner_of_draft.broken = False
    devices.answer(make_request("b", [5, 6, 7], max_tokens=20))
    assert sum(devices.engine.stats().num_accepted)


def test_who_is_cancelled_while_it_drafts_leaves_nothing() -> None:
    devices = Devices()

    def cancel(_batch: Batch) -> None:
        devices.engine.cancel("a")

    devices.engine.submit(make_request("a", [5, 6, 7], max_tokens=20))
    devices.engine.submit(make_request("b", [5, 6, 7], max_tokens=20))
    devices.engine.step()
    devices.runner_of_draft.during = cancel
    tokens, _ = drain(devices.engine)
    assert "a" not in tokens
    assert len(tokens["b"]) == 19
    devices.model.prepare([], 0)
    assert devices.model.num_free_blocks == devices.model.num_blocks


def test_an_answer_handed_over_is_caught_up_with() -> None:
    source, target = Devices(), Devices()
    request = make_request("a", [5] * 300, max_tokens=60)
    first, _ = hand_over(source.engine, target.engine, request)
    tokens, _ = drain(target.engine)
    assert [first, *ids_of(tokens["a"])] == answer_of(request)
    # A prefill worker drafts nothing.
    assert not source.batches
    stats = target.engine.stats()
    assert stats.num_drafted == stats.num_accepted
    assert sum(stats.num_drafted) > 40
    assert len(target.batches[0].token_ids) == MOST_CAUGHT_UP


def test_after_a_preemption_it_goes_on_where_it_was() -> None:
    devices = Devices(max_num_batched_tokens=64)
    small = engine_of(
        HookedRunner(num_blocks=26, block_size=4, vocab_size=VOCAB, max_model_len=48),
        speculative=SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=2),
        proposer=devices.model,
    )
    requests = [make_request(f"r{i}", [i + 3] * (3 + 2 * i), max_tokens=19 - 2 * i) for i in range(6)]
    for request in requests:
        small.submit(request)
    tokens, _ = drain(small)
    assert [ids_of(tokens[request.seq_id]) for request in requests] == [answer_of(request) for request in requests]
    stats = small.stats()
    assert stats.num_preemptions
    assert stats.num_drafted == stats.num_accepted
    # What was computed before is not computed again.
    computed = sum(len(batch.token_ids) for batch in devices.batches)
    assert computed < sum(len(request.token_ids) + 19 for request in requests) + 2 * len(devices.batches)


def test_with_a_grammar_or_without_speculation_it_is_not_asked() -> None:
    devices = Devices()
    devices.answer(make_request("a", [5, 6, 7], max_tokens=20, speculate=False))
    assert not devices.batches


def test_an_engine_without_the_model_refuses() -> None:
    runner = HookedRunner(num_blocks=40, block_size=4, vocab_size=VOCAB, max_model_len=100)
    with pytest.raises(SetupError, match="needs a model"):
        engine_of(runner, speculative=SpeculativeConfig(method="draft_model", model="m"))


def test_a_round_s_time_is_learnt() -> None:
    """From few rows what it takes at all, from many what a row does; whichever comes."""
    rounds = RoundTime([(1, 0.011), (101, 0.111)])
    assert rounds.time == pytest.approx((0.010, 0.001))
    for _ in range(60):
        rounds.saw(1, 0.021)
    assert rounds.time == pytest.approx((0.020, 0.001), rel=0.01)
    for _ in range(60):
        rounds.saw(100, 0.220)
    assert rounds.time == pytest.approx((0.020, 0.002), rel=0.01)
    # A row that takes less than nothing takes nothing.
    assert RoundTime([(1, 0.2), (64, 0.1)]).time == (0.2, 0.0)
    assert RoundTime([(1, 0.2)]).time == (0.2, 0.0)


def test_little_of_much_is_left_alone() -> None:
    """Where a step leaves room for a few tokens only, it would never catch up."""
    devices = Devices()
    engine: Engine = devices.engine
    engine.submit(make_request("a", [5] * 100, max_tokens=20))
    engine.step()
    (sequence,) = engine._scheduler._running.values()
    devices.model.prepare([WantedDrafts(sequence, 1)], LEAST_CAUGHT_UP - 1)
    assert not devices.batches
    devices.model.prepare([WantedDrafts(sequence, 1)], LEAST_CAUGHT_UP)
    assert [len(batch.token_ids) for batch in devices.batches] == [LEAST_CAUGHT_UP]
