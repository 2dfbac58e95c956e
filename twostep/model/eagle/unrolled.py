"""A head unrolled over several steps at every position of a sequence at once: the paper's training-time test.

In the first step each position is given the model's states; in step n, what the head itself made of the position one before in step n - 1.
The row that began at position t stays row t of every step, and is then at position t + n. It sees what it would see when it drafts:

    step 0   keys of step 0 at positions 0 .. t
    step 2   keys of step 0 at positions 0 .. t, and its own of steps 1 and 2, at positions t + 1 and t + 2
"""

from __future__ import annotations

import torch

from twostep.model.eagle.head import EagleHead


class Unrolled:
    """`step` once for each proposal; gradients go through all of them. B sequences of T positions; padding stands at their ends, where
    no position before it sees it."""

    def __init__(self, head: EagleHead, states: torch.Tensor, first: int = 0) -> None:
        """states [B, T, 3 * target_hidden_size], the model's. `first`: rows before it are only seen by the others, and R = T - first are
        computed."""
        self._head = head
        self._first = first
        self._hidden = head.fuse(states)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns what `EagleHead.logits` takes, [B, R, hidden_size]. token_ids int64: of each row the token after its position, which in
        the first step is one after t, [B, T]; in later ones [B, R]."""
        head, number = self._head, len(self._keys)
        begin = self._first if number else 0
        positions = torch.arange(begin, begin + token_ids.shape[1], device=token_ids.device) + number
        rows = head.project(token_ids, self._hidden, positions)
        repeats = head.config.num_heads // head.config.num_kv_heads
        self._keys.append(rows.key.repeat_interleave(repeats, 1))
        self._values.append(rows.value.repeat_interleave(repeats, 1))
        left_out = self._first - begin
        self._hidden = head.finish(self._attend(rows.query[:, :, left_out:]), rows.residual[:, left_out:])
        return self._hidden

    def _attend(self, query: torch.Tensor) -> torch.Tensor:
        """[B, num_heads, R, head_dim] of queries of that shape."""
        scale = self._head.config.head_dim**-0.5
        length = self._keys[0].shape[-2]
        later = torch.ones(query.shape[-2], length, dtype=torch.bool, device=query.device).triu(1 + self._first)
        scores = [(query @ self._keys[0].mT * scale).masked_fill(later, -torch.inf)]
        scores += [(query * key).sum(-1, keepdim=True) * scale for key in self._keys[1:]]
        shares = torch.cat(scores, -1).float().softmax(-1).to(query.dtype)
        attended = shares[..., :length] @ self._values[0]
        for number, value in enumerate(self._values[1:]):
            attended = attended + shares[..., length + number, None] * value
        return attended
