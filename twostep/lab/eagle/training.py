"""Teaches a head: training-time test (Li et al., EAGLE-3, 2025, section 3.2).

The head is unrolled over as many steps as it will draft, at every position of an answer, on its own outputs; the tokens that it is given
are the answer's. In each step it is to say what the model thinks comes next:

    loss = sum over steps n of 0.8 ** n * mean over positions of -sum over tokens of p_model(token) * log p_head(token)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from twostep.lab.eagle.answers import LearntAnswer
from twostep.lab.eagle.target import Looked
from twostep.model.eagle.head import EagleHead
from twostep.model.eagle.unrolled import Unrolled
from twostep.process.startup import Progress

_LATER_STEPS_COUNT = 0.8
_BETAS = (0.9, 0.95)
_LARGEST_GRADIENT = 1.0
# Of all batches: so long the rate grows, before it falls to nothing.
_WARM_UP = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """`num_steps`: how many tokens ahead; `batch_size`: answers at once; `save_every`: batches."""

    num_rounds: int
    num_steps: int
    batch_size: int
    learning_rate: float
    seed: int
    save_every: int = 25

    def num_batches(self, num_answers: int) -> int:
        return self.num_rounds * -(-num_answers // self.batch_size)


class Trainer:
    """A head on its way. The same answers and plan make the same head, however often it was interrupted."""

    def __init__(self, head: EagleHead, plan: TrainingPlan) -> None:
        self.head = head.train()
        self.plan = plan
        self.num_done = 0  # batches
        self.losses: list[float] = []  # of each batch since this object was made
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=plan.learning_rate, betas=_BETAS, weight_decay=0.0)

    def state(self) -> dict[str, object]:
        return {"num_done": self.num_done, "head": self.head.state_dict(), "optimizer": self._optimizer.state_dict()}

    def restore(self, state: dict[str, object]) -> None:
        """Takes what `state` gave."""
        self.head.load_state_dict(state["head"])  # type: ignore[arg-type]
        self._optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
        self.num_done = int(state["num_done"])  # type: ignore[call-overload]

    def train(self, answers: Sequence[LearntAnswer], look: Callable[[int], Looked], save: Callable[[], None], progress: Progress) -> None:
        """Goes on up to the end of the plan. `look`: into the model, at the answer of a number; `save` is called now and then, and at the
        end."""
        total = self.plan.num_batches(len(answers))
        each_round = total // self.plan.num_rounds
        progress.phase("training")
        recent = list[float]()
        while self.num_done < total:
            number, place = divmod(self.num_done, each_round)
            order = torch.randperm(len(answers), generator=torch.Generator().manual_seed(self.plan.seed + number)).tolist()
            chosen = order[place * self.plan.batch_size : (place + 1) * self.plan.batch_size]
            recent.append(self._learn([answers[i] for i in chosen], [look(i) for i in chosen], total))
            self.losses.append(recent[-1])
            self.num_done += 1
            progress.advance(self.num_done, total, "batches")
            if place == each_round - 1:
                progress.say(f"round {number + 1} of {self.plan.num_rounds}: loss {sum(recent) / len(recent):.3f}")
                recent.clear()
            if self.num_done % self.plan.save_every == 0 or self.num_done == total:
                save()

    def _learn(self, answers: Sequence[LearntAnswer], looked: Sequence[Looked], total: int) -> float:
        rate = self.plan.learning_rate * rate_at(self.num_done, total)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(self.head, answers, looked, self.plan.num_steps)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), _LARGEST_GRADIENT)
        self._optimizer.step()
        return float(loss.detach())


def rate_at(number: int, total: int) -> float:
    """Returns the share of the learning rate that a batch learns with: a straight line up, then a cosine down."""
    warm = max(1, round(total * _WARM_UP))
    if number < warm:
        return (number + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (number - warm) / max(1, total - warm)))


def loss_of(head: EagleHead, answers: Sequence[LearntAnswer], looked: Sequence[Looked], num_steps: int) -> torch.Tensor:
    """Returns the loss of some answers, each with what the model saw of it, a number that gradients go through."""
    device = head.fc.weight.device
    longest = max(len(each.states) for each in looked)

    def padded(tensors: Sequence[torch.Tensor], more: int = 0) -> torch.Tensor:
        sizes = (len(tensors), longest + more, *tensors[0].shape[1:])
        whole = torch.zeros(sizes, dtype=tensors[0].dtype)
        for row, tensor in zip(whole, tensors, strict=True):
            row[: len(tensor)] = tensor
        return whole.to(device)

    # Of step n, row t: the token at t + 1 + n is given, the one at t + 2 + n is to come.
    tokens = padded([torch.tensor(answer.whole) for answer in answers], num_steps + 1)
    labels = padded([each.labels for each in looked], num_steps + 1).long()
    shares = padded([each.shares for each in looked], num_steps + 1)
    ends = torch.tensor([len(answer.whole) for answer in answers], device=device)[:, None]
    starts = torch.tensor([len(answer.prompt) for answer in answers], device=device)[:, None]
    # Before the last token of a prompt nothing is to be said.
    first = max(0, min(len(answer.prompt) for answer in answers) - 1)
    rows = torch.arange(first, longest, device=device)
    unrolled = Unrolled(head, padded([each.states for each in looked]), first)
    losses, weights = list[torch.Tensor](), list[float]()
    for number in range(num_steps):
        begin = first if number else 0
        hidden = unrolled.step(tokens[:, begin + 1 + number : longest + 1 + number])
        wanted = (rows + 1 >= starts) & (rows + 2 + number < ends)
        if not bool(wanted.any()):
            break
        given = slice(first + 1 + number, longest + 1 + number)
        log_shares = head.logits(hidden[wanted]).float().log_softmax(-1).gather(1, labels[:, given][wanted])
        losses.append(-(shares[:, given][wanted] * log_shares).sum(-1).mean())
        weights.append(_LATER_STEPS_COUNT**number)
    assert losses, "answers have a token after the first"
    return torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum() / sum(weights)
