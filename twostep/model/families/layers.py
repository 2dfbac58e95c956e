"""A decoder's layers: how norms, attention and MLP stand around the residual.

    DecoderLayer   norm ─ attention ─ + ─ norm ─ MLP ─ +      Llama and most others

A layer begins with what its attention's first product gave, and ends with what the next layer's gives: between two layers there is
a place where a device may join products and norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from twostep.model.families.attention import Attention
from twostep.model.families.mlp import Mlp
from twostep.model.families.modules import Norm, Places
from twostep.model.kernels.ops import Linear, Ops


class Part(Protocol):
    """What a layer is made of."""

    def place(self, places: Places, name: str) -> None: ...

    def finish_loading(self, ops: Ops) -> None: ...


class DecoderLayer:
    """x + attention(norm(x)), and of that x + mlp(norm(x))."""

    def __init__(
        self,
        index: int,
        input_norm: Norm,
        attention: Attention,
        post_norm: Norm,
        mlp: Mlp,
        *,
        names: Sequence[str] = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    ) -> None:
        """`names`: what a checkpoint calls the parts, in this order; "": a part whose weights lie beside the others'."""
        self.index = index
        self.input_norm = input_norm
        self.attention = attention
        self.post_norm = post_norm
        self.mlp = mlp
        self._names = names

    @property
    def parts(self) -> Sequence[Part]:
        return self.input_norm, self.attention, self.post_norm, self.mlp

    def place(self, places: Places, prefix: str) -> None:
        """Registers all weights under the checkpoint's names."""
        for name, part in zip(self._names, self.parts, strict=True):
            part.place(places, f"{prefix}.{name}" if name else prefix)

    def finish_loading(self, ops: Ops) -> None:
        for part in self.parts:
            part.finish_loading(ops)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor, norm: Norm, then: Linear) -> torch.Tensor:
        """Adds attention's result and the MLP's to `residual` in place, and returns then(norm(residual)).

        attended  [T, num_heads * head_dim], as attention gave it
        residual  [T, hidden_size], as it was when the layer began
        """
        entered = self.post_norm.join(self.attention.leave, attended, residual, self.mlp.enter)
        return norm.join(self.mlp.leave, entered, residual, then)
