"""How long waiting makes a sequence more urgent, so that no class starves another for good.

    rank = class - whole spans of `ageing_s` that it has waited, in sum         0 interactive, 1 standard, 2 batch

Waiting is time in which it could have gone on and was passed over: in the queue, after giving way, or running and not fed. Time in
which it is served does not count, so an unhindered batch sequence stays one; and what it has waited is never taken back, so a sequence
that is pushed out again and again ends up among the most urgent, where who came first goes first. After 2 * ageing_s of waiting, then,
nobody that came later is preferred to it. (Ageing, as in any priority scheduler: Silberschatz et al., Operating system concepts.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Patience:
    """Of one sequence. Times in seconds, on any one clock."""

    request_class: int
    rank: int
    waited_s: float = 0.0
    since: float | None = None

    def pause(self, now: float) -> None:
        """It is passed over from now on, if it was not before."""
        if self.since is None:
            self.since = now

    def wait(self, now: float, ageing_s: float) -> None:
        """It is passed over still: its rank is that of now."""
        self.pause(now)
        assert self.since is not None
        waited = self.waited_s + now - self.since
        self.rank = max(0, self.request_class - int(waited / ageing_s))

    def serve(self, now: float) -> None:
        """It goes on."""
        if self.since is not None:
            self.waited_s += now - self.since
            self.since = None
