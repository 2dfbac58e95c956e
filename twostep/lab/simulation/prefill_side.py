"""A worker in the prefill role: prompts, first in, first out, in steps of a token budget, long ones split and short ones together."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from twostep.lab.simulation.decode_side import DecodeSide
from twostep.lab.simulation.hardware import Hardware
from twostep.step_curve import StepWorkload, chunk_pairs


@dataclass(slots=True, eq=False)
class Prompt:
    """A request's prompt on its way: `computed` of its `length` tokens are there. `seat` is where it has reserved."""

    request: int
    length: int
    computed: int
    seat: DecodeSide
    queued_at: float = 0.0


class PrefillSide:
    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._curve = hardware.prefill
        self._queue: deque[Prompt] = deque()
        self._step: list[Prompt] = []  # those that the running step completes
        self._step_s = 0.0
        self.free_at = 0.0  # when the running step is over
        self.running = False
        self.num_prompts = 0
        self.queued_tokens = 0  # not planned yet
        self.queued_s = 0.0  # what they take in full steps
        self.busy_s = 0.0
        self.num_tokens = 0  # computed since the start

    def add(self, prompt: Prompt, now: float) -> None:
        prompt.queued_at = now
        self._queue.append(prompt)
        self.num_prompts += 1
        num_tokens = prompt.length - prompt.computed
        self.queued_tokens += num_tokens
        self.queued_s += self._hardware.prompt_s(num_tokens, chunk_pairs(num_tokens, prompt.computed))

    def start(self, now: float) -> float | None:
        """Plans and starts a step; when it is over. None: there is nothing to do. Behind a step that has just ended, those that came too
        late for its planning wait for the next one, unless they are all there are."""
        queue = self._queue
        if not queue:
            return None
        latest = now
        if self._step_s:
            ahead = now - min(self._hardware.ahead_s, self._step_s)
            if queue[0].queued_at <= ahead:
                latest = ahead
        curve, room = self._curve, self._hardware.prefill_tokens
        rows, pairs = 0, 0.0
        while queue and room:
            prompt = queue[0]
            if prompt.queued_at > latest:
                break
            computed = prompt.computed
            count = prompt.length - computed
            if count > room:
                count = room
            pairs += count * (computed + count / 2)
            rows += count
            room -= count
            prompt.computed = computed + count
            if prompt.computed == prompt.length:
                self._step.append(queue.popleft())
        self.queued_tokens -= rows
        # Sums of rounded numbers leave something.
        self.queued_s = self.queued_s - curve.per_row_s * rows - curve.per_pair_s * pairs if queue else 0.0
        self._step_s = curve.step_s(StepWorkload(prompt_tokens=rows, pairs=pairs))
        self.num_tokens += rows
        self.busy_s += self._step_s
        self.free_at = now + self._step_s
        self.running = True
        return self.free_at

    def settle(self) -> list[Prompt]:
        """The running step is over: the prompts it completed."""
        done, self._step = self._step, []
        self.num_prompts -= len(done)
        self.running = False
        return done

    def rest(self) -> None:
        """Nothing followed the last step: the next one is planned when a prompt comes."""
        self._step_s = 0.0

    def predicted_s(self, now: float) -> float:
        """Seconds until a prompt that comes now would begin."""
        return (self.free_at - now if self.free_at > now else 0.0) + self.queued_s

    def abandon(self) -> list[Prompt]:
        """The worker is gone, or has no more time: all prompts that were here."""
        left = [*self._step, *self._queue]
        self._step.clear()
        self._queue.clear()
        self.num_prompts = self.queued_tokens = 0
        self.queued_s = 0.0
        self.running = False
        return left
