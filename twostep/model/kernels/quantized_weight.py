"""A linear layer's weight while it stays quantized: one canonical form of all formats, what it means, and its product in torch.

    w = (q - z) · s      in float32, rounded once to the dtype that is asked for

Loading fills it whatever the checkpoint's form was (twostep/model/loading); kernels take it to a layout of their own
(triton_quantized_linear.py). What stands here is the oracle of both, and what multiplies where no kernel does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from twostep.model.kernels.input_quantizer import InputQuantizer

# Of a weight that are made dense at a time, in float32.
_ELEMENTS_AT_ONCE = 1 << 22
# What 4 bits stand for as floats.
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_MIDDLE = 8  # what stands for 0 where 4 bits have no zero points


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A weight [N, K]. All tensors are dense and on one device.

    values       float8_e4m3fn or int8 [N, K]; or uint8 [N, K / 2] of two 4-bit numbers each, 0 to 15, the even column's in the low half
    float4       these are not 0 to 15 but floats (e2m1): a sign, two bits of exponent, one of mantissa
    scales       float32 [⌈N / block_rows⌉, ⌈K / group⌉]: of how many rows and columns each is the scale
    group        columns; K for whole rows
    zeros        of the scales' shape, in the range of the values: uint8 for 4 bits, int8 for 8. None: 0, for 4 bits 8
    activations  how the product rounds its input; None: not at all
    """

    values: torch.Tensor
    scales: torch.Tensor
    group: int
    block_rows: int = 1
    zeros: torch.Tensor | None = None
    activations: InputQuantizer | None = None
    float4: bool = False

    def __post_init__(self) -> None:
        assert self.values.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8)
        rows, columns = self.shape
        assert self.group > 0
        assert self.block_rows > 0
        assert self.scales.shape == (-(-rows // self.block_rows), -(-columns // self.group))
        assert self.scales.dtype == torch.float32
        assert not self.float4 or (self.bits == 4 and self.zeros is None)
        if self.zeros is not None:
            assert self.zeros.shape == self.scales.shape
            assert self.zeros.dtype == self.values.dtype != torch.float8_e4m3fn

    @property
    def bits(self) -> int:
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        rows, width = self.values.shape
        return rows, width * 8 // self.bits

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.values, self.scales, self.zeros) if part is not None)

    def rows(self, start: int, count: int) -> QuantizedWeight:
        """Rows [start, start + count) as a weight of their own, a view of this one; `start` begins a block of rows."""
        assert start % self.block_rows == 0
        scales = slice(start // self.block_rows, -(-(start + count) // self.block_rows))
        zeros = None if self.zeros is None else self.zeros[scales]
        return replace(self, values=self.values[start : start + count], scales=self.scales[scales], zeros=zeros)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K] in `dtype`."""
        rows, columns = self.shape
        dense = torch.empty(rows, columns, dtype=dtype, device=self.device)
        # Whole blocks of rows.
        at_once = max(1, _ELEMENTS_AT_ONCE // max(1, columns * self.block_rows)) * self.block_rows
        for start in range(0, rows, at_once):
            part = self.rows(start, min(at_once, rows - start))
            numbers = part.numbers()
            if part.zeros is not None:
                numbers.sub_(part.spread(part.zeros.float()))
            elif part.bits == 4 and not part.float4:
                numbers.sub_(_MIDDLE)
            dense[start : start + at_once] = numbers.mul_(part.spread(part.scales))
        return dense

    def numbers(self) -> torch.Tensor:
        """q, float32 [N, K]."""
        if self.bits == 8:
            return self.values.float()
        numbers = torch.stack((self.values & 15, self.values >> 4), -1).flatten(-2)
        if not self.float4:
            return numbers.float()
        return torch.tensor(FLOAT4, device=self.device)[numbers.int()]

    def spread(self, scales: torch.Tensor) -> torch.Tensor:
        """A number of each block (of the scales' shape) for each of its elements: [N or 1, K or 1], to broadcast."""
        rows, columns = self.shape
        if self.block_rows > 1 and len(scales) > 1:
            scales = scales.repeat_interleave(self.block_rows, 0)[:rows]
        return scales.repeat_interleave(self.group, 1)[:, :columns] if scales.shape[1] > 1 else scales


def multiply_dense(weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias by way of the dense weight in x's dtype, x rounded as the weight says. x [..., K], bias [N]. Returns [..., N] in
    x's dtype. It takes memory for the dense weight, every time."""
    if weight.activations is not None:
        x = weight.activations(x)
    return F.linear(x, weight.dequantize(x.dtype), bias)
