"""Counts by arithmetic how much a step has to do, and how near to the card's limits it came.

    work        FLOPs and bytes that the model itself asks for, however they are computed
    MFU         model FLOPs utilization (Chowdhery et al., PaLM, 2022, appendix B): FLOPs / (seconds * the card's FLOPs per second)
    MBU         model bandwidth utilization: bytes / (seconds * the card's bytes per second)
    verdict     roofline (Williams, Waterman, Patterson, 2009): with fewer FLOPs per byte than the card's own ratio, memory sets the pace

Counted are FLOPs of matrix products and attention (a multiply and an add are two), and bytes of weights, read once a step, and of keys and
values. Activations, norms and sampling are left out: small, and nothing that a model must move through memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from twostep.engine.batch import KvShape
from twostep.model.families.config import ModelConfig

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.num_bytes + other.num_bytes)

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
class ModelShape:
    """The parameters that matrix products read, and what a token's keys and values take."""

    config: ModelConfig
    dtype: str
    kv_token_bytes: float  # K and V over all layers, scales of quantized ones included

    @classmethod
    def of(cls, config: ModelConfig, kv: KvShape, dtype: str) -> ModelShape:
        """`dtype` is that of the weights in memory, a name."""
        return cls(config, dtype, kv.block_bytes / kv.block_size)

    @property
    def layer_params(self) -> int:
        """Counts one layer's matrices. Llama's MLP has three, opt's two."""
        c = self.config
        attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        num_mlp = 2 if c.architecture == "opt" else 3
        return attention + num_mlp * c.hidden_size * c.intermediate_size

    @property
    def head_params(self) -> int:
        return self.config.hidden_size * self.config.vocab_size

    @property
    def num_params(self) -> int:
        """Read by a step that samples; the embedding is looked up, not multiplied."""
        return self.config.num_layers * self.layer_params + self.head_params

    @property
    def weight_bytes(self) -> int:
        return self.num_params * _ITEM_BYTES[self.dtype]

    def decode(self, contexts: Sequence[int]) -> Work:
        """One step of as many sequences; a context counts the keys attended to, the new token's own included."""
        keys = sum(self._keys(context) for context in contexts)
        flops = 2.0 * self.num_params * len(contexts) + self._attention_flops(keys)
        return Work(flops, self.weight_bytes + self._kv_bytes(keys))

    def prefill(self, lengths: Sequence[int], num_steps: int) -> Work:
        """Whole prompts in `num_steps` steps, each sampled once at its end. Keys and values are written and, at the least, read once."""
        num_tokens = sum(lengths)
        keys = sum(self._causal_keys(length) for length in lengths)
        layers = 2.0 * self.config.num_layers * self.layer_params * num_tokens
        head = 2.0 * self.head_params * len(lengths)
        return Work(layers + head + self._attention_flops(keys), num_steps * self.weight_bytes + 2.0 * num_tokens * self.kv_token_bytes)

    def _keys(self, context: int) -> int:
        """Keys that a query attends to, over all layers."""
        return sum(min(context, window) if window else context for window in self._windows)

    def _causal_keys(self, length: int) -> int:
        """The same for all queries of a prompt together."""
        return sum(_causal(min(length, window) if window else length, length) for window in self._windows)

    @property
    def _windows(self) -> Iterable[int]:
        return self.config.windows

    def _attention_flops(self, keys: int) -> float:
        return 4.0 * self.config.num_heads * self.config.head_dim * keys

    def _kv_bytes(self, keys: int) -> float:
        return self.kv_token_bytes / self.config.num_layers * keys


def _causal(window: int, length: int) -> int:
    """Sum of min(i, window) for i from 1 to length."""
    return window * (window + 1) // 2 + window * (length - window)
