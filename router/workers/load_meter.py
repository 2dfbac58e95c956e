"""Means over the last seconds of what is on one worker: all routers' load, from its heartbeats, and this router's own part.

A heartbeat says how it was a second ago, in which a queue of prompts on a GPU comes and goes ten times. Compared moment by moment, the
router's own queue then and now would look like another router's. Their means over some heartbeats can be compared whatever the delay.
"""

from __future__ import annotations

import math

from twostep.cluster.records import WorkerLoad
from twostep.cluster.snapshot import MeanLoad

# Some heartbeats: fewer are noise, more are history.
TIME_CONSTANT_S = 3.0
# How old what records tell is at most: a heartbeat, and a look at them.
RECENT_S = 1.5


class LoadMeter:
    """Instants are seconds of one clock that does not go back."""

    def __init__(self, now: float) -> None:
        self._queued_tokens = self._batch_tokens = 0
        self._token_seconds = 0.0  # of the own queue, since it was observed last
        self._changed = self._observed = now
        self._mean: MeanLoad | None = None
        self._recent_tokens = 0.0

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of this router's that are there and not yet computed."""
        return self._queued_tokens

    @property
    def batch_tokens(self) -> int:
        """Those of batch requests among them."""
        return self._batch_tokens

    def queue(self, num_tokens: int, now: float, *, batch: bool = False) -> None:
        """So many more of them are there; below 0: fewer."""
        self._token_seconds += self._queued_tokens * (now - self._changed)
        self._recent_tokens = self.recent_tokens(now) + (0 if batch else max(0, num_tokens))
        self._changed = now
        self._queued_tokens += num_tokens
        if batch:
            self._batch_tokens += num_tokens

    def recent_tokens(self, now: float) -> float:
        """Prompt tokens that were sent there lately, batch requests' aside; what was sent RECENT_S ago counts a third."""
        return self._recent_tokens * math.exp((self._changed - now) / RECENT_S)

    @property
    def mean(self) -> MeanLoad | None:
        """None before the first observation."""
        return self._mean

    def observe(self, load: WorkerLoad, num_attempts: int, now: float) -> None:
        """Whenever records are read: `load` has held since the last time, for all that is known."""
        elapsed = now - self._observed
        self.queue(0, now)
        own = self._token_seconds / elapsed if elapsed > 0 else float(self._queued_tokens)
        self._token_seconds, self._observed = 0.0, now
        seqs = load.num_running + load.num_reserved
        if self._mean is None:
            self._mean = MeanLoad(
                queued_tokens=load.num_queued_tokens,
                batch_tokens=load.num_queued_batch_tokens,
                own_queued_tokens=own,
                num_seqs=seqs,
                own_num_seqs=min(seqs, num_attempts),
            )
            return
        weight, before = -math.expm1(-elapsed / TIME_CONSTANT_S), self._mean
        self._mean = MeanLoad(
            queued_tokens=_blend(before.queued_tokens, load.num_queued_tokens, weight),
            batch_tokens=_blend(before.batch_tokens, load.num_queued_batch_tokens, weight),
            own_queued_tokens=_blend(before.own_queued_tokens, own, weight),
            num_seqs=_blend(before.num_seqs, seqs, weight),
            own_num_seqs=_blend(before.own_num_seqs, num_attempts, weight),
        )


def _blend(before: float, now: float, weight: float) -> float:
    return before + weight * (now - before)
