"""How long a step with prompts may take, by itself and in engines whose steps take what the curve says: who was promised something has it,
and prompts get on all the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from engine_helpers import VOCAB, assert_idle, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.engine.config import EngineConfig
from twostep.engine.engine import Engine
from twostep.engine.fake import FakeRunner
from twostep.engine.step_bound import MADE_UP_WITHIN, MOST_WAITED, Promise, StepTimeLimit, time_limit_of
from twostep.engine.types import EngineRequest
from twostep.step_curve import FIRST_GAP_SHARE, GAP_SHARE, PACE_SHARE, StepCurve, StepWorkload

# A step takes 4 ms, a tenth of a millisecond more for each row beyond 8, and 50 us for each that decodes.
CURVE = StepCurve(fixed_s=4e-3, per_row_s=1e-4, knee=8, per_sequence_s=5e-5)
MIN_CHUNK = 8


def limit_of(*promised: tuple[Promise | None, int], curve: StepCurve = CURVE, num_waited: int = 0, **more: Any) -> StepTimeLimit | None:
    """Returns the bound of a step that begins at 0 and gives each so promised the token of that number."""
    work = StepWorkload(decodes=len(promised))
    return time_limit_of(
        [promise for promise, _ in promised],
        [number for _, number in promised],
        begin_s=0.0,
        curve=curve,
        decodes=work,
        decode_step_s=curve.step_s(work),
        min_chunk=MIN_CHUNK,
        num_waited=num_waited,
        **more,
    )


def bound_of(*promised: tuple[Promise | None, int], **more: Any) -> float:
    limit = limit_of(*promised, **more)
    assert limit is not None
    assert not limit.waits
    return limit.max_step_s


# One that decodes alone takes 4.05 ms a token; 9.5 ms are its pace.
ALONE_S, EVERY_S = 4.05e-3, 9.5e-3


def test_without_any_promise_the_workers_bound_is_the_only_one() -> None:
    assert limit_of((None, 1)) is None
    assert bound_of((None, 1), max_step_s=0.02) == 0.02
    assert limit_of(max_step_s=0.02) is None, "nobody's gap is at stake"
    assert bound_of((Promise(gap_s=0.3), 1), max_step_s=0.02) == pytest.approx(0.3 * FIRST_GAP_SHARE), "who was promised something has that"
    assert bound_of((Promise(gap_s=0.3), 1), (None, 1), max_step_s=0.02) == 0.02


def test_a_pace_that_only_drafts_can_keep_does_not_bound_them() -> None:
    too_quick = Promise(tpot_s=ALONE_S, last=100)
    assert bound_of((too_quick, 1)) < ALONE_S
    assert limit_of((too_quick, 1), drafts=True) is None
    assert bound_of((replace(too_quick, gap_s=0.3), 2), drafts=True) == pytest.approx(0.3 * GAP_SHARE), "a gap is one between steps"
    kept = Promise(tpot_s=EVERY_S / PACE_SHARE, last=100)
    assert bound_of((too_quick, 1), (kept, 1), drafts=True) == bound_of((None, 1), (kept, 1)), "it is another's, too"


def test_a_gap_is_for_two_steps_and_holds_for_one_that_is_to_come() -> None:
    assert bound_of((Promise(gap_s=0.06), 1), (Promise(gap_s=0.09), 1)) == pytest.approx(0.06 * FIRST_GAP_SHARE)
    assert bound_of((Promise(gap_s=0.06), 1), coming_gap_s=0.03) == pytest.approx(0.03 * FIRST_GAP_SHARE)
    assert bound_of(coming_gap_s=0.03) == pytest.approx(0.03 * FIRST_GAP_SHARE)


@pytest.mark.parametrize(
    ("number", "last", "late_s", "expected"),
    [
        (1, 127, 0.0, EVERY_S + MADE_UP_WITHIN * (EVERY_S - ALONE_S)),  # it has just begun
        (1, 1, 0.0, EVERY_S),  # nothing comes after it
        (1, 4, 0.0, EVERY_S + 3 * (EVERY_S - ALONE_S)),
        (11, 11, 10 * ALONE_S, 11 * EVERY_S - 10 * ALONE_S),  # it is ahead
        (11, 127, 10 * EVERY_S, EVERY_S + MADE_UP_WITHIN * (EVERY_S - ALONE_S)),  # it has kept to its pace
    ],
)
def test_a_pace_leaves_what_is_earned_and_what_will_be_made_up(number: int, last: int, late_s: float, expected: float) -> None:
    promise = Promise(tpot_s=0.01, since_s=-late_s, last=last)
    assert bound_of((promise, number)) == pytest.approx(expected)
    easy = Promise(tpot_s=1.0, last=100)
    assert bound_of((easy, 1), (promise, number)) <= expected, "two take longer, so that less can be made up"


def test_prompts_wait_where_a_step_with_some_is_slower_than_the_pace_and_waiting_brings_it_back() -> None:
    slow = replace(CURVE, mixed_s=0.02)
    late = (Promise(tpot_s=0.01, since_s=-0.095, last=40), 1)
    limit = limit_of(late, curve=slow)
    assert limit is not None
    assert limit.waits
    assert bound_of(late, curve=slow, num_waited=MOST_WAITED) == 0.02, "what a step takes anyway is filled"
    assert bound_of(late) < CURVE.step_s(StepWorkload(prompt_tokens=MIN_CHUNK, decodes=1)), "a least chunk keeps to the pace here"
    lost = (Promise(tpot_s=0.01, since_s=-1.0, last=40), 1)
    assert bound_of(lost, curve=slow) == 0.02, "nothing brings it back"
    assert bound_of(lost) == pytest.approx(EVERY_S), "it has its pace from now on"
    assert bound_of((Promise(tpot_s=4e-3, last=40), 1)) < ALONE_S, "decoding alone breaks it"


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.004, 0.01, 0.1]), st.sampled_from([0.0, 0.01, 0.1]), st.floats(-1.0, 0.1), st.integers(1, 50)),
        max_size=20,
    ),
    st.sampled_from([0.0, 0.02]),
    st.integers(0, MOST_WAITED),
)
def test_more_promises_never_leave_more_time(promised: list[tuple[float, float, float, int]], mixed_s: float, num_waited: int) -> None:
    curve = replace(CURVE, mixed_s=mixed_s)
    some = [(Promise(tpot_s, gap_s, since_s, last=60) if tpot_s or gap_s else None, number) for tpot_s, gap_s, since_s, number in promised]
    bounds = []
    for count in range(len(some) + 1):
        # The same step with all of them: what is compared are the promises alone.
        padded = some[:count] + [(None, 1)] * (len(some) - count)
        limit = limit_of(*padded, curve=curve, num_waited=num_waited)
        bounds.append(float("inf") if limit is None else -1.0 if limit.waits else limit.max_step_s)
    assert bounds == sorted(bounds, reverse=True)


# ---- in engines -----------------------------------------------------------------------------------------------------------


@dataclass
class Sequence:
    """One sequence of a run: after `steps` steps it comes, as a prompt or as a reservation that is committed `steps_reserved` later."""

    steps: int
    num_prompt: int
    max_tokens: int
    tpot_s: float | None
    gap_s: float | None
    steps_reserved: int | None


SEQUENCES = st.lists(
    st.builds(
        Sequence,
        steps=st.integers(0, 60),
        num_prompt=st.integers(1, 300),
        max_tokens=st.integers(2, 50),
        tpot_s=st.sampled_from([None, 0.008, 0.01, 0.02]),
        gap_s=st.sampled_from([None, 0.02, 0.03]),
        steps_reserved=st.one_of(st.none(), st.integers(0, 20)),
    ),
    min_size=1,
    max_size=10,
)


@dataclass(frozen=True)
class Step:
    """`waiting`: prompts were there that could go on. `gap_bound_s`: what the gaps allow that were promised to those that decode or are
    reserved."""

    work: StepWorkload
    seconds: float
    waiting: bool
    gap_bound_s: float


class Served:
    """Steps an engine through all of `sequences`, each step for as long as the curve says, and keeps when tokens came."""

    def __init__(self, sequences: list[Sequence], curve: StepCurve, *, look_ahead: bool, max_step_s: float = 0.0) -> None:
        self._now = 0.0
        self._curve = curve
        config = EngineConfig(
            max_num_batched_tokens=2048,
            max_num_seqs=16,
            enable_prefix_caching=False,
            look_ahead=look_ahead,
            hash_unit=4,
            max_step_s=max_step_s,
            min_chunk_tokens=MIN_CHUNK,
        )
        runner = FakeRunner(num_blocks=1000, block_size=4, vocab_size=VOCAB, max_model_len=1000)
        self.engine = Engine(runner, config, clock=lambda: self._now)
        self.engine.set_curve(curve)
        self.sequences = {str(i): sequence for i, sequence in enumerate(sequences)}
        # Those of its tokens here, the first one, or when it was committed, included.
        self.times: dict[str, list[float]] = {name: [] for name in self.sequences}
        self.steps: list[Step] = []
        self._run()

    def _run(self) -> None:
        left, reserved, prompts = set(self.sequences), dict[str, int](), set[str]()
        while left:
            count = len(self.steps)
            for name in sorted(left):
                sequence = self.sequences[name]
                if sequence.steps == count:
                    if sequence.steps_reserved is None:
                        self.engine.submit(self._request(name))
                        prompts.add(name)
                    else:
                        self.engine.reserve(self._request(name))
                        reserved[name] = count + sequence.steps_reserved
            for name in [name for name, at in reserved.items() if at <= count]:
                del reserved[name]
                self.engine.commit(name, [1])
                self.times[name].append(self._now)
            here = [name for name in left if name in reserved or self.times[name]]
            # Those that are to come, or have had no step here yet, have part of their gap behind them.
            shares = [GAP_SHARE if len(self.times[name]) > 1 else FIRST_GAP_SHARE for name in here]
            gaps = [share * (self.sequences[name].gap_s or float("inf")) for name, share in zip(here, shares, strict=True)]
            output = self.engine.step()
            seconds = self._curve.step_s(output.workload) if output.tokens or output.progress else 1e-3
            self._now += seconds
            self.steps.append(Step(output.workload, seconds, bool(prompts), min(gaps, default=float("inf"))))
            for token in output.tokens:
                self.times[token.seq_id].append(self._now)
                prompts.discard(token.seq_id)
                if token.finish_reason is not None:
                    left.remove(token.seq_id)
        assert_idle(self.engine)

    def _request(self, name: str) -> EngineRequest:
        sequence = self.sequences[name]
        tokens = range(1, sequence.num_prompt + 1)
        return make_request(name, tokens, max_tokens=sequence.max_tokens, tpot_s=sequence.tpot_s, gap_s=sequence.gap_s)


CURVES = st.sampled_from([CURVE, replace(CURVE, mixed_s=9e-3), replace(CURVE, mixed_s=0.02)])


@settings(max_examples=80, deadline=None)
@given(SEQUENCES, CURVES, st.booleans(), st.sampled_from([0.0, 0.005, 0.02]))
def test_prompts_never_starve(sequences: list[Sequence], curve: StepCurve, look_ahead: bool, max_step_s: float) -> None:
    served = Served(sequences, curve, look_ahead=look_ahead, max_step_s=max_step_s)
    num_waited = 0
    for step in served.steps:
        num_waited = num_waited + 1 if step.waiting and not step.work.prompt_tokens else 0
        # With look-ahead the step that follows was planned before the prompt came.
        assert num_waited <= MOST_WAITED + look_ahead
    for name, sequence in served.sequences.items():
        assert len(served.times[name]) == sequence.max_tokens


@settings(max_examples=80, deadline=None)
@given(SEQUENCES, CURVES, st.booleans())
def test_a_pace_that_can_be_kept_is_missed_by_no_more_than_is_made_up(
    sequences: list[Sequence], curve: StepCurve, look_ahead: bool
) -> None:
    """It can be kept if decoding beside all others does, and a step with the least chunk does too or the steps that prompts wait for make
    up for it."""
    all_s = curve.step_s(StepWorkload(decodes=len(sequences)))
    least_s = curve.step_s(StepWorkload(decodes=len(sequences), prompt_tokens=MIN_CHUNK))
    served = Served(sequences, curve, look_ahead=look_ahead)
    # What ran when it was committed was planned without it.
    running_s = max(step.seconds for step in served.steps) if look_ahead else 0.0
    for name, sequence in served.sequences.items():
        every_s = PACE_SHARE * (sequence.tpot_s or 0.0)
        if all_s < every_s and least_s - every_s <= MOST_WAITED * (every_s - all_s):
            first, *times = served.times[name]
            late_s = max(time - first - every_s * (i + 1) for i, time in enumerate(times))
            assert late_s <= max(MADE_UP_WITHIN * (every_s - ALONE_S), running_s) + 1e-9


@settings(max_examples=80, deadline=None)
@given(SEQUENCES, CURVES, st.booleans())
def test_a_gap_bounds_steps_with_prompts_from_the_reservation_on(sequences: list[Sequence], curve: StepCurve, look_ahead: bool) -> None:
    served = Served(sequences, curve, look_ahead=look_ahead)
    for before, step in pairwise(served.steps):
        # With look-ahead a step is planned while the one before it runs.
        bound_s = max(before.gap_bound_s, step.gap_bound_s) if look_ahead else step.gap_bound_s
        if step.work.prompt_tokens:
            least_s = curve.step_s(replace(step.work, prompt_tokens=min(MIN_CHUNK, step.work.prompt_tokens)))
            assert step.seconds <= max(bound_s, least_s) + 1e-9
