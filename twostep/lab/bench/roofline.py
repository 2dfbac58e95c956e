"""Counts by arithmetic how much a step has to do, measures what the device can do, and says how near to its limits a step came.

    work        FLOPs and bytes that the model itself asks for, however they are computed
    MFU         model FLOPs utilization (Chowdhery et al., PaLM, 2022, appendix B): FLOPs / (seconds * the card's FLOPs per second)
    MBU         model bandwidth utilization: bytes / (seconds * the card's bytes per second)
    verdict     roofline (Williams, Waterman, Patterson, 2009): with fewer FLOPs per byte than the card's own ratio, memory sets the pace

Counted are FLOPs of matrix products and attention (a multiply and an add are two), and bytes of weights, read once a step (of experts
those that its tokens choose), and of keys and values. Activations, norms and sampling are left out: small, and nothing that a model
must move through memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from twostep.checkpoint.expert_sizes import expected_experts
from twostep.checkpoint.held import held_in_head, held_in_layers
from twostep.engine.batch import KvShape
from twostep.errors import SetupError
from twostep.model.families.config import ModelConfig

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# What is measured with. Beyond every cache; on a GPU, large enough that starting the kernel does not count.
_READ_BYTES = {"cuda": 4 << 30, "cpu": 512 << 20}
_MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
_REPEATS = 7


class Bound(Enum):
    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Rates that a device reached in the same run: bytes per second reading memory, FLOPs per second multiplying matrices of the model's
    dtype."""

    bytes_per_s: float
    flops_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which both limits are reached at once."""
        return self.flops_per_s / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Work:
    flops: float
    num_bytes: float

    def mfu(self, seconds: float, limits: DeviceLimits) -> float:
        return self.flops / seconds / limits.flops_per_s

    def mbu(self, seconds: float, limits: DeviceLimits) -> float:
        return self.num_bytes / seconds / limits.bytes_per_s

    def bound(self, limits: DeviceLimits) -> Bound:
        return Bound.COMPUTE if self.flops / self.num_bytes > limits.ridge else Bound.BANDWIDTH

    def floor_s(self, limits: DeviceLimits) -> float:
        """The least time that the limits allow."""
        return max(self.flops / limits.flops_per_s, self.num_bytes / limits.bytes_per_s)


@dataclass(frozen=True, slots=True)
class _Matrices:
    """`shapes`, [out, in], so many times; `is_dense`: whatever the others' format is."""

    count: float
    shapes: Sequence[tuple[int, int]]
    is_dense: bool = False
    are_experts: bool = False


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The parameters that matrix products read, and what a token's keys and values take."""

    config: ModelConfig
    dtype: str
    kv_token_bytes: float  # K and V over all layers, scales of quantized ones included

    @classmethod
    def of(cls, config: ModelConfig, kv: KvShape, dtype: str) -> ModelShape:
        """`dtype` is that of the weights in memory, a name. Raises SetupError for a model whose work is not counted here."""
        if config.encoder is not None:
            raise SetupError(f"{config.architecture} has an encoder, whose work is not counted; measure it with twostep bench serve")
        return cls(config, dtype, config.num_kv_layers * kv.layer_bytes / kv.block_size)

    def _matrices(self, experts: float) -> Iterator[_Matrices]:
        """All layers', counted where of each layer's experts so many are."""
        c = self.config
        num_states = 0
        if (delta := c.gated_delta) is not None:
            num_states, heads = sum(delta.layers), delta.num_value_heads
            yield _Matrices(num_states, [(delta.num_inputs + 2 * heads, c.hidden_size), (c.hidden_size, heads * delta.value_dim)])
        yield _Matrices(c.num_layers - num_states, self._attention())
        num_sparse = 0 if c.experts is None else sum(c.experts.layers)
        yield _Matrices(c.num_layers - num_sparse, self._mlp(c.intermediate_size))
        if c.experts is not None:
            yield _Matrices(num_sparse * experts, self._mlp(c.experts.intermediate_size), are_experts=True)
            if c.experts.shared_size:
                yield _Matrices(num_sparse, self._mlp(c.experts.shared_size))
            routers = [(c.experts.router.num_experts, c.hidden_size), *[(1, c.hidden_size)] * c.experts.shared_gated]
            yield _Matrices(num_sparse, routers, is_dense=True)

    def _attention(self) -> list[tuple[int, int]]:
        c = self.config
        if (dims := c.latent) is not None:
            queries = [(c.num_heads * dims.query, c.q_lora_rank or c.hidden_size)]
            queries += [(c.q_lora_rank, c.hidden_size)] if c.q_lora_rank else []
            up = (c.num_heads * (dims.nope + dims.value), dims.latent)
            return [*queries, (dims.kept, c.hidden_size), up, (c.hidden_size, c.num_heads * dims.value)]
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return [((1 + c.gated_attention) * q, c.hidden_size), (kv, c.hidden_size), (kv, c.hidden_size), (c.hidden_size, q)]

    def _mlp(self, width: int) -> list[tuple[int, int]]:
        hidden_size, num_in = self.config.hidden_size, 2 if self.config.gated_mlp else 1
        return [*[(width, hidden_size)] * num_in, (hidden_size, width)]

    def _layer_params(self, experts: float) -> float:
        return sum(each.count * sum(rows * columns for rows, columns in each.shapes) for each in self._matrices(experts))

    @property
    def head_params(self) -> int:
        return self.config.hidden_size * self.config.vocab_size

    @property
    def num_params(self) -> int:
        """All there are, but for the embedding, which is looked up, not multiplied."""
        experts = self.config.experts
        return int(self._layer_params(0 if experts is None else experts.router.num_experts)) + self.head_params

    @property
    def token_params(self) -> int:
        """What one token is multiplied with, the output layer left out."""
        experts = self.config.experts
        return int(self._layer_params(0 if experts is None else experts.router.top_k))

    def weight_bytes(self, num_tokens: float) -> float:
        """What products of a step of so many tokens read of them, in their bits where a GPU's do so: of experts as many as tokens choose
        independently and uniformly."""
        c, item_bytes, touched = self.config, _ITEM_BYTES[self.dtype], 0.0
        if c.experts is not None:
            router = c.experts.router
            touched = expected_experts(router.num_experts, router.top_k, num_tokens)
        layers = 0.0
        for each in self._matrices(touched):
            format = None if each.is_dense else c.quantization
            layers += each.count * held_in_layers(format, each.shapes, item_bytes=item_bytes, experts=each.are_experts)
        return layers + held_in_head(c.quantization, c.vocab_size, c.hidden_size, item_bytes=item_bytes)

    def decode(self, contexts: Sequence[int]) -> Work:
        """One step of as many sequences; a context counts the keys attended to, the new token's own included."""
        keys = sum(self._keys(context) for context in contexts)
        flops = 2.0 * (self.token_params + self.head_params) * len(contexts) + self._attention_flops(keys, absorbed=True)
        return Work(flops, self.weight_bytes(len(contexts)) + self._kv_bytes(keys))

    def prefill(self, lengths: Sequence[int], num_steps: int) -> Work:
        """Whole prompts in `num_steps` steps, each sampled once at its end. Keys and values are written and, at the least, read once."""
        num_tokens = sum(lengths)
        keys = sum(self._causal_keys(length) for length in lengths)
        flops = 2.0 * (self.token_params * num_tokens + self.head_params * len(lengths)) + self._attention_flops(keys)
        return Work(flops, num_steps * self.weight_bytes(num_tokens / num_steps) + 2.0 * num_tokens * self.kv_token_bytes)

    def _keys(self, context: int) -> int:
        """Keys that a query attends to, over all layers."""
        return sum(min(context, window) if window else context for window in self.config.windows)

    def _causal_keys(self, length: int) -> int:
        """The same for all queries of a prompt together."""
        return sum(_causal(min(length, window) if window else length, length) for window in self.config.windows)

    def _attention_flops(self, keys: int, *, absorbed: bool = False) -> float:
        """`absorbed`: of latent attention, which makes no keys for a few queries."""
        c = self.config
        if (dims := c.latent) is not None:
            return 2.0 * c.num_heads * (dims.kept + dims.latent if absorbed else dims.query + dims.value) * keys
        return 4.0 * c.num_heads * c.head_dim * keys

    def _kv_bytes(self, keys: int) -> float:
        return self.kv_token_bytes / self.config.num_layers * keys


def _causal(window: int, length: int) -> int:
    """Sum of min(i, window) for i from 1 to length."""
    return window * (window + 1) // 2 + window * (length - window)


# ---- what this device can do ------------------------------------------------------------------------------------------------


def measure_limits(device: torch.device, dtype: torch.dtype) -> DeviceLimits:
    """The best of some repeats of a reduction over memory and of a square product of random matrices in `dtype`. On a GPU it needs
    about 5 GB, less where less is free."""
    with torch.inference_mode():
        return DeviceLimits(_read_rate(device), _matmul_rate(device, dtype))


def _read_rate(device: torch.device) -> float:
    num_bytes = _READ_BYTES[device.type]
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 2)
    words = torch.ones(max(1, num_bytes // 4), dtype=torch.int32, device=device)
    return words.numel() * 4 / _best_s(lambda: words.amax(), device)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = _MATMUL_SIZE[device.type]
    # Zeros would flatter: they draw less power, and clocks stay higher.
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / _best_s(lambda: a @ b, device)


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
