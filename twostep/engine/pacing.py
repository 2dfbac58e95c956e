"""When to launch the step after the one that runs: late, so that a request that arrives meanwhile is in it, but before the device runs dry.

    device   ──── n ──────────────────────┬──── n+1 ─────
    host     settle n-1 · · · wait · · · launch n+1 ┘        arrivals up to the launch join n+1, not n+2

Launched at once, n+1 would be planned when n has only begun, and a request that comes during n would wait for all of n and all of n+1.

How long n is sure to take is judged by the shortest of the last steps like it. A step may take longer than its work does: KV that arrives
beside it takes its share of the device. Judged by such a step, the next launch would come late, and the device would stand still after it.
"""

from __future__ import annotations

from collections import deque

from twostep.step_curve import StepCurve, StepWorkload

# How many steps are judged by, and how much the work of steps that are like each other may differ. Sequences come and go.
_NUM_STEPS = 8
_ALIKE = 0.9
# Above what launches have taken lately: for a thread that gets the processor late.
_SLACK_S = 0.0005
_LAUNCHES = 1.5
# A host that found a result there already, or nearly, does not know when the device had it.
UNSEEN_S = 0.0002
# How fast a slow launch is forgotten.
_DECAY = 0.95
# One step that took long says little of the next one, if the host or the device was held up meanwhile: no step is thought to be sure to
# take so many times what the curve says, nor, without a curve, so long.
_OF_CURVE = 2.0
_LONGEST_S = 0.25


class Pacing:
    """Belongs to one engine's thread. Times in seconds."""

    def __init__(self) -> None:
        # How long steps take here; None: not known.
        self.curve: StepCurve | None = None
        # Of steps that only decode, which replay what was captured, and of those with prompts, which are launched kernel by kernel.
        self._launch_s = self._prompt_launch_s = 0.0
        # The last ones, all like each other: their work, and what they took.
        self._last: deque[tuple[StepWorkload, float]] = deque(maxlen=_NUM_STEPS)
        # What part of that is waited for: less after ends that were not seen.
        self._sure = 1.0

    def launched(self, seconds: float, *, prompts: bool = False) -> None:
        """Notes that a launch took so long from when it was due, planning included; of a step with `prompts`, or without."""
        if prompts:
            self._prompt_launch_s = max(seconds, _DECAY * self._prompt_launch_s)
        else:
            self._launch_s = max(seconds, _DECAY * self._launch_s)

    def settled(self, work: StepWorkload, seconds: float, blocked_s: float) -> None:
        """Notes that a step took so long until its result was there, for which the host waited `blocked_s`. If that is nothing, the host
        came late and `seconds` are its own: they say nothing of the device, and must not make the next wait, and with it the next step,
        longer still. Then half of what was thought is waited for, until an end is seen again."""
        if blocked_s < UNSEEN_S:
            self._sure /= 2
            return
        self._sure = 1.0
        if self._last and min(_share(work, self._last[-1][0]), _share(self._last[-1][0], work)) < _ALIKE:
            self._last.clear()
        self._last.append((work, seconds))

    def wait_s(self, work: StepWorkload, running_s: float, *, prompts: bool = False) -> float:
        """Returns how long the next launch may wait when a step of `work` has run for so long; 0: not at all. `prompts`: it may be of
        some."""
        launch_s = max(self._launch_s, self._prompt_launch_s) if prompts else self._launch_s
        return max(0.0, self._least_s(work) - running_s - _LAUNCHES * launch_s - _SLACK_S)

    def _least_s(self, work: StepWorkload) -> float:
        """Returns how long a step takes at least, in seconds, judged by the last ones: time grows with each kind of work, and from a part
        that is always there."""
        least_s = self._sure * min((_share(work, before) * seconds for before, seconds in self._last), default=0.0)
        return min(least_s, _LONGEST_S if self.curve is None else _OF_CURVE * self.curve.step_s(work))


def _share(now: StepWorkload, then: StepWorkload) -> float:
    """Returns what part of the work before there is now, of the kind of which that is least; 1 at most."""
    share = 1.0
    for new, old in (
        (now.prompt_tokens + now.decodes, then.prompt_tokens + then.decodes),
        (now.pairs, then.pairs),
        (now.decodes, then.decodes),
        (now.context, then.context),
    ):
        if old > 0:
            share = min(share, new / old)
    return share
