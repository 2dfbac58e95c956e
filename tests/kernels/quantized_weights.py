"""Random quantized weights of every form, and what their products are in float64."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from kernel_pools import DEVICE

from twostep.checkpoint.linear_format import Activations
from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.quantized_weight import QuantizedWeight

FP8_TOKEN = Activations(is_float=True, dynamic=True)
FP8_STATIC = Activations(is_float=True, dynamic=False)
FP8_GROUP = Activations(is_float=True, dynamic=True, group=128)
INT8_TOKEN = Activations(is_float=False, dynamic=True)
INT8_STATIC = Activations(is_float=False, dynamic=False)
INT8_UNEVEN = Activations(is_float=False, dynamic=True, symmetric=False)


def input_quantizer(how: Activations | None, scale: float = 0.02) -> InputQuantizer | None:
    if how is None:
        return None
    quantizer = InputQuantizer(how, torch.device(DEVICE))
    if quantizer.scale is not None:
        quantizer.scale.fill_(scale)
    return quantizer


def random_weight(
    kind: str, rows: int, columns: int, *, group: int = 0, block_rows: int = 1, zeros: bool = False, activations: Activations | None = None
) -> QuantizedWeight:
    """kind: fp8, int8, int4 or fp4; `group` 0: whole rows. Dequantized numbers are of the size of 1 / sqrt(columns)."""
    group = group or columns
    shape = (-(-rows // block_rows), -(-columns // group))
    scales = torch.rand(shape, device=DEVICE) + 0.5
    if kind == "fp8":
        values = torch.randn(rows, columns, device=DEVICE).mul(60).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales /= 60 * columns**0.5
    elif kind == "int8":
        values = torch.randint(-128, 128, (rows, columns), device=DEVICE, dtype=torch.int8)
        scales /= 74 * columns**0.5
    else:
        values = torch.randint(0, 256, (rows, columns // 2), device=DEVICE, dtype=torch.uint8)
        scales /= (4.6 if kind == "int4" else 2.7) * columns**0.5
    uneven = None
    if zeros:
        uneven = torch.randint(0, 16, shape, dtype=torch.uint8) if kind == "int4" else torch.randint(-20, 21, shape, dtype=torch.int8)
        uneven = uneven.to(DEVICE)
    return QuantizedWeight(
        values=values,
        scales=scales,
        group=group,
        block_rows=block_rows,
        zeros=uneven,
        activations=input_quantizer(activations),
        float4=kind == "fp4",
    )


@st.composite
def weight_forms(draw: st.DrawFn) -> dict[str, object]:
    """Arguments of random_weight but the shape: what published formats have, and what lies between."""
    kind = draw(st.sampled_from(["fp8", "int8", "int4"]))
    group = draw(st.sampled_from([0, 128, 64, 32])) if kind != "fp8" else draw(st.sampled_from([0, 128]))
    block_rows = draw(st.sampled_from([1, 128])) if kind == "fp8" and group else 1
    if kind == "fp8":
        activations = draw(st.sampled_from([None, FP8_GROUP] if group else [None, FP8_TOKEN, FP8_STATIC, FP8_GROUP]))
    elif kind == "int8":
        activations = draw(st.sampled_from([None, INT8_TOKEN, INT8_STATIC, INT8_UNEVEN]))
    else:
        activations = draw(st.sampled_from([None, None, FP8_TOKEN]))
    zeros = kind != "fp8" and draw(st.booleans())
    return {"kind": kind, "group": group, "block_rows": block_rows, "zeros": zeros, "activations": activations}


def product(weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns the product, float64, from the same rounded input, which is kept in float32."""
    rounded = x if weight.activations is None else weight.activations(x.float())
    y = rounded.double() @ weight.dequantize(torch.float64).T
    return y if bias is None else y + bias.double()
