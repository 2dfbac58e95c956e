"""The pool's memory: one tensor, a block of it is one contiguous region for all layers and heads.

tensor [block, layer, K/V, kv_head, slot, head_dim]
         │      │     │      │       │
         │      └─────┴──────┴───────┴── block_bytes, moved as a whole
         └── block id of the block pool
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from twostep.engine.batch import KvShape
from twostep.engine.kv_staging import PinnedStaging
from twostep.errors import SetupError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvCache:
    """Owns the tensor. Reading and writing whole blocks is safe from any thread for blocks that no step writes."""

    def __init__(self, shape: KvShape, device: str = "cpu") -> None:
        """Raises SetupError if the memory is not there."""
        self.shape = shape
        sizes = (shape.num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        try:
            # Zeros, not empty: padding of a gathered group may read slots never written, and 0 * NaN is NaN.
            self.tensor = torch.zeros(sizes, dtype=DTYPES[shape.dtype], device=device)
        except RuntimeError as error:
            gib = shape.num_blocks * shape.block_bytes / 2**30
            raise SetupError(f"no memory for a KV cache of {gib:.1f} GiB on {device}; give fewer blocks") from error
        self._bytes = self.tensor.view(shape.num_blocks, -1).view(torch.uint8)
        self._staging = PinnedStaging(self._bytes) if self.tensor.is_cuda else None
        if self.tensor.is_cuda:
            torch.cuda.synchronize(self.tensor.device)  # transfers run on another stream than the zeros
        flat = self.tensor.view(-1)
        per_layer = 2 * shape.num_kv_heads * shape.block_size * shape.head_dim
        layers = [flat[layer * per_layer :] for layer in range(shape.num_layers)]
        self._slot_rows = [x.view(-1, shape.head_dim) for x in layers]
        self._block_rows = [x.view(-1, shape.block_size * shape.head_dim) for x in layers]

    def slot_rows(self, layer: int) -> torch.Tensor:
        """[rows, head_dim], row ((block * num_layers * 2 + kv) * num_kv_heads + head) * block_size + slot, from the layer on."""
        return self._slot_rows[layer]

    def block_rows(self, layer: int) -> torch.Tensor:
        """[rows, block_size * head_dim], row (block * num_layers * 2 + kv) * num_kv_heads + head, from the layer on."""
        return self._block_rows[layer]

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> None:
        """Copies whole blocks into `out`, uint8 [len(block_ids), block_bytes], contiguous. Raises ValueError if it is not that."""
        index = self._check(block_ids, out)
        if self._staging is not None:
            self._staging.read(block_ids, out)
            return
        torch.index_select(self._bytes, 0, index, out=torch.from_numpy(out))

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """The inverse of read_blocks; `data` may be read-only."""
        index = self._check(block_ids, data)
        if self._staging is not None:
            self._staging.write(block_ids, data)
            return
        # numpy copies straight from read-only memory, which torch.from_numpy would warn about.
        self._bytes.numpy()[index.numpy()] = data

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block onto another."""
        self.tensor[target].copy_(self.tensor[source])

    def _check(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> torch.Tensor:
        want = (len(block_ids), self.shape.block_bytes)
        if data.shape != want or data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise ValueError(f"{len(block_ids)} blocks need a contiguous uint8 array of shape {want}, not {data.dtype} {data.shape}")
        index = torch.tensor(block_ids, dtype=torch.int64)
        if len(block_ids) and not (int(index.min()) >= 0 and int(index.max()) < self.shape.num_blocks):
            raise ValueError(f"block ids must be from 0 to {self.shape.num_blocks - 1}")
        return index
