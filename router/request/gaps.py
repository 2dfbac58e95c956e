"""Tells where the time between two tokens of an answer went: of its longest gaps alone, so that a token costs a comparison.

    token before ─┬─ outside ─┬─ step ─┬─ late ─┬─ network ─┬─ token          two of one decode worker's, by that worker's clock
    first token  ─┴─ hand_over ───────┴─ the same, as far as it is known     from the prefill worker's to the decode worker's first

Late and network are what they took longer for this token than for the one before, and may be negative.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from twostep.rpc.v1 import decode_pb2, inference_pb2

MAX_GAPS = 64


class StepTimes(NamedTuple):
    """The steps that one message of a decode worker tells of. It may be of several: the first ends the gap, the last begins the next one.
    Numbers only, since a part of a message keeps all of it. Instants are in the worker's monotonic seconds."""

    step: int
    ended_s: float
    duration_s: float
    prompt_tokens: int
    decodes: int
    last_step: int
    last_ended_s: float
    sent_s: float

    @classmethod
    def of(cls, message: decode_pb2.StepEvents) -> StepTimes | None:
        """Returns None where the events are no step's own: they were held back, are replayed, or come from an older worker."""
        if not (steps := message.steps):
            return None
        first, last = steps[0], steps[-1]
        own = (first.step, first.ended_s, first.duration_s, first.prompt_tokens, first.decodes)
        return cls(*own, last.step, last.ended_s, message.sent_s)


class LongestGaps:
    """Holds what is known of the longest gaps of one answer, `most` of them; the account is made at the end."""

    def __init__(self, most: int = 1) -> None:
        self._most = max(1, min(MAX_GAPS, most))
        # The shortest of them first; of equal ones, the earlier.
        self._kept: list[tuple[float, int, Callable[[], inference_pb2.Gap]]] = []
        self._num_seen = 0
        self.least_s = 0.0  # one that is no longer than this is not kept

    @property
    def longest_s(self) -> float:
        return max((gap_s for gap_s, _, _ in self._kept), default=0.0)

    def keep(self, gap_s: float, describe: Callable[[], inference_pb2.Gap]) -> None:
        """Takes a gap above `least_s`."""
        self._num_seen += 1
        entry = (gap_s, self._num_seen, describe)
        if len(self._kept) < self._most:
            heapq.heappush(self._kept, entry)
        else:
            heapq.heapreplace(self._kept, entry)
        if len(self._kept) == self._most:
            self.least_s = self._kept[0][0]

    def in_order(self) -> list[inference_pb2.Gap]:
        """Returns them in the order in which they came."""
        return [describe() for _, _, describe in sorted(self._kept, key=lambda entry: entry[1])]


def gap_between(position: int, gap_s: float, before: StepTimes | None, now: StepTimes | None) -> inference_pb2.Gap:
    """Returns the gap that ended with the token at `position`, between two tokens of one decode worker."""
    gap = inference_pb2.Gap(position=position, gap_s=gap_s)
    if now is None:
        # A worker that has told of steps, and now does not, repeats what was missed.
        gap.replay_s = 0.0 if before is None else gap_s
        return gap
    gap.prompt_tokens, gap.decodes = now.prompt_tokens, now.decodes
    if before is None:
        gap.step_s = min(gap_s, now.duration_s)
        return gap
    gap.steps_missed = max(0, now.step - before.last_step - 1)
    gap.step_s = now.duration_s
    gap.outside_s = now.ended_s - now.duration_s - before.last_ended_s
    gap.late_s = (now.sent_s - now.ended_s) - (before.sent_s - before.last_ended_s)
    gap.network_s = gap_s - (now.sent_s - before.sent_s)
    return gap


def gap_of_hand_over(position: int, gap_s: float, hand_over_s: float, now: StepTimes | None) -> inference_pb2.Gap:
    """Returns the gap from a prefill worker's token to the decode worker's first: `hand_over_s` until that had the KV. What the step that
    computed the token does not explain of the rest is time that it waited for one."""
    gap = inference_pb2.Gap(position=position, gap_s=gap_s, hand_over_s=min(gap_s, hand_over_s))
    if now is not None:
        gap.prompt_tokens, gap.decodes = now.prompt_tokens, now.decodes
        rest_s = max(0.0, gap_s - hand_over_s)
        gap.step_s = min(rest_s, now.duration_s)
        gap.late_s = min(rest_s - gap.step_s, max(0.0, now.sent_s - now.ended_s))
        gap.outside_s = max(0.0, rest_s - gap.step_s - gap.late_s)
    return gap
