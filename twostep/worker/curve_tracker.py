"""A cost curve that follows the steps that are really made.

Warm-up measures an empty machine. What serving adds (other kernels' tails, Python between steps, a card that gets hot, a neighbour on the
same cores) is learned from finished steps, as two factors on the curve:

    base     of what every step has: fixed, per sequence, per context. Learned from steps that are mostly that
    prompt   of what prompts add: rows beyond the knee, and pairs. Learned from the others, after the base is taken off

Each is a geometric mean that forgets: a step moves it by a small share of how far it was off, and one that was far off counts as if it had
been less so (Huber, 1964), so that a pause says little and a lasting change is followed within some hundred steps. The first steps count
for more: what was measured at the start counts as four of them, since workers that start beside each other on the same cores measure
each other, too.

Beside them, what launches of mixed steps take the host (`StepCurve.mixed_s`), in the same way but faster, since they may be few.
"""

from __future__ import annotations

import dataclasses
import math

from twostep.step_curve import StepCurve, StepWorkload

# Share of a step's error that is learned from it, and the error (a factor, as a logarithm) beyond which it counts no more.
LEARNING_RATE = 0.03
# So many steps what was measured at the start is worth: of the first steps each has the share of a plain mean, until that is smaller.
_MEASURED_STEPS = 4
_FAR = 0.5
_LAUNCH_RATE, _LAUNCH_FAR = 0.2, 1.0
# Factors beyond which a curve is a fault rather than wrong.
MAX_FACTOR = 16.0
# A prompt's part below this share of a step cannot be told from noise of the rest.
_LEAST_PROMPT_SHARE = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class _Factor:
    """As a logarithm, and how many steps it was learned from."""

    log: float = 0.0
    num_steps: int = 0

    def learned(self, ratio: float) -> _Factor:
        """Returns the curve as it is after a step that took `ratio` times as long as was expected with it."""
        rate = max(LEARNING_RATE, 1 / (_MEASURED_STEPS + 1 + self.num_steps))
        bound = math.log(MAX_FACTOR)
        log = self.log + rate * min(_FAR, max(-_FAR, math.log(ratio)))
        return _Factor(min(bound, max(-bound, log)), self.num_steps + 1)


class CurveTracker:
    """`observe` every finished step; `curve` is what to reckon with now. None: nothing was measured, and nothing is tracked."""

    def __init__(self, measured: StepCurve | None) -> None:
        self._measured = measured
        self._base = self._prompt = _Factor()
        self._mixed_s = 0.0 if measured is None else measured.mixed_s

    @property
    def base_factor(self) -> float:
        return math.exp(self._base.log)

    @property
    def prompt_factor(self) -> float:
        return math.exp(self._prompt.log)

    @property
    def curve(self) -> StepCurve | None:
        if self._measured is None:
            return None
        base, prompt = self.base_factor, self.prompt_factor
        return dataclasses.replace(
            self._measured,
            fixed_s=self._measured.fixed_s * base,
            per_sequence_s=self._measured.per_sequence_s * base,
            per_context_s=self._measured.per_context_s * base,
            per_row_s=self._measured.per_row_s * prompt,
            per_pair_s=self._measured.per_pair_s * prompt,
            mixed_s=self._mixed_s,
        )

    def observe_mixed_launch(self, work: StepWorkload, seconds: float) -> None:
        """Notes that launching a step with prompts and decodes took so long. The launch of a large step, which nothing was captured for,
        says nothing of others as long as the device has more to do with it than the host."""
        curve = self.curve
        if seconds <= 0 or (curve is not None and self._mixed_s < seconds <= dataclasses.replace(curve, mixed_s=0.0).step_s(work)):
            return
        if not self._mixed_s:
            self._mixed_s = seconds
        self._mixed_s *= math.exp(_LAUNCH_RATE * min(_LAUNCH_FAR, max(-_LAUNCH_FAR, math.log(seconds / self._mixed_s))))

    def observe(self, work: StepWorkload, seconds: float) -> None:
        """Notes that a step that did this took so long. Empty ones say nothing."""
        measured = self._measured
        if measured is None or seconds <= 0 or not (work.prompt_tokens or work.decodes):
            return
        base = measured.fixed_s + measured.per_sequence_s * work.decodes + measured.per_context_s * work.context
        prompt = measured.step_s(work) - base
        expected_base, expected_prompt = base * self.base_factor, prompt * self.prompt_factor
        if expected_prompt < _LEAST_PROMPT_SHARE * (expected_base + expected_prompt):
            if expected_base + expected_prompt > 0:
                self._base = self._base.learned(seconds / (expected_base + expected_prompt))
        else:
            # No prompt is computed in no time, however slow the base is thought to be.
            left = max(seconds - expected_base, seconds * _LEAST_PROMPT_SHARE / 2)
            self._prompt = self._prompt.learned(left / expected_prompt)
