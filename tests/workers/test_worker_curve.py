"""Cost curves: fitted to noisy steps, measured without a trace, corrected by what steps really take."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_harness import HeldRunner, expected, make_model, make_runner, prompt_of, routed, started, until

from twostep.cluster.records import WorkerRecord
from twostep.engine.batch import Batch, FinishedStep, InFlight, Sampled
from twostep.engine.fake import FakeRunner
from twostep.errors import SetupError
from twostep.step_curve import StepCurve, StepWorkload, chunk_pairs
from twostep.worker.calibration import calibrate, mixed_probes, probes
from twostep.worker.config import WorkerConfig, config_in_role
from twostep.worker.curve_fit import StepSample, fit_curve, non_negative_least_squares
from twostep.worker.curve_tracker import MAX_FACTOR, CurveTracker
from twostep.worker.model import ServedModel, at_knee, resolve_config

GPU = StepCurve(fixed_s=4e-3, per_row_s=20e-6, knee=200, per_pair_s=2e-10, per_sequence_s=4e-6, per_context_s=3e-8)
CPU = StepCurve(fixed_s=8e-3, per_row_s=0.8e-3, per_pair_s=1e-7, per_sequence_s=1e-3, per_context_s=2e-6)

PROMPTS = ((16, 0), (64, 0), (128, 0), (256, 0), (512, 0), (1024, 0), (2048, 0), (256, 4096), (4096, 0), (8192, 0))
DECODES = ((1, 64), (1, 4096), (4, 512), (16, 64), (16, 4096), (64, 1024), (256, 64), (256, 512))
WORK = [
    *(StepWorkload(prompt_tokens=count, pairs=chunk_pairs(count, before)) for count, before in PROMPTS),
    *(StepWorkload(decodes=count, context=count * context) for count, context in DECODES),
]

BOTH = StepWorkload(prompt_tokens=192, pairs=chunk_pairs(192, 0), decodes=40, context=40 * 600)

curves = st.builds(
    StepCurve,
    fixed_s=st.floats(1e-4, 2e-2),
    per_row_s=st.floats(5e-6, 2e-3),
    knee=st.sampled_from([0.0, 0.0, 100.0, 300.0]),
    per_pair_s=st.floats(0, 1e-7),
    per_sequence_s=st.floats(0, 1e-3),
    per_context_s=st.floats(0, 1e-5),
)


# ---- the fit ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=10)
@given(curves, st.integers(0, 1 << 30))
def test_a_known_curve_is_found_again_within_ten_percent_from_steps_with_three_percent_of_noise(curve: StepCurve, seed: int) -> None:
    rng = random.Random(seed)
    samples = [StepSample(work, curve.step_s(work) * (1 + max(-0.06, min(0.06, rng.gauss(0, 0.03))))) for work in WORK]
    found = fit_curve(samples)
    errors = sorted(abs(found.step_s(work) / curve.step_s(work) - 1) for work in WORK)
    assert errors[-1] < 0.10, (found, curve)
    # Steps of both kinds, between the sizes measured.
    mixed = StepWorkload(prompt_tokens=700, pairs=chunk_pairs(700, 300), decodes=40, context=40 * 600)
    assert found.step_s(mixed) == pytest.approx(curve.step_s(mixed), rel=0.15)


@pytest.mark.parametrize("curve", [GPU, CPU])
def test_exact_steps_give_the_curve_and_pauses_do_not_bend_it(curve: StepCurve) -> None:
    samples = [StepSample(work, curve.step_s(work)) for work in WORK]
    for disturbed in ((), (3, 12)):
        for index in disturbed:
            samples[index] = StepSample(samples[index].work, 3 * samples[index].seconds)
        found = fit_curve(samples)
        assert all(found.step_s(work) == pytest.approx(curve.step_s(work), rel=0.05) for work in WORK), disturbed
    assert found.knee == pytest.approx(curve.knee, abs=60)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(0, 4096), st.integers(0, 256), st.integers(0, 4096), st.floats(1e-5, 10)).filter(lambda s: s[0] + s[1] > 0),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_was_measured_no_term_is_negative_and_more_work_takes_no_less(steps: list[tuple[int, int, int, float]]) -> None:
    curve = fit_curve(
        [StepSample(StepWorkload(prompt_tokens=p, pairs=p * p / 2, decodes=d, context=d * c), seconds) for p, d, c, seconds in steps]
    )
    assert min(dataclasses.astuple(curve)) >= 0
    assert all(np.isfinite(dataclasses.astuple(curve)))
    work = StepWorkload(prompt_tokens=100, pairs=5000, decodes=10, context=1000)
    more = StepWorkload(prompt_tokens=200, pairs=20_000, decodes=11, context=1500)
    assert curve.step_s(more) >= curve.step_s(work) > -1e-12


def test_steps_that_took_no_time_and_no_steps_are_refused() -> None:
    for samples in ([], [StepSample(StepWorkload(decodes=1), 0.0)]):
        with pytest.raises(ValueError, match="time"):
            fit_curve(samples)


@given(st.integers(0, 1 << 30), st.integers(1, 12), st.integers(1, 6))
def test_non_negative_least_squares_meets_the_conditions_of_a_minimum(seed: int, num_rows: int, num_columns: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(num_rows, num_columns)) * 10.0 ** rng.integers(-6, 6, num_columns)
    matrix[:, rng.random(num_columns) < 0.1] = 0.0
    target = rng.normal(size=num_rows)
    x = non_negative_least_squares(matrix, target)
    assert (x >= 0).all()
    # Karush, Kuhn, Tucker: no term would gain by growing, and none that is there by shrinking.
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    gradient = matrix.T @ (target - matrix @ x) / scale
    assert (gradient <= 1e-6).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) <= 1e-6


# ---- the measurement ----------------------------------------------------------------------------------------------------


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _KnownRunner(FakeRunner):
    """Its steps take what a curve says, on a clock of its own."""

    def __init__(self, curve: StepCurve, clock: _Clock, **options: int) -> None:
        super().__init__(**({"num_blocks": 4096, "block_size": 16} | options))  # type: ignore[arg-type]
        self.curve, self.clock = curve, clock
        self.batches: list[Batch] = []

    def launch(self, batch: Batch) -> InFlight:
        counts = np.diff(batch.query_start)
        lens = batch.seq_lens.astype(int)
        prompts = counts > 1
        work = StepWorkload(
            prompt_tokens=int(counts[prompts].sum()),
            pairs=float(sum(chunk_pairs(int(n), int(m - n)) for n, m in zip(counts[prompts], lens[prompts], strict=True))),
            decodes=int((~prompts).sum()),
            context=int(lens[~prompts].sum()),
        )
        self.clock.now += self.curve.step_s(work)
        self.batches.append(batch)
        rows = len(batch.sample_rows)
        return FinishedStep(Sampled(token_ids=[0] * rows, logprobs=[None] * rows, top_logprobs=[()] * rows))


def _unfaked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake runner's curve is known; a runner made of it is measured like any other."""
    monkeypatch.setattr("twostep.worker.calibration.FakeRunner", type("Nobody", (), {}))


@pytest.mark.parametrize(("curve", "step_tokens"), [(GPU, 8192), (CPU, 512)])
def test_calibration_finds_the_curve_in_bounded_time(monkeypatch: pytest.MonkeyPatch, curve: StepCurve, step_tokens: int) -> None:
    _unfaked(monkeypatch)
    clock = _Clock()
    runner = _KnownRunner(curve, clock, max_model_len=16_384)
    found = calibrate(runner, step_tokens=step_tokens, max_num_seqs=64, budget_s=2.0, clock=clock)
    assert clock.now < 2.5
    for work in (StepWorkload(prompt_tokens=300, pairs=45_000), StepWorkload(decodes=32, context=32 * 300), BOTH):
        assert found.step_s(work) == pytest.approx(curve.step_s(work), rel=0.1)
    assert found.mixed_s == 0
    for batch in runner.batches:
        # No two sequences own a block, so that as much memory is read as would be.
        used = [table[: -(-length // 16)] for table, length in zip(batch.block_tables[0], batch.seq_lens.tolist(), strict=True)]
        blocks = np.concatenate(used)
        assert len(set(blocks.tolist())) == len(blocks)
        assert batch.seq_lens.max() <= runner.max_model_len


@pytest.mark.parametrize("launch_s", [0.0, 0.03])
def test_steps_with_both_count_for_what_they_take(monkeypatch: pytest.MonkeyPatch, launch_s: float) -> None:
    """A sixth more than the curve of the others, and what is foretold lies between; or a multiple, whatever they hold, which is a least
    time for them."""
    _unfaked(monkeypatch)
    clock = _Clock()

    class Runner(_KnownRunner):
        def launch(self, batch: Batch) -> InFlight:
            before, counts = clock.now, np.diff(batch.query_start)
            step = super().launch(batch)
            if counts.min() == 1 < counts.max():
                clock.now = before + (launch_s or (clock.now - before) * 7 / 6)
            return step

    found = calibrate(Runner(GPU, clock, max_model_len=16_384), step_tokens=2048, max_num_seqs=256, clock=clock)
    assert found.mixed_s == pytest.approx(launch_s)
    assert 1.02 * GPU.step_s(BOTH) < found.step_s(BOTH) <= max(launch_s, 7 / 6 * GPU.step_s(BOTH))
    for alone in (dataclasses.replace(BOTH, decodes=0, context=0), dataclasses.replace(BOTH, prompt_tokens=0, pairs=0.0)):
        assert found.step_s(alone) == pytest.approx(GPU.step_s(alone), rel=0.1)
    assert CurveTracker(found).curve == found


class _Device(_KnownRunner):
    """Takes steps ahead of their results. It builds for `build_s` before its first step of a size; the host takes `launch_s` for a prompt
    and `collect_s` for a result, and stands still for 80 ms in one of three prompts of `paused_size` tokens."""

    overlaps = True

    def __init__(
        self, clock: _Clock, *, build_s: float = 0.0, launch_s: float = 0.0, collect_s: float = 0.0, paused_size: int = 0, turn: int = 0
    ) -> None:
        super().__init__(GPU, clock, max_model_len=16_384)
        self.build_s, self.launch_s, self.collect_s, self.paused_size = build_s, launch_s, collect_s, paused_size
        self.built: set[tuple[int, int]] = set()
        self.free_at = 0.0
        self.num_paused = -turn
        self.in_flight = self.max_in_flight = 0

    def launch(self, batch: Batch) -> InFlight:
        size = len(batch.token_ids), len(batch.seq_lens)
        if size not in self.built:
            self.built.add(size)
            self.clock.now += self.build_s
        before = self.clock.now
        step = super().launch(batch)
        seconds, is_prompt = self.clock.now - before, size[0] > size[1]
        self.clock.now = before + (self.launch_s if is_prompt else 3e-4)
        self.free_at = max(self.free_at, before) + seconds
        self.num_paused += is_prompt and size[0] == self.paused_size
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        pause = 0.08 if size[0] == self.paused_size and self.num_paused % 3 == 0 else 0.0
        return _Flying(self, step, max(self.free_at, self.clock.now), pause)


@dataclasses.dataclass
class _Flying:
    device: _Device
    step: InFlight
    done_at: float
    pause_s: float
    layer_marks = ()

    def result(self) -> Sampled:
        """Collecting is hidden by the next step."""
        self.device.in_flight -= 1
        self.device.clock.now = max(self.device.clock.now, self.done_at) + self.device.collect_s + self.pause_s
        return self.step.result()


@pytest.mark.parametrize(
    "options",
    [
        {"build_s": 3.0, "collect_s": 1e-3},
        *({"launch_s": 8e-3, "paused_size": size, "turn": turn} for size in (16, 1024) for turn in range(3)),
    ],
    ids=str,
)
def test_what_is_built_first_and_a_host_that_pauses_spoil_no_curve(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """If launching takes longer than the device's part of a prompt, a step seems long, or its end is seen when the next is over."""
    _unfaked(monkeypatch)
    clock = _Clock()
    device = _Device(clock, **options)
    found = calibrate(device, step_tokens=2048, max_num_seqs=64, budget_s=2.0, clock=clock)
    assert device.max_in_flight == 2, "steps follow each other as when served"
    work = [StepWorkload(decodes=1, context=300), StepWorkload(decodes=32, context=32 * 2600)]
    if "build_s" in options:
        assert len(device.batches) * 0.1 + 2.5 + 3.0 * len(device.built) > clock.now
        work.append(StepWorkload(prompt_tokens=300, pairs=45_000))
    for each in work:
        assert found.step_s(each) == pytest.approx(GPU.step_s(each), rel=0.15)


@pytest.mark.parametrize("captured_rows", [0, 64, 320])
def test_steps_that_are_captured_are_not_built_ahead(monkeypatch: pytest.MonkeyPatch, captured_rows: int) -> None:
    _unfaked(monkeypatch)
    clock = _Clock()
    device = _Device(clock)
    calibrate(device, step_tokens=2048, max_num_seqs=64, captured_rows=captured_rows, budget_s=2.0, clock=clock)
    probes = [probe for probe in mixed_probes(device, 2048, 64, captured_rows) if sum(probe.counts) > captured_rows]
    # What is too large to be captured has kernels of its own, beside few decodes and many.
    assert len({len(probe.counts) for probe in probes}) > 5
    assert {(sum(probe.counts), len(probe.counts)) for probe in probes} <= device.built
    short = {(sum(probe.counts), len(probe.counts)) for probe in mixed_probes(device, 2048, 64) if sum(probe.counts) <= captured_rows}
    assert not short & device.built


def test_a_machine_too_slow_for_the_grid_measures_what_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    _unfaked(monkeypatch)
    clock = _Clock()
    slow = dataclasses.replace(CPU, fixed_s=0.1, per_row_s=8e-3)
    runner = _KnownRunner(slow, clock)
    found = calibrate(runner, step_tokens=512, max_num_seqs=64, budget_s=1.0, clock=clock)
    assert len(runner.batches) < 8
    assert found.per_row_s > 0
    assert found.step_s(StepWorkload(prompt_tokens=128, pairs=8192)) == pytest.approx(1.124, rel=0.1)


@given(st.integers(1, 64), st.integers(1, 300), st.integers(2, 5000), st.integers(2, 4096), st.integers(1, 300))
def test_whatever_the_pool_probes_fit_it(num_blocks: int, block_size: int, max_model_len: int, step_tokens: int, max_num_seqs: int) -> None:
    runner = FakeRunner(num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len)
    alone, mixed = list(probes(runner, step_tokens, max_num_seqs)), list(mixed_probes(runner, step_tokens, max_num_seqs))
    assert len(set(alone)) == len(alone)
    for probe in (*alone, *mixed):
        assert probe.num_blocks(block_size) <= num_blocks
        assert max(start + count for start, count in zip(probe.starts, probe.counts, strict=True)) <= max_model_len
        assert sum(probe.counts) <= max(step_tokens, max_num_seqs)
        assert len(probe.counts) <= max_num_seqs
    assert alone or max_model_len <= 2 or num_blocks * block_size < 64
    for probe in mixed:
        assert probe.counts[-1] > 1, "a prompt"
        assert set(probe.counts[:-1]) == {1}, "behind decodes"
        assert sum(probe.counts) <= step_tokens
    roomy = max_model_len > 64 and num_blocks * block_size > 1000 and step_tokens > 64
    assert not roomy or bool(mixed) == (max_num_seqs > 1)


def test_a_pool_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _unfaked(monkeypatch)
    runner = _KnownRunner(CPU, _Clock(), max_model_len=1)
    with pytest.raises(SetupError, match="--no-calibrate"):
        calibrate(runner, step_tokens=512, max_num_seqs=8)


def test_the_fake_runners_curve_is_what_it_was_told() -> None:
    runner = FakeRunner(num_blocks=4, block_size=4, step_s=0.02, per_token_s=1e-3)
    assert calibrate(runner, step_tokens=512, max_num_seqs=8) == StepCurve(fixed_s=0.02, per_row_s=1e-3)
    assert calibrate(FakeRunner(num_blocks=4, block_size=4), step_tokens=512, max_num_seqs=8).fixed_s > 0


# ---- what steps really take ---------------------------------------------------------------------------------------------


def _served(tracker: CurveTracker, true: StepCurve, num_steps: int, noise: Callable[[], float]) -> None:
    rng = random.Random(5)
    for _ in range(num_steps):
        decodes = rng.randrange(1, 64)
        prompt = rng.choice((0, 0, 0, 512, 2048))
        work = StepWorkload(prompt_tokens=prompt, pairs=prompt * prompt / 2, decodes=decodes, context=800 * decodes)
        tracker.observe(work, true.step_s(work) * noise())


@pytest.mark.parametrize(("base", "prompt"), [(1.5, 1.0), (0.7, 1.4), (2.0, 0.6)])
def test_a_drift_is_followed_within_some_hundred_steps_and_noise_is_not(base: float, prompt: float) -> None:
    tracker, rng = CurveTracker(GPU), random.Random(9)
    noise = lambda: 1 + rng.gauss(0, 0.05)  # noqa: E731
    scaled = dataclasses.replace(
        GPU,
        fixed_s=GPU.fixed_s * base,
        per_sequence_s=GPU.per_sequence_s * base,
        per_context_s=GPU.per_context_s * base,
        per_row_s=GPU.per_row_s * prompt,
        per_pair_s=GPU.per_pair_s * prompt,
    )
    _served(tracker, scaled, 600, noise)
    assert tracker.base_factor == pytest.approx(base, rel=0.08)
    assert tracker.prompt_factor == pytest.approx(prompt, rel=0.08)
    # And back.
    _served(tracker, GPU, 600, noise)
    curve = tracker.curve
    assert curve is not None
    for work in WORK:
        assert curve.step_s(work) == pytest.approx(GPU.step_s(work), rel=0.1)


def test_launches_of_mixed_steps_are_followed_and_a_kernel_that_is_built_is_forgotten() -> None:
    tracker = CurveTracker(GPU)
    assert tracker.curve is not None
    assert tracker.curve.mixed_s == 0.0
    mixed = StepWorkload(prompt_tokens=32, decodes=4, context=400)
    tracker.observe_mixed_launch(mixed, 0.7)
    for _ in range(40):
        tracker.observe_mixed_launch(mixed, 0.015)
    assert tracker.curve.mixed_s == pytest.approx(0.015, rel=0.05)
    assert tracker.curve.step_s(mixed) == pytest.approx(0.015, rel=0.05)
    for alone in (dataclasses.replace(mixed, decodes=0), dataclasses.replace(mixed, prompt_tokens=0)):
        assert tracker.curve.step_s(alone) == GPU.step_s(alone)


def test_a_launch_that_takes_less_than_its_step_says_nothing_of_smaller_ones() -> None:
    """Small steps are captured: only one of thousands of tokens is launched kernel by kernel."""
    tracker = CurveTracker(GPU)
    small, large = (StepWorkload(prompt_tokens=count, decodes=4, context=400) for count in (32, 30_000))
    tracker.observe_mixed_launch(small, 0.001)
    tracker.observe_mixed_launch(large, GPU.step_s(large) / 2)
    assert tracker.curve is not None
    assert tracker.curve.step_s(small) == GPU.step_s(small)


def test_a_first_step_that_takes_long_and_a_pause_say_little() -> None:
    tracker = CurveTracker(GPU)
    long = StepWorkload(decodes=8, context=8000)
    tracker.observe(long, 10.0)
    assert tracker.base_factor < 1.11
    _served(tracker, GPU, 300, lambda: 1.0)
    tracker.observe(long, 10.0)
    tracker.observe(StepWorkload(prompt_tokens=2048, pairs=2048 * 1024), 10.0)
    assert max(tracker.base_factor, tracker.prompt_factor) < 1.02


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 300), st.floats(-1, 1e6, allow_nan=False)), max_size=300),
    curves,
)
def test_factors_are_bounded_and_curves_stay_curves(steps: list[tuple[int, int, float]], measured: StepCurve) -> None:
    tracker = CurveTracker(measured)
    for prompt, decodes, seconds in steps * 3:
        tracker.observe(StepWorkload(prompt_tokens=prompt, pairs=prompt * prompt / 2, decodes=decodes, context=decodes * 500), seconds)
    for factor in (tracker.base_factor, tracker.prompt_factor):
        assert max(factor, 1 / factor) <= MAX_FACTOR * 1.0001
    curve = tracker.curve
    assert curve is not None
    assert curve.knee == measured.knee
    assert min(dataclasses.astuple(curve)) >= 0


# ---- what a worker publishes --------------------------------------------------------------------------------------------


async def test_a_worker_publishes_its_curve_and_what_it_learns_of_it(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = make_runner(step_s=0.02)

    def measured(runner: FakeRunner, **options: Any) -> ServedModel:
        return dataclasses.replace(make_model(runner, **options), curve=calibrate(runner, step_tokens=512, max_num_seqs=8))

    monkeypatch.setattr("worker_harness.make_model", measured)
    async with started(redis_url, decode_runner=slow) as pair, routed(pair) as router:
        told = pair.decode_worker.record()
        assert told.curve == StepCurve(fixed_s=0.02, per_row_s=1e-6)
        assert (told.load.num_queued_tokens, told.load.num_context_tokens) == (0, 0)
        prompt = prompt_of(20)
        slow.step_s = 0.06
        answer = await router.generate("r", prompt, 25)
        assert answer.tokens == expected(prompt, 25)
        learned = pair.decode_worker.record().curve
        assert learned is not None
        assert learned.fixed_s > 0.025
        assert WorkerRecord.from_json(pair.decode_worker.record().to_json()).curve == learned


async def test_a_worker_tells_how_much_it_has_to_compute(redis_url: str) -> None:
    runner = HeldRunner()
    async with started(redis_url, prefill_runner=runner, prefill_options={"max_num_batched_tokens": 8}) as pair, routed(pair) as router:

        async def queued(num_tokens: int) -> None:
            await until(lambda: pair.prefill_worker.record().load.num_queued_tokens == num_tokens)

        assert pair.prefill_worker.record().curve is None
        assert pair.prefill_worker.record().step_tokens == 8
        asked = asyncio.create_task(router.generate("r", prompt_of(60), 4))
        # It becomes less, step by step; what the last one computes is none while that runs.
        for num_left in range(60, 8, -8):
            await queued(num_left)
            runner.allow(1)
        runner.let_go()
        await queued(0)
        assert (await asked).tokens == expected(prompt_of(60), 4)


# ---- the budget of steps that mix prompts and tokens: at the knee, where it was left to the machine ------------------------

# Each token beyond the 16th costs the same; and a device that is not busy with 512 yet.
SLOW, FAST = StepCurve(fixed_s=1e-6, per_row_s=1e-3), StepCurve(fixed_s=1.0, per_row_s=1e-6)


def settled(role: str, step_tokens: int = 0, max_num_seqs: int = 0) -> WorkerConfig:
    return resolve_config(WorkerConfig(role=role, runner="fake", max_num_batched_tokens=step_tokens, max_num_seqs=max_num_seqs))


def test_a_decode_worker_s_budget_is_at_the_knee_and_has_room_for_its_sequences() -> None:
    assert settled("decode").max_num_batched_tokens == 512
    assert at_knee(settled("decode"), SLOW).max_num_batched_tokens == 2 * 64
    assert at_knee(settled("decode", max_num_seqs=8), SLOW).max_num_batched_tokens == 16
    assert at_knee(settled("decode", max_num_seqs=1000), SLOW).max_num_batched_tokens == 512
    assert at_knee(settled("decode"), FAST).max_num_batched_tokens == 512


def test_a_prefill_worker_s_is_as_it_was_and_changes_with_its_role() -> None:
    prefill = at_knee(settled("prefill"), SLOW)
    assert prefill.max_num_batched_tokens == 512
    decode = config_in_role(prefill, "decode")
    assert decode.max_num_batched_tokens == 128
    assert config_in_role(decode, "prefill").max_num_batched_tokens == 512
    assert config_in_role(at_knee(settled("decode"), SLOW), "prefill").max_num_batched_tokens == 512


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_was_told_or_not_measured_stays(role: str) -> None:
    assert at_knee(settled(role), None) == settled(role)
    told = settled(role, step_tokens=300)
    assert at_knee(told, SLOW) == told
    assert dataclasses.replace(at_knee(settled(role), FAST), other_step_tokens=0) == settled(role)
