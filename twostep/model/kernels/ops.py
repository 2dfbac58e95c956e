"""What a device must offer to run a model: the models are written against `Ops` and know no device.

`TorchOps` (twostep/model/kernels/torch_ops.py) implements it for the CPU and is the oracle for every other implementation.
Sizes: T tokens of a step, N heads of whatever kind, D head_dim. All tensors share one dtype and device unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from twostep.engine.batch import Batch
from twostep.model.step.kv_cache import KvCache

# [..., in_features] -> [..., out_features]
Linear = Callable[[torch.Tensor], torch.Tensor]


class AttentionPlan(Protocol):
    """How one step reads and writes the pool. Made once per step from its Batch, used by every layer, then dropped."""

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 [T] on the device."""
        ...

    @property
    def positions(self) -> torch.Tensor:
        """int64 or int32 [T] on the device."""
        ...

    @property
    def sample_rows(self) -> torch.Tensor | None:
        """int64 [R] on the device, the batch's; None: all T rows, in order."""
        ...

    def rotate_and_write(self, layer: int, qkv: torch.Tensor) -> None:
        """Applies RoPE (if the model has it) to the query and key heads of `qkv` in place, and writes keys and values to the step's
        slots.

        qkv  [T, (num_heads + 2 * num_kv_heads) * D], contiguous: query heads, then key heads, then value heads
        """
        ...

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Causal attention of each token over its sequence's blocks, its own slot included (rotate_and_write came before), and not
        past the layer's window.

        qkv  as left by rotate_and_write; only the query heads are read
        Returns [T, num_heads * D].
        """
        ...


class Ops(Protocol):
    """Stateless operations of one device. An argument is left as it is unless the text says otherwise."""

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A callable x @ weight.T + bias, weight [out, in] in whatever layout is fastest here. It may keep a copy of `weight`:
        drop yours."""
        ...

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """silu_mul of such a product; the first half of weight's rows are the gates'."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, the mean of squares in float32. x [..., N], weight [N]."""
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds x to `residual` in place and returns rms_norm(residual)."""
        ...

    def join_rms_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, then: Linear
    ) -> torch.Tensor:
        """then(add_rms_norm(linear(x), residual, weight, eps)), in whatever pieces are fastest: what lies between two layers' products."""
        ...

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension. x [..., N], weight and bias [N]."""
        ...

    def add_layer_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds x to `residual` in place and returns layer_norm(residual)."""
        ...

    def relu(self, x: torch.Tensor) -> torch.Tensor:
        """max(x, 0). May overwrite x."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for gate_up [T, 2 * N] (gate first). May overwrite gate_up. Returns [T, N]."""
        ...

    def plan_attention(
        self, batch: Batch, cache: KvCache, *, num_heads: int, cos: torch.Tensor, sin: torch.Tensor, windows: Sequence[int]
    ) -> AttentionPlan:
        """Plans a step.

        cos, sin  the RoPE tables, float32 [max_model_len, D / 2], or [max_model_len, 0]: nothing is rotated
        windows   of each layer: keys that a query sees, its own included; 0: all
        """
        ...
