"""Inputs of quantized products, rounded on a GPU in one pass, alone or by the kernel that computes them.

The oracle is InputQuantizer: the same numbers, which stay in 8 bits here, beside the scales that the product multiplies its sums with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.triton_launch import follow, overlaps
from twostep.model.kernels.triton_quantized_kv import e4m3_bytes, peak_of

INPUT_GROUP = 128  # columns of an input that share a scale, where not all do
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_WIDEST_ROW = 32768


@dataclass(frozen=True, slots=True)
class RoundedInput:
    """values  float8_e4m3fn or int8 [T, K], dense
    scales  float32 [T], or [⌈K / 128⌉, T]; NaN where a token (or its columns) had one
    """

    values: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def empty(tokens: int, width: int, how: InputQuantizer, device: torch.device) -> RoundedInput:
        dtype = torch.float8_e4m3fn if how.how.is_float else torch.int8
        shape = (-(-width // INPUT_GROUP), tokens) if how.how.group else (tokens,)
        return RoundedInput(torch.empty(tokens, width, dtype=dtype, device=device), torch.empty(shape, dtype=torch.float32, device=device))


class RoundedBeside:
    """Passes an input on as it is. A kernel ahead that rounds it as well leaves that here, for the product that takes it so."""

    def __init__(self, how: InputQuantizer, rows_up_to: int) -> None:
        """`rows_up_to`: inputs of so few tokens are rounded where they are multiplied."""
        self.how = how
        self._rows_up_to = rows_up_to
        self._last: tuple[torch.Tensor, RoundedInput] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def wants(self, tokens: int) -> bool:
        return tokens > self._rows_up_to

    def leave(self, x: torch.Tensor, rounded: RoundedInput) -> None:
        self._last = x, rounded

    def take(self, x: torch.Tensor) -> RoundedInput:
        """Returns x, rounded: what was left of it, or else now."""
        last, self._last = self._last, None
        return last[1] if last is not None and last[0] is x else round_input(x, self.how)


def can_round(how: InputQuantizer, width: int) -> bool:
    """Returns whether round_input rounds so."""
    return how.how.symmetric and how.how.group in (0, INPUT_GROUP) and width <= _WIDEST_ROW


def round_input(x: torch.Tensor, how: InputQuantizer) -> RoundedInput:
    """x [T, K], rows dense, as `how` rounds it."""
    tokens, width = x.shape
    assert x.stride(1) == 1
    out = RoundedInput.empty(tokens, width, how, x.device)
    if tokens:
        pdl, block = overlaps(x.device), triton.next_power_of_2(max(width, INPUT_GROUP))
        _round_kernel[(tokens,)](
            x, x.stride(0), *round_arguments(out, how), tokens, WIDTH=width, BLOCK=block, **round_constants(how),
            PDL=pdl, num_warps=8 if block >= 4096 else 4, launch_pdl=pdl,
        )  # fmt: skip
    return out


def round_arguments(out: RoundedInput, how: InputQuantizer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What store_rounded asks of a kernel: where numbers and scales go, and the static scale."""
    return out.values, out.scales, out.scales if how.scale is None else how.scale


def round_constants(how: InputQuantizer) -> dict[str, object]:
    # The interpreter's own conversion to 8 bits rounds ties up.
    return {"STATIC": how.scale is not None, "GROUPS": how.how.group > 0, "HARDWARE": how.device.type == "cuda"}


@triton.jit(do_not_specialize=["tokens"])
def _round_kernel(
    x_ptr, stride_x, values_ptr, scales_ptr, static_ptr, tokens,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STATIC: tl.constexpr, GROUPS: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        follow()
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * stride_x + col, mask=(row < tokens) & (col < WIDTH), other=0.0)
    store_rounded(x, values_ptr, scales_ptr, static_ptr, row, col, tokens, WIDTH, BLOCK, 1, STATIC, GROUPS, HARDWARE)


@triton.jit
def store_rounded(
    x, values_ptr, scales_ptr, static_ptr, row, col, tokens,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STATIC: tl.constexpr, GROUPS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Rounds whole rows x [ROWS, BLOCK] of `tokens`, zeros past WIDTH; row [ROWS, 1], col [1, BLOCK]."""
    COUNT: tl.constexpr = BLOCK // 128 if GROUPS else 1
    # A row for each scale.
    x = tl.reshape(x.to(tl.float32), [ROWS * COUNT, BLOCK // COUNT])
    numbers, scale = rounded(x, static_ptr, values_ptr.dtype.element_ty != tl.int8, STATIC, HARDWARE)
    mask = (row < tokens) & (col < WIDTH)
    tl.store(values_ptr + row * WIDTH + col, tl.reshape(numbers, [ROWS, BLOCK]), mask=mask)
    group = tl.arange(0, COUNT)[None, :]
    at = group.to(tl.int64) * tokens + row
    tl.store(scales_ptr + at, tl.reshape(scale, [ROWS, COUNT]), mask=(row < tokens) & (group * 128 < WIDTH))


@triton.jit
def rounded(x, static_ptr, FLOAT8: tl.constexpr, STATIC: tl.constexpr, HARDWARE: tl.constexpr):
    """Rounds each row of x, float32, as one. Returns the numbers, and the scales, a column."""
    LIMIT: tl.constexpr = 448.0 if FLOAT8 else 127.0
    peak = peak_of(x)
    scale = tl.load(static_ptr) if STATIC else tl.div_rn(peak, tl.full(peak.shape, LIMIT, tl.float32))
    scale = tl.where(peak == peak, tl.maximum(scale, _TINY), peak)
    scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    if FLOAT8:
        scaled = tl.clamp(scaled, -448.0, 448.0)
        numbers = scaled.to(tl.float8e4nv) if HARDWARE else e4m3_bytes(scaled).to(tl.float8e4nv, bitcast=True)
    else:
        # The nearest integer, ties to even, is left in the low digits.
        digits = (tl.clamp(scaled, -128.0, 127.0) + 12582912.0).to(tl.int32, bitcast=True)
        numbers = ((digits << 24) >> 24).to(tl.int8)
    return numbers, scale
