"""Linear layers whose weights stay quantized, on GPUs: which kernel multiplies, and the layout that it reads.

    weight x input      fp8 x fp8          int8 x int8            4 or 8 bits x 16 bits
    kernel              rows 1             eight                  unpack
                        eight -64
                        cuBLAS             (whole rows, no        dense, cuBLAS from 192 or 256 tokens on, where writing the
                        (blocks: eight)    zero points)           dense weight first costs less than unpacking in every tile

Inputs of 8 bits are rounded by a kernel of their own, by the norm ahead (triton_elementwise.py), or, for rows, by each program. Where a
format asks for another pair (4-bit weights with fp8 inputs, say), the input is rounded first and stays in 16 bits. What no kernel takes is
made dense anew for every product in torch (multiply_dense). Measured on an H200 (benchmarks/gpu_quantized_linear.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton

from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.linear_trial import try_linear
from twostep.model.kernels.ops import LinearInParts
from twostep.model.kernels.quantized_weight import QuantizedWeight, multiply_dense
from twostep.model.kernels.triton_elementwise import silu_mul
from twostep.model.kernels.triton_launch import num_sms_of, overlaps, shared_bytes_of
from twostep.model.kernels.triton_quantized_input import INPUT_GROUP, RoundedInput, can_round, round_input
from twostep.model.kernels.triton_quantized_linear_rows import QuantizedRowTile, multiply_rows
from twostep.model.kernels.triton_quantized_linear_tiles import Packed, QuantizedTile, multiply_eight, multiply_unpacked, unpack_dense

_FLOAT8 = torch.float8_e4m3fn
QUANTIZED_DTYPES = (torch.bfloat16, torch.float16)  # of inputs and results
# Weights and inputs come in pieces of 16 bytes.
_ALIGNMENT = 16
_MOST_PARTS = 8
_MOST_SUMS = 512  # tokens times parts
_ROWS_UP_TO = 1
_WIDEST_ROW = 32768
_ROW_BYTES = 16384  # of a program's weights in registers
_EIGHT_UP_TO = 64
_UNPACKED_UP_TO = {4: 192, 8: 256}
_UNPACKED_GATES_UP_TO = 64
# Tiles of a product in parts, of which the last program of each adds up: more than fill any chip.
_MOST_MERGED = 2048
# Shared memory of a program beside its tiles: barriers, and what threads exchange.
_SHARED_SLACK = 4096
_TRIAL_TOKENS = (1, 2, 3, 16, 17, 64, 65, 128, 300)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedWeight:
    """A weight [N, K] on its device in the layout of its kernel: `packed`, or, where no kernel takes it, `dense`."""

    shape: tuple[int, int]
    activations: InputQuantizer | None
    packed: Packed | None
    dense: QuantizedWeight | None

    @property
    def takes_rounded(self) -> bool:
        """Returns whether the kernel multiplies a RoundedInput, else numbers of 16 bits."""
        return self.packed is not None and self.packed.values.dtype != torch.int16

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in (self.packed, self.dense) if part is not None)


def prepare(weight: QuantizedWeight, device: torch.device | str, *, slice: int = 0) -> PreparedWeight:
    """Takes `weight` to `device` and its kernel's layout: drop yours. `slice`: columns of an unpacked slice that are tried instead of the
    best (32 or 64)."""
    device = torch.device(device)
    if weight.device != device:
        zeros = None if weight.zeros is None else weight.zeros.to(device)
        weight = replace(weight, values=weight.values.to(device), scales=weight.scales.to(device), zeros=zeros)
    packed = _packed(weight, slice)
    return PreparedWeight(shape=weight.shape, activations=weight.activations, packed=packed, dense=weight if packed is None else None)


def _packed(weight: QuantizedWeight, slice: int) -> Packed | None:
    columns = weight.shape[1]
    if columns % _ALIGNMENT or (weight.device.type == "cuda" and not overlaps(weight.device)):
        # Tiles come by the tensor memory accelerator: that and kernels that overlap came with Hopper.
        return None
    is_float, group = weight.values.dtype == _FLOAT8 or weight.float4, weight.group if weight.group < columns else 0
    how = weight.activations
    eight = how is not None and can_round(how, columns) and how.how.is_float == is_float and weight.bits == 8
    if eight and (group in (0, INPUT_GROUP) if is_float else not group and weight.zeros is None and not how.how.group):  # type: ignore[union-attr]
        values, zeros = weight.values, None
    else:
        slices = 16 // weight.bits
        # Slices of 64 columns are fewer steps, but those of groups would take more registers than there are.
        slice = slice or (64 if group % 64 == 0 and (weight.bits == 8 or not group) else 32)
        block = slices * slice
        if group % slice or (group % block and block % max(1, group)):
            return None
        values = _words(weight, slice)
        zeros = None if weight.zeros is None else weight.zeros.float().T.contiguous()
        # Blocks past the last column have scales, too.
        groups = -(-columns // block) * block // (group or columns)
        padding = max(0, groups - weight.scales.shape[1]) if group else 0
        scales = F.pad(weight.scales.T, (0, 0, 0, padding)).contiguous()
        zeros = None if zeros is None else F.pad(zeros, (0, 0, 0, padding)).contiguous()
        return _make(weight, values, scales, zeros, group, is_float)
    return _make(weight, values, weight.scales.T.contiguous(), zeros, group, is_float)


def _make(
    weight: QuantizedWeight, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, is_float: bool
) -> Packed:
    rows, columns = weight.shape
    return Packed(
        values=values, scales=scales, zeros=zeros, group=group, block_rows=weight.block_rows, num_out=rows, width=columns,
        bits=weight.bits, is_float=is_float, counters=torch.zeros(_MOST_MERGED, dtype=torch.int32, device=weight.device),
    )  # fmt: skip


def _words(weight: QuantizedWeight, slice: int) -> torch.Tensor:
    """The numbers as the kernel `unpack` reads them: int16 [K blocks * N, slice]."""
    rows, columns = weight.shape
    numbers = weight.values.view(torch.uint8)
    if weight.bits == 4:
        numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)
    slices = 16 // weight.bits
    numbers = F.pad(numbers, (0, -columns % (slices * slice)))
    # [K blocks, N, slices, slice]
    numbers = numbers.view(rows, -1, slices, slice).transpose(0, 1)
    words = torch.zeros(len(numbers), rows, slice, dtype=torch.int16, device=numbers.device)
    for p in range(slices):
        words |= numbers[:, :, p].to(torch.int16) << (weight.bits * p)
    return words.view(-1, slice)


def quantized_linear(
    weight: PreparedWeight,
    x: torch.Tensor | RoundedInput,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    in_parts: bool = False,
    dtype: torch.dtype | None = None,
    tile: QuantizedTile | QuantizedRowTile | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias, float32 inside, x rounded as the weight says.

    x         [T, K], rows dense, in 16 bits; or, where the weight `takes_rounded`, what was rounded so already
    bias      [N]
    gated     silu of the first half of the result times the second: [T, N / 2]
    in_parts  the result may be float32 [parts, T, N], whose sum over the parts it is, where that is faster
    dtype     of the result, where x is a RoundedInput; else x's
    tile      in place of the one that choose_tile chooses
    Returns [T, N].
    """
    packed, how = weight.packed, weight.activations
    assert not (gated and in_parts)
    if isinstance(x, torch.Tensor):
        dtype = x.dtype
    assert dtype is not None
    if packed is None:
        assert isinstance(x, torch.Tensor)
        assert weight.dense is not None
        y = multiply_dense(weight.dense, x, bias)
        return silu_mul(y) if gated else y
    assert dtype in QUANTIZED_DTYPES
    tokens, device = len(x if isinstance(x, torch.Tensor) else x.values), packed.values.device
    if tile is None:
        tile = choose_tile(packed, tokens, gated=gated, num_sms=num_sms_of(device), shared_bytes=shared_bytes_of(device))
    if isinstance(tile, QuantizedRowTile):
        assert how is not None
        return multiply_rows(x, packed, bias, how=how, tile=tile, dtype=dtype, gated=gated)
    if isinstance(x, torch.Tensor) and how is not None:
        x = round_input(x, how) if weight.takes_rounded else how(x)
    if tile is None:
        y = _multiply_library(x, packed, bias, dtype)
        return silu_mul(y) if gated else y
    if isinstance(x, RoundedInput):
        return multiply_eight(x, packed, bias, tile=tile, dtype=dtype, gated=gated, in_parts=in_parts)
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % _ALIGNMENT or x.data_ptr() % _ALIGNMENT:
        x = x.contiguous()
    # Gates beside what they gate would take tiles of many tokens more registers than there are.
    apart = gated and tile.tokens > _UNPACKED_GATES_UP_TO
    y = multiply_unpacked(x, packed, bias, tile=tile, gated=gated and not apart, in_parts=in_parts)
    return silu_mul(y) if apart else y


def _multiply_library(x: torch.Tensor | RoundedInput, packed: Packed, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """By cuBLAS: fp8 on both sides, or the dense weight, written first."""
    if isinstance(x, torch.Tensor):
        return F.linear(x, unpack_dense(packed, dtype), bias)
    y: torch.Tensor = torch._scaled_mm(
        x.values, packed.values.t(), x.scales[:, None], packed.scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    y = y.to(dtype)
    return y if bias is None else y.add_(bias)


def choose_tile(packed: Packed, tokens: int, *, gated: bool, num_sms: int, shared_bytes: int) -> QuantizedTile | QuantizedRowTile | None:
    """How so many tokens are multiplied; None: by cuBLAS. It follows from the shape alone, so that a captured step always does the same."""
    unpack, grouped, tokens = packed.values.dtype == torch.int16, bool(packed.group), max(1, tokens)
    width = packed.width * (1 + gated)
    if not unpack and packed.is_float and not grouped and tokens <= _ROWS_UP_TO and width <= _WIDEST_ROW:
        return QuantizedRowTile(rows=max(2, _ROW_BYTES // triton.next_power_of_2(width)), num_warps=4)
    by_library = unpack or (packed.is_float and not grouped and packed.num_out % _ALIGNMENT == 0)
    if by_library and tokens > (_UNPACKED_UP_TO[packed.bits] if unpack else _EIGHT_UP_TO):
        return None
    few_bits = unpack and packed.bits == 4
    if tokens <= 64:
        tile = QuantizedTile(
            tokens=max(16, triton.next_power_of_2(tokens)), cols=128, num_warps=4, num_stages=8, ahead=2, bulk=not few_bits
        )
        if few_bits and tokens <= 32:
            # By the instructions of warps, not of groups of four: nobody waits for them.
            tile = replace(tile, cols=64, num_warps=2, num_stages=6)
        elif tokens > 16 and not (unpack or grouped or gated) and packed.num_out < 128 * num_sms:
            tile = replace(tile, cols=64)
    elif tokens <= 256 or unpack:
        tile = QuantizedTile(tokens=128, cols=128, num_warps=8, num_stages=5, bulk=not unpack)
    else:
        tile = QuantizedTile(tokens=128, cols=128 if grouped else 256, num_warps=8, num_stages=4, turned=False, exact=False)
    tiles = -(-packed.num_out // tile.cols) * -(-tokens // tile.tokens)
    # Programs of a multiprocessor.
    beside = 4 if tile.num_warps == 2 else 2 if tokens <= 16 or unpack or grouped else 1
    if tiles > beside * num_sms:
        # The bytes of a program that waits for its place are not missed yet.
        tile = replace(tile, ahead=0, num_stages=4 if unpack else tile.num_stages)
    if not gated and not (tokens > 256):
        # No part is less than two steps, and there are not more sums than cost as much as the weight.
        steps = -(-packed.width // step_of(packed, tile))
        parts = min(_MOST_PARTS, beside * num_sms // tiles, steps // 2, _MOST_SUMS // tokens)
        tile = replace(tile, parts=1 << max(1, parts).bit_length() - 1)
    if tokens <= 64:
        shared_bytes //= min(max(2, beside), -(-tiles * tile.parts // num_sms))
    while tile.num_stages > 2 and bytes_on_their_way(packed, tile) + _SHARED_SLACK > shared_bytes:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    return tile


def step_of(packed: Packed, tile: QuantizedTile) -> int:
    """Columns that a program multiplies at a time."""
    return packed.num_slices * packed.slice if packed.values.dtype == torch.int16 else tile.depth


def bytes_on_their_way(packed: Packed, tile: QuantizedTile) -> int:
    """Bytes of weight and tokens in the shared memory of one program."""
    if packed.values.dtype == torch.int16:
        step = tile.cols * packed.slice * 2 + tile.tokens * packed.slice * packed.num_slices * 2
    else:
        step = (tile.cols + tile.tokens) * tile.depth
    if packed.group:
        step += 4 * tile.cols * -(-step_of(packed, tile) // packed.group) * (1 if packed.zeros is None else 2)
    return step * tile.num_stages


class QuantizedLinear(LinearInParts):
    """x @ weight.T + bias; or, gated, silu of its first half times the second."""

    def __init__(self, weight: PreparedWeight, bias: torch.Tensor | None, *, gated: bool = False) -> None:
        """bias [N]; gated: the first half of N are the gates'"""
        self.weight = weight
        self._bias = bias
        self._gated = gated

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(self.weight, x, self._bias, gated=self._gated)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(self.weight, x, self._bias, gated=self._gated, in_parts=not self._gated)

    def of_rounded(self, x: RoundedInput, dtype: torch.dtype) -> torch.Tensor:
        """The product of what a kernel ahead has rounded as the weight says, in `dtype`; for a weight that `takes_rounded`."""
        return quantized_linear(self.weight, x, self._bias, gated=self._gated, dtype=dtype)

    def trial(self, weight: QuantizedWeight, dtype: torch.dtype) -> str:
        """Runs every kernel that steps of this layer will take, beside the product by way of `weight`, which this layer was made of, made
        dense. Empty, or what went wrong."""

        def right(x: torch.Tensor) -> torch.Tensor:
            y = multiply_dense(weight, x, self._bias)
            return silu_mul(y) if self._gated else y

        return try_linear(self, right, num_tokens=_TRIAL_TOKENS, width=weight.shape[1], dtype=dtype, device=weight.device)
