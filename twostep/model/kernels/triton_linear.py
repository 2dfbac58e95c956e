"""Linear layers of 16-bit weights on GPUs: this project's kernels while tokens are few and the weight's bytes are the floor, cuBLAS beyond.

    tokens      1 … 2              3 … 64 (gated: 128)           more
    kernel      rows               tiles                         cuBLAS
                of the weight      of it stream to the tensor    the best where arithmetic counts
                in registers       cores; parts of K where
                                   its rows are few

Which one, and its layout, follow from the shape alone, so a captured step always takes the same, and a result is the same every time.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
import triton

from twostep.model.kernels.triton_elementwise import silu_mul
from twostep.model.kernels.triton_launch import overlaps, shared_bytes_of
from twostep.model.kernels.triton_linear_rows import RowTile, linear_rows
from twostep.model.kernels.triton_linear_tiles import LinearTile, linear_tiles

_DTYPES = (torch.bfloat16, torch.float16)
# Weights come in pieces of 16 bytes.
_ALIGNMENT = 8
# Tokens up to which rows in registers are faster than tiles through tensor cores, tiles than cuBLAS, and gated tiles than cuBLAS.
_ROWS_UP_TO = 2
_TILES_UP_TO = 64
_GATED_TILES_UP_TO = 128
_WIDEST_ROW = 16384
_MOST_PARTS = 8
# Shared memory of a program beside its tiles: barriers, and what threads exchange.
_SHARED_SLACK = 4096
# On both sides of every change of kernel or layout. Both results are rounded to 16 bits, which makes some thousandths.
_TRIAL_TOKENS = (1, 2, 3, 16, 17, 32, 33, 64, 65, 128)
_TRIAL_DIFFERENCE = 2e-2


class StreamedLinear:
    """x @ weight.T + bias; or, gated, silu of its first half times the second."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False) -> None:
        """weight [N, K], gated [2 * N, K] with the gates first; bias [N] or [2 * N]"""
        self._weight = weight
        self._bias = bias
        self._gated = gated

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N] from x [T, K]."""
        return self._run(x, in_parts=False)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N] or, where that is faster, float32 [parts, T, N], whose sum over the parts it is."""
        return self._run(x, in_parts=not self._gated)

    def trial(self) -> str:
        """Runs every kernel that steps of this layer will take, beside cuBLAS. Empty, or what went wrong: a card or a compiler that nobody
        tried must not show in the tokens."""
        generator = torch.Generator(self._weight.device).manual_seed(0)
        width = self._weight.shape[1]
        for tokens in _TRIAL_TOKENS:
            x = torch.randn(tokens, width, generator=generator, device=self._weight.device).to(self._weight.dtype)
            want = F.linear(x, self._weight, self._bias)
            want = (silu_mul(want) if self._gated else want).float()
            try:
                parts = self.parts(x).float()
                results = (self(x).float(), parts.sum(0) if parts.dim() == 3 else parts)
            except Exception as error:  # noqa: BLE001 - whatever a compiler or driver raises
                return f"the kernel for {tokens} tokens fails: {type(error).__name__}: {str(error)[:200]}"
            for result in results:
                difference = float((result - want).norm() / want.norm().clamp(min=1e-30))
                if not difference < _TRIAL_DIFFERENCE:
                    return f"the kernel for {tokens} tokens differs from cuBLAS by {difference:.1e}"
        return ""

    def _run(self, x: torch.Tensor, *, in_parts: bool) -> torch.Tensor:
        num_out, width = self._weight.shape
        chip = {"num_sms": _num_sms(x.device), "shared_bytes": _shared_bytes(x.device)}
        tile = choose_tile(len(x), num_out, width, gated=self._gated, in_parts=in_parts, **chip)
        if isinstance(tile, RowTile):
            return linear_rows(x, self._weight, self._bias, tile=tile, gated=self._gated)
        if isinstance(tile, LinearTile):
            return linear_tiles(x, self._weight, self._bias, tile=tile, gated=self._gated)
        y = F.linear(x, self._weight, self._bias)
        return silu_mul(y) if self._gated else y


def can_stream(weight: torch.Tensor) -> bool:
    """Whether StreamedLinear takes this weight."""
    return weight.dtype in _DTYPES and weight.is_contiguous() and weight.shape[1] % _ALIGNMENT == 0


@functools.cache
def _num_sms(device: torch.device) -> int:
    # The interpreter runs programs one by one: a few show all that many would.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _shared_bytes(device: torch.device) -> int:
    # What overlaps its neighbours has the tensor memory accelerator: both came with Hopper.
    return shared_bytes_of(device) if device.type != "cuda" or overlaps(device) else 0


def choose_tile(
    tokens: int, num_out: int, width: int, *, gated: bool, in_parts: bool, num_sms: int, shared_bytes: int
) -> RowTile | LinearTile | None:
    """Which kernel multiplies `tokens` rows with a weight [num_out, width] (gated: num_out counts both halves); None: cuBLAS.

    in_parts      whether the result may come as several terms of a sum
    num_sms       multiprocessors of the device
    shared_bytes  shared memory that a program may take; 0: the device has no tensor memory accelerator, and tiles are not for it

    Measured on an H200 with the shapes of an 8B model (benchmarks/gpu_linear.py --sweep; the table is in benchmarks/RESULTS.md).
    """
    if tokens <= _ROWS_UP_TO and width * (1 + gated) <= _WIDEST_ROW:
        # At least 64 numbers of the weight to a thread, gated twice that.
        return RowTile(rows=max(2, 8192 // triton.next_power_of_2(width)), num_warps=4)
    if tokens > (_GATED_TILES_UP_TO if gated else _TILES_UP_TO):
        return None
    tile = _tile(tokens, num_out, width, gated=gated, in_parts=in_parts, num_sms=num_sms)
    if tile is None or _bytes_on_their_way(tile, tokens) + _SHARED_SLACK > shared_bytes:
        return None
    return tile


def _tile(tokens: int, num_out: int, width: int, *, gated: bool, in_parts: bool, num_sms: int) -> LinearTile | None:
    if tokens > 64:
        return LinearTile(cols=256, depth=64, parts=1, num_warps=8, num_stages=4, turned=True, bulk=True)
    stages = 5 if tokens <= 32 else 4
    wide = LinearTile(cols=128, depth=128, parts=1, num_warps=4, num_stages=stages, turned=True, bulk=True)
    if gated or num_out >= wide.cols * num_sms:
        return wide
    # Few rows: not every multiprocessor would have some. Parts of them reach all, at the price of adding up more numbers than cuBLAS
    # has to write, so that longer rows pay for more tokens.
    parts = min(_MOST_PARTS, max(1, num_sms * wide.cols // num_out))
    if in_parts and parts > 1 and (tokens <= 32 or width >= 8192):
        if tokens <= 16:
            return LinearTile(cols=64, depth=128, parts=parts, num_warps=4, num_stages=5, turned=False, bulk=True)
        return replace(wide, parts=parts, num_warps=8)
    if tokens <= 32:
        return LinearTile(cols=64, depth=128, parts=1, num_warps=4, num_stages=5, turned=True, bulk=False)
    return None


def _bytes_on_their_way(tile: LinearTile, tokens: int) -> int:
    """Of weight and tokens, in the shared memory of one program."""
    padded = max(16, 1 << (tokens - 1).bit_length())
    return (tile.cols + padded) * tile.depth * 2 * tile.num_stages
