"""Turns KV of one layout into KV of another: split, joined and converted by pure functions over bytes, numpy only.

A pool's block (twostep/model/step/kv_cache.py, and kv_quantization.py of quantized ones) is taken apart into Vectors, a token
and head each, and put together again; between the two, vectors are dealt out to other blocks and heads, and where
the number formats differ, rounded. twostep.cluster.convertible says which pairs can be joined, and what a conversion does to prefix hashes.

    source blocks of 3   | a b c | d e f | g h . |         a target block is done when all of its tokens up to the sequence's end have
    target blocks of 4   | a b c d | e f g h |             come, of every layer and head: block 0 needs source blocks 0 and 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kv_transfer import kv_numbers
from kv_transfer.transport import Bytes
from twostep.cluster.convertible import check_convertible, same_numbers
from twostep.cluster.records import KEYS_AND_VALUES, LayoutRecord
from twostep.errors import InvalidRequest
from twostep.quantized_vector import SLOTS_TOGETHER, number_bytes, vector_bytes


@dataclass(frozen=True, slots=True)
class Vectors:
    """values  [blocks, layers, planes, heads, slots, head_dim] of kv_numbers.stored_dtype, or uint8 as kv_numbers.quantize makes it
    scales  bfloat16 as uint16 [blocks, layers, planes, heads, slots], of quantized KV"""

    values: npt.NDArray[np.generic]
    scales: npt.NDArray[np.uint16] | None = None


def block_bytes(layout: LayoutRecord, num_layers: int | None = None) -> int:
    """Returns the bytes of one block over `num_layers` layers, by default all."""
    vectors = (layout.num_layers if num_layers is None else num_layers) * layout.num_planes * layout.num_kv_heads * layout.block_size
    if layout.quantization != "none":
        return vectors * vector_bytes(layout.head_dim, layout.quantization)
    return vectors * layout.head_dim * kv_numbers.stored_dtype(layout.dtype).itemsize


def all_layers(layout: LayoutRecord) -> LayoutRecord:
    """Returns the layout whose blocks have the layers of all groups, one group's after the other's."""
    return replace(layout, num_layers=layout.num_layers * layout.num_groups, num_groups=1, num_windowed=0, reach=0)


def unpack(blocks: Bytes, layout: LayoutRecord, num_layers: int | None = None) -> Vectors:
    """Returns the vectors of blocks. blocks: uint8 [n, block_bytes], contiguous. Raises InvalidRequest for another shape."""
    layers = layout.num_layers if num_layers is None else num_layers
    if blocks.ndim != 2 or blocks.shape[1] != block_bytes(layout, layers) or blocks.dtype != np.uint8:
        raise InvalidRequest(f"blocks of {block_bytes(layout, layers)} bytes are wanted, not {blocks.dtype} {blocks.shape}")
    count, heads, slots, dim, num_planes = len(blocks), layout.num_kv_heads, layout.block_size, layout.head_dim, layout.num_planes
    blocks = np.ascontiguousarray(blocks)
    if layout.quantization == "none":
        return Vectors(blocks.view(kv_numbers.stored_dtype(layout.dtype)).reshape(count, layers, num_planes, heads, slots, dim))
    width = number_bytes(dim, layout.quantization)
    size = heads * slots * width
    by_layer = blocks.reshape(count, layers, -1)
    planes = [by_layer[:, :, :size].reshape(count, layers, heads, slots, width)]
    if num_planes == KEYS_AND_VALUES:
        together = (slots // SLOTS_TOGETHER, width, SLOTS_TOGETHER)
        planes += [by_layer[:, :, size : 2 * size].reshape(count, layers, heads, *together).swapaxes(-1, -2).reshape(planes[0].shape)]
    behind = np.ascontiguousarray(by_layer[:, :, num_planes * size :]).view(np.uint16).reshape(count, layers, heads, slots, -1, num_planes)
    behind = np.ascontiguousarray(np.moveaxis(behind, -1, 2))
    values, scales = np.stack(planes, axis=2), np.ascontiguousarray(behind[..., 0])
    return Vectors(np.concatenate((values, np.ascontiguousarray(behind[..., 1:]).view(np.uint8)), -1), scales)


def pack(vectors: Vectors, layout: LayoutRecord) -> Bytes:
    """Does the inverse of unpack: returns uint8 [n, block_bytes]."""
    count, layers = vectors.values.shape[:2]
    if layout.quantization == "none":
        flat = np.ascontiguousarray(vectors.values).reshape(-1).view(np.uint8)
        return flat.reshape(count, block_bytes(layout, layers))
    assert vectors.scales is not None
    heads, slots, width = layout.num_kv_heads, layout.block_size, number_bytes(layout.head_dim, layout.quantization)
    values, groups = np.split(vectors.values.view(np.uint8), [width], -1)
    parts = [values[:, :, 0]]
    if layout.num_planes == KEYS_AND_VALUES:
        v = values[:, :, 1].reshape(count, layers, heads, slots // SLOTS_TOGETHER, SLOTS_TOGETHER, width)
        parts += [v.swapaxes(-1, -2)]
    behind = np.concatenate((vectors.scales[..., None], np.ascontiguousarray(groups).view(np.uint16)), -1)
    parts += [np.ascontiguousarray(np.moveaxis(behind, 2, -1)).view(np.uint8)]
    pieces = [np.ascontiguousarray(part).reshape(count, layers, math.prod(part.shape[2:])) for part in parts]
    out: Bytes = np.concatenate(pieces, axis=-1).reshape(count, block_bytes(layout, layers))
    return out


def recode(vectors: Vectors, source: LayoutRecord, target: LayoutRecord) -> Vectors:
    """Returns the same vectors in the target's number format; the very same where it is the source's."""
    if same_numbers(source, target):
        return vectors
    if source.quantization == "none":
        numbers = kv_numbers.to_float32(vectors.values, source.dtype)
    else:
        assert vectors.scales is not None
        numbers = kv_numbers.dequantize(vectors.values.view(np.uint8), vectors.scales, source.quantization)
    if target.quantization == "none":
        return Vectors(kv_numbers.from_float32(numbers, target.dtype))
    return Vectors(*kv_numbers.quantize(numbers, target.quantization))


@dataclass(frozen=True, slots=True)
class TargetBlock:
    """A block that is done. `data`: uint8 [block_bytes]; slots past the sequence's end are zeros."""

    index: int
    data: Bytes


@dataclass(slots=True)
class _Partial:
    vectors: Vectors
    come: npt.NDArray[np.bool_]  # [layers, heads, slots], of the slots the sequence fills


class Assembler:
    """Target blocks of one sequence from source blocks that come in any order, in chunks of blocks and layers, from one or more ranks.
    What comes twice, or is not needed, is passed over. What it holds is at most the target blocks that are not whole yet."""

    def __init__(
        self, target: LayoutRecord, *, first_block: int, num_tokens: int, num_unseen: int = 0, num_unwindowed: int | None = None
    ) -> None:
        """Makes target blocks from `first_block` on, of a sequence of `num_tokens` tokens in all. Of its first `num_unseen` tokens only the
        first `num_unwindowed` layers are waited for."""
        self._target = target
        self._unseen = num_unseen, num_unwindowed
        self._first_block = first_block
        self._num_tokens = num_tokens
        self._partial: dict[int, _Partial] = {}
        self._done: set[int] = set()

    def add(
        self, source: LayoutRecord, first_block: int, blocks: Bytes, *, first_layer: int = 0, num_layers: int | None = None
    ) -> Sequence[TargetBlock]:
        """Takes the sequence's source blocks from `first_block` on, uint8 [n, bytes of a block over these layers]; returns the target
        blocks that this completes. Raises Incompatible, InvalidRequest."""
        check_convertible(source, self._target)
        layers = source.num_layers - first_layer if num_layers is None else num_layers
        if first_layer < 0 or layers < 1 or first_layer + layers > source.num_layers or first_block < 0:
            raise InvalidRequest(f"block {first_block}, layers {first_layer} + {layers} are none of a model of {source.num_layers} layers")
        heads_there, heads_here = _shared_heads(source, self._target)
        if not len(heads_there):
            return []
        vectors = recode(_heads(unpack(blocks, source, layers), heads_there), source, self._target)
        begin, end = self._first_block * self._target.block_size, self._num_tokens
        region = (slice(first_layer, first_layer + layers), slice(heads_here.start, heads_here.stop))
        done = []
        for place in range(len(blocks)):
            start = (first_block + place) * source.block_size
            low, high = max(begin, start), min(end, start + source.block_size)
            size = self._target.block_size
            for index in range(low // size, -(-high // size)) if low < high else ():
                slots = range(max(low, index * size) - index * size, min(high, (index + 1) * size) - index * size)
                block = self._fill(index, slots, vectors, place, index * size + slots.start - start, region)
                if block is not None:
                    done.append(block)
        return done

    def _fill(
        self, index: int, slots: range, vectors: Vectors, place: int, first_slot: int, region: tuple[slice, slice]
    ) -> TargetBlock | None:
        """Copies slots of one source block, from `first_slot` on, into the region's layers and heads of a target block."""
        if index in self._done:
            return None
        partial = self._partial.get(index) or self._new(index)
        layers, heads = region
        here, there = slice(slots.start, slots.stop), slice(first_slot, first_slot + len(slots))
        partial.vectors.values[0, layers, :, heads, here] = vectors.values[place, :, :, :, there]
        if vectors.scales is not None:
            assert partial.vectors.scales is not None
            partial.vectors.scales[0, layers, :, heads, here] = vectors.scales[place, :, :, :, there]
        partial.come[layers, heads, here] = True
        if not partial.come.all():
            return None
        self._done.add(index)
        del self._partial[index]
        return TargetBlock(index, pack(partial.vectors, self._target)[0])

    def _new(self, index: int) -> _Partial:
        target = self._target
        shape = (1, target.num_layers, target.num_planes, target.num_kv_heads, target.block_size, target.head_dim)
        if target.quantization == "none":
            vectors = Vectors(np.zeros(shape, kv_numbers.stored_dtype(target.dtype)))
        else:
            width = vector_bytes(target.head_dim, target.quantization) - 2
            vectors = Vectors(np.zeros((*shape[:-1], width), np.uint8), np.zeros(shape[:-1], np.uint16))
        filled = min(target.block_size, self._num_tokens - index * target.block_size)
        come = np.ones((target.num_layers, target.num_kv_heads, target.block_size), np.bool_)
        come[:, :, :filled] = False
        num_unseen, first_windowed = self._unseen
        come[first_windowed:, :, : max(0, num_unseen - index * target.block_size)] = True
        self._partial[index] = _Partial(vectors, come)
        return self._partial[index]


def _shared_heads(source: LayoutRecord, target: LayoutRecord) -> tuple[range, range]:
    """Returns the heads that both parts have, counted in the source's and in the target's blocks."""
    there, here = source.tp_rank * source.num_kv_heads, target.tp_rank * target.num_kv_heads
    low, high = max(there, here), min(there + source.num_kv_heads, here + target.num_kv_heads)
    high = max(low, high)
    return range(low - there, high - there), range(low - here, high - here)


def _heads(vectors: Vectors, heads: range) -> Vectors:
    part = slice(heads.start, heads.stop)
    return Vectors(vectors.values[:, :, :, part], None if vectors.scales is None else vectors.scales[:, :, :, part])
