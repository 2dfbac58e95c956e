"""Attention of a decoder's layer: one product for queries, keys and values, and one for what comes out."""

from __future__ import annotations

import torch

from twostep.model.families.config import ModelConfig
from twostep.model.families.modules import Cut, Maker, Places, RmsNorm
from twostep.model.kernels.ops import AttentionPlan, Linear, Ops


class Attention:
    """Grouped-query attention (Ainslie et al., GQA, 2023); q, k and v are one product, their weights in that order of rows."""

    def __init__(
        self,
        config: ModelConfig,
        make: Maker,
        *,
        names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
        qk_norms: tuple[RmsNorm, RmsNorm] | None = None,
    ) -> None:
        """`qk_norms`: of each head of the queries and of the keys, before they turn; q_norm and k_norm in a checkpoint."""
        c = self._config = config
        self._names = names
        self._qk_norms = qk_norms
        self._qkv = make.linear((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size, bias=c.qkv_bias)
        self._o = make.linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.o_bias)

    def place(self, places: Places, name: str) -> None:
        """Registers all weights under the checkpoint's names, which begin with `name`."""
        c = self._config
        rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        q, k, v, o = (f"{name}.{each}" for each in self._names)
        self._qkv.place(places, (q, rows, Cut.HEADS), (k, kv_rows, Cut.KV_HEADS), (v, kv_rows, Cut.KV_HEADS))
        self._o.place(places, (o, c.hidden_size, Cut.FROM_HEADS))
        for norm, of in zip(self._qk_norms or (), ("q_norm", "k_norm"), strict=False):
            norm.place(places, f"{name}.{of}")

    def finish_loading(self, ops: Ops) -> None:
        self._qkv.finish_loading(ops)
        self._o.finish_loading(ops)
        for norm in self._qk_norms or ():
            norm.finish_loading(ops)

    @property
    def enter(self) -> Linear:
        """[T, (num_heads + 2 * num_kv_heads) * head_dim] from what the norm gave, [T, hidden_size]."""
        return self._qkv.run

    @property
    def leave(self) -> Linear:
        """[T, hidden_size] from what `attend` gave; of one of several ranks, its term of their sum."""
        return self._o.run

    def attend(self, plan: AttentionPlan, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """[T, num_heads * head_dim] from what `enter` gave; writes the tokens' keys and values."""
        if self._qk_norms is not None:
            c = self._config
            heads = qkv.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
            query, key = heads[:, : c.num_heads], heads[:, c.num_heads : c.num_heads + c.num_kv_heads]
            for norm, part in zip(self._qk_norms, (query, key), strict=True):
                part.copy_(norm(part))
        plan.rotate_and_write(layer, qkv)
        return plan.attend(layer, qkv)
