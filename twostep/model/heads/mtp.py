"""Multi-token prediction: the layer that comes with a model (families/next_token.py), from round to round on its own output."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from twostep.model.families.decoder import Decoder
from twostep.model.families.latent_attention import LatentAttention
from twostep.model.families.layer_states import Reads
from twostep.model.heads.head import Drafted, DraftHead
from twostep.model.kernels.ops import AttentionPlan


class MtpDrafts(DraftHead):
    reads = Reads.ALL

    def __init__(self, model: Decoder) -> None:
        """`model`: one that was built with its layer."""
        next_token, spec = model.next_token, model.attention
        assert next_token is not None
        attention = next_token.layer.attention
        assert isinstance(attention, LatentAttention), "other families' layers write keys and values"
        self._model, self._next, self._own = model, next_token, attention
        self._layer = model.config.num_layers
        self.state_size = model.config.hidden_size
        self.vocab_size = model.config.vocab_size
        self.attention = replace(spec, rope=[*spec.rope, spec.rope[-1]], windows=[*spec.windows, 0], first=self._layer)

    def state(self, seen: torch.Tensor) -> torch.Tensor:
        return seen

    def write(self, plan: AttentionPlan, token_ids: torch.Tensor, states: torch.Tensor) -> None:
        self._own.write(plan, self._layer, self._enter(token_ids, states)[1])

    def step(self, plan: AttentionPlan | None, token_ids: torch.Tensor, states: torch.Tensor, number: int) -> Drafted:
        assert plan is not None
        residual, projected = self._enter(token_ids, states)
        attended = self._own.attend(plan, self._layer, projected)
        normed = self._next.layer.finish(attended, residual, self._next.norm, lambda x: x)
        return Drafted(residual, self._model.logits(normed))

    def _enter(self, token_ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what enters the layer, and what its attention's first product makes of it."""
        embedded = F.embedding(token_ids, self._model.embedding)
        residual = self._next.join(embedded, states)
        return residual, self._own.enter(self._next.layer.input_norm(residual))
