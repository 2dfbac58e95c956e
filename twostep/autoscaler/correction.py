"""Corrects the load by what the answers show: where the target is missed although sizing says that there are enough workers, these are
slower than their curves (a neighbour on the host, a cold cache, a load of another shape), and the load is counted for more. A correction
that nothing confirms is forgotten."""

from __future__ import annotations

import math

from twostep.autoscaler.memory import Correction
from twostep.autoscaler.model import PolicyConfig

HALF_LIFE_S = 300.0
MOST = 1.5
_LEAST_STEP, _MOST_STEP = 0.05, 0.25
# What is missed by chance deviates by so many standard deviations.
_SIGMAS = 2.0
# So many windows there must have been enough: answers that end now may have waited while there were not.
_WINDOWS = 3.0


def corrected(
    config: PolicyConfig, before: Correction, *, met: float | None, num_answers: float, enough: bool, now_s: float, dt_s: float
) -> Correction:
    """After a window in which the share `met` of about `num_answers` answers was within the target. `enough`: there were as many ready
    workers as sizing asks for, nothing waited beyond its time, and more could help."""
    factor = 1.0 + (before.factor - 1.0) * 0.5 ** (max(0.0, dt_s) / HALF_LIFE_S)
    since = (before.enough_s if before.enough_s is not None else now_s) if enough else None
    late = 1.0 - config.attainment
    noise = math.sqrt(late * config.attainment / max(1.0, num_answers))
    missing = 0.0 if met is None else config.attainment - _SIGMAS * noise - met
    judged = since is not None and now_s - since >= _WINDOWS * config.window_s
    again = before.raised_s is None or now_s - before.raised_s >= config.window_s
    if missing <= 0.0 or not judged or not again or num_answers < 1.0:
        return Correction(factor=factor, raised_s=before.raised_s, enough_s=since)
    factor = min(MOST, factor * (1.0 + min(_MOST_STEP, max(_LEAST_STEP, missing))))
    return Correction(factor=factor, raised_s=now_s, enough_s=since)
