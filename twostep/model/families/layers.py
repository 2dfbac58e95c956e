"""A decoder's layers: how norms, attention and MLP stand around the residual.

    DecoderLayer    norm ─ attention ─ + ─ norm ─ MLP ─ +                          Llama and most others
    SandwichLayer   norm ─ attention ─ norm ─ + ─ norm ─ MLP ─ norm ─ +            Gemma 2 and 3; OLMo 2, without the norms before
    ParallelLayer   norm ─ attention ─┬─ +                                         GPT-NeoX, Falcon
                    norm ─ MLP ───────┘

A layer begins with what its attention's first product gave, and ends with what the next layer's gives: between two layers there is
a place where a device may join products and norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from twostep.model.families.mlp import Mlp
from twostep.model.families.modules import Norm, Places, RmsNorm
from twostep.model.kernels.ops import AttentionPlan, Linear, Ops


class LayerPart(Protocol):
    """What a layer is made of."""

    def place(self, places: Places, name: str) -> None: ...

    def finish_loading(self, ops: Ops) -> None: ...


class AttentionPart(LayerPart, Protocol):
    """What a layer has where tokens see those before them: attention of some kind, or something in its place."""

    @property
    def enter(self) -> Linear:
        """[T, anything] from what the norm gave, [T, hidden_size]."""
        ...

    @property
    def leave(self) -> Linear:
        """[T, hidden_size] from what `attend` gave; of one of several ranks, its term of their sum."""
        ...

    def attend(self, plan: AttentionPlan, layer: int, projected: torch.Tensor) -> torch.Tensor:
        """[T, anything] from what `enter` gave; reads and writes what the step's sequences keep. `layer` counts the layers of its kind."""
        ...


class DecoderLayer:
    """x + attention(norm(x)), and of that x + mlp(norm(x))."""

    def __init__(
        self,
        index: int,
        input_norm: Norm,
        attention: AttentionPart,
        post_norm: Norm,
        mlp: Mlp,
        *,
        names: Sequence[str] = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
        among_its_kind: int | None = None,
    ) -> None:
        """`among_its_kind`: which of the layers with KV, or of those with a state, it is; None: all are alike. `names`: what a checkpoint
        calls the parts, in this order; "": a part whose weights lie beside the others'."""
        self.index = index
        self.among_its_kind = index if among_its_kind is None else among_its_kind
        self.input_norm = input_norm
        self.attention = attention
        self.post_norm = post_norm
        self.mlp = mlp
        self._names = names

    @property
    def parts(self) -> Sequence[LayerPart]:
        return self.input_norm, self.attention, self.post_norm, self.mlp

    def place(self, places: Places, prefix: str) -> None:
        """Registers all weights under the checkpoint's names."""
        for name, part in zip(self._names, self.parts, strict=True):
            part.place(places, f"{prefix}.{name}" if name else prefix)

    def finish_loading(self, ops: Ops) -> None:
        # A norm may stand in two places.
        for part in dict.fromkeys(self.parts):
            part.finish_loading(ops)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor, norm: Norm, then: Linear) -> torch.Tensor:
        """Adds attention's result and the MLP's to `residual` in place, and returns then(norm(residual)).

        attended  [T, num_heads * head_dim], as attention gave it
        residual  [T, hidden_size], as it was when the layer began
        """
        entered = self.post_norm.join(self.attention.leave, attended, residual, self.mlp.enter)
        return norm.join(self.mlp.leave, entered, residual, then)


class SandwichLayer(DecoderLayer):
    """y = x + norm(attention(norm(x))), and y + norm(mlp(norm(y)))."""

    def __init__(
        self,
        index: int,
        input_norm: Norm,
        attention: AttentionPart,
        attention_norm: RmsNorm,
        mlp_input_norm: Norm,
        mlp: Mlp,
        mlp_norm: RmsNorm,
    ) -> None:
        """`attention_norm`, `mlp_norm`: of what is added."""
        names = "input_layernorm", "self_attn", "pre_feedforward_layernorm", "mlp", "post_attention_layernorm", "post_feedforward_layernorm"
        super().__init__(index, input_norm, attention, mlp_input_norm, mlp, names=names)
        self._attention_norm = attention_norm
        self._mlp_norm = mlp_norm

    @property
    def parts(self) -> Sequence[LayerPart]:
        return *super().parts, self._attention_norm, self._mlp_norm

    def finish(self, attended: torch.Tensor, residual: torch.Tensor, norm: Norm, then: Linear) -> torch.Tensor:
        entered = self._attention_norm.join_normed(self.attention.leave, attended, residual, self.post_norm, self.mlp.enter)
        return self._mlp_norm.join_normed(self.mlp.leave, entered, residual, norm, then)


class ParallelLayer(DecoderLayer):
    """x + attention(norm(x)) + mlp(norm(x)) (Wang and Komatsuzaki, GPT-J, 2021); the norms may be one. Ranks exchange once, not twice."""

    def finish(self, attended: torch.Tensor, residual: torch.Tensor, norm: Norm, then: Linear) -> torch.Tensor:
        entered = self.mlp.enter(self.post_norm(residual))
        left = self.attention.leave(attended)
        return norm.join(lambda x: self.mlp.leave(x) + left, entered, residual, then)
