"""Works out and checks what every transport has to know of a chunk: its bytes, whether it fits the blocks, whether it arrived unharmed."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.checksum import checksum
from kv_transfer.transport import BlockStore, Bytes, ChunkInfo
from twostep.engine.batch import LayerRange
from twostep.errors import DataLoss, InvalidRequest


def part_of_block(block_bytes: int, num_layers: int, layers: LayerRange | None) -> slice:
    """Returns which bytes of a block of `num_layers` hold some layers, None: all. Raises InvalidRequest if it has no such layers."""
    if layers is None:
        return slice(0, block_bytes)
    if not 0 <= layers.first < layers.stop <= num_layers:
        raise InvalidRequest(f"layers {layers.first} + {layers.num_layers} are not among {num_layers}; compare the layouts before fetching")
    layer_bytes = block_bytes // num_layers
    return slice(layers.first * layer_bytes, layers.stop * layer_bytes)


def part_bytes(block_bytes: int, num_layers: int, layers: LayerRange | None) -> int:
    """Returns how many bytes `part_of_block` has. Raises InvalidRequest."""
    part = part_of_block(block_bytes, num_layers, layers)
    return int(part.stop - part.start)


def chunk_info(
    index: int,
    first_block: int,
    block_ids: Sequence[int],
    layers: LayerRange | None,
    *,
    num_bytes: int,
    digest: int,
    in_place: bool = False,
) -> ChunkInfo:
    """Describes what was published of these blocks. `in_place`: the reader takes it from them itself."""
    return ChunkInfo(
        index=index,
        first_block=first_block,
        num_blocks=len(block_ids),
        num_bytes=num_bytes,
        checksum=digest,
        first_layer=layers.first if layers else 0,
        num_layers=layers.num_layers if layers else 0,
        source_blocks=tuple(block_ids) if in_place else (),
    )


def check_blocks(chunk: ChunkInfo, block_ids: Sequence[int], block_bytes: int, num_layers: int = 1) -> None:
    """Raises InvalidRequest unless the chunk fills exactly its layers of these blocks."""
    each = part_bytes(block_bytes, num_layers, chunk.layers)
    if len(block_ids) != chunk.num_blocks or chunk.num_bytes != chunk.num_blocks * each:
        raise InvalidRequest(
            f"chunk {chunk.index} holds {chunk.num_blocks} blocks in {chunk.num_bytes} bytes, "
            f"but was to fill {len(block_ids)} blocks of {each} bytes; compare the layouts before fetching"
        )


def check_source_blocks(chunk: ChunkInfo, *, num_blocks: int, block_bytes: int, own_block_bytes: int) -> None:
    """Checks what a chunk says of a source's pool of `num_blocks`, before any of it is read. Raises InvalidRequest for blocks of another
    size than ours, DataLoss for blocks that the pool does not have: no fault of the request's, and another attempt may succeed."""
    if block_bytes != own_block_bytes:
        raise InvalidRequest(f"the source's blocks have {block_bytes} bytes, ours {own_block_bytes}; compare the layouts before fetching")
    if len(chunk.source_blocks) != chunk.num_blocks:
        raise DataLoss(f"chunk {chunk.index} names {len(chunk.source_blocks)} source blocks for {chunk.num_blocks}; prefill again")
    if chunk.source_blocks and not 0 <= min(chunk.source_blocks) <= max(chunk.source_blocks) < num_blocks:
        raise DataLoss(f"chunk {chunk.index} names source blocks that are not among {num_blocks}; prefill again")


def check_arrived(chunk: ChunkInfo, digest: int) -> None:
    """Raises DataLoss unless what arrived has the chunk's checksum."""
    if digest != chunk.checksum:
        raise DataLoss(f"chunk {chunk.index} does not match its checksum; fetch it again once, then prefill again")


def check_sum(chunk: ChunkInfo, data: Bytes) -> None:
    """Raises DataLoss. Runs in a thread."""
    check_arrived(chunk, checksum(data))


def write_verified(store: BlockStore, chunk: ChunkInfo, block_ids: Sequence[int], data: Bytes) -> None:
    """Writes uint8 [num_bytes] into the blocks if its checksum is the chunk's. Raises DataLoss. Runs in a thread."""
    check_sum(chunk, data)
    store.write_blocks(block_ids, data.reshape(chunk.num_blocks, -1), chunk.layers)
