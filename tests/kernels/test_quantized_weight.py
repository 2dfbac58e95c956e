"""The canonical form of quantized weights, one number at a time, and its product in torch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pools import DEVICE, assert_products
from quantized_weights import random_weight, weight_forms

from twostep.model.kernels.quantized_weight import QuantizedWeight, multiply_dense


def element(weight: QuantizedWeight, row: int, column: int) -> torch.Tensor:
    """(q - z) · s of one element, float32."""
    q = float(weight.values[row, column // 2] >> 4 * (column % 2) & 15) if weight.bits == 4 else float(weight.values[row, column])
    block = row // weight.block_rows, column // weight.group
    z = float(weight.zeros[block]) if weight.zeros is not None else 8.0 if weight.bits == 4 else 0.0
    return torch.tensor(q - z) * weight.scales[block].cpu()


@settings(max_examples=40)
@given(
    form=weight_forms(),
    rows=st.integers(1, 300),
    columns=st.integers(1, 150).map(lambda n: 2 * n),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_dequantized_to_the_last_bit(form: dict[str, object], rows: int, columns: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    weight = random_weight(rows=rows, columns=columns, **form)
    assert weight.shape == (rows, columns)
    dense = weight.dequantize(dtype)
    assert dense.dtype == dtype
    for row, column in {(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3), (rows // 3, columns - 1)}:
        assert dense[row, column].cpu() == element(weight, row, column).to(dtype)
    # Rows apart are the same rows.
    start = rows // 2 // weight.block_rows * weight.block_rows
    assert torch.equal(weight.rows(start, rows - start).dequantize(dtype), dense[start:])


@settings(max_examples=25)
@given(
    form=weight_forms(),
    tokens=st.integers(1, 5),
    rows=st.integers(1, 140),
    columns=st.integers(1, 140).map(lambda n: 2 * n),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_product_by_way_of_a_dense_weight(
    form: dict[str, object], tokens: int, rows: int, columns: int, with_bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = random_weight(rows=rows, columns=columns, **form)
    x = torch.randn(tokens, columns, device=DEVICE)
    bias = torch.randn(rows, device=DEVICE) if with_bias else None
    got = multiply_dense(weight, x, bias)
    rounded = x if weight.activations is None else weight.activations(x)
    assert_products(got, rounded, weight.dequantize(torch.float64), bias, operands=x.dtype)
