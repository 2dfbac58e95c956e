"""How one step's decode attention is shared out over the chip: equal numbers of tiles for every program, planned on the device.

    sequences      0        1 2    3            4
    tiles          ooooooooo|o|ooo|oooooooooooo|oooooo        a tile: num_keys keys in sequence of num_heads KV heads
    programs       ├─ 0 ──┤├─ 1 ─┤├─ 2 ──┤├─ 3 ─┤├─ 4 ──┤     as many tiles each, but for one, whatever sequence they belong to

A long sequence is split over as many programs as its length takes, and many short ones share a program. Lengths are read on the
device only, so a captured step may be replayed with others (after "Stream-K", Osama et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from twostep.engine.batch import KvShape
from twostep.errors import SetupError
from twostep.model.kernels.shared_prefix import OWN_COLUMNS
from twostep.model.kernels.triton_launch import DecodeWorkspace, num_sms_of, overlaps, shared_bytes_of
from twostep.model.kernels.triton_quantized_kv import converts_fp8
from twostep.model.kernels.triton_shared_prefix import SharedPrefix

WORK_COLUMNS = tl.constexpr(8)
_WORKERS_PER_PROGRAM = 16
_FEW_SEQS = 16
# Numbers of parts that a warp of the merge has on their way at once; fewer where registers are to leave room for more programs.
_MERGE_NUMBERS = 2048
_MERGE_NUMBERS_QUANTIZED = 1024
# Numbers that a program of the second launch has on their way at once.
_MERGED_NUMBERS = 8192
# Of a multiprocessor, for 32 threads.
_REGISTERS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    """How one program works. All powers of 2 but num_stages and programs_per_sm.

    A tile is `num_heads` KV heads × `num_lanes` stretches of `num_keys` keys, a product of matrices each: warps share nothing until
    a sequence's last tile.
    """

    num_heads: int
    num_lanes: int
    num_keys: int
    num_warps: int
    num_stages: int
    programs_per_sm: int

    @property
    def tile_keys(self) -> int:
        return self.num_lanes * self.num_keys


def decode_layout(shape: KvShape, *, num_heads: int, num_seqs: int) -> DecodeLayout:
    """The layout for steps of `num_seqs` sequences, chosen on an H200 (benchmarks/gpu_decode_attention.py --sweep).

    Eight matrices of 16 keys side by side for a few sequences, for which the longer stretch leaves fewer parts to merge; two programs of
    four to a multiprocessor for the rest, where one streams while the other begins or ends a sequence; four of two for heads that are
    no power of 2 wide. Fewer of wide accumulators, which have to stay in registers. One KV head always: more read no faster, and leave
    a long sequence among short ones with several times as much to merge.
    """
    wide = max(16, triton.next_power_of_2(shape.head_dim))
    share_wide = triton.next_power_of_2(num_heads // shape.num_kv_heads)
    rows = max(16, share_wide)
    if shape.quantization != "none":
        lanes = 8 if num_seqs <= _FEW_SEQS and wide * share_wide <= 1024 else 4
        # Half the bytes and half the registers leave room for one more program, among which conversions and waiting are shared.
        # Not of int4, of which a tile has more in registers.
        programs = 12 if lanes == 4 and wide * max(8, share_wide) <= 1024 and shape.quantization != "int4" else 8
        return DecodeLayout(num_heads=1, num_lanes=lanes, num_keys=16, num_warps=lanes, num_stages=3, programs_per_sm=programs // lanes)
    if shape.dtype == "float32" or wide > 128 or rows > 32:
        lanes, warps = (2 if rows <= 32 else 1), 4
    elif rows == 16 and wide != shape.head_dim:
        lanes = warps = 2
    elif rows == 16 and num_seqs <= _FEW_SEQS:
        lanes = warps = 8
    else:
        lanes = warps = 4
    return DecodeLayout(num_heads=1, num_lanes=lanes, num_keys=16, num_warps=warps, num_stages=3, programs_per_sm=8 // warps)


def fitted(layout: DecodeLayout, shape: KvShape, shared_bytes: int) -> DecodeLayout:
    """`layout` with fewer stretches side by side where a program would need more shared memory than `shared_bytes`. Reckoned are K and V of
    a tile in every stage; Triton 3.6 takes five sixths of that."""
    wide = max(16, triton.next_power_of_2(shape.head_dim))
    item_bytes = shape.block_bytes / (2 * shape.num_layers * shape.num_kv_heads * shape.block_size * shape.head_dim)
    while layout.num_lanes > 1 and 2 * layout.tile_keys * wide * item_bytes * layout.num_stages > shared_bytes:
        lanes = layout.num_lanes // 2
        layout = replace(layout, num_lanes=lanes, num_warps=min(layout.num_warps, max(2, lanes)))
    return layout


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProgram:
    """Says what the decode kernels are compiled for: a layout, and the shapes it works on.

    groups        of KV heads, each some programs'
    share         query heads to a KV head, padded to `rows` in products, to `merge_share` in merges
    merge_parts   parts that a merge has on their way at once
    fused         the program that arrives last merges a sequence
    shared        columns of the list of shared prefixes; 0: none. shared_rows: rows of a tile of that pass
    softcap       of the logits; 0: none. sinks: each head has one more logit
    in_float32    the interpreter multiplies bfloat16 wrongly
    """

    groups: int
    share: int
    rows: int
    heads: int
    lanes: int
    keys: int
    head_dim: int
    block_d: int
    block_size: int
    window: int
    quantization: str
    converts_fp8: bool
    merge_share: int
    merge_parts: int
    fused: bool
    shared: int
    shared_rows: int
    softcap: float
    sinks: bool
    in_float32: bool
    pdl: bool


class DecodePlan:
    """How steps of `num_seqs` sequences are shared out. Made once; `refresh` per step, on the stream and in the graph of its layers.

    window  keys a query sees, its own included; 0: all
    shared  the pass over shared prefixes: what its list says is shared is left to it
    softcap and sinks: of all layers that it is for (AttentionSpec)
    """

    def __init__(
        self,
        shape: KvShape,
        *,
        num_heads: int,
        num_seqs: int,
        device: torch.device | str,
        window: int = 0,
        workspace: DecodeWorkspace | None = None,
        layout: DecodeLayout | None = None,
        num_sms: int | None = None,
        shared: SharedPrefix | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        merges_itself: bool | None = None,
    ) -> None:
        """`num_sms` is read off the device, and `merges_itself` chosen, where they are not given. Raises SetupError for a shape that no
        layout serves."""
        if num_seqs < 1 or window < 0 or num_heads % shape.num_kv_heads:
            raise SetupError(
                f"{num_heads} query heads over {shape.num_kv_heads} KV heads, {num_seqs} sequences, window {window}: give a multiple "
                "of the KV heads, at least one sequence and no negative window"
            )
        if shape.block_size % 16:
            raise SetupError(f"block size {shape.block_size} is no multiple of 16; give --block-size 16, 32 or 64")
        self.shape = shape
        self.num_heads = num_heads
        self.num_seqs = num_seqs
        self.window = window
        assert shared is None or (not window and shared.layout.num_seqs == num_seqs)
        self.shared = shared
        chosen = layout or decode_layout(shape, num_heads=num_heads, num_seqs=num_seqs)
        self.layout = fitted(chosen, shape, shared_bytes_of(torch.device(device)))
        assert shape.num_kv_heads % self.layout.num_heads == 0
        self.num_groups = shape.num_kv_heads // self.layout.num_heads
        sms = num_sms or num_sms_of(torch.device(device))
        self.num_workers = max(1, sms * self.layout.programs_per_sm // self.num_groups)
        self.workspace = workspace or DecodeWorkspace(device)
        self.workspace.reserve(num_parts=2 * self.num_workers * num_heads, head_dim=shape.head_dim, num_counters=num_seqs * self.num_groups)
        self.parts, self.scales, self.counters = self.workspace.parts, self.workspace.scales, self.workspace.counters
        # Row w: the worker's first tile and one past its last, counted over all sequences; its first sequence, the tile to begin with
        # there, that sequence's length and the next one's; the keys that the two share. After them: workers that have work, and all
        # tiles.
        self.work = torch.zeros(self.num_workers * WORK_COLUMNS + 2, dtype=torch.int32, device=device)
        # First tile of each sequence, counted over all, and the end.
        self.starts = torch.zeros(num_seqs + 1, dtype=torch.int32, device=device)
        # Whether the program that arrives last merges a sequence by itself. Where few sequences have many parts of many rows (few KV
        # heads over all workers), that is much to read for one program, and a second launch merges all rows side by side.
        rows = num_heads // self.num_groups
        self.merges_itself = self.num_workers * rows <= max(300, 64 * num_seqs) if merges_itself is None else merges_itself
        # Parts that a program of that launch has on their way at once.
        most = max(4, _MERGED_NUMBERS // triton.next_power_of_2(shape.head_dim))
        self.parts_at_once = max(4, min(64, most, triton.next_power_of_2(2 + self.num_workers // num_seqs)))
        self.program = self._program(torch.device(device), softcap, sinks=sinks)
        quantized = shape.quantization != "none"
        self.max_registers = min(255, _REGISTERS // (self.layout.num_warps * self.layout.programs_per_sm) // 8 * 8) if quantized else None

    def _program(self, device: torch.device, softcap: float, *, sinks: bool) -> DecodeProgram:
        shape, layout, quantized = self.shape, self.layout, self.shape.quantization != "none"
        share = self.num_heads // shape.num_kv_heads
        share_wide, wide = triton.next_power_of_2(share), max(16, triton.next_power_of_2(shape.head_dim))
        merge_numbers = (_MERGE_NUMBERS_QUANTIZED if quantized else _MERGE_NUMBERS) * layout.num_warps
        return DecodeProgram(
            groups=self.num_groups,
            share=share,
            rows=max(8 if quantized else 16, share_wide),
            heads=layout.num_heads,
            lanes=layout.num_lanes,
            keys=layout.num_keys,
            head_dim=shape.head_dim,
            block_d=wide,
            block_size=shape.block_size,
            window=self.window,
            quantization=shape.quantization,
            converts_fp8=converts_fp8(device),
            merge_share=share_wide,
            merge_parts=max(2, min(16, merge_numbers // (layout.num_heads * share_wide * wide))),
            fused=self.merges_itself,
            shared=0 if self.shared is None else OWN_COLUMNS,
            shared_rows=1 if self.shared is None else self.shared.tile.num_rows,
            softcap=softcap,
            sinks=sinks,
            in_float32=device.type != "cuda",
            pdl=overlaps(device),
        )

    def refresh(self, seq_lens: torch.Tensor) -> None:
        """Plans a step. seq_lens int32 [num_seqs] on the device; 0 is allowed and costs a tile. The last ones may be negative: padding,
        which costs nothing, and of which nothing is written."""
        assert seq_lens.shape == (self.num_seqs,)
        assert seq_lens.dtype == torch.int32
        assert seq_lens.is_contiguous()
        listed = seq_lens if self.shared is None else self.shared.listed
        _plan_kernel[(triton.cdiv(self.num_workers, _WORKERS_PER_PROGRAM),)](
            seq_lens, listed, self.work, self.starts, self.num_seqs, self.num_workers,
            TILE=self.layout.tile_keys, WINDOW=self.window, SHARED=self.program.shared,
            SEQS=triton.next_power_of_2(self.num_seqs), WORKERS=_WORKERS_PER_PROGRAM, num_warps=4,
        )  # fmt: skip


@triton.jit
def first_tile(length, num_shared, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first tile that a sequence's query sees, of those behind its shared keys."""
    if WINDOW > 0:
        return tl.maximum(length - WINDOW, 0) // TILE
    else:
        return num_shared // TILE


@triton.jit
def last_tile(length, TILE: tl.constexpr):
    """One past a sequence's last tile; an empty sequence has one tile all the same, whose program writes its zeros. Padding, of negative
    length, has none."""
    return tl.where(length < 0, 0, tl.maximum((length + TILE - 1) // TILE, 1))


@triton.jit
def load_blocks(tables_ptr, stride_table, seq, tile, length, there, P: tl.constexpr):
    """Block numbers of a tile, one for each of its matrices; 0 where no key of theirs is seen."""
    key = tile * (P.lanes * P.keys) + tl.arange(0, P.lanes * P.heads) // P.heads * P.keys
    mask = there & (key < length)
    if P.window > 0:
        mask = mask & (key + P.keys > length - P.window)
    return tl.load(tables_ptr + seq.to(tl.int64) * stride_table + key // P.block_size, mask=mask, other=0)


@triton.jit
def sum_first(x):
    """Sum over the first of four dimensions, a power of 2, by halves: fewer exchanges than a reduction across warps makes."""
    if x.shape[0] == 1:
        return tl.reshape(x, [x.shape[1], x.shape[2], x.shape[3]])
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1], x.shape[2], x.shape[3]]), (1, 2, 3, 4, 0)))
        return sum_first(a + b)


@triton.jit(do_not_specialize=["num_seqs"])
def _plan_kernel(
    lens_ptr, own_ptr, work_ptr, starts_ptr, num_seqs, num_workers,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, SEQS: tl.constexpr, WORKERS: tl.constexpr,
):  # fmt: skip
    seq = tl.arange(0, SEQS)
    length = tl.load(lens_ptr + seq, mask=seq < num_seqs, other=0)
    num_shared = tl.zeros_like(length)
    if SHARED > 0:
        num_shared = tl.load(own_ptr + seq * SHARED, mask=seq < num_seqs, other=0)
    first = first_tile(length, num_shared, TILE, WINDOW)
    count = tl.where(seq < num_seqs, last_tile(length, TILE) - first, 0)
    ends = tl.cumsum(count)
    total = tl.sum(count)
    # A worker with work has a tile at least, so that the workers of a sequence are consecutive.
    active = tl.maximum(tl.minimum(total, num_workers), 1)
    worker = tl.program_id(0) * WORKERS + tl.arange(0, WORKERS)
    there = worker < num_workers
    position = (worker.to(tl.int64) * total // active).to(tl.int32)
    end = ((worker + 1).to(tl.int64) * total // active).to(tl.int32)
    end = tl.where(worker < active, end, position)
    mine = tl.sum(((ends[None, :] <= position[:, None]) & (seq < num_seqs)[None, :]).to(tl.int32), 1)
    # Its place in the sequence: of all tiles before it, those of earlier sequences gone, those before the window added.
    here = seq[None, :] == mine[:, None]
    tile = position + tl.sum(tl.where(here, (first - ends + count)[None, :], 0), 1)
    row = work_ptr + worker * WORK_COLUMNS
    tl.store(row, position, mask=there)
    tl.store(row + 1, end, mask=there)
    tl.store(row + 2, mine, mask=there)
    tl.store(row + 3, tile, mask=there)
    tl.store(row + 4, tl.sum(tl.where(here, length[None, :], 0), 1), mask=there)
    tl.store(row + 5, tl.load(lens_ptr + mine + 1, mask=there & (mine + 1 < num_seqs), other=0), mask=there)
    if SHARED > 0:
        tl.store(row + 6, tl.sum(tl.where(here, num_shared[None, :], 0), 1), mask=there)
        tl.store(row + 7, tl.load(own_ptr + (mine + 1) * SHARED, mask=there & (mine + 1 < num_seqs), other=0), mask=there)
    if tl.program_id(0) == 0:
        tl.store(work_ptr + num_workers * WORK_COLUMNS, active)
        tl.store(work_ptr + num_workers * WORK_COLUMNS + 1, total)
        tl.store(starts_ptr + seq, ends - count, mask=seq < num_seqs)
        tl.store(starts_ptr + num_seqs, total)
