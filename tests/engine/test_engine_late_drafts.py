"""Drafts of a step that is planned while another with drafts runs: it goes on wherever that one comes to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from engine_helpers import VOCAB, Clock, HookedRunner, KnowingProposer, answer_of, assert_idle, drain, engine_of, ids_of, make_request

from twostep.engine.batch import Batch, InFlight, Sampled
from twostep.engine.draft_learning import Slowness
from twostep.engine.draft_record import DraftRecord
from twostep.engine.engine import Engine, EngineConfig
from twostep.settings.speculative import SpeculativeConfig
from twostep.step_curve import StepCurve

CONTEXT = 300
CURVE = StepCurve(fixed_s=0.010, per_row_s=0.0001)


def config(most: int) -> SpeculativeConfig:
    return SpeculativeConfig(method="ngram", num_speculative_tokens=most)


class Watched(HookedRunner):
    """Counts the steps that go on behind drafts, and those that do not. Of rows behind drafts a device moves the position, and nothing
    else of how they are sampled."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"num_blocks": 200, "block_size": 4, "vocab_size": VOCAB, "max_model_len": CONTEXT} | options))
        self.num_behind = self.num_steps = 0

    def launch(self, batch: Batch) -> InFlight:
        self.num_steps += 1
        if batch.behind is not None:
            self.num_behind += 1
            for row in (batch.sampling[i] for i in batch.behind.rows.tolist()):
                assert not row.params.has_penalties
                assert not row.stop_ids or row.position >= row.params.min_tokens
        return super().launch(batch)


@pytest.mark.parametrize("most", [1, 3, 7])
def test_right_drafts_follow_each_other_without_a_wait(most: int) -> None:
    runner = Watched()
    engine = engine_of(runner, look_ahead=True, speculative=config(most), proposer=KnowingProposer(VOCAB, 1.0, tireless=True))
    request = make_request("a", [5, 7, 2], max_tokens=100)
    engine.submit(request)
    tokens, steps = drain(engine)
    assert ids_of(tokens["a"]) == answer_of(request, CONTEXT)
    # The first comes of the prompt, and the last ones perhaps by a step more.
    assert len(steps) <= 3 + -(-99 // (most + 1))
    assert runner.num_behind >= len(steps) - 5
    stats = engine.stats()
    assert stats.num_drafted == stats.num_accepted
    assert_idle(engine)


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_without_drafts(seed: int) -> None:
    """They end anywhere in a step, by length and by a token that ends them, some are penalized, others may not end too soon."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 16])
    # Room for one of them at least, or for all.
    runner = Watched(num_blocks=-(-rng.choice([90, 800]) // block_size), block_size=block_size)
    engine = engine_of(
        runner,
        look_ahead=True,
        speculative=config(rng.choice([1, 2, 4, 7])),
        proposer=KnowingProposer(VOCAB, rng.choice([0.5, 0.9, 0.98]), seed, tireless=rng.random() < 0.5),
        max_num_batched_tokens=rng.choice([12, 40]),
        max_num_seqs=rng.choice([6, 12]),
    )
    requests = []
    for i in range(8):
        sampling: dict[str, Any] = rng.choice([{}, {}, {"min_tokens": 6}, {"repetition_penalty": 1.5}, {"speculate": False}])
        request = make_request(f"r{i}", [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))], max_tokens=60, **sampling)
        answer = answer_of(request, CONTEXT)
        # A token that comes somewhere in it.
        stop = rng.choice([(), (answer[rng.randrange(len(answer))],)])
        requests.append(replace(request, sampling=replace(request.sampling, max_tokens=rng.randrange(6, 60), stop_token_ids=stop)))
    for request in requests:
        engine.submit(request)
    tokens, _ = drain(engine)
    for request in requests:
        assert ids_of(tokens[request.seq_id]) == answer_of(request, CONTEXT), request.seq_id
    assert_idle(engine)


def test_one_that_is_cancelled_between_two_steps_leaves_nothing() -> None:
    runner = Watched()
    engine = engine_of(runner, look_ahead=True, speculative=config(3), proposer=KnowingProposer(VOCAB, 1.0, tireless=True))
    requests = [make_request(name, [5 + i, 7, 2], max_tokens=60) for i, name in enumerate("ab")]
    for request in requests:
        engine.submit(request)
    outputs = [engine.step() for _ in range(4)]
    assert runner.num_behind >= 2
    engine.cancel("a")
    engine.check_integrity()
    tokens, _ = drain(engine)
    assert "a" not in tokens
    before = [token.token_id for output in outputs for token in output.tokens if token.seq_id == "b"]
    assert before + ids_of(tokens["b"]) == answer_of(requests[1], CONTEXT)
    assert_idle(engine)


def test_a_penalized_one_has_drafts_only_where_its_last_token_is_known() -> None:
    runner = Watched()
    engine = engine_of(runner, look_ahead=True, speculative=config(3), proposer=KnowingProposer(VOCAB, 1.0, tireless=True))
    request = make_request("a", [5, 7, 2], max_tokens=60, presence_penalty=0.5)
    engine.submit(request)
    tokens, steps = drain(engine)
    assert ids_of(tokens["a"]) == answer_of(request, CONTEXT)
    assert not runner.num_behind
    assert len(steps) < 20


class Device(Watched):
    """Takes what CURVE says, and `slower` times that where rows are drafts; each launch takes the host `launch_s`."""

    overlaps = True

    def __init__(self, clock: Clock, launch_s: float, slower: float = 1.0) -> None:
        super().__init__(num_blocks=1000, max_model_len=1000)
        self.clock, self.launch_s, self.slower = clock, launch_s, slower
        self.free_at = 0.0
        self.num_in_flight = self.num_ahead = 0

    def launch(self, batch: Batch) -> InFlight:
        sampled = super().launch(batch).result()
        self.clock.sleep(self.launch_s)
        self.num_ahead += self.num_in_flight > 0
        self.num_in_flight += 1
        num_rows = len(batch.token_ids)
        seconds = CURVE.fixed_s + CURVE.per_row_s * num_rows
        if not all(row.seq_id for row in batch.sampling):
            seconds *= self.slower
        self.free_at = max(self.clock.now, self.free_at) + seconds
        return Ending(self, sampled, self.free_at)


class Ending:
    layer_marks = ()

    def __init__(self, device: Device, sampled: Sampled, ends: float) -> None:
        self._device, self._sampled, self._ends = device, sampled, ends

    def result(self) -> Sampled:
        self._device.clock.sleep(self._ends - self._device.clock.now)
        self._device.num_in_flight -= 1
        return replace(self._sampled, ready_at=self._device.clock.now)


class SlowProposer(KnowingProposer):
    """Looks up for so long."""

    def __init__(self, clock: Clock, seconds: float, rate: float) -> None:
        super().__init__(VOCAB, rate, tireless=True)
        self._clock, self._seconds = clock, seconds

    def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        self._clock.sleep(self._seconds)
        return super().propose(seq_id, tokens, most)


def on(device: Device, rate: float, most: int = 4, proposer: KnowingProposer | None = None) -> Engine:
    clock, proposer = device.clock, proposer or KnowingProposer(VOCAB, rate, tireless=True)
    bounds = EngineConfig(hash_unit=4, speculative=config(most))
    engine = Engine(device, bounds, clock=clock.monotonic, sleep=clock.sleep, proposer=proposer)
    engine.set_curve(CURVE)
    return engine


@pytest.mark.parametrize(("launch_s", "rate", "waits"), [(0.0005, 0.9, True), (0.009, 0.9, False), (0.0005, 1.0, False)])
def test_a_step_waits_for_better_drafts_where_they_are_worth_it(launch_s: float, rate: float, waits: bool) -> None:
    """Behind a wrong token all is wrong here: late drafts are right less often."""
    device = Device(Clock(), launch_s)
    engine = on(device, rate)
    request = make_request("a", [5, 7, 2], max_tokens=600)
    engine.submit(request)
    tokens, _ = drain(engine)
    assert ids_of(tokens["a"]) == answer_of(request, 1000)
    assert (device.num_ahead < 0.3 * device.num_steps) == waits, (device.num_ahead, device.num_steps)
    assert (device.num_ahead > 0.7 * device.num_steps) != waits


@pytest.mark.parametrize("slower", [1.0, 4.0])
def test_drafting_ends_where_steps_with_drafts_take_longer_than_foretold(slower: float) -> None:
    device = Device(Clock(), 0.0005, slower)
    engine = on(device, 0.95, most=1)
    request = make_request("a", [5, 7, 2], max_tokens=900)
    engine.submit(request)
    tokens, _ = drain(engine)
    assert ids_of(tokens["a"]) == answer_of(request, 1000)
    num_drafted = sum(engine.stats().num_drafted)
    assert num_drafted < 60 if slower > 1.0 else num_drafted > 300, num_drafted


@pytest.mark.parametrize(("look_up_s", "rate", "looks"), [(0.04, 0.5, False), (0.04, 0.0, False), (0.002, 0.9, True)])
def test_nothing_is_looked_up_where_that_takes_longer_than_it_saves(look_up_s: float, rate: float, looks: bool) -> None:
    """The host is slower than the device then, which no curve tells; where drafts are never right, too."""
    device = Device(Clock(), 0.0005)
    proposer = SlowProposer(device.clock, look_up_s, rate)
    engine = on(device, rate, most=2, proposer=proposer)
    request = make_request("a", [5, 7, 2], max_tokens=900)
    engine.submit(request)
    tokens, _ = drain(engine)
    assert ids_of(tokens["a"]) == answer_of(request, 1000)
    assert proposer.num_asked > 0.7 * device.num_steps if looks else proposer.num_asked < 0.15 * device.num_steps


def test_slowness_is_that_of_steps_with_drafts_alone_and_is_forgotten() -> None:
    slowness = Slowness()
    for _ in range(200):
        slowness.learn(5, 0.013, 0.010, drafted=False)
        slowness.learn(6, 0.013, 0.010, drafted=True)
    assert slowness.of(5) == pytest.approx(1.0, abs=0.01), "the curve is wrong of either"
    for _ in range(100):
        slowness.learn(5, 0.026, 0.010, drafted=True)
    assert slowness.of(7) == pytest.approx(2.0, abs=0.05)
    assert slowness.of(8) == 1.0, "of others nothing is known"
    slowness.learn(5, 9.0, 0.010, drafted=True)
    assert slowness.of(5) < 2.2, "one step says little"
    for _ in range(2000):
        slowness.learn(5, 0.013, 0.010, drafted=False)
    assert slowness.of(5) < 1.05


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_record_learns_whether_what_is_proposed_behind_a_wrong_token_is_right(goes_on: bool) -> None:
    record = DraftRecord(most=3)
    tokens: list[int] = [0]
    for _ in range(30):
        record.propose([1, 2, 3, 4, 5, 6, 7], tokens)
        tokens += [1, 9]
        record.learn(tokens)
        record.propose([3, 4, 5, 6, 7, 8, 9], tokens)
        tokens += [3, 4, 5] if goes_on else [8, 4, 5]
        record.learn(tokens)
    assert record.again_rate > 0.9 if goes_on else record.again_rate < 0.1
    assert 0.0 < record.rate < 0.9
