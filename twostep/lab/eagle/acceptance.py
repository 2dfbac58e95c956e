"""Measures how good a head is: over answers that it has not learned from, how many of its proposals are what the model said.

At every token of an answer the head proposes what follows, with the noise that the answer was drawn with, as a worker would. A proposal
counts if it and all before it are the answer's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from twostep.engine.batch import SamplingRow
from twostep.lab.eagle.answers import LearntAnswer
from twostep.lab.eagle.target import Looked
from twostep.model.eagle.head import EagleHead
from twostep.model.eagle.unrolled import Unrolled
from twostep.model.runner.sampler import sample


@dataclass(frozen=True, slots=True)
class Acceptance:
    """By position of a proposal: how many there were that the answer goes on for, and how many of them counted."""

    proposed: Sequence[int]
    accepted: Sequence[int]

    @property
    def rates(self) -> list[float]:
        return [right / max(1, all_) for right, all_ in zip(self.accepted, self.proposed, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        """Returns how many tokens a step gives that is given all proposals: one more than are accepted."""
        return 1 + sum(self.rates)

    def __add__(self, other: Acceptance) -> Acceptance:
        def summed(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
            return [a + b for a, b in zip(ours, theirs, strict=True)]

        return Acceptance(summed(self.proposed, other.proposed), summed(self.accepted, other.accepted))


def measure(head: EagleHead, answers: Sequence[LearntAnswer], look: Callable[[int], Looked], num_steps: int) -> Acceptance:
    """`look`: into the model, at the answer of a number."""
    found = Acceptance([0] * num_steps, [0] * num_steps)
    for number, answer in enumerate(answers):
        found += _measure(head, answer, look(number), num_steps)
    return found


@torch.inference_mode()
def _measure(head: EagleHead, answer: LearntAnswer, looked: Looked, num_steps: int) -> Acceptance:
    whole = torch.tensor(answer.whole, device=head.fc.weight.device)
    length, first = len(whole), len(answer.prompt)
    unrolled = Unrolled(head, looked.states.to(whole.device)[None, :-1])
    given = whole[1:]
    # Row t proposes the token at t + 2 first, and does so once the answer has begun.
    rows = torch.arange(length - 1, device=whole.device)
    right = rows + 1 >= first
    proposed, accepted = list[int](), list[int]()
    for step in range(num_steps):
        hidden = unrolled.step(given[None])[0]
        ends = max(0, length - 2 - step)
        begun = rows[:ends] + 1 >= first
        given = given.clone()
        if bool(begun.any()):
            places = (rows[:ends][begun] + 2 + step - first).tolist()
            sampling = [SamplingRow(answer.sampling, place, (), first, frozenset()) for place in places]
            logits = head.target_logits(hidden[:ends][begun])
            given[:ends][begun] = torch.tensor(sample(logits, sampling).token_ids, device=whole.device)
        right[:ends] &= given[:ends] == whole[2 + step :]
        proposed.append(int(begun.sum()))
        accepted.append(int((right[:ends] & begun).sum()))
    return Acceptance(proposed, accepted)
