"""A cost curve that follows the steps that are really made.

Warm-up measures an empty machine. What serving adds (other kernels' tails, Python between steps, a card that gets hot, a neighbour on the
same cores) is learned from finished steps, as two factors on the curve:

    base     of what every step has: fixed, per sequence, per context. Learned from steps that are mostly that
    prompt   of what prompts add: rows beyond the knee, and pairs. Learned from the others, after the base is taken off

Each is a geometric mean that forgets: a step moves it by a small share of how far it was off, and one that was far off counts as if it had
been less so (Huber, 1964), so that a pause says little and a lasting change is followed within some hundred steps.

Beside them, what launches of mixed steps take the host (`StepCurve.mixed_s`), in the same way but faster, since they may be few.
"""

from __future__ import annotations

import dataclasses
import math

from twostep.step_curve import StepCurve, StepWorkload

# Share of a step's error that is learned from it, and the error (a factor, as a logarithm) beyond which it counts no more.
LEARNING_RATE = 0.03
_FAR = 0.5
_LAUNCH_RATE, _LAUNCH_FAR = 0.2, 1.0
# Factors beyond which a curve is a fault rather than wrong.
MAX_FACTOR = 16.0
# A prompt's part below this share of a step cannot be told from noise of the rest.
_LEAST_PROMPT_SHARE = 0.25


class CurveTracker:
    """`observe` every finished step; `curve` is what to reckon with now. None: nothing was measured, and nothing is tracked."""

    def __init__(self, measured: StepCurve | None) -> None:
        self._measured = measured
        self._base = self._prompt = 0.0  # logarithms of the factors
        self._mixed_s = 0.0

    @property
    def base_factor(self) -> float:
        return math.exp(self._base)

    @property
    def prompt_factor(self) -> float:
        return math.exp(self._prompt)

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

    def observe_mixed_launch(self, seconds: float) -> None:
        """Launching a step with prompts and decodes took so long."""
        if seconds <= 0:
            return
        if not self._mixed_s:
            self._mixed_s = seconds
        self._mixed_s *= math.exp(_LAUNCH_RATE * min(_LAUNCH_FAR, max(-_LAUNCH_FAR, math.log(seconds / self._mixed_s))))

    def observe(self, work: StepWorkload, seconds: float) -> None:
        """A step that did this took so long. Empty ones say nothing."""
        measured = self._measured
        if measured is None or seconds <= 0 or not (work.prompt_tokens or work.decodes):
            return
        base = measured.fixed_s + measured.per_sequence_s * work.decodes + measured.per_context_s * work.context
        prompt = measured.step_s(work) - base
        expected_base, expected_prompt = base * self.base_factor, prompt * self.prompt_factor
        if expected_prompt < _LEAST_PROMPT_SHARE * (expected_base + expected_prompt):
            if expected_base + expected_prompt > 0:
                self._base = _learned(self._base, seconds / (expected_base + expected_prompt))
        else:
            # No prompt is computed in no time, however slow the base is thought to be.
            left = max(seconds - expected_base, seconds * _LEAST_PROMPT_SHARE / 2)
            self._prompt = _learned(self._prompt, left / expected_prompt)


def _learned(before: float, ratio: float) -> float:
    step = LEARNING_RATE * min(_FAR, max(-_FAR, math.log(ratio)))
    bound = math.log(MAX_FACTOR)
    return min(bound, max(-bound, before + step))
