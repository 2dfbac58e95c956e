"""The launch of the next step waits for arrivals, and never for longer than the running step is sure to take."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from engine_helpers import Clock, HookedRunner, answer_of, drain, ids_of, make_request
from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.batch import Batch, InFlight, Sampled
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.pacing import Pacing
from twostep.step_curve import StepCurve, StepWorkload

WORK = st.builds(
    StepWorkload,
    prompt_tokens=st.integers(0, 4096),
    pairs=st.floats(0, 1e8),
    decodes=st.integers(0, 256),
    context=st.integers(0, 1 << 20),
)
COST = st.floats(0, 1e-4)


@given(WORK, WORK, st.builds(StepCurve, fixed_s=st.floats(0, 0.05), per_row_s=COST, per_pair_s=st.floats(0, 1e-9), per_context_s=COST))
def test_the_device_never_runs_dry_whatever_the_steps_cost(before: StepWorkload, now: StepWorkload, curve: StepCurve) -> None:
    pacing = Pacing()
    pacing.settled(before, curve.step_s(before), 0.001)
    assert pacing.wait_s(now, 0.0) <= curve.step_s(now) + 1e-9


@given(WORK, st.floats(0.0, 0.2), st.floats(0.0, 0.01), st.floats(0.0, 0.2))
def test_a_step_like_the_last_one_leaves_time_for_a_few_launches(
    work: StepWorkload, step_s: float, launch_s: float, running_s: float
) -> None:
    pacing = Pacing()
    assert pacing.wait_s(work, running_s) == 0.0
    pacing.settled(work, step_s, 0.001)
    pacing.launched(launch_s)
    wait = pacing.wait_s(work, running_s)
    assert wait == 0.0 or abs(running_s + wait + 1.5 * launch_s + 0.0005 - step_s) < 1e-9


def run_with_a_pause(pacing: Pacing, *, pause_s: float) -> float:
    """Seconds that the device stood still: its steps take 10 ms, and once, while its result is awaited, everything stops."""
    work = StepWorkload(decodes=4, context=400)
    idle_s = 0.0
    for number in range(30):
        host_s = pacing.wait_s(work, 0.001) + 0.0015
        pacing.launched(0.0005)
        idle_s += max(0.0, host_s - 0.01)
        took = max(0.01, host_s) + (pause_s if number == 5 else 0.0)
        pacing.settled(work, took, took - host_s)
    return idle_s


def test_a_long_step_holds_up_none_after_it() -> None:
    """A process that was stopped, a device that another had: for two seconds."""
    pacing = Pacing()
    assert run_with_a_pause(pacing, pause_s=2.0) <= 0.5
    pacing.curve = StepCurve(fixed_s=0.009, per_row_s=0.0, per_sequence_s=0.0002)
    assert run_with_a_pause(pacing, pause_s=2.0) <= 0.02


@given(st.lists(st.floats(0.0, 0.02), min_size=2, max_size=60), st.integers(1, 256), st.floats(0.001, 0.02))
def test_a_step_that_others_held_up_holds_up_none_after_it(beside: list[float], decodes: int, step_s: float) -> None:
    """KV that arrives beside a step takes its share of the device, now and then. The device never waits for the launch after it."""
    pacing, context, idle_s = Pacing(), 1000 * decodes, 0.0
    for number, more_s in enumerate(beside):
        work = StepWorkload(decodes=decodes, context=(context := context + decodes))
        took_s = step_s + (more_s if number % 4 == 3 else 0.0)
        ready_s = pacing.wait_s(work, 0.0) + 0.0004
        pacing.launched(0.0004)
        idle_s += max(0.0, ready_s - took_s)
        pacing.settled(work, max(took_s, ready_s), 0.001)
    assert idle_s == 0.0


@given(st.floats(0.0, 0.01), st.integers(2, 20))
def test_steps_that_become_longer_are_waited_for_as_long(more_s: float, num_steps: int) -> None:
    """Other work forgets it at once, the same work when the last short step is forgotten."""
    pacing = Pacing()
    few, many = StepWorkload(decodes=8, context=800), StepWorkload(decodes=64, context=6400)
    for _ in range(num_steps):
        pacing.settled(few, 0.01, 0.001)
    pacing.settled(many, 0.02, 0.001)
    assert abs(pacing.wait_s(many, 0.0) - 0.0195) < 1e-9
    for _ in range(num_steps):
        pacing.settled(many, 0.02 + more_s, 0.001)
    waited_s = pacing.wait_s(many, 0.0) + 0.0005
    assert 0.02 - 1e-9 <= waited_s <= 0.02 + more_s + 1e-9
    for _ in range(8):
        pacing.settled(many, 0.02 + more_s, 0.001)
    assert abs(pacing.wait_s(many, 0.0) + 0.0005 - 0.02 - more_s) < 1e-9


class Clocked(HookedRunner):
    """Each step takes the device 20 ms, and its launch the host half a one. `making_s`: what the host makes of a result takes so long."""

    overlaps = True
    making_s = 0.0

    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(**options)
        self.clock, self.free_at = clock, 0.0

    def launch(self, batch: Batch) -> InFlight:
        sampled = super().launch(batch).result()
        self.clock.sleep(0.0005)
        self.free_at = ends = max(self.clock.now, self.free_at) + 0.02
        return Ending(self.clock, sampled, ends, self.making_s)


class Ending:
    layer_marks = ()

    def __init__(self, clock: Clock, sampled: Sampled, ends: float, making_s: float) -> None:
        self._clock, self._sampled, self._ends, self._making_s = clock, sampled, ends, making_s

    def result(self) -> Sampled:
        self._clock.sleep(self._ends - self._clock.now)
        ready_at = self._clock.now
        self._clock.sleep(self._making_s)
        return replace(self._sampled, ready_at=ready_at)


def test_a_step_whose_end_was_not_seen_is_not_timed_nor_is_the_next() -> None:
    clock = Clock()
    runner = Clocked(clock, num_blocks=64, block_size=4, vocab_size=1000, max_model_len=512)
    engine = Engine(runner, EngineConfig(hash_unit=4, look_ahead=True), clock=clock.monotonic, sleep=clock.sleep)
    engine.submit(make_request("old", [1, 2, 3], max_tokens=30))
    outputs = [engine.step() for _ in range(6)]
    # Something else has the processor for a while.
    clock.sleep(0.06)
    outputs += [engine.step() for _ in range(8)]
    timed = [output.timed for output in outputs]
    assert timed[:8] == [True] * 6 + [False] * 2
    assert timed[-3:] == [True] * 3
    assert all(abs(output.duration_s - 0.02) < 0.0011 for output in outputs[1:] if output.timed)


def test_what_the_host_makes_of_a_result_lengthens_no_step() -> None:
    """Hundreds of answers with logprobs: the host has them for longer than a launch takes. It is not the device's time, and no time for
    the next launch to wait, or each step would make the next one longer."""
    clock = Clock()
    runner = Clocked(clock, num_blocks=64, block_size=4, vocab_size=1000, max_model_len=512)
    runner.making_s = 0.004
    engine = Engine(runner, EngineConfig(hash_unit=4, look_ahead=True), clock=clock.monotonic, sleep=clock.sleep)
    engine.submit(make_request("old", [1, 2, 3], max_tokens=60))
    outputs = [engine.step() for _ in range(50)]
    assert [len(output.tokens) for output in outputs] == [1] * 50
    gaps = [after.ended_at - before.ended_at for before, after in itertools.pairwise(outputs)]
    assert max(gaps[2:]) < 0.0201, "the device is never left without a step"
    assert all(output.timed for output in outputs[3:])


def test_a_thread_that_is_called_late_is_called_earlier() -> None:
    """A busy host: each sleep takes two milliseconds more. Soon the device is left without a step no more."""
    clock = Clock()
    runner = Clocked(clock, num_blocks=64, block_size=4, vocab_size=1000, max_model_len=512)

    def oversleep(seconds: float) -> None:
        clock.sleep(seconds + (0.002 if seconds else 0.0))

    engine = Engine(runner, EngineConfig(hash_unit=4, look_ahead=True), clock=clock.monotonic, sleep=oversleep)
    engine.submit(make_request("old", [1, 2, 3], max_tokens=60))
    outputs = [engine.step() for _ in range(40)]
    gaps = [after.ended_at - before.ended_at for before, after in itertools.pairwise(outputs)]
    assert max(gaps[5:]) < 0.0201
    assert all(output.launch_s < 0.001 for output in outputs), "the host's work is what a launch takes, not when it began"


def test_a_request_that_comes_while_a_step_runs_is_in_the_next_one() -> None:
    """It comes while the launch waits."""
    old, new = make_request("old", [1, 2, 3], max_tokens=30), make_request("new", [4, 5], max_tokens=2)
    came_after: list[int] = []

    def sleep(seconds: float) -> None:
        if not came_after:
            came_after.append(engine.stats().steps)
            engine.submit(new)

    runner = Clocked(Clock(), num_blocks=64, block_size=4, vocab_size=1000, max_model_len=512)
    engine = Engine(runner, EngineConfig(hash_unit=4, look_ahead=True), sleep=sleep)
    engine.submit(old)
    answers, steps = drain(engine)
    first = next(step.step for step in steps if any(token.seq_id == "new" for token in step.tokens))
    assert first == came_after[0] + 1
    for request in (old, new):
        assert ids_of(answers[request.seq_id]) == answer_of(request, 512)


def test_steps_that_are_shorter_than_foretold_leave_prompts_no_less() -> None:
    """The differences do not add up while one follows the other: else each sequence that comes would seem late at once."""
    clock = Clock()
    runner = Clocked(clock, num_blocks=2000, block_size=4, vocab_size=1000, max_model_len=6000)
    config = EngineConfig(hash_unit=4, look_ahead=True, max_num_batched_tokens=512)
    engine = Engine(runner, config, clock=clock.monotonic, sleep=clock.sleep)
    engine.set_curve(StepCurve(fixed_s=0.022, per_row_s=1e-4, knee=8))
    chunks: list[int] = []
    engine.submit(make_request("long", [i % 1000 for i in range(5000)], max_tokens=2))
    while sum(chunks) < 5000:
        if len(chunks) % 8 == 0:
            engine.reserve(make_request(f"new {len(chunks)}", [1, 2, 3], max_tokens=40, tpot_s=0.03))
            engine.commit(f"new {len(chunks)}", [4])
        chunks.append(engine.step().workload.prompt_tokens)
    # A step of 28.5 ms, which is what the pace allows, has room for 73 of its tokens by the curve; and steps take 20 ms.
    assert len(chunks) < 5000 / 73
