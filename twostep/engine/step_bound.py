"""How long a step may take that computes prompts, by what was promised to those that get a token in it: one rule, for the engine and for
its simulation (twostep/lab/simulator/engine.py).

    gap      `GAP_SHARE` of it: the rest is for steps that last longer than foretold, and the way to the client. `FIRST_GAP_SHARE` while a
             sequence is to come, and in its first step: its first gap is the rest of the step that runs, and a step (its first token is
             kept from the client until its KV is here: router/serving/attempt.py)
    TPOT     what the sequence has left of its pace, and what it makes up within its next tokens, in steps without prompts
    neither  the worker's own bound, for the sake of those who were promised nothing

    pace     |--------|--------|--------|--------|--------|        a token each `PACE_SHARE * tpot_s`, from the first one on
    tokens   |----|----|----|- a step with prompts -|----|         ahead: it has time left
    tokens   |- a step with prompts -|----|----|----|----|         just begun: it will be late, and back at its pace four tokens later

The least of all these bounds the step. Somebody has always just begun: by what they have left alone, a long prompt would hardly get on.
What a sequence may make up is little by itself where decoding takes nearly as long as its pace allows.

Where not even a least chunk fits, it is computed all the same: as a rule a step with so little keeps to the pace, so that nobody gets
later by it. Where it does not, since steps with prompts take long whatever they hold, prompts wait for some steps, `MOST_WAITED` at most,
in which the sequence gets back to its pace; but not if that is of no use, because decoding alone is too slow, or it is too late already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from twostep.step_curve import FIRST_GAP_SHARE, GAP_SHARE, MADE_UP_WITHIN, PACE_SHARE, StepCurve, StepWorkload

# Steps in a row that prompts wait for the sake of a pace.
MOST_WAITED = 8


@dataclass(slots=True, eq=False)
class Promise:
    """What one sequence was promised, in seconds (0: nothing), and since when it counts here: its token number `first` came at `since_s`,
    and `last` is the last it can have. Numbers count its tokens, from any start."""

    tpot_s: float = 0.0
    gap_s: float = 0.0
    since_s: float = 0.0
    first: int = 0
    last: int = 0

    def begin(self, since_s: float, first: int, last: int) -> None:
        """Notes its first token here: what was lost before, by a hand-over or because it gave way, is not made up for."""
        self.since_s, self.first, self.last = since_s, first, last


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeLimit:
    """Longest that a step with prompts may take. A prompt that alone would break it gets `min_chunk` tokens all the same, or, if it
    `waits`, none."""

    curve: StepCurve
    max_step_s: float
    min_chunk: int
    waits: bool = False


def time_limit_of(
    promises: Iterable[Promise | None],
    numbers: Iterable[int],
    *,
    begin_s: float,
    curve: StepCurve,
    decodes: StepWorkload,
    decode_step_s: float,
    min_chunk: int,
    num_waited: int,
    max_step_s: float = 0.0,
    coming_gap_s: float = math.inf,
    drafts: bool = False,
) -> StepTimeLimit | None:
    """Returns the bound of a step that begins then; None: it may take any time.

    promises, numbers       of each that decodes, what it was promised (None: nothing), and which of its tokens it would get
    decodes, decode_step_s  their work, and what a step takes that is nothing else
    num_waited              steps since prompts last got something, in which they waited
    max_step_s              for the sake of those who were promised nothing; 0: any time
    coming_gap_s            the tightest gap that was promised to one that is to come
    drafts                  the bound is for drafts: a pace for which decoding alone is too slow can only gain by them
    """
    least_s = curve.step_s(replace(decodes, prompt_tokens=min_chunk))
    bound_s, kept_s = FIRST_GAP_SHARE * coming_gap_s, math.inf
    for promise, number in zip(promises, numbers, strict=True):
        if promise is None:
            if 0.0 < max_step_s < bound_s:
                bound_s = max_step_s
            continue
        if promise.gap_s:
            step_s = promise.gap_s * (GAP_SHARE if number > promise.first + 1 else FIRST_GAP_SHARE)
            if step_s < bound_s:
                bound_s = step_s
        if not promise.tpot_s:
            continue
        every_s, num_left = PACE_SHARE * promise.tpot_s, promise.last - number
        if drafts and every_s <= decode_step_s:
            continue
        left_s = every_s * (number - promise.first) - (begin_s - promise.since_s)
        helps = decode_step_s < every_s < least_s  # waiting does
        if every_s > decode_step_s:
            left_s += (every_s - decode_step_s) * (num_left if num_left < MADE_UP_WITHIN else MADE_UP_WITHIN)
        if left_s < every_s:
            end_s = begin_s + decode_step_s * (num_left + 1)
            if end_s > promise.since_s + promise.tpot_s * (promise.last - promise.first):
                # It is broken whatever is done: it has its pace from now on.
                left_s, helps = every_s, False
        if helps:
            if left_s < kept_s:
                kept_s = left_s
        elif left_s < bound_s:
            bound_s = left_s
    waits = kept_s < least_s and num_waited < MOST_WAITED
    bound_s = min(bound_s, kept_s)
    if bound_s == math.inf:
        return None
    if not waits and decodes.decodes:
        # What a step with prompts takes anyway may as well be filled.
        bound_s = max(bound_s, curve.mixed_s)
    return StepTimeLimit(curve=curve, max_step_s=max(0.0, bound_s), min_chunk=min_chunk, waits=waits)
