"""The operations that a device must offer to run a model: models are written against `Ops` and know no device.

`Ops` itself is in torch: what the CPU runs, and the oracle of the other devices' kernels (TritonOps, triton_ops.py).
Sizes: T tokens of a step, N heads of whatever kind, D head_dim. All tensors share one dtype and device where nothing else is said.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from twostep.engine.batch import Batch
from twostep.model.kernels.cpu_linear import pack as pack_for_cpu
from twostep.model.kernels.delta_net import DeltaWeights
from twostep.model.kernels.experts import EveryExpert, ExpertLoop, ExpertRouter, Experts, ExpertWeights, Routing, apply_gate, route
from twostep.model.kernels.latent import LatentWeights
from twostep.model.kernels.quantized_weight import QuantizedWeight, multiply_dense
from twostep.model.kernels.torch_attention import AttentionSpec, StatePlaces, TorchAttentionPlan
from twostep.model.kernels.torch_latent import TorchLatentPlan
from twostep.model.step.kv_cache import KvCache

Activation = Literal["silu", "relu", "gelu", "gelu_tanh"]
# [..., in_features] -> [..., out_features]
Linear = Callable[[torch.Tensor], torch.Tensor]

# Most keys that attention reads at once: a tile of them may begin so far before a window.
KEYS_TOGETHER = 128


class LinearInParts(ABC):
    """A Linear that may leave the last of its additions to what comes next."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N] from x [T, K]."""

    @abstractmethod
    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N] or, where that is faster, float32 [parts, T, N], whose sum over the parts it is."""


# oneDNN asks for how many rows a weight is packed. Measured: the layout and its speed are the same from 1 to 512.
_PACKED_FOR_ROWS = 16
# Up to so many, what an operator costs is its call.
_FEW_NUMBERS = 1 << 13


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

    @property
    def places(self) -> StatePlaces:
        """Says where the T tokens' states go, of a model whose AttentionSpec asks for it."""
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

    def attend_latent(self, layer: int, query: torch.Tensor, kv: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
        """Does both over a pool of latents (latent.py): norms, rotates and writes what the tokens keep, and attends.

        query  [T, num_heads * dims.query], rows dense: as the product gave them
        kv     [T, dims.kept], rows dense: latents, then rope parts, likewise
        Returns [T, num_heads * dims.value].
        """
        ...

    def write_beside(self, layer: int, qkv: torch.Tensor, spec: AttentionSpec) -> None:
        """rotate_and_write of the pool's last layer, a head's (twostep/model/heads), whose attention is another one's: `spec`."""
        ...

    def write_latent(self, layer: int, kv: torch.Tensor, weights: LatentWeights) -> None:
        """The same of a pool of latents: the part of attend_latent that writes."""
        ...

    def attend_delta(self, layer: int, projected: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
        """Does what a gated delta net (delta_net.py) has in attention's place: convolves, recalls by the delta rule, norms and gates. Reads
        what the layer keeps of each sequence, nothing of one that begins, and writes what it keeps from now on.

        layer      counts the layers that have a state
        projected  [T, dims.num_inputs + 2 * dims.num_value_heads], rows dense: as the product gave it
        Returns [T, dims.num_value_heads * dims.value_dim]; of rows of padding, zeros.
        """
        ...


class Ops:
    """Stateless operations of one device. An argument is left as it is unless the text says otherwise."""

    # Whether experts that take every token are best multiplied together with those that are chosen (ExpertRouter.num_shared).
    joins_shared_experts = False

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A callable x @ weight.T + bias, weight [out, in] in whatever layout is fastest here. It may keep a copy of `weight`:
        drop yours."""
        if weight.device.type == "cpu" and _packing_works(weight.dtype):
            return _packed_linear(weight, bias)
        return lambda x: F.linear(x, weight, bias)

    def prepare_exact(self, weight: torch.Tensor, dtype: torch.dtype) -> Linear:
        """A callable over x of `dtype`: x @ weight.T in float32, weight float32 [out, in]; [T, out] or [parts, T, out], to be summed."""
        return lambda x: F.linear(x.float(), weight)

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """silu_mul of such a product; the first half of weight's rows are the gates'."""
        linear = self.prepare_linear(weight, bias)
        return lambda x: self.silu_mul(linear(x))

    def prepare_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False) -> Linear:
        """A callable x -> x @ weight.T + bias, x of `dtype` and rounded as the weight says; `gated`: silu_mul of that. It may keep the
        weight in another layout: drop yours."""
        if gated:
            linear = self.prepare_quantized(weight, bias, dtype)
            return lambda x: self.silu_mul(linear(x))
        if weight.device.type != "cpu":
            return lambda x: multiply_dense(weight, x, bias)
        packed = pack_for_cpu(weight, bias)
        if packed is not None:
            return packed
        # To unpack it in each step would take longer than to read it dense.
        linear = self.prepare_linear(weight.dequantize(dtype), bias)
        quantizer = weight.activations
        return linear if quantizer is None else lambda x: linear(quantizer(x))

    def route(
        self,
        logits: torch.Tensor,
        router: ExpertRouter,
        correction: torch.Tensor | None = None,
        load: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> Routing:
        """Chooses each token's experts (see experts.py). Adds to `load`."""
        return route(logits, router, correction, load, gate)

    def prepare_experts(self, weights: ExpertWeights, router: ExpertRouter, dtype: torch.dtype) -> Experts:
        """A callable over the experts that are held here, for inputs of `dtype` that `router` sends. It may keep the weights in another
        layout: drop yours."""
        if len(weights.held) and weights.down[0].device.type != "cpu":
            return EveryExpert(weights)
        return ExpertLoop([self._expert(weights, number, dtype) for number in range(len(weights.held))], weights.held)

    def _expert(self, weights: ExpertWeights, number: int, dtype: torch.dtype) -> Linear:
        gate_up, down = weights.gate_up[number], weights.down[number]
        biases = (None, None) if weights.biases is None else (weights.biases[0][number], weights.biases[1][number])
        clamped = weights.clamped
        if isinstance(gate_up, QuantizedWeight):
            enter = self.prepare_quantized(gate_up, biases[0], dtype, gated=clamped is None)
        else:
            enter = self.prepare_gated(gate_up, biases[0]) if clamped is None else self.prepare_linear(gate_up, biases[0])
        if isinstance(down, QuantizedWeight):
            leave = self.prepare_quantized(down, biases[1], dtype)
        else:
            leave = self.prepare_linear(down, biases[1])
        return (lambda x: leave(enter(x))) if clamped is None else lambda x: leave(apply_gate(enter(x), clamped))

    def prepare_delta(self, weights: DeltaWeights) -> None:
        """To be called with the weights of each gated delta net before the first step: what serves it is tried."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, the mean of squares in float32. x [..., N], weight [N], which may be float32 where
        x is not: then the product is rounded once."""
        if weight.dtype != x.dtype:
            return self.rms_norm(x.float(), weight, eps).to(x.dtype)
        if x.device.type != "cpu":
            return F.rms_norm(x, weight.shape, weight, eps)
        if x.numel() <= _FEW_NUMBERS:
            # x and -x have no mean, and the variance of both is x's mean square: one operator, where few rows cost what their operators do.
            both = x.unsqueeze(-2) * _signs(x.dtype)
            return F.layer_norm(both, both.shape[-2:], eps=eps)[..., 0, :] * weight
        # Less memory than F.rms_norm goes through.
        size: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return x.mul(size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()).mul_(weight).to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds x to `residual` in place and returns rms_norm(residual)."""
        return self.rms_norm(residual.add_(x), weight, eps)

    def join_rms_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, then: Linear
    ) -> torch.Tensor:
        """then(add_rms_norm(linear(x), residual, weight, eps)), in whatever pieces are fastest: what lies between two layers' products."""
        return then(self.add_rms_norm(linear(x), residual, weight, eps))

    def add_normed(self, x: torch.Tensor, residual: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds rms_norm(x, w1, eps) to `residual` in place and returns rms_norm(residual, w2, eps): for layers that norm what they add
        (Gemma 2, OLMo 2).

        x       [T, N]; of one of several ranks its term of a sum, which is summed over the ranks first
        w1, w2  [N], of x and of the sum; each may be float32 where x is not
        """
        return self.rms_norm(residual.add_(self.rms_norm(x, w1, eps)), w2, eps)

    def join_normed(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, eps: float, then: Linear
    ) -> torch.Tensor:
        """then(add_normed(linear(x), residual, w1, w2, eps)), in whatever pieces are fastest."""
        return then(self.add_normed(linear(x), residual, w1, w2, eps))

    def norm_heads(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, num_heads: int, num_kv_heads: int, eps: float
    ) -> None:
        """rms_norm of each head of the queries and of the keys, in place.

        qkv  [T, (num_heads + 2 * num_kv_heads) * D], dense: query heads, then key heads, then value heads, which are left alone
        q_weight, k_weight  [D], both of qkv's dtype or both float32
        """
        heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
        for part, weight in ((heads[:, :num_heads], q_weight), (heads[:, num_heads : num_heads + num_kv_heads], k_weight)):
            part.copy_(self.rms_norm(part, weight, eps))

    def norm_rotate_and_write(
        self,
        plan: AttentionPlan,
        layer: int,
        qkv: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
    ) -> None:
        """norm_heads, and then the plan's rotate_and_write."""
        self.norm_heads(qkv, q_weight, k_weight, num_heads, num_kv_heads, eps)
        plan.rotate_and_write(layer, qkv)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension. x [..., N], weight and bias [N]."""
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def add_layer_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds x to `residual` in place and returns layer_norm(residual)."""
        return self.layer_norm(residual.add_(x), weight, bias, eps)

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """The function of each element; gelu_tanh is the approximation by tanh. May overwrite x."""
        if activation == "relu":
            return x.relu_()
        return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for gate_up [T, 2 * N] (gate first). May overwrite gate_up. Returns [T, N]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(gate) * up for gate_up [T, 2 * N] (gate first). May overwrite gate_up. Returns [T, N]."""
        if activation == "silu":
            return self.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return self.activate(gate, activation) * up

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] from what a layer's last product gave: of several ranks, the sum of their terms; here x itself."""
        return x

    def plan_attention(self, batch: Batch, cache: KvCache, spec: AttentionSpec) -> AttentionPlan:
        return TorchAttentionPlan(batch, cache, spec) if spec.latent is None else TorchLatentPlan(batch, cache, spec)


@functools.cache
def _signs(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[1.0], [-1.0]], dtype=dtype)


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
    """Returns whether this build and CPU have packed linears for `dtype`, and they compute what F.linear does. They are torch's own
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
