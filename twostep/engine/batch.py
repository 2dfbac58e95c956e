"""One step's work as flat arrays: what a scheduler plans and a runner executes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostep.engine.types import TopLogprob
from twostep.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One row to sample. `history` is prompt and output so far, looked at only for penalties; `position` is that of the
    token to be sampled among the generated ones (it and the seed make the noise). `stop_ids` must not be sampled while
    `position < min_tokens`."""

    params: SamplingParams
    position: int
    history: Sequence[int]
    num_prompt_tokens: int
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """T tokens of S sequences, prompt chunks and decode tokens alike, in one flat row each.

    token_ids      int64 [T]
    positions      int64 [T]      place of the token in its sequence, from 0
    query_start    int32 [S + 1]  tokens query_start[s] .. query_start[s+1] belong to sequence s
    seq_lens       int32 [S]      KV length after this step (last position + 1)
    block_tables   int32 [S, B]   blocks of each sequence in order, padded with 0
    slots          int64 [T]      where the token's KV goes: block * block_size + slot in block
    sample_rows    int64 [R]      rows (of T) whose logits are needed: the last token of each sequence that is complete
    sampling       R SamplingRows, aligned with sample_rows
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    sample_rows: npt.NDArray[np.int64]
    sampling: Sequence[SamplingRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """R sampled tokens, aligned with Batch.sample_rows. Logprobs are the model's own, before penalties and temperature;
    None where the row did not ask."""

    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    top_logprobs: Sequence[tuple[TopLogprob, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Shape of the pool's one tensor, [block, layer, K/V, kv_head, slot, head_dim], and of its bytes."""

    num_blocks: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32" | "bfloat16" | "float16"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        item = 4 if self.dtype == "float32" else 2
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * item


class Runner(Protocol):
    """Executes batches on one device. Not thread-safe but for read_blocks and write_blocks, which any thread may call
    for blocks that no running batch writes."""

    @property
    def kv_shape(self) -> KvShape: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    def run(self, batch: Batch) -> Sampled:
        """Writes the KV of all T tokens and samples R of them. Blocks until done."""
        ...

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> None:
        """Copies whole blocks (all layers) out, in the order given. `out` is uint8 [len(block_ids), block_bytes], contiguous."""
        ...

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """The inverse of read_blocks. `data` is uint8 [len(block_ids), block_bytes], contiguous."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block inside the pool (copy-on-write)."""
        ...
