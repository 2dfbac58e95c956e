"""When to launch the step after the one that runs: late, so that a request that arrives meanwhile is in it, but before the device runs dry.

    device   ──── n ──────────────────────┬──── n+1 ─────
    host     settle n-1 · · · wait · · · launch n+1 ┘        arrivals up to the launch join n+1, not n+2

Launched at once, n+1 would be planned when n has only begun, and a request that comes during n would wait for all of n and all of n+1.
"""

from __future__ import annotations

from twostep.step_curve import StepCurve, StepWorkload

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
        self._last: tuple[StepWorkload, float] | None = None

    def launched(self, seconds: float, *, prompts: bool = False) -> None:
        """Notes that a launch took so long, planning included; of a step with `prompts`, or without."""
        if prompts:
            self._prompt_launch_s = max(seconds, _DECAY * self._prompt_launch_s)
        else:
            self._launch_s = max(seconds, _DECAY * self._launch_s)

    def settled(self, work: StepWorkload, seconds: float, blocked_s: float) -> None:
        """Notes that a step took so long until its result was there, for which the host waited `blocked_s`. If that is nothing, the host
        came late and `seconds` are its own: they say nothing of the device, and must not make the next wait, and with it the next step,
        longer still. Then half of what was thought is waited for, until an end is seen again."""
        if blocked_s < UNSEEN_S:
            seconds = min(seconds, self._least_s(work)) / 2
        self._last = work, seconds

    def wait_s(self, work: StepWorkload, running_s: float, *, prompts: bool = False) -> float:
        """Returns how long the next launch may wait when a step of `work` has run for so long; 0: not at all. `prompts`: it may be of
        some."""
        launch_s = max(self._launch_s, self._prompt_launch_s) if prompts else self._launch_s
        return max(0.0, self._least_s(work) - running_s - _LAUNCHES * launch_s - _SLACK_S)

    def _least_s(self, work: StepWorkload) -> float:
        """It takes at least so long, judged by the last one: time grows with each kind of work, and from a part that is always there."""
        if self._last is None:
            return 0.0
        before, seconds = self._last
        share = 1.0
        for now, then in (
            (work.prompt_tokens + work.decodes, before.prompt_tokens + before.decodes),
            (work.pairs, before.pairs),
            (work.decodes, before.decodes),
            (work.context, before.context),
        ):
            if then > 0:
                share = min(share, now / then)
        return min(share * seconds, _LONGEST_S if self.curve is None else _OF_CURVE * self.curve.step_s(work))
