"""KV blocks of several ranks as blocks of the whole model, and back: a block's layout is the same for every number of ranks.

whole block     of each layer: K of heads 0 … H-1 │ V of heads 0 … H-1 │ scales (and groups) of heads 0 … H-1, where the pool is
                quantized; of latent attention K alone, of one head, which every rank holds
a rank's block  the same for the heads it holds. Where several ranks hold the same head of a model with states, each takes its own part of
                the head's K and V into the whole block: a state's parts differ between ranks (step/state_columns.py), those of KV are
                the same. So a block is joined in one way, whether it has a state or KV
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from twostep.engine.batch import KvShape
from twostep.model.families.config import ModelConfig
from twostep.model.families.sharding import shard_of
from twostep.quantized_vector import number_bytes


class BlockParts:
    """Arithmetic of one pool's blocks, or of the same layers of them; holds no memory."""

    def __init__(self, local: KvShape, config: ModelConfig, size: int) -> None:
        """`local`: the shape of any rank's pool (all are alike)."""
        self.shape = replace(local, num_kv_heads=config.num_kv_heads)
        self._planes = _planes(local)
        shards = [shard_of(config, rank, size) for rank in range(size)]
        self._heads = [shard.kv_heads for shard in shards]
        self._shards = shards
        # Of each head that ranks hold together, how many parts they have, of blocks that hold states.
        self._parts = max(1, size // config.num_kv_heads) if local.num_state_blocks else 1
        # Ranks that together hold every head once, or with states all parts of it.
        self.owners = [rank for rank, shard in enumerate(shards) if shard.owns_kv or self._parts > 1]

    def join(self, part: npt.NDArray[np.uint8], rank: int, whole: npt.NDArray[np.uint8]) -> None:
        """Puts a rank's parts [n, its bytes] into whole blocks [n, block_bytes], or some layers of both."""
        heads, number = self._heads[rank], rank % self._parts
        for i, (of_whole, of_part) in enumerate(zip(self._by_heads(whole, heads.whole), self._by_heads(part, len(heads)), strict=True)):
            if i < self.shape.num_planes:
                each = self._planes[i] // self._parts
                of_whole[:, :, heads.slice, number * each : (number + 1) * each] = of_part[..., number * each : (number + 1) * each]
            elif self._shards[rank].owns_kv:  # scales, which are no part of a state
                of_whole[:, :, heads.slice] = of_part

    def cut(self, whole: npt.NDArray[np.uint8], rank: int, part: npt.NDArray[np.uint8]) -> None:
        """The inverse: takes a rank's parts out of whole blocks."""
        heads = self._heads[rank]
        for of_whole, of_part in zip(self._by_heads(whole, heads.whole), self._by_heads(part, len(heads)), strict=True):
            of_part[...] = of_whole[:, :, heads.slice]

    def _by_heads(self, blocks: npt.NDArray[np.uint8], num_heads: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Views [n, layer, head, bytes] of what a layer consists of."""
        num_layers = blocks.shape[1] // (num_heads * sum(self._planes))
        layers = blocks.reshape(len(blocks), num_layers, -1)
        start = 0
        for head_bytes in self._planes:
            stop = start + num_heads * head_bytes
            yield layers[:, :, start:stop].reshape(len(blocks), num_layers, num_heads, head_bytes)
            start = stop


def _planes(shape: KvShape) -> list[int]:
    """Bytes of one head in what one layer of a block consists of, in order."""
    total = shape.block_bytes // (shape.num_layers * shape.num_kv_heads)
    if shape.quantization == "none":
        return [total // shape.num_planes] * shape.num_planes
    values = shape.block_size * number_bytes(shape.head_dim, shape.quantization)
    return [values] * shape.num_planes + [total - shape.num_planes * values]
