"""Puts a dense weight into a format of fewer bits, each number to the nearest: what --quantization does to a layer as it is read, and how
made-up weights of quantized layers are made."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from twostep.checkpoint.linear_format import LinearFormat
from twostep.model.kernels.quantized_weight import FLOAT4, QuantizedWeight

_FLOAT8 = torch.float8_e4m3fn
# What lies in the middle between two floats of 4 bits.
_BETWEEN = tuple((low + high) / 2 for low, high in itertools.pairwise(FLOAT4[:8]))
# Of a weight that are quantized at a time, in float32.
_ELEMENTS_AT_ONCE = 1 << 22


def quantize(weight: torch.Tensor, format: LinearFormat) -> QuantizedWeight:
    """weight [N, K], dense, on any device. Scales take the largest magnitude of a block to the largest number; there are no zero points,
    whatever the format says of them. Rows and columns of zeros have scale 1."""
    rows, columns = weight.shape
    height, width = format.block[0] or 1, format.block[1] or columns
    halves = format.halves and columns % 2 == 0
    float4 = format.is_float and format.bits == 4
    assert halves or not float4
    dtype = torch.uint8 if halves else _FLOAT8 if format.is_float else torch.int8
    values = torch.empty(rows, columns // 2 if halves else columns, dtype=dtype, device=weight.device)
    scales = torch.empty(-(-rows // height), -(-columns // width), dtype=torch.float32, device=weight.device)
    at_once = max(1, _ELEMENTS_AT_ONCE // max(1, columns * height)) * height
    for start in range(0, rows, at_once):
        chunk = weight[start : start + at_once].float()
        blocks = F.pad(chunk, (0, -columns % width, 0, -len(chunk) % height))
        # [blocks of rows, height, blocks of columns, width]
        blocks = blocks.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        if float4:
            # The largest exponent of 4 bits is 2.
            scale = torch.exp2(blocks.abs().amax((1, 3)).log2().floor() - 2)
        else:
            scale = _to_the_lowest(blocks) if format.bits == 4 else blocks.abs().amax((1, 3)) / _largest(format)
        scale = torch.where(scale == 0, 1.0, scale)
        scales[start // height : start // height + len(scale)] = scale
        numbers = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[: len(chunk), :columns]
        if float4:
            q = torch.bucketize(numbers.abs(), torch.tensor(_BETWEEN, device=weight.device)).to(torch.uint8)
            q += (numbers < 0).to(torch.uint8) * 8
            values[start : start + at_once] = q[:, ::2] | q[:, 1::2] << 4
            continue
        if format.is_float:
            values[start : start + at_once] = numbers.clamp_(-_largest(format), _largest(format)).to(_FLOAT8)
            continue
        least = -(1 << (format.bits - 1))
        numbers = numbers.round_().clamp_(least, -least - 1)
        if halves:
            q = numbers.sub_(least).to(torch.uint8)
            values[start : start + at_once] = q[:, ::2] | q[:, 1::2] << 4
        else:
            values[start : start + at_once] = numbers.to(torch.int8)
    return QuantizedWeight(values=values, scales=scales, group=width, block_rows=height, float4=float4)


def _largest(format: LinearFormat) -> float:
    return torch.finfo(_FLOAT8).max if format.is_float else float((1 << (format.bits - 1)) - 1)


def _to_the_lowest(blocks: torch.Tensor) -> torch.Tensor:
    """Returns scales [R, C] of blocks [R, height, C, width] by which the number of the largest magnitude becomes -8, whichever sign it has:
    there is no 8, and steps of an eighth are smaller than those of a seventh. So does llama.cpp's Q4_0. To cut the largest off for the
    others' sake has a smaller squared error, and worse answers."""
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    return torch.where(-low > high, low, high) / -8
