"""The interface of heads that draft, whatever they are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from twostep.model.families.layer_states import Reads
from twostep.model.kernels.ops import AttentionPlan
from twostep.model.kernels.torch_attention import AttentionSpec


class Drafted(NamedTuple):
    """Holds what a round gave of R sequences: `hidden` [R, state_size], which the next round is given, and `logits` [R, the head's
    vocabulary]."""

    hidden: torch.Tensor
    logits: torch.Tensor


class DraftHead(ABC):
    """Draws its tokens from logits. All it is given is on the model's device and in its dtype; what it does may be captured.

    layers        of the model whose inputs it is given, side by side
    reads         what it is given of the last norm's output, where there are no `layers`
    state_size    numbers that it keeps of a token's states
    attention     its own layer's: with an entry for each layer of the pool, whose last one it is; None: it has no keys and values
    most_tokens   that it can draft
    vocab_size    of the model
    target_ids    int64 [its vocabulary]: the model's tokens that its own are, ascending; None: the same
    """

    layers: tuple[int, ...] = ()
    reads: Reads = Reads.NOTHING
    state_size: int
    vocab_size: int
    attention: AttentionSpec | None = None
    most_tokens: int = 1 << 10
    target_ids: torch.Tensor | None = None
    # Whether rounds differ by more than what they are given.
    counts_rounds = False

    @abstractmethod
    def state(self, seen: torch.Tensor) -> torch.Tensor:
        """[T, state_size] from what it is given of T tokens, [T, len(layers) * hidden_size] or [T, hidden_size]."""

    def write(self, plan: AttentionPlan, token_ids: torch.Tensor, states: torch.Tensor) -> None:
        """Writes its keys and values of a step's T tokens.

        token_ids  integer [T]
        states     [T, state_size], of the tokens before them
        """
        raise AssertionError("this head has no keys and values")

    @abstractmethod
    def step(self, plan: AttentionPlan | None, token_ids: torch.Tensor, states: torch.Tensor, number: int) -> Drafted:
        """Drafts after the last tokens of R sequences; `plan`, of one row each over the head's own `attention`, is there if it has one.

        token_ids  integer [R]
        states     [R, state_size], of the tokens before them; or what the round before this one gave
        number     of the round, from 0
        """

    def whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, vocab_size] of logits over its own vocabulary: minus infinity where it has no such token."""
        if self.target_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.target_ids, logits)
