"""A worker in the decode role, without its single steps: all sequences get tokens at the pace of the step that they make together.

`_passed` counts the steps since the start, in fractions: while n sequences with c tokens among them decode, it grows by one in each
`curve.decode_step_s(n, c)` seconds. A sequence that joins at `_passed` = v with r tokens to come ends at v + r, so that a heap of ends
is all there is to keep, and the cost does not depend on the number of steps.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from twostep.lab.simulation.hardware import Hardware

# A sequence waits for the running step to end before it takes part in one.
_JOINING_STEPS = 0.5


class Ended(NamedTuple):
    request: int
    at_s: float


class Left(NamedTuple):
    """A sequence that has to go on elsewhere, with the tokens it got here."""

    request: int
    num_tokens: int


class DecodeSide:
    def __init__(self, hardware: Hardware, now: float) -> None:
        curve = hardware.decode
        self._fixed, self._each, self._context_s = curve.fixed_s, curve.per_sequence_s, curve.per_context_s
        self._row, self._knee = curve.per_row_s, curve.knee
        self._max_seqs, self._max_tokens = hardware.max_num_seqs, hardware.num_tokens
        # (end in steps, request, beginning in steps, first length, tokens to come)
        self._ends: list[tuple[float, int, float, int, int]] = []
        self._passed = 0.0
        self._last = now
        self._base = 0.0  # Σ (first length - beginning): with n * _passed the tokens there are
        self.frozen = False  # lost: nothing goes on here
        self.closed = False  # what was here has moved on
        self.num_reserved = 0
        self.taken_tokens = 0  # of the pool, ends included: of the running and the reserved
        self.num_tokens = 0.0  # given since the start
        self.sequence_s = 0.0  # sequences x seconds
        self.token_s = 0.0  # tokens in the pool x seconds

    @property
    def num_running(self) -> int:
        return len(self._ends)

    @property
    def num_seqs(self) -> int:
        return len(self._ends) + self.num_reserved

    @property
    def context(self) -> float:
        return max(0.0, self._base + len(self._ends) * self._passed)

    @property
    def step_s(self) -> float:
        num = len(self._ends)
        seconds = self._fixed + self._each * num
        context = self._base + num * self._passed
        if context > 0:
            seconds += self._context_s * context
        return seconds + self._row * (num - self._knee) if num > self._knee else seconds

    def has_room(self, num_tokens: int) -> bool:
        return len(self._ends) + self.num_reserved < self._max_seqs and self.taken_tokens + num_tokens <= self._max_tokens

    def reserve(self, num_tokens: int) -> None:
        self.num_reserved += 1
        self.taken_tokens += num_tokens

    def cancel(self, num_tokens: int) -> None:
        self.num_reserved -= 1
        self.taken_tokens -= num_tokens

    def join(self, request: int, length: int, num_left: int, delay_s: float) -> None:
        """A reserved sequence of `length` tokens, `num_left` of which are to come, `delay_s` from now. The caller has advanced to now."""
        self.num_reserved -= 1
        begun = self._passed
        late = delay_s / self.step_s + _JOINING_STEPS
        heappush(self._ends, (begun + late + num_left, request, begun, length, num_left))
        self._base += length - begun

    def advance(self, now: float) -> list[Ended]:
        """To `now`, which is not before the last time. Those that ended, in order."""
        ended: list[Ended] = []
        ends = self._ends
        if self.frozen:
            return ended
        while ends:
            num = len(ends)
            context = self._base + num * self._passed
            step = self.step_s
            seconds = now - self._last
            steps = seconds / step
            first = ends[0]
            until = first[0] - self._passed
            over = until <= steps
            if over:
                steps = until
                seconds = until * step
            self.num_tokens += num * steps
            self.sequence_s += num * seconds
            self.token_s += (context + num * steps / 2) * seconds
            if not over:
                self._passed += steps
                break
            self._last += seconds
            end, request, begun, length, num_left = heappop(ends)
            self._passed = end
            self._base -= length - begun
            self.taken_tokens -= length + num_left
            ended.append(Ended(request, self._last))
        else:
            self._base = 0.0
        self._last = now
        return ended

    def abandon(self) -> list[Left]:
        """The worker is gone, or has no more time: all sequences that were here. Who has reserved finds it closed."""
        self.closed = True
        left = []
        for end, request, _, _, num_left in self._ends:
            num_tokens = min(num_left - 1, max(0, int(num_left - (end - self._passed))))
            left.append(Left(request, num_tokens))
        self._ends.clear()
        return left
