"""Attention of a decoder's layer: one product for queries, keys and values, and one for what comes out."""

from __future__ import annotations

import torch

from twostep.model.families.config import ModelConfig
from twostep.model.families.modules import Cut, Maker, Place, Places, RmsNorm
from twostep.model.kernels.ops import AttentionPlan, Linear, Ops


class WholeNorms:
    """RMSNorm of all queries together and of all keys together (OLMo 2). Of one of several ranks, which has some of the heads, the means
    are those of all of them: one exchange of two numbers a token."""

    def __init__(self, config: ModelConfig, make: Maker, num_ranks: int) -> None:
        self._rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._weights = tuple(make.empty(rows) for rows in self._rows)
        self._num_ranks = num_ranks
        self._eps = config.norm_eps
        self._ops = make.ops

    def place(self, places: Places, name: str) -> None:
        for weight, of, cut in zip(self._weights, ("q_norm", "k_norm"), (Cut.HEADS, Cut.KV_HEADS), strict=True):
            places[f"{name}.{of}.weight"] = Place.whole(weight, cut, middle=1.0)

    def apply(self, qkv: torch.Tensor) -> None:
        """In place, on queries and keys of [T, (num_heads + 2 * num_kv_heads) * head_dim]."""
        parts = qkv[:, : sum(self._rows)].split(self._rows, -1)
        if self._num_ranks == 1:
            for part, weight in zip(parts, self._weights, strict=True):
                part.copy_(self._ops.rms_norm(part.contiguous(), weight, self._eps))
            return
        # Ranks have as many heads each; a key's head that several have counts as often in both.
        squares = self._ops.whole(torch.stack([part.float().square().mean(-1) for part in parts], -1)) / self._num_ranks
        scales = torch.rsqrt(squares + self._eps)
        for part, weight, scale in zip(parts, self._weights, scales.split(1, -1), strict=True):
            part.copy_(part.float() * scale * weight)


class Attention:
    """Grouped-query attention (Ainslie et al., GQA, 2023); q, k and v are one product, their weights in that order of rows."""

    def __init__(
        self,
        config: ModelConfig,
        make: Maker,
        *,
        names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
        qk_norms: tuple[RmsNorm, RmsNorm] | None = None,
        whole_norms: WholeNorms | None = None,
    ) -> None:
        """Norms before heads turn, q_norm and k_norm in a checkpoint. `qk_norms`: of each head of the queries and of the keys;
        `whole_norms`: of all together."""
        c = self._config = config
        self._ops = make.ops
        self._gated = gated = config.gated_attention
        self._names = names
        self._qk_norms = qk_norms
        self._whole_norms = whole_norms
        self._qkv = make.linear(((1 + gated) * c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size, bias=c.qkv_bias)
        self._o = make.linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.o_bias)

    def place(self, places: Places, name: str) -> None:
        """Registers all weights under the checkpoint's names, which begin with `name`."""
        c = self._config
        rows, kv_rows = (1 + self._gated) * c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        q, k, v, o = (f"{name}.{each}" for each in self._names)
        self._qkv.place(places, (q, rows, Cut.HEADS), (k, kv_rows, Cut.KV_HEADS), (v, kv_rows, Cut.KV_HEADS))
        self._o.place(places, (o, c.hidden_size, Cut.FROM_HEADS))
        for norm, of in zip(self._qk_norms or (), ("q_norm", "k_norm"), strict=False):
            norm.place(places, f"{name}.{of}")
        if self._whole_norms is not None:
            self._whole_norms.place(places, name)

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
        gate = None
        if self._gated:
            width = self._config.num_heads * self._config.head_dim
            query, gate = qkv[:, : 2 * width].view(len(qkv), self._config.num_heads, 2, -1).unbind(2)
            qkv = torch.cat((query.reshape(len(qkv), width), qkv[:, 2 * width :]), -1)
        if self._whole_norms is not None:
            self._whole_norms.apply(qkv)
        if self._qk_norms is not None:
            c, (of_queries, of_keys) = self._config, self._qk_norms
            self._ops.norm_rotate_and_write(plan, layer, qkv, of_queries.weight, of_keys.weight, c.num_heads, c.num_kv_heads, c.norm_eps)
        else:
            plan.rotate_and_write(layer, qkv)
        attended = plan.attend(layer, qkv)
        return attended if gate is None else attended.mul_(gate.reshape(attended.shape).sigmoid())
