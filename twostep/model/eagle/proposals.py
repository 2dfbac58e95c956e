"""What an EAGLE-3 head proposes after a sequence, token by token.

1. `extend` computes the rows of positions that the model has been through, and keeps their keys and values
2. `propose` goes on from the last of them on the head's own outputs; what it computes there is dropped, since the model comes through
   those positions next

The tokens come from logits as the model's own do: the likeliest, or drawn with the noise of (seed, position), so that a proposal is what
the model would draw wherever the two distributions agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from twostep.engine.batch import SamplingRow
from twostep.model.eagle.head import EagleHead
from twostep.model.runner.sampler import sample
from twostep.sampling_params import SamplingParams

# A token of the model's vocabulary out of logits float32 [vocab_size], the n-th proposal, from 0.
Choice = Callable[[torch.Tensor, int], int]


def likeliest(logits: torch.Tensor, number: int) -> int:
    """A Choice: the largest logit's token."""
    return int(logits.argmax())


def drawn(params: SamplingParams, position: int, history: Sequence[int] = (), num_prompt_tokens: int = 0) -> Choice:
    """Returns a Choice that picks as the model's sampler does. `position`: of the first proposal among the generated tokens; `history`:
    prompt and answer before it, which penalties look at."""
    before = list(history)

    def choose(logits: torch.Tensor, number: int) -> int:
        row = SamplingRow(params, position + number, before, num_prompt_tokens, frozenset())
        token = int(sample(logits[None], [row]).token_ids[0])
        before.append(token)
        return token

    return choose


class DraftedSequence:
    """Keys and values of the head for one sequence, [num_kv_heads, T, head_dim], from position `first` on: what comes before is not
    seen."""

    def __init__(self, head: EagleHead, first: int = 0) -> None:
        self.first = first
        self._head = head
        c = head.config
        self._keys = self._values = head.fc.weight.new_empty(c.num_kv_heads, 0, c.head_dim)
        self._last = head.fc.weight.new_empty(1, c.hidden_size)

    def __len__(self) -> int:
        """Positions that are computed."""
        return self._keys.shape[1]

    @property
    def end(self) -> int:
        """The position behind the last one that is computed."""
        return self.first + len(self)

    @torch.inference_mode()
    def extend(self, states: torch.Tensor, token_ids: Sequence[int]) -> None:
        """Adds T positions, at least one. states [T, 3 * target_hidden_size], the model's; token_ids, T as well: of each position the one
        after it."""
        self.extend_fused(self._head.fuse(states), token_ids)

    @torch.inference_mode()
    def extend_fused(self, hidden: torch.Tensor, token_ids: Sequence[int]) -> None:
        """The same of what `EagleHead.fuse` made of the states, [T, hidden_size]."""
        assert len(hidden) == len(token_ids) > 0
        self._last, self._keys, self._values = self._step(hidden, token_ids, self._keys, self._values)

    @torch.inference_mode()
    def propose(self, count: int, choose: Choice = likeliest, *, own: bool = False) -> list[int]:
        """Returns `count` tokens that may follow the last one. Nothing of it is kept. `own`: the choice is among the head's own tokens, by
        their numbers; of a head whose tokens are in the model's order it comes to the same, since all others have no share, and takes a
        fraction of the time."""
        assert len(self)
        proposed: list[int] = []
        hidden, keys, values = self._last, self._keys, self._values
        while len(proposed) < count:
            if proposed:
                hidden, keys, values = self._step(hidden, proposed[-1:], keys, values)
            if own:
                number = choose(self._head.logits(hidden)[0].float(), len(proposed))
                proposed.append(number + int(self._head.d2t[number]))
            else:
                proposed.append(choose(self._head.target_logits(hidden)[0].float(), len(proposed)))
        return proposed

    def _step(
        self, hidden: torch.Tensor, token_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes the positions behind those of `keys` and `values`; returns the last one's state [1, hidden_size], and all keys and
        values."""
        head, before, count = self._head, keys.shape[1], len(token_ids)
        device = keys.device
        positions = self.first + torch.arange(before, before + count, device=device)
        rows = head.project(torch.tensor(token_ids, device=device), hidden, positions)
        keys, values = torch.cat((keys, rows.key), 1), torch.cat((values, rows.value), 1)
        # Only the last row leads on.
        attended = _attend(rows.query[:, -1:], keys, values)
        return head.finish(attended, rows.residual[-1:]), keys, values


def propose(head: EagleHead, states: torch.Tensor, token_ids: Sequence[int], count: int, choose: Choice = likeliest) -> list[int]:
    """Returns `count` tokens that may follow a sequence. token_ids: T + 1 of them, whose last one the model has not been through; states
    [T, 3 * target_hidden_size] of those before it."""
    sequence = DraftedSequence(head)
    sequence.extend(states, token_ids[1:])
    return sequence.propose(count, choose)


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[num_heads, 1, head_dim] of one row's queries over all keys [num_kv_heads, T, head_dim]."""
    repeats = len(query) // len(keys)
    result: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        query, keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
    )
    return result
