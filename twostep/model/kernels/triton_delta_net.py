"""Gated delta nets (delta_net.py) as Triton kernels. They read and write the states where they lie, in blocks of the pool, and know from
the device alone which rows are whose, so that a step can be captured.

    mix       rows × key heads             q, k, v ─ convolution ─ silu ─▶ mixed; of decodes, their last inputs
    decode    decodes × heads × parts of V state ─▶ out, state
    prepare   chunks of 64 × heads         (I + A)⁻¹ and tril(Q Kᵀ ⊙ Γ), by themselves
    recall    prompts × heads × parts of V state ─ chunk after chunk ─▶ out, state, the prompt's last inputs
    leave     rows × heads                 norm(out) · silu(z), zeros of padding

The rule is that of gated_delta.py, with one product less: U - W S = (I + A)⁻¹ β (V - exp(γ) K S), so that W is never made, and columns of V
know nothing of each other. (I + A)⁻¹: blocks of 16 on the diagonal row by row, D, then N = D⁻¹ A of what lies outside them, and
(I - N)(I + N²) D⁻¹, as N⁴ = 0. Powers of all of A would be shorter, and lose every digit where keys repeat themselves.

What it should cost, of Qwen3-Next-80B in bfloat16 (32 heads of 128 × 128, 8192 channels of 4, 36 layers):

    a row that decodes    2 × (2.10 MB recurrent + 0.05 MB inputs) a layer, 154 MB in all: 46 µs of a memory of 3.35 TB/s. 8 operations
                          for 8 bytes: arithmetic is hidden. One program has 16 KB of a state, 128 of them a row
    64 tokens of a prompt prepare: 2.1 MFLOP of K Kᵀ and Q Kᵀ a head, 2.1 of the solution; recall: 8.4 (K S, Q S, Kᵀ V' 2.1 each; the two
                          of 64 × 64 1.0 each). 0.2 GFLOP a token in all, beside 6 of the products
    beside them           what is prepared, float32 [T, heads, 2, 64]: 32 KB a head and chunk, written once and read by four programs;
                          128 MiB of 8192 tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from twostep.model.kernels.delta_net import CHUNK, UNIT_EPS, DeltaDims, DeltaWeights
from twostep.model.kernels.triton_launch import follow, overlaps
from twostep.model.step.kv_cache import KvCache

# Columns of a state that one program has: a quarter of Qwen3-Next's, so that one prompt fills the chip.
_COLUMNS = 32
# Prompts that the kernel which looks for a chunk's own is made for, at least: one program for most steps.
_LEAST_PROMPTS = 64
# Elements of a tile of the kernels that only pass over rows.
_MIXED, _LEFT = 1024, 2048

# How numbers of one type lie in the columns of a pool's blocks (step/state_columns.py). Kernels get that as one tuple, PLACES, whose items
# are counts of numbers where the drawing has an arrow, and else as said; these are their indices.
#
#     a block, quantized   | K of layer 0 | V of layer 0 | scales | K of layer 1 | V of layer 1 | scales |
#                          |<-- _PLANE -->|                       |
#                          |<--------------- _LAYER ------------->|     _RUN = 2 planes follow each other, then there is something else
#     another block        | K of layer 0 | V of layer 0 | K of layer 1 | V of layer 1 |           _RUN = 4: all of them
#     K or V of a layer    | column 0 | column 1 | column 2 | column 3 |
#                          |<-_PIECE->|                                 a column has a piece in each of the block's _PIECES planes
#     a column's pieces,   | key head 0 | key head 1 | ... _HEADS of them
#     one after the other  |<-- _HEAD ->|
_PIECE, _HEAD, _HEADS, _PIECES, _PLANE, _RUN, _LAYER = map(tl.constexpr, range(7))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """Says whose states a step's T rows read and write, S sequences' (places, where a captured step has more of them than sequences).

    sequences    int32 [T]     each row's sequence, or -1: padding, which reads and writes nothing
    offsets      int32 [T]     how many rows of its sequence are before it
    sources      int32 [S, n]  the blocks that the states are read from
    tables       int32 [S, n]  and those that they are written to, often the same
    num_decodes  sequences of one token come first, each in the row of its own number
    most_chunks  chunks of 64 tokens that the others have at most
    """

    sequences: torch.Tensor
    offsets: torch.Tensor
    sources: torch.Tensor
    tables: torch.Tensor
    num_decodes: int
    most_chunks: int


def most_chunks(num_rows: int, num_seqs: int) -> int:
    """Returns how many chunks of 64 so many sequences can have of so many rows."""
    return num_rows // CHUNK + num_seqs if num_seqs else 0


def owners(query_start: npt.NDArray[np.int32], places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Returns StateRows.sequences and .offsets, [T] each, of sequences that have these places."""
    counts = np.diff(query_start)
    offsets = np.arange(query_start[-1], dtype=np.int32) - np.repeat(query_start[:-1], counts)
    return np.repeat(places, counts).astype(np.int32), offsets.astype(np.int32)


def delta_net(
    projected: torch.Tensor,
    cache: KvCache,
    layer: int,
    *,
    rows: StateRows,
    positions: torch.Tensor,
    query_start: torch.Tensor,
    weights: DeltaWeights,
) -> torch.Tensor:
    """See AttentionPlan.attend_delta.

    projected    [T, dims.num_inputs + 2 * dims.num_value_heads], rows dense
    positions    integer [T]: a sequence whose first row has 0 begins
    query_start  int32 [S + 1]: first rows; those of decodes are not looked at
    """
    d, dtype, count = weights.dims, projected.dtype, len(projected)
    assert projected.stride(1) == 1
    assert all(x.is_contiguous() for x in (weights.conv, weights.dt_bias, weights.log_rate, weights.norm))
    assert rows.sources.stride(1) == rows.tables.stride(1) == 1
    assert len(rows.sources) == len(rows.tables) == len(query_start) - 1
    out = projected.new_empty(count, d.num_value_heads, d.value_dim)
    if not count:
        return out.view(0, -1)
    pdl, num_seqs = overlaps(projected.device), len(rows.tables)
    recurrent, inputs = cache.state_numbers(torch.float32, d.columns), cache.state_numbers(dtype, d.columns)
    first = layer * cache.shape.state_blocks_each(d.column_bytes(dtype.itemsize), d.columns.count)
    segment = 2 * d.key_dim + d.share * d.value_dim
    mixed = projected.new_empty(count, d.num_key_heads, segment)
    # What all kernels know of a state, and how they are launched.
    tables = (rows.sources, rows.tables, rows.sources.stride(0), rows.tables.stride(0), first)
    layout = {
        "KEYS": d.key_dim, "VALUES": d.value_dim, "NUM_KEY_HEADS": d.num_key_heads, "SHARE": d.share, "PDL": pdl, "launch_pdl": pdl,
    }  # fmt: skip
    kept = {"KERNEL": d.kernel, "KEPT_FROM": d.recurrent_numbers * 4 // dtype.itemsize, "KEPT": places_of(cache, d, dtype)}
    block = triton.next_power_of_2(segment)
    # Few rows have a program each: then all of them are in flight.
    tile = 1 if count <= CHUNK else max(1, _MIXED // block)
    _mix_kernel[(triton.cdiv(count, tile), d.num_key_heads)](
        projected, weights.conv, mixed, inputs, rows.sequences, rows.offsets, positions, *tables, count, rows.num_decodes,
        projected.stride(0), inputs.stride(0), ROWS=tile, BLOCK=block, **kept, **layout, num_warps=4,
    )  # fmt: skip
    columns = max(16, min(_COLUMNS, triton.next_power_of_2(d.value_dim)))
    parts = triton.cdiv(d.value_dim, columns)
    rule = {"UNIT_EPS": UNIT_EPS, "BLOCK_K": max(16, triton.next_power_of_2(d.key_dim))}
    part = {"HELD": places_of(cache, d, torch.float32), "BLOCK_V": columns}
    gates = (projected, weights.dt_bias, weights.log_rate, projected.stride(0))
    if rows.num_decodes:
        _decode_kernel[(rows.num_decodes, d.num_value_heads, parts)](
            mixed, *gates, out, recurrent, rows.sequences, positions, *tables, recurrent.stride(0), **part, **rule, **layout,
            num_warps=4,
        )  # fmt: skip
    num_prompts = num_seqs - rows.num_decodes
    if num_prompts and rows.most_chunks:
        # Of 16 bits: the errors that it leaves in an inverse are those of one that is stored in bfloat16. With three products for each, as
        # float32 needs, or with four warps, registers do not suffice.
        precision = "tf32x3" if dtype == torch.float32 else "tf32"
        prepared = torch.empty(count, d.num_value_heads, 2, CHUNK, dtype=torch.float32, device=projected.device)
        _prepare_kernel[(rows.most_chunks, d.num_value_heads)](
            mixed, *gates, prepared, query_start, rows.num_decodes, num_prompts, CHUNK=CHUNK,
            SEQS=max(_LEAST_PROMPTS, triton.next_power_of_2(num_prompts)), PRECISION=precision, IN_FLOAT32=not projected.is_cuda,
            **rule, **layout, num_warps=8,
        )  # fmt: skip
        _recall_kernel[(num_prompts, d.num_value_heads, parts)](
            mixed, *gates, prepared, out, recurrent, inputs, query_start, positions, *tables, rows.num_decodes, recurrent.stride(0),
            inputs.stride(0), CHUNK=CHUNK, SEGMENT_BLOCK=block, KERNEL_BLOCK=triton.next_power_of_2(d.kernel - 1), PRECISION=precision,
            **kept, **part, **rule, **layout, num_warps=8, num_stages=1,
        )  # fmt: skip
    left = torch.empty_like(out)
    block_v = triton.next_power_of_2(d.value_dim)
    heads = min(triton.next_power_of_2(d.num_value_heads), max(1, _LEFT // block_v))
    _leave_kernel[(count, triton.cdiv(d.num_value_heads, heads))](
        out, projected, weights.norm, left, rows.sequences, projected.stride(0), weights.eps, HEADS=heads, BLOCK_V=block_v, **layout,
        num_warps=4,
    )  # fmt: skip
    return left.view(count, -1)


def places_of(cache: KvCache, dims: DeltaDims, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns PLACES of numbers of this type."""
    shape, size = cache.shape, dtype.itemsize
    plane, planes = shape.plane_bytes // size, shape.num_planes
    if planes * shape.plane_bytes == shape.layer_bytes:
        planes *= shape.num_layers  # nothing is between two layers
    head = dims.head_bytes(cache.dtype.itemsize) // size
    pieces = shape.num_layers * shape.num_planes
    return plane // dims.columns.count, head, dims.heads_per_column, pieces, plane, planes, shape.layer_bytes // size


@triton.jit
def _piece(pool_ptr, table_ptr, piece, column, mask, stride, PLACES: tl.constexpr):
    """Pointers to pieces of a column."""
    block = tl.load(table_ptr + piece // PLACES[_PIECES], mask=mask, other=0)
    at = piece % PLACES[_PIECES]
    if PLACES[_RUN] == PLACES[_PIECES]:
        within = at * PLACES[_PLANE]
    else:
        within = at // PLACES[_RUN] * PLACES[_LAYER] + at % PLACES[_RUN] * PLACES[_PLANE]
    return pool_ptr + block.to(tl.int64) * stride + within + column * PLACES[_PIECE]


@triton.jit
def _in_blocks(pool_ptr, table_ptr, key_head, number, mask, stride, PLACES: tl.constexpr):
    """Pointers to numbers of a key head's state."""
    number += key_head % PLACES[_HEADS] * PLACES[_HEAD]
    return _piece(pool_ptr, table_ptr, number // PLACES[_PIECE], key_head // PLACES[_HEADS], mask, stride, PLACES) + number % PLACES[_PIECE]


@triton.jit
def _recurrent(pool_ptr, table_ptr, key_head, row, column, inside, stride, WIDTH: tl.constexpr, PLACES: tl.constexpr):
    """Pointers to rows [n, 1] and columns [1, m] of a key head's matrices, one upon the other."""
    if PLACES[_PIECE] % WIDTH == 0 and (PLACES[_HEADS] == 1 or PLACES[_HEAD] % WIDTH == 0):
        # No row is cut in two: neighbours of a row are neighbours in memory, and are loaded together.
        each: tl.constexpr = PLACES[_PIECE] // WIDTH
        row += key_head % PLACES[_HEADS] * (PLACES[_HEAD] // WIDTH)
        piece = _piece(pool_ptr, table_ptr, row // each, key_head // PLACES[_HEADS], inside, stride, PLACES)
        return piece + (row % each) * WIDTH + column
    return _in_blocks(pool_ptr, table_ptr, key_head, row * WIDTH + column, inside & (column < WIDTH), stride, PLACES)


@triton.jit
def _gates(
    projected_ptr, bias_ptr, rate_ptr, row, inside, head, stride, KEYS: tl.constexpr, VALUES: tl.constexpr, NUM_KEY_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """beta and log_decay of rows, both zero where not inside."""
    INPUTS: tl.constexpr = NUM_KEY_HEADS * 2 * (KEYS + SHARE * VALUES)
    at = projected_ptr + row.to(tl.int64) * stride + INPUTS + (head // SHARE) * 2 * SHARE + head % SHARE
    beta = tl.sigmoid(tl.load(at, mask=inside, other=0.0).to(tl.float32))
    x = tl.load(at + SHARE, mask=inside, other=0.0).to(tl.float32) + tl.load(bias_ptr + head)
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    log_decay = -tl.exp(tl.load(rate_ptr + head)) * softplus
    return tl.where(inside, beta, 0.0), tl.where(inside, log_decay, 0.0)


@triton.jit
def _channels(head, i, KEYS: tl.constexpr, VALUES: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, SHARE: tl.constexpr):
    """The convolution's numbers of a key head's q, k and v."""
    of_keys = tl.where(i < KEYS, head * KEYS + i, (NUM_KEY_HEADS - 1 + head) * KEYS + i)
    return tl.where(i < 2 * KEYS, of_keys, 2 * (NUM_KEY_HEADS - 1) * KEYS + head * SHARE * VALUES + i)


@triton.jit(do_not_specialize=["first", "num_rows", "num_decodes"])
def _mix_kernel(
    projected_ptr, conv_ptr, mixed_ptr, pool_ptr, sequences_ptr, offsets_ptr, positions_ptr, sources_ptr, tables_ptr, stride_sources,
    stride_tables, first, num_rows, num_decodes, stride_projected, stride_block, KEYS: tl.constexpr, VALUES: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, KERNEL: tl.constexpr, KEPT_FROM: tl.constexpr, KEPT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SEGMENT: tl.constexpr = 2 * KEYS + SHARE * VALUES
    BEFORE: tl.constexpr = KERNEL - 1
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    channel = _channels(head, i, KEYS, VALUES, NUM_KEY_HEADS, SHARE)
    weight = tl.load(conv_ptr + channel * KERNEL + BEFORE, mask=i < SEGMENT, other=0.0).to(tl.float32)
    if PDL:
        follow()
    sequence = tl.load(sequences_ptr + row, mask=row < num_rows, other=-1)
    offset = tl.load(offsets_ptr + row, mask=row < num_rows, other=0)
    position = tl.load(positions_ptr + row, mask=row < num_rows, other=0).to(tl.int32)
    inside = (sequence >= 0) & (i < SEGMENT)
    continued = inside & (position > offset)
    # Prompts leave their last inputs when all of their rows have been here: their first ones may still read what was kept.
    decodes = inside & (row < num_decodes) & (sequence == row)
    source = sources_ptr + sequence.to(tl.int64) * stride_sources + first
    table = tables_ptr + sequence.to(tl.int64) * stride_tables + first
    number = KEPT_FROM + i * BEFORE
    at = projected_ptr + row.to(tl.int64) * stride_projected + head * (SEGMENT + SHARE * VALUES) + i
    x = tl.load(at, mask=inside, other=0.0)
    acc = x.to(tl.float32) * weight
    for step in tl.static_range(BEFORE):
        # From the oldest input on, so that each that is kept moves to a place whose own has been read.
        back = BEFORE - step
        weight = tl.load(conv_ptr + channel * KERNEL + step, mask=i < SEGMENT, other=0.0).to(tl.float32)
        is_here = offset >= back
        here = tl.load(at - back * stride_projected, mask=inside & is_here, other=0.0)
        was_kept = continued & (offset < back)
        kept = number + step + offset
        before = tl.load(_in_blocks(pool_ptr, source, head, kept, was_kept, stride_block, KEPT), mask=was_kept, other=0.0)
        acc += tl.where(is_here, here, before).to(tl.float32) * weight
        if step > 0:
            tl.debug_barrier()
            to = _in_blocks(pool_ptr, table, head, number + step - 1, decodes, stride_block, KEPT)
            tl.store(to, before, mask=decodes)
    tl.debug_barrier()
    tl.store(_in_blocks(pool_ptr, table, head, number + BEFORE - 1, decodes, stride_block, KEPT), x, mask=decodes)
    acc *= tl.sigmoid(acc)
    to = mixed_ptr + (row.to(tl.int64) * NUM_KEY_HEADS + head) * SEGMENT + i
    tl.store(to, acc.to(mixed_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first"])
def _decode_kernel(
    mixed_ptr, projected_ptr, bias_ptr, rate_ptr, stride_projected, out_ptr, pool_ptr, sequences_ptr, positions_ptr, sources_ptr,
    tables_ptr, stride_sources, stride_tables, first, stride_block, KEYS: tl.constexpr, VALUES: tl.constexpr, NUM_KEY_HEADS: tl.constexpr,
    SHARE: tl.constexpr, HELD: tl.constexpr, UNIT_EPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    if PDL:
        follow()
    if tl.load(sequences_ptr + row) != row:
        return  # a place that is empty
    source = sources_ptr + row.to(tl.int64) * stride_sources + first
    table = tables_ptr + row.to(tl.int64) * stride_tables + first
    inside = (i < KEYS)[:, None]
    mask = inside & (j < VALUES)[None, :]
    matrix_row = (head % SHARE * KEYS + i)[:, None]
    at = _recurrent(pool_ptr, source, head // SHARE, matrix_row, j[None, :], inside, stride_block, VALUES, HELD)
    state = tl.load(at, mask=mask & (tl.load(positions_ptr + row) > 0), other=0.0)
    of_head = mixed_ptr + (row.to(tl.int64) * NUM_KEY_HEADS + head // SHARE) * (2 * KEYS + SHARE * VALUES)
    q = tl.load(of_head + i, mask=i < KEYS, other=0.0).to(tl.float32)
    k = tl.load(of_head + KEYS + i, mask=i < KEYS, other=0.0).to(tl.float32)
    v = tl.load(of_head + 2 * KEYS + (head % SHARE) * VALUES + j, mask=j < VALUES, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + UNIT_EPS) * tl.rsqrt(KEYS + 0.0)
    k *= tl.rsqrt(tl.sum(k * k, 0) + UNIT_EPS)
    beta, log_decay = _gates(projected_ptr, bias_ptr, rate_ptr, row, row >= 0, head, stride_projected, KEYS, VALUES, NUM_KEY_HEADS, SHARE)
    state *= tl.exp(log_decay)
    held = tl.sum(k[:, None] * state, 0)
    state += k[:, None] * ((v - held) * beta)[None, :]
    out = tl.sum(q[:, None] * state, 0)
    tl.store(_recurrent(pool_ptr, table, head // SHARE, matrix_row, j[None, :], inside, stride_block, VALUES, HELD), state, mask=mask)
    to = out_ptr + (row.to(tl.int64) * NUM_KEY_HEADS * SHARE + head) * VALUES + j
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=j < VALUES)


@triton.jit(do_not_specialize=["num_decodes", "num_prompts"])
def _prepare_kernel(
    mixed_ptr, projected_ptr, bias_ptr, rate_ptr, stride_projected, prepared_ptr, query_start_ptr, num_decodes, num_prompts,
    KEYS: tl.constexpr, VALUES: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, UNIT_EPS: tl.constexpr,
    BLOCK_K: tl.constexpr, SEQS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, IN_FLOAT32: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    if PDL:
        follow()
    # Which prompt has it: they take their numbers of chunks in turn.
    prompt = tl.arange(0, SEQS)
    is_prompt = prompt < num_prompts
    starts = tl.load(query_start_ptr + num_decodes + prompt, mask=is_prompt, other=0)
    stops = tl.load(query_start_ptr + num_decodes + prompt + 1, mask=is_prompt, other=0)
    counts = (stops - starts + CHUNK - 1) // CHUNK
    ends = tl.cumsum(counts, 0)
    own = tl.sum((ends <= chunk).to(tl.int32), 0)
    if own >= num_prompts:
        return
    start = tl.sum(tl.where(prompt == own, starts + (chunk - ends + counts) * CHUNK, 0), 0)
    stop = tl.sum(tl.where(prompt == own, stops, 0), 0)
    r, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    row = start + r
    inside = row < stop
    beta, log_decay = _gates(projected_ptr, bias_ptr, rate_ptr, row, inside, head, stride_projected, KEYS, VALUES, NUM_KEY_HEADS, SHARE)
    of_head = mixed_ptr + ((row.to(tl.int64) * NUM_KEY_HEADS + head // SHARE) * (2 * KEYS + SHARE * VALUES))[:, None] + i[None, :]
    mask = inside[:, None] & (i < KEYS)[None, :]
    q, k = tl.load(of_head, mask=mask, other=0.0), tl.load(of_head + KEYS, mask=mask, other=0.0)
    if IN_FLOAT32:
        q, k = q.to(tl.float32), k.to(tl.float32)
    # As they are, so that products of 16 bits lose nothing, and brought to their lengths afterwards.
    q_size, k_size = _inverse_length(q, UNIT_EPS) * tl.rsqrt(KEYS + 0.0), _inverse_length(k, UNIT_EPS)
    total = tl.cumsum(log_decay, 0)
    # What lies above the diagonal may overflow.
    decay = tl.exp(tl.where(r[:, None] >= r[None, :], total[:, None] - total[None, :], -float("inf"))) * k_size[None, :]
    inner = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay * q_size[:, None]
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * (k_size * beta)[:, None]
    inverse = _unit_inverse(system, CHUNK, PRECISION)
    to = prepared_ptr + ((row.to(tl.int64) * NUM_KEY_HEADS * SHARE + head) * 2 * CHUNK)[:, None] + r[None, :]
    tl.store(to, inverse, mask=inside[:, None])
    tl.store(to + CHUNK, inner, mask=inside[:, None])


@triton.jit
def _inverse_length(x, EPS: tl.constexpr):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + EPS)


@triton.jit
def _unit_inverse(x, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of a lower triangular matrix whose diagonal counts as ones; what is above it is not looked at."""
    PART: tl.constexpr = 16
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    same = i // PART == j // PART
    near = tl.where(same & (i > j), x, 0.0)
    inverse = tl.where(i == j, 1.0, 0.0)
    # A row of each part at once: their columns are apart.
    for row in range(1, PART):
        factors = tl.sum(tl.where(i % PART == row, near, 0.0), 0)
        change = tl.sum(factors[:, None] * inverse, 0)
        inverse -= tl.where(same & (i % PART == row), change[None, :], 0.0)
    far = tl.dot(inverse, tl.where(same | (i < j), 0.0, x), input_precision=PRECISION)
    squared = tl.dot(far, far, input_precision=PRECISION)
    solved = inverse + tl.dot(squared, inverse, input_precision=PRECISION)
    return solved - tl.dot(far, solved, input_precision=PRECISION)


@triton.jit(do_not_specialize=["first", "num_decodes"])
def _recall_kernel(
    mixed_ptr, projected_ptr, bias_ptr, rate_ptr, stride_projected, prepared_ptr, out_ptr, pool_ptr, inputs_ptr, query_start_ptr,
    positions_ptr, sources_ptr, tables_ptr, stride_sources, stride_tables, first, num_decodes, stride_block, stride_inputs,
    KEYS: tl.constexpr, VALUES: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, HELD: tl.constexpr,
    KERNEL: tl.constexpr, KEPT_FROM: tl.constexpr, KEPT: tl.constexpr, UNIT_EPS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, SEGMENT_BLOCK: tl.constexpr, KERNEL_BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    SEGMENT: tl.constexpr = 2 * KEYS + SHARE * VALUES
    sequence, head = num_decodes + tl.program_id(0), tl.program_id(1)
    if PDL:
        follow()
    start, stop = tl.load(query_start_ptr + sequence), tl.load(query_start_ptr + sequence + 1)
    if start >= stop:
        return
    continued = tl.load(positions_ptr + start) > 0
    source = sources_ptr + sequence.to(tl.int64) * stride_sources + first
    table = tables_ptr + sequence.to(tl.int64) * stride_tables + first
    if (head % SHARE == 0) & (tl.program_id(2) == 0):
        # For all heads of the key head.
        _keep_inputs(
            projected_ptr, inputs_ptr, source, table, head // SHARE, start, stop, continued, stride_projected, stride_inputs, KEYS, VALUES,
            NUM_KEY_HEADS, SHARE, KERNEL, KEPT_FROM, KEPT, SEGMENT_BLOCK, KERNEL_BLOCK,
        )  # fmt: skip
    i, r = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_state = (i < KEYS)[:, None]
    mask_state = inside_state & (j < VALUES)[None, :]
    matrix_row = (head % SHARE * KEYS + i)[:, None]
    at = _recurrent(pool_ptr, source, head // SHARE, matrix_row, j[None, :], inside_state, stride_block, VALUES, HELD)
    state = tl.load(at, mask=mask_state & continued, other=0.0)
    for since in range(start, stop, CHUNK):
        row = since + r
        inside = row < stop
        beta, log_decay = _gates(
            projected_ptr, bias_ptr, rate_ptr, row, inside, head, stride_projected, KEYS, VALUES, NUM_KEY_HEADS, SHARE
        )  # fmt: skip
        total, whole = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
        of_head = mixed_ptr + ((row.to(tl.int64) * NUM_KEY_HEADS + head // SHARE) * SEGMENT)[:, None]
        mask = inside[:, None] & (i < KEYS)[None, :]
        k = tl.load(of_head + KEYS + i[None, :], mask=mask, other=0.0).to(tl.float32)
        k *= _inverse_length(k, UNIT_EPS)[:, None]
        v_at = of_head + 2 * KEYS + (head % SHARE) * VALUES + j[None, :]
        mask_v = inside[:, None] & (j < VALUES)[None, :]
        v = tl.load(v_at, mask=mask_v, other=0.0).to(tl.float32)
        of_chunk = prepared_ptr + ((row.to(tl.int64) * NUM_KEY_HEADS * SHARE + head) * 2 * CHUNK)[:, None] + r[None, :]
        inverse = tl.load(of_chunk, mask=inside[:, None], other=0.0)
        since_start = tl.exp(total)[:, None]
        held = tl.dot(k, state, input_precision=PRECISION)
        value = tl.dot(inverse, (v - held * since_start) * beta[:, None], input_precision=PRECISION)
        q = tl.load(of_head + i[None, :], mask=mask, other=0.0).to(tl.float32)
        q *= (_inverse_length(q, UNIT_EPS) * tl.rsqrt(KEYS + 0.0))[:, None]
        out = tl.dot(q, state, input_precision=PRECISION) * since_start
        inner = tl.load(of_chunk + CHUNK, mask=inside[:, None], other=0.0)
        out = tl.dot(inner, value, out, input_precision=PRECISION)
        to = out_ptr + ((row.to(tl.int64) * NUM_KEY_HEADS * SHARE + head) * VALUES)[:, None] + j[None, :]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=mask_v)
        to_end = value * tl.exp(whole - total)[:, None]
        state = tl.dot(tl.trans(k), to_end, state * tl.exp(whole), input_precision=PRECISION)
    at = _recurrent(pool_ptr, table, head // SHARE, matrix_row, j[None, :], inside_state, stride_block, VALUES, HELD)
    tl.store(at, state, mask=mask_state)


@triton.jit
def _keep_inputs(
    projected_ptr, pool_ptr, source, table, key_head, start, stop, continued, stride_projected, stride_block, KEYS: tl.constexpr,
    VALUES: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, KERNEL: tl.constexpr, KEPT_FROM: tl.constexpr,
    KEPT: tl.constexpr, SEGMENT_BLOCK: tl.constexpr, KERNEL_BLOCK: tl.constexpr,
):  # fmt: skip
    """A prompt's last inputs, some of which were kept before if it has few."""
    SEGMENT: tl.constexpr = 2 * KEYS + SHARE * VALUES
    BEFORE: tl.constexpr = KERNEL - 1
    i, m = tl.arange(0, SEGMENT_BLOCK)[:, None], tl.arange(0, KERNEL_BLOCK)[None, :]
    mask = (i < SEGMENT) & (m < BEFORE)
    row = stop - BEFORE + m
    at = projected_ptr + row.to(tl.int64) * stride_projected + key_head * (SEGMENT + SHARE * VALUES) + i
    here = tl.load(at, mask=mask & (row >= start), other=0.0)
    was_kept = mask & (row < start) & continued
    kept = KEPT_FROM + i * BEFORE + m + stop - start
    before = tl.load(_in_blocks(pool_ptr, source, key_head, kept, was_kept, stride_block, KEPT), mask=was_kept, other=0.0)
    # Read by all threads before one writes.
    tl.debug_barrier()
    to = _in_blocks(pool_ptr, table, key_head, KEPT_FROM + i * BEFORE + m, mask, stride_block, KEPT)
    tl.store(to, tl.where(row >= start, here, before), mask=mask)


@triton.jit
def _leave_kernel(
    out_ptr, projected_ptr, norm_ptr, left_ptr, sequences_ptr, stride_projected, eps, KEYS: tl.constexpr, VALUES: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, HEADS: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, j = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK_V)[None, :]
    mask = (head < NUM_KEY_HEADS * SHARE) & (j < VALUES)
    weight = tl.load(norm_ptr + j, mask=j < VALUES, other=0.0).to(tl.float32)
    if PDL:
        follow()
    rounded: tl.constexpr = left_ptr.dtype.element_ty
    known = tl.load(sequences_ptr + row) >= 0
    place = (row * NUM_KEY_HEADS * SHARE + head) * VALUES + j
    x = tl.load(out_ptr + place, mask=mask & known, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 1) / VALUES + eps)[:, None]).to(rounded).to(tl.float32)
    normed = (normed * weight).to(rounded).to(tl.float32)
    of_head = (head // SHARE) * 2 * (KEYS + SHARE * VALUES) + 2 * KEYS + (SHARE + head % SHARE) * VALUES
    z = tl.load(projected_ptr + row * stride_projected + of_head + j, mask=mask & known, other=0.0).to(tl.float32)
    tl.store(left_ptr + place, (normed * z * tl.sigmoid(z)).to(rounded), mask=mask)
