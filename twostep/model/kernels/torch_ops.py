"""`Ops` in torch: what the CPU runs, and the oracle of the other devices' kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from twostep.engine.batch import Batch
from twostep.model.kernels.ops import AttentionPlan, Linear
from twostep.model.kernels.torch_attention import TorchAttentionPlan
from twostep.model.step.kv_cache import KvCache

# oneDNN asks for how many rows a weight is packed. Measured: the layout and its speed are the same from 1 to 512.
_PACKED_FOR_ROWS = 16


class TorchOps:
    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if weight.device.type == "cpu" and _packing_works(weight.dtype):
            return _packed_linear(weight, bias)
        return lambda x: F.linear(x, weight, bias)

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        linear = self.prepare_linear(weight, bias)
        return lambda x: self.silu_mul(linear(x))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(residual.add_(x), weight.shape, weight, eps)

    def join_rms_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, then: Linear
    ) -> torch.Tensor:
        return then(self.add_rms_norm(linear(x), residual, weight, eps))

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def add_layer_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return self.layer_norm(residual.add_(x), weight, bias, eps)

    def relu(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu_()

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def plan_attention(
        self, batch: Batch, cache: KvCache, *, num_heads: int, cos: torch.Tensor, sin: torch.Tensor, windows: Sequence[int]
    ) -> AttentionPlan:
        return TorchAttentionPlan(batch, cache, num_heads=num_heads, cos=cos, sin=sin, windows=windows)


def _packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """A linear layer over oneDNN's blocked copy of the weight. In bfloat16 with few rows it reads memory at more than twice the rate
    of F.linear (43 against 18 GB/s), which reorders the weight on every call."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    run = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run(x, packed, bias, "none", [], "")
        return result

    return linear


@functools.cache
def _packing_works(dtype: torch.dtype) -> bool:
    """Whether this build and CPU have packed linears for `dtype`, and they compute what F.linear does. They are torch's own
    (its compiler emits them) but not public: where they are missing or have changed, F.linear serves."""
    if dtype != torch.bfloat16:  # float32 gains nothing from it
        return False
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        weight, x = torch.eye(32, dtype=dtype) * 3, torch.arange(64, dtype=dtype).view(2, 32)
        return torch.equal(_packed_linear(weight, None)(x), F.linear(x, weight))
    except (AttributeError, RuntimeError, TypeError):
        return False
