"""Which kernel attends a step's prompt chunks. Chosen by measurement: benchmarks/gpu_prefill_attention.py, table in RESULTS.md."""

from __future__ import annotations

from twostep.engine.batch import KvShape

HOPPER_ROWS = 128
# Rows (tokens times the query heads of a KV head) of the largest chunk from which on a tile of HOPPER_ROWS is filled well enough.
_ENOUGH_ROWS = 64


def uses_hopper(kv: KvShape, *, num_heads: int, max_queries: int, capability: tuple[int, int] | None) -> bool:
    """Whether hopper_prefill.py attends chunks of at most `max_queries` tokens; triton_prefill.py does otherwise, exactly in float32.
    `capability` is the device's, None: no NVIDIA GPU."""
    share = num_heads // kv.num_kv_heads
    rows = kv.num_blocks * kv.num_layers * 2 * kv.num_kv_heads * kv.block_size
    return (
        capability is not None
        and capability[0] == 9
        and kv.dtype in ("bfloat16", "float16")
        and kv.quantization == "none"
        # What its tiles in shared memory and its TMA boxes can be.
        and kv.head_dim in (64, 128)
        and kv.block_size in (8, 16, 32, 64, 128)
        and share <= HOPPER_ROWS
        and rows < 2**31
        and share * max_queries >= _ENOUGH_ROWS
    )


def num_leading_decodes(num_queries: list[int], block_size: int) -> int:
    """How many sequences, from the first on, flash-decoding serves: those of one token, which a step lists before its chunks."""
    if block_size % 16:
        return 0
    for index, count in enumerate(num_queries):
        if count != 1:
            return index
    return len(num_queries)
