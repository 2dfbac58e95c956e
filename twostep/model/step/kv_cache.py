"""The pool's memory: one tensor, a block of it is one contiguous region for all layers and heads.

tensor [block, layer, K/V, kv_head, slot, head_dim]      latent attention's has one plane where others have K and V
         │      │     │      │       │
         │      └─────┴──────┴───────┴── block_bytes, moved as a whole
         └── block id of the block pool

Of quantized KV (twostep/model/step/kv_quantization.py) it is uint8 [block, layer, bytes of a layer]: a block is one region all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from twostep.engine.batch import KvShape, LayerRange
from twostep.errors import SetupError
from twostep.model.step.kv_quantization import QuantizedRows, check_shape, static_scales
from twostep.model.step.kv_staging import PinnedStaging, pin
from twostep.model.step.kv_sums import KvSums
from twostep.model.step.state_columns import StateColumns

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvCache:
    """Owns the tensor. Reading and writing whole blocks is safe from any thread for blocks that no step writes."""

    def __init__(
        self,
        shape: KvShape,
        device: str = "cpu",
        *,
        tensor: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        num_scratch: int = 0,
    ) -> None:
        """`tensor`: memory to use instead of own, of the right shape, whose blocks are not moved. `scales`: of a layer's heads, keys' and
        values' [num_layers, 2, num_kv_heads], if the checkpoint brings some for this format. `num_scratch`: blocks behind the shape's, for
        steps that write what nobody keeps; no other method knows of them. Raises SetupError if the memory is not there."""
        self.shape = shape
        whole = _allocate(replace(shape, num_blocks=shape.num_blocks + num_scratch), device) if tensor is None else tensor
        self.tensor = whole[: shape.num_blocks]
        self._whole = whole
        self._bytes = self.tensor.view(shape.num_blocks, -1).view(torch.uint8)
        self._staging = PinnedStaging(self._bytes) if self.tensor.is_cuda and tensor is None else None
        if self._staging is not None:
            torch.cuda.synchronize(self.tensor.device)  # transfers run on another stream than the zeros
        # Checksums that are kept while the pool is written; None: they are computed when they are asked for.
        self.sums: KvSums | None = None
        # Of quantized KV; else rows of numbers.
        static = None if scales is None else static_scales(scales).flatten(1).to(self.tensor.device)
        self.quantized = None
        if shape.quantization != "none":
            self.quantized = QuantizedRows(replace(shape, num_blocks=len(whole)), whole, static)
        self._slot_rows: list[torch.Tensor] = []
        self._block_rows: list[torch.Tensor] = []
        if self.quantized is None:
            flat = whole.view(-1)
            per_layer = shape.vectors * shape.block_size * shape.head_dim
            layers = [flat[layer * per_layer :] for layer in range(shape.num_layers)]
            self._slot_rows = [x.view(-1, shape.head_dim) for x in layers]
            self._block_rows = [x.view(-1, shape.block_size * shape.head_dim) for x in layers]

    def with_scratch(self) -> KvCache:
        """Returns the same memory with the scratch blocks as the last of its own. What is written through it is in no checksum: it is to be
        told to `sums.overwritten`."""
        view = KvCache(replace(self.shape, num_blocks=len(self._whole)), tensor=self._whole)
        view.quantized = self.quantized
        return view

    @property
    def dtype(self) -> torch.dtype:
        """The type of keys and values before they are stored, and of queries."""
        return DTYPES[self.shape.dtype]

    def write_rows(self, layer: int, index: torch.Tensor, vectors: torch.Tensor) -> None:
        """Writes T tokens' keys and values, quantized where the pool is.

        index    int64 [T * shape.vectors], token by token, the same for every layer:
                 ((block * num_layers * num_planes + plane) * num_kv_heads + head) * block_size + slot
        vectors  [T * shape.vectors, head_dim]
        """
        shape = self.shape
        if self.quantized is None:
            self._slot_rows[layer].index_copy_(0, index, vectors)
            return
        heads = shape.vectors
        first = index.view(-1, heads)[:, 0]
        block, slot = first // (shape.num_layers * heads * shape.block_size), first % shape.block_size
        self.quantized.write(layer, block, slot, vectors.view(-1, heads, shape.head_dim))

    def read_rows(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        """Keys, then values, of whole blocks: [num_planes * R, block_size * head_dim].

        index    int64 [num_planes * R], the same for every layer: (block * num_layers * num_planes + plane) * num_kv_heads + head; first R
                 of plane 0, then the same of plane 1, if there is one
        """
        shape = self.shape
        if self.quantized is None:
            return self._block_rows[layer].index_select(0, index)
        of_keys, per_block = index[: len(index) // shape.num_planes], shape.num_layers * shape.vectors
        kv = self.quantized.read(layer, of_keys // per_block, of_keys % per_block)
        return kv.view(len(index), -1).to(self.dtype)

    def numbers(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Keys and values [B, num_planes, num_kv_heads, block_size, head_dim] of the blocks, int64 [B]; float32 of quantized KV."""
        if self.quantized is None:
            return self.tensor[blocks, layer]
        heads = torch.arange(self.shape.num_kv_heads, device=blocks.device).expand(len(blocks), -1)
        return self.quantized.read(layer, blocks[:, None].expand_as(heads), heads).transpose(0, 1)

    def read_states(self, tables: torch.Tensor, layer: int, columns: StateColumns, num_bytes: int) -> torch.Tensor:
        """Returns what a layer without KV keeps of each sequence, `num_bytes` in each of its own columns, uint8 [S, columns.num_own,
        num_bytes]. `tables` int64 [S, num_state_blocks]: their state blocks; `layer` counts the layers that have a state."""
        pieces, blocks = self._state_pieces(tables, layer, columns, num_bytes)
        # [S, blocks each, layer, plane, column, bytes]
        held: torch.Tensor = pieces[blocks.reshape(-1)].unflatten(0, blocks.shape)
        return held.permute(0, 4, 1, 2, 3, 5).flatten(2)[:, :, :num_bytes].contiguous()

    def write_states(self, tables: torch.Tensor, layer: int, columns: StateColumns, states: torch.Tensor) -> None:
        """The inverse of read_states, uint8 [S, columns.num_own, num_bytes]."""
        pieces, blocks = self._state_pieces(tables, layer, columns, states.shape[2])
        whole = states.new_zeros(*states.shape[:2], blocks.shape[1] * pieces[0, :, :, 0].numel())
        whole[:, :, : states.shape[2]] = states
        whole = whole.unflatten(2, (-1, *pieces.shape[1:3], pieces.shape[4])).permute(0, 2, 3, 4, 1, 5)
        pieces[blocks.reshape(-1)] = whole.flatten(0, 1)

    def state_numbers(self, dtype: torch.dtype, columns: StateColumns) -> torch.Tensor:
        """Returns the pool itself as such numbers, [num_blocks, numbers of a block from its first own column on], for kernels that read and
        write states in it. Raises SetupError where a block has no whole number of them."""
        if self.shape.block_bytes % dtype.itemsize:
            raise SetupError(f"a block of {self.shape.block_bytes} bytes cannot hold states; give an even --block-size")
        return self._bytes.view(dtype)[:, columns.first * self.shape.plane_bytes // columns.count // dtype.itemsize :]

    def _state_pieces(self, tables: torch.Tensor, layer: int, columns: StateColumns, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the own columns, [num_blocks, layer, plane, column, bytes], and of a layer's blocks in the tables."""
        shape = self.shape
        each = shape.state_blocks_each(num_bytes, columns.count)
        planes = self._bytes.unflatten(1, (shape.num_layers, -1))[:, :, : shape.num_planes * shape.plane_bytes]
        pieces = planes.unflatten(2, (shape.num_planes, columns.count, -1))[:, :, :, columns.own]
        return pieces, tables[:, layer * each : (layer + 1) * each]

    def fill_random(self, num_blocks: int) -> None:
        """Random numbers in the first blocks, for trials while nobody owns them."""
        used = self.tensor[:num_blocks]
        if self.quantized is None:
            used.normal_()
            return
        shape = self.shape
        # Bytes as they are stored, in every layer the same.
        for slots in torch.arange(num_blocks * shape.block_size, device=used.device).split(1024):
            vectors = torch.randn(len(slots), shape.vectors, shape.head_dim, device=used.device)
            self.quantized.write(0, slots // shape.block_size, slots % shape.block_size, vectors)
        used[:, 1:] = used[:, :1]

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        """Copies whole blocks, or a range of their layers, into `out`: uint8 [len(block_ids), block_bytes], or
        [len(block_ids), num_layers * layer_bytes], contiguous. Raises ValueError if it is not that."""
        columns = self._check(block_ids, out, layers)
        if self._staging is not None:
            self._staging.read(block_ids, out, columns)
            return
        # One by one: torch's index_select takes ten times as long for a few layers of each block.
        rows = self._bytes.numpy()[:, columns or slice(None)]
        for place, block in enumerate(block_ids):
            out[place] = rows[block]

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        """The inverse of read_blocks; `data` may be read-only."""
        columns = self._check(block_ids, data, layers)
        if self._staging is not None:
            self._staging.write(block_ids, data, columns)
        else:
            # numpy copies straight from read-only memory, which torch.from_numpy would warn about.
            self._bytes.numpy()[np.asarray(block_ids, np.int64), columns or slice(None)] = data
        if self.sums is not None:
            self.sums.overwritten(block_ids)

    def new_host_blocks(self, count: int) -> npt.NDArray[np.uint8]:
        """See Runner: pinned where there is a GPU."""
        memory: npt.NDArray[np.uint8] = torch.empty(
            count, self.shape.block_bytes, dtype=torch.uint8, pin_memory=self._staging is not None
        ).numpy()
        return memory

    def pin_host(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """See Runner."""
        return _no_pin if self._staging is None else pin(memory)

    def _check(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8], layers: LayerRange | None) -> slice | None:
        """Which bytes of the blocks are meant; None: all. No tensors: each call of torch gives the interpreter away and waits for it."""
        shape = self.shape
        columns = None if layers is None or layers.covers(shape.num_layers) else shape.bytes_of(layers)
        want = (len(block_ids), shape.block_bytes if columns is None else columns.stop - columns.start)
        if data.shape != want or data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise ValueError(f"{len(block_ids)} blocks need a contiguous uint8 array of shape {want}, not {data.dtype} {data.shape}")
        if len(block_ids) and not (min(block_ids) >= 0 and max(block_ids) < shape.num_blocks):
            raise ValueError(f"block ids must be from 0 to {shape.num_blocks - 1}")
        return columns


def _no_pin() -> None:
    """Memory of a machine without a GPU is as it is."""


def _allocate(shape: KvShape, device: str) -> torch.Tensor:
    sizes: tuple[int, ...] = (shape.num_blocks, shape.num_layers)
    if shape.quantization == "none":
        sizes += (shape.num_planes, shape.num_kv_heads, shape.block_size, shape.head_dim)
    else:
        check_shape(shape)
        sizes += (shape.block_bytes // shape.num_layers,)
    try:
        # Zeros, not empty: padding of a gathered group may read slots never written, and 0 * NaN is NaN.
        return torch.zeros(sizes, dtype=DTYPES[shape.dtype] if shape.quantization == "none" else torch.uint8, device=device)
    except RuntimeError as error:
        gib = shape.num_blocks * shape.block_bytes / 2**30
        raise SetupError(f"no memory for a KV cache of {gib:.1f} GiB on {device}; give fewer blocks") from error
