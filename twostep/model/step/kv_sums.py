"""Checksums of a pool, kept beside it while steps write it, so that publishing a block costs no pass over its bytes.

tensor  int64 [block, layer, slot, part]        a part: what one program of the KV write (triton_elementwise.py) stores of a token
        └───────┬─────────────────────┘
         their sum is the block's (kv_transfer/checksums.py): 0.2 % of the pool's memory in Llama-3.1-8B's shape

Those of the bytes that are there, also in slots of earlier sequences; but of blocks that something else has written to (`overwritten`) they
are not kept from then on: most blocks that arrive are never published, and their arrival is waited for. To compute the sums anew would
need a moment in which no step writes any layer of the block; publishing only has one for the layers that it takes.
Kept of keys and values in numbers only; blocks of quantized and of latent KV are summed when they are published.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

import torch

from twostep.engine.batch import KvShape

WORD_BYTES = 8
# Query, key and value heads of a token that one program of the KV write handles (triton_elementwise.py).
HEADS_PER_PROGRAM = 16
_ROWS_AT_ONCE = 4096


def can_keep(shape: KvShape, rotated: int, item_bytes: int) -> bool:
    """Returns whether steps can keep the sums of such a pool: every piece of a vector that the KV write handles is whole words, and nothing
    else writes into blocks, as states and what an encoder gives are written."""
    half, in_word = rotated // 2, WORD_BYTES // item_bytes
    if shape.num_state_blocks or shape.has_encoder:
        return False
    return shape.num_planes == 2 and shape.quantization == "none" and half % in_word == 0 and (shape.head_dim - rotated) % in_word == 0


def bytes_beside_block(shape: KvShape, num_heads: int) -> int:
    """Bytes that sums take for each block of the pool."""
    return shape.num_layers * shape.block_size * _num_parts(shape, num_heads) * WORD_BYTES


def _num_parts(shape: KvShape, num_heads: int) -> int:
    """Programs of the KV write that have keys or values of a token."""
    return -(-(num_heads + 2 * shape.num_kv_heads) // HEADS_PER_PROGRAM) - num_heads // HEADS_PER_PROGRAM


class SlotSums(Protocol):
    """Computes the sums of blocks anew: triton_pull.slot_sums, which says what shapes it takes."""

    def __call__(self, pool: torch.Tensor, ids: torch.Tensor, sums: torch.Tensor, *, num_slots: int, num_rows: int) -> None: ...


class KvSums:
    """Owns the tensor. Methods are safe from any thread, for blocks that no step writes."""

    def __init__(self, pool: torch.Tensor, shape: KvShape, num_heads: int, rotated: int, slot_sums: SlotSums) -> None:
        """`pool`: a KvCache's tensor, of `shape`; `num_heads`: the model's query heads; `rotated`: dimensions of a head that RoPE turns."""
        assert can_keep(shape, rotated, pool.element_size())
        num_slots, num_rows = shape.block_size, 2 * shape.num_kv_heads
        self._of_model = (num_heads, rotated)
        # Blocks whose sums may not be those of their bytes.
        self._overwritten: set[int] = set()
        self._lock = threading.Lock()
        self.num_parts = _num_parts(shape, num_heads)
        # 64-bit words of one layer of a block.
        self.layer_words = num_rows * num_slots * shape.head_dim * pool.element_size() // WORD_BYTES
        self.tensor = torch.zeros(shape.num_blocks, shape.num_layers, num_slots, self.num_parts, dtype=torch.int64, device=pool.device)
        # int64 [layer, slot, part]: those of a block of zeros.
        self.of_zeros = torch.zeros_like(self.tensor[0])
        slot_sums(
            torch.zeros_like(pool[:1]),
            torch.zeros(1, dtype=torch.int32, device=self.tensor.device),
            self.of_zeros[None],
            num_slots=num_slots,
            num_rows=num_rows,
        )
        for start in range(0, shape.num_blocks, _ROWS_AT_ONCE):
            ids = torch.arange(start, min(start + _ROWS_AT_ONCE, shape.num_blocks), dtype=torch.int32, device=pool.device)
            slot_sums(pool, ids, self.tensor, num_slots=num_slots, num_rows=num_rows)
        if pool.is_cuda:
            torch.cuda.synchronize(pool.device)  # steps and transfers run on other streams

    def kept_by_steps(self, num_heads: int, rotated: int) -> bool:
        """Returns whether the sums were made for such a model."""
        return self._of_model == (num_heads, rotated)

    def overwritten(self, block_ids: Iterable[int]) -> None:
        """Notes that something other than a step has written to these blocks."""
        with self._lock:
            self._overwritten.update(block_ids)

    def kept(self, block_ids: Iterable[int]) -> bool:
        """Returns whether the sums of all of these blocks are those of their bytes."""
        with self._lock:
            return self._overwritten.isdisjoint(block_ids)
