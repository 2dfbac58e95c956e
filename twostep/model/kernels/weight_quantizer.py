"""Puts a dense weight into a format of fewer bits, by the largest number of each channel, group or block: what --quantization does to a
layer as it is read, and how made-up weights of quantized layers are made."""

from __future__ import annotations

import torch

from twostep.checkpoint.linear_format import LinearFormat
from twostep.model.kernels.quantized_weight import QuantizedWeight

_FLOAT8 = torch.float8_e4m3fn
# Of a weight that are quantized at a time, in float32.
_ELEMENTS_AT_ONCE = 1 << 22


def quantize(weight: torch.Tensor, format: LinearFormat) -> QuantizedWeight:
    """weight [N, K], dense, on any device. A scale is the largest magnitude of its rows and columns by the largest number of the format,
    the same without zero points whatever the format says of them. Rows and columns of zeros have scale 1."""
    rows, columns = weight.shape
    height, width = format.block[0] or 1, format.block[1] or columns
    halves = not format.is_float and format.bits == 4 and columns % 2 == 0
    dtype = _FLOAT8 if format.is_float else torch.uint8 if halves else torch.int8
    values = torch.empty(rows, columns // 2 if halves else columns, dtype=dtype, device=weight.device)
    largest = torch.finfo(_FLOAT8).max if format.is_float else float((1 << (format.bits - 1)) - 1)
    scales = torch.empty(-(-rows // height), -(-columns // width), dtype=torch.float32, device=weight.device)
    at_once = max(1, _ELEMENTS_AT_ONCE // max(1, columns * height)) * height
    for start in range(0, rows, at_once):
        chunk = weight[start : start + at_once].float()
        blocks = torch.nn.functional.pad(chunk, (0, -columns % width, 0, -len(chunk) % height))
        blocks = blocks.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        scale = blocks.abs().amax((1, 3)) / largest
        scale = torch.where(scale == 0, 1.0, scale)
        scales[start // height : start // height + len(scale)] = scale
        numbers = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[: len(chunk), :columns]
        if format.is_float:
            values[start : start + at_once] = numbers.clamp(-largest, largest).to(_FLOAT8)
        elif halves:
            q = numbers.round_().add_(8).to(torch.uint8)
            values[start : start + at_once] = q[:, ::2] | q[:, 1::2] << 4
        else:
            values[start : start + at_once] = numbers.round_().to(torch.int8)
    return QuantizedWeight(values=values, scales=scales, group=width, block_rows=height)
