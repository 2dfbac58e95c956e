"""Kernels for products of few tokens against float64, on shapes that fit no tile; on the CPU through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_pools import DEVICE, DTYPES, tolerance

from twostep.model.kernels.triton_linear import LinearTile, RowTile, linear_rows, linear_tiles


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> torch.Tensor:
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("tokens", "num_out", "width", "rows"), [(1, 10, 64, 4), (3, 7, 72, 2), (2, 5, 40, 1)])
def test_rows(tokens: int, num_out: int, width: int, rows: int, gated: bool, dtype: torch.dtype) -> None:
    x = random(tokens, width + 8, dtype=dtype)[:, :width]
    weight = random(num_out * (1 + gated), width, dtype=dtype) * width**-0.5
    bias = random(len(weight), dtype=dtype)
    tile = RowTile(rows=rows, num_warps=2)
    got = linear_rows(x, weight, bias, tile=tile, gated=gated)
    torch.testing.assert_close(got.double(), product(x, weight, bias, gated=gated), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("turned", "bulk"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("tokens", "num_out", "width", "parts"), [(1, 40, 64, 1), (17, 50, 104, 2), (5, 33, 200, 3), (3, 40, 96, 7)])
def test_tiles(tokens: int, num_out: int, width: int, parts: int, turned: bool, bulk: bool, dtype: torch.dtype) -> None:
    x = random(tokens, width + 8, dtype=dtype)[:, :width]
    weight, bias = random(num_out, width, dtype=dtype) * width**-0.5, random(num_out, dtype=dtype)
    tile = LinearTile(cols=32, depth=32, parts=parts, num_warps=2, num_stages=2, turned=turned, bulk=bulk)
    got = linear_tiles(x, weight, bias, tile=tile)
    assert got.shape[-2:] == (tokens, num_out)
    assert got.dim() == 2 or (len(got) <= parts and got.dtype == torch.float32)
    got = got.double() if got.dim() == 2 else got.double().sum(0)
    torch.testing.assert_close(got, product(x, weight, bias, gated=False), **tolerance(dtype))


@pytest.mark.parametrize(("turned", "bulk"), [(False, False), (True, True)])
def test_gated_tiles(turned: bool, bulk: bool) -> None:
    x, bias = random(9, 72, dtype=torch.float32), random(60, dtype=torch.float32)
    weight = random(60, 72, dtype=torch.float32) * 72**-0.5
    tile = LinearTile(cols=32, depth=16, parts=1, num_warps=2, num_stages=2, turned=turned, bulk=bulk)
    got = linear_tiles(x, weight, bias, tile=tile, gated=True)
    torch.testing.assert_close(got.double(), product(x, weight, bias, gated=True), rtol=1e-5, atol=1e-5)
