"""Latent attention of a decoder's layer (DeepSeek-V2, 2024, arXiv 2405.04434): what a token keeps is one short vector for all heads."""

from __future__ import annotations

from dataclasses import replace

import torch

from twostep.model.families.config import ModelConfig
from twostep.model.families.modules import Cut, Maker, Places
from twostep.model.kernels.latent import LatentWeights
from twostep.model.kernels.ops import AttentionPlan, Linear, Ops

# Of the norms of what is compressed, whatever config.json says of the others.
_NORM_EPS = 1e-6


class LatentAttention:
    """Has Attention's methods. Queries, or what they are made of, and latents are one product, their weights in that order of rows."""

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        c = self._config = config
        assert c.latent is not None
        dims = self._dims = c.latent
        make_norm = replace(make, norm_eps=_NORM_EPS)
        self._query_rows = c.num_heads * dims.query
        self._first_rows = c.q_lora_rank or self._query_rows
        self._into = make.linear(self._first_rows + dims.kept, c.hidden_size, bias=False)
        self._q_norm = make_norm.rms_norm(c.q_lora_rank) if c.q_lora_rank else None
        self._q = make.linear(self._query_rows, c.q_lora_rank, bias=False) if c.q_lora_rank else None
        self._kv_norm = make_norm.rms_norm(dims.latent)
        # Multiplied from both sides, head by head: no product of a quantized weight does that, and to round it here would serve nobody.
        stays = make.quantization is not None and make.quantization.stored
        self._up = (make if stays else replace(make, quantization=None)).linear(
            c.num_heads * (dims.nope + dims.value), dims.latent, bias=False
        )
        self._o = make.linear(c.hidden_size, c.num_heads * dims.value, bias=False)
        self._weights: LatentWeights  # there when loading has finished

    def place(self, places: Places, name: str) -> None:
        c, dims = self._config, self._dims
        compressed = (f"{name}.kv_a_proj_with_mqa", dims.kept, Cut.WHOLE)
        if self._q is None or self._q_norm is None:
            self._into.place(places, (f"{name}.q_proj", self._query_rows, Cut.HEADS), compressed)
        else:
            self._into.place(places, (f"{name}.q_a_proj", c.q_lora_rank, Cut.WHOLE), compressed)
            self._q_norm.place(places, f"{name}.q_a_layernorm")
            self._q.place(places, (f"{name}.q_b_proj", self._query_rows, Cut.HEADS))
        self._kv_norm.place(places, f"{name}.kv_a_layernorm")
        self._up.place(places, (f"{name}.kv_b_proj", c.num_heads * (dims.nope + dims.value), Cut.HEADS))
        self._o.place(places, (f"{name}.o_proj", c.hidden_size, Cut.FROM_HEADS))

    def finish_loading(self, ops: Ops) -> None:
        c, dims = self._config, self._dims
        for linear in (self._into, self._q, self._o):
            if linear is not None:
                linear.finish_loading(ops)
        up = self._up.take_dense().view(c.num_heads, dims.nope + dims.value, dims.latent)
        self._weights = LatentWeights(norm=self._kv_norm.weight, eps=_NORM_EPS, up=up)

    @property
    def enter(self) -> Linear:
        """[T, queries or what they are made of, then dims.kept] from what the norm gave, [T, hidden_size]."""
        return self._into.run

    @property
    def leave(self) -> Linear:
        """[T, hidden_size] from what `attend` gave; of one of several ranks, its term of their sum."""
        return self._o.run

    def write(self, plan: AttentionPlan, layer: int, projected: torch.Tensor) -> None:
        """The part of `attend` that writes what the tokens keep."""
        plan.write_latent(layer, projected[:, self._first_rows :], self._weights)

    def attend(self, plan: AttentionPlan, layer: int, projected: torch.Tensor) -> torch.Tensor:
        """[T, num_heads * dims.value] from what `enter` gave; writes what the tokens keep."""
        query, kv = projected[:, : self._first_rows], projected[:, self._first_rows :]
        if self._q is not None and self._q_norm is not None:
            query = self._q(self._q_norm(query))
        return plan.attend_latent(layer, query, kv, self._weights)
