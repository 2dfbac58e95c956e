"""Divides a worker's memory into weights, what its steps need, and KV blocks; and says how many tokens are in flight by Little's law."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from twostep.errors import InvalidRequest, SetupError
from twostep.lab.plan.model_shape import PlannedModel
from twostep.lab.simulator.cluster import SimulatedRequest

GIB = 1 << 30
# Libraries, the largest step and captured graphs, where they have not been measured: an H200 with Llama-3.1-8B's shape and steps of 8192
# tokens took 0.8 + 1.4 + 0.6 GiB.
DEFAULT_RUNTIME_BYTES = 3 * GIB
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Bytes of one GPU of a worker that may use `utilization` of it."""

    gpu_bytes: int
    utilization: float
    weight_bytes: int
    runtime_bytes: int
    kv_token_bytes: int
    block_size: int

    @property
    def pool_bytes(self) -> int:
        return int(self.gpu_bytes * self.utilization) - self.weight_bytes - self.runtime_bytes

    @property
    def num_blocks(self) -> int:
        return self.pool_bytes // (self.kv_token_bytes * self.block_size)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


def worker_memory(
    model: PlannedModel,
    gpu_bytes: int,
    *,
    utilization: float = 0.9,
    runtime_bytes: int = DEFAULT_RUNTIME_BYTES,
    block_size: int = 16,
    tensor_parallel_size: int = 1,
) -> WorkerMemory:
    """Raises SetupError if no KV fits beside the weights, with how much is missing."""
    memory = WorkerMemory(
        gpu_bytes=gpu_bytes,
        utilization=utilization,
        weight_bytes=-(-model.weight_bytes // tensor_parallel_size),
        runtime_bytes=runtime_bytes,
        kv_token_bytes=-(-model.kv_token_bytes // tensor_parallel_size),
        block_size=block_size,
    )
    if memory.num_blocks < 1:
        raise SetupError(
            f"{model.name} does not fit: weights {gib(memory.weight_bytes)} and steps {gib(runtime_bytes)} leave nothing for KV in "
            f"{utilization:g} of {gib(gpu_bytes)}; take larger GPUs or a higher --tensor-parallel-size"
        )
    return memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensInFlight:
    """Little's law: sequences there at once = rate · time that each stays."""

    sequences: float
    tokens: float


def in_flight(sample: Sequence[SimulatedRequest], rate: float, *, seconds_per_token: float, seconds_before: float = 0.0) -> TokensInFlight:
    """Counts for one worker that gets `rate` requests like those of `sample` a second, each of which stays `seconds_before` with its prompt
    alone and then `seconds_per_token` for every further token."""
    sequences = tokens = 0.0
    for request in sample:
        decoding = (request.num_output - 1) * seconds_per_token
        sequences += seconds_before + decoding
        # While it decodes it has half of its answer, on average.
        tokens += request.num_prompt * seconds_before + (request.num_prompt + request.num_output / 2) * decoding
    return TokensInFlight(sequences=rate * sequences / len(sample), tokens=rate * tokens / len(sample))


def parse_bytes(text: str) -> int:
    """`141GiB`, `80GB`, `24e9`. Raises InvalidRequest."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    try:
        amount = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    except (ValueError, OverflowError):
        amount = 0
    if amount < 1:
        raise InvalidRequest(f"{text!r} is no amount of memory; give one such as 141GiB or 80GB")
    return amount


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"
