"""From measured steps to a cost curve: non-negative least squares over the formula of twostep/step_curve.py, and a search for its knee."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostep.step_curve import StepCurve, StepWorkload

_Array = npt.NDArray[np.float64]

# Rounds of weighing down what lies far off (Huber's weights): beyond so many times the median deviation, and beyond what any step's time
# varies by.
_ROUNDS, _FAR, _LEAST_FAR = 3, 2.5, 0.05
# A knee must explain the samples so much better than none, in squared relative error, to be believed.
_KNEE_GAIN = 0.95
# Places tried between two sizes.
_PLACES = 5
_TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step that was measured: its work and how long it took."""

    work: StepWorkload
    seconds: float


def fit_curve(samples: Sequence[StepSample]) -> StepCurve:
    """Returns the curve with the least squared *relative* errors, so that short decode steps count as long prefill steps do. No term is
    negative: more work never takes less time. Samples far off the others are weighed down. What the samples do not tell apart (no prompts
    among them, say) gets 0. Raises ValueError without samples, or if one took no time."""
    if not samples or any(not sample.seconds > 0 for sample in samples):
        raise ValueError(f"a curve is fitted to steps that took some time; got {len(samples)} samples")
    seconds = np.array([sample.seconds for sample in samples])
    rows = np.array([sample.work.prompt_tokens + sample.work.decodes for sample in samples], np.float64)
    others = np.array([[s.work.pairs, s.work.decodes, s.work.context] for s in samples], np.float64)

    def fit(knee: float) -> _Fit:
        columns = np.column_stack([np.ones(len(samples)), np.maximum(0.0, rows - knee), others])
        return _robust(columns / seconds[:, None], knee)

    plain = fit(0.0)
    best = min((fit(knee) for knee in _knees(rows)), key=lambda found: found.error, default=plain)
    if best.knee:
        best = min((best, *(fit(knee) for knee in _near(best.knee, rows))), key=lambda found: found.error)
    # Without a price for rows, a knee says nothing.
    if best.error > _KNEE_GAIN * plain.error or best.terms[1] == 0.0:
        best = plain
    knee, terms = best.knee, best.terms
    return StepCurve(
        fixed_s=float(terms[0]),
        per_row_s=float(terms[1]),
        knee=float(knee),
        per_pair_s=float(terms[2]),
        per_sequence_s=float(terms[3]),
        per_context_s=float(terms[4]),
    )


@dataclass(frozen=True, slots=True)
class _Fit:
    knee: float
    terms: _Array  # fixed, per row, per pair, per sequence, per token of context
    error: float


def _knees(rows: _Array) -> list[float]:
    """Returns where a knee may lie: at and between the sizes measured, but for the largest: beyond it nothing is known."""
    steps = [np.linspace(low, high, _PLACES, endpoint=False) for low, high in itertools.pairwise(np.unique(rows))]
    return [float(knee) for knee in np.concatenate(steps)] if steps else []


def _near(knee: float, rows: _Array) -> list[float]:
    """Returns more places around one that was found."""
    sizes = np.unique(rows)
    at = int(np.searchsorted(sizes, knee, side="right"))
    step = (sizes[at] - sizes[at - 1]) / _PLACES if 0 < at < len(sizes) else 0.0
    return [knee + step * share for share in (-0.75, -0.5, -0.25, 0.25, 0.5, 0.75) if knee + step * share > 0]


def _robust(columns: _Array, knee: float) -> _Fit:
    """Terms for which `columns @ terms` is about 1 everywhere, and the error: a mean of squares in which far ones count linearly."""
    weights = np.ones(len(columns))
    terms = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        terms = non_negative_least_squares(columns * weights[:, None], weights)
        deviations = np.abs(columns @ terms - 1.0)
        far = max(_FAR * float(np.median(deviations)), _LEAST_FAR)
        weights = np.sqrt(np.minimum(1.0, far / np.maximum(deviations, 1e-12)))
    # All knees are measured with one rule, whatever is far for them.
    squares = np.where(deviations <= _LEAST_FAR, deviations**2, 2 * _LEAST_FAR * deviations - _LEAST_FAR**2)
    return _Fit(knee, terms, float(np.mean(squares)))


def non_negative_least_squares(matrix: _Array, target: _Array) -> _Array:
    """Returns the x >= 0 that minimises |matrix @ x - target|: the active-set method of Lawson and Hanson, "Solving Least Squares Problems"
    (1974), chapter 23. `matrix` is float64 [m, n], `target` [m]; columns may have any scale, or be zero."""
    scale = np.linalg.norm(matrix, axis=0)
    used = scale > 0
    scaled = matrix[:, used] / scale[used]
    num = scaled.shape[1]
    x = np.zeros(num)
    passive = np.zeros(num, bool)
    for _ in range(3 * num):
        gradient = scaled.T @ (target - scaled @ x)
        gradient[passive] = -np.inf
        if not num or gradient.max() <= _TOLERANCE * np.linalg.norm(target):
            break
        passive[int(np.argmax(gradient))] = True
        while True:
            candidate = np.zeros(num)
            candidate[passive] = np.linalg.lstsq(scaled[:, passive], target, rcond=None)[0]
            if candidate[passive].min(initial=1.0) > 0:
                break
            # Up to where the first of them would become negative, which leaves.
            falling = passive & (candidate <= 0)
            ratio = np.min(x[falling] / np.maximum(x[falling] - candidate[falling], 1e-300))
            x += ratio * (candidate - x)
            passive &= x > 1e-15
            x[~passive] = 0.0
            if not passive.any():
                candidate = x
                break
        x = candidate
    result = np.zeros(matrix.shape[1])
    result[used] = x / scale[used]
    return result
