"""Encodes blocks that travel otherwise than they lie in the pool (--kv-wire). Off unless asked for.

    raw     as they are
    int8    lossy: a byte a number, a scale a token and head, by the same code as a quantized pool's. What arrives is not what was
    fp8     computed: right tokens are no longer promised, and its blocks never stand under prefix hashes
    zstd    lossless: bytes of equal significance side by side (exponents compress, fractions hardly do), then zstd. A chunk that does
            not get smaller so travels as it is: that it is as long as its blocks are tells it apart

benchmarks/RESULTS.md says what zstd gives on real KV.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import zstandard

from kv_transfer import kv_numbers
from kv_transfer.layout_conversion import block_bytes, pack, recode, unpack
from kv_transfer.transport import Bytes
from twostep.cluster.records import LayoutRecord
from twostep.errors import DataLoss, InvalidRequest
from twostep.quantized_vector import SLOTS_TOGETHER
from twostep.settings.readers import KV_WIRES

ENCODINGS = KV_WIRES
RAW = "raw"
LOSSY = ("int8", "fp8")


def check_encoding(encoding: str, layout: LayoutRecord) -> None:
    """Raises InvalidRequest where blocks of this layout cannot travel so."""
    if encoding not in ENCODINGS:
        raise InvalidRequest(f"KV cannot travel as {encoding!r}; give one of {', '.join(ENCODINGS)}")
    if encoding in LOSSY and layout.quantization != "none":
        raise InvalidRequest(f"KV is stored as {layout.quantization} already and cannot travel as {encoding}; give raw or zstd")
    if encoding in LOSSY and layout.num_state_blocks:
        raise InvalidRequest(f"this model's sequences have a state beside their KV, which cannot travel as {encoding}; give raw or zstd")
    if encoding in LOSSY and layout.block_size % SLOTS_TOGETHER:
        raise InvalidRequest(f"KV travels as {encoding} in blocks of a multiple of {SLOTS_TOGETHER} tokens; change --block-size")


def wire_layout(encoding: str, layout: LayoutRecord) -> LayoutRecord:
    """Returns the layout of blocks while they travel, if not as zstd."""
    return replace(layout, quantization=encoding) if encoding in LOSSY else layout


def encode(encoding: str, blocks: Bytes, layout: LayoutRecord, *, num_layers: int | None = None, level: int = 1) -> Bytes:
    """Returns blocks, uint8 [n, bytes of a block over these layers] as flat bytes, never more of them. `level`: zstd's. Raises
    InvalidRequest. Run it in a thread."""
    check_encoding(encoding, layout)
    flat = np.ascontiguousarray(blocks).reshape(-1)
    if encoding == "raw":
        return flat
    if encoding == "zstd":
        packed = zstandard.ZstdCompressor(level=level).compress(shuffle(flat, _item_bytes(layout)).data)
        return np.frombuffer(packed, np.uint8) if len(packed) < flat.size else flat
    wire = wire_layout(encoding, layout)
    return pack(recode(unpack(blocks, layout, num_layers), layout, wire), wire).reshape(-1)


def decode(encoding: str, data: Bytes, num_blocks: int, layout: LayoutRecord, *, num_layers: int | None = None) -> Bytes:
    """Does the inverse of encode, exact but for LOSSY ones. Raises InvalidRequest, and DataLoss for what cannot have been encoded so. Never
    makes more than the blocks' own size."""
    check_encoding(encoding, layout)
    size = block_bytes(layout, num_layers)
    if encoding == "zstd" and data.size != num_blocks * size:
        _check_size(data, num_blocks * size)
        try:
            plain = zstandard.ZstdDecompressor().decompress(
                np.ascontiguousarray(data).data, max_output_size=num_blocks * size, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise DataLoss(f"{num_blocks} blocks do not come out of {data.size} zstd bytes: {error}; prefill again") from error
        data, wire_size = unshuffle(np.frombuffer(plain, np.uint8), _item_bytes(layout)), size
    else:
        wire = wire_layout(encoding, layout)
        wire_size = block_bytes(wire, num_layers)
    if data.size != num_blocks * wire_size:
        raise DataLoss(f"{num_blocks} blocks are {num_blocks * wire_size} bytes as {encoding}, but {data.size} came; prefill again")
    blocks = data.reshape(num_blocks, wire_size)
    if encoding not in LOSSY:
        return blocks
    return pack(recode(unpack(blocks, wire, num_layers), wire, layout), layout)


def _check_size(data: Bytes, num_bytes: int) -> None:
    """Checks that a frame holds as many bytes as were announced: it says itself how many, and the decompressor would take its word."""
    try:
        said = zstandard.frame_content_size(data.data)
    except zstandard.ZstdError as error:
        raise DataLoss(f"{data.size} bytes are no zstd frame: {error}; prefill again") from error
    if said != num_bytes:
        raise DataLoss(f"a zstd frame of {said} bytes came where {num_bytes} were announced; prefill again")


def shuffle(data: Bytes, item_bytes: int) -> Bytes:
    """Returns the first bytes of all items, then all second ones, and so on; flat."""
    if item_bytes == 1:
        return data
    # Byte by byte with a stride: several times as fast as copying a transposed view.
    out = np.empty((item_bytes, data.size // item_bytes), np.uint8)
    for place in range(item_bytes):
        out[place] = data[place::item_bytes]
    return out.reshape(-1)


def unshuffle(data: Bytes, item_bytes: int) -> Bytes:
    """Does the inverse of shuffle. Raises DataLoss if there are no whole items."""
    if data.size % item_bytes:
        raise DataLoss(f"{data.size} bytes are no whole numbers of {item_bytes} bytes; prefill again")
    if item_bytes == 1:
        return data
    out = np.empty(data.size, np.uint8)
    for place, plane in enumerate(data.reshape(item_bytes, -1)):
        out[place::item_bytes] = plane
    return out


def _item_bytes(layout: LayoutRecord) -> int:
    return 1 if layout.quantization != "none" else kv_numbers.stored_dtype(layout.dtype).itemsize
