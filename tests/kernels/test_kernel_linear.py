"""Products of few tokens against float64, on shapes that fit no tile; which kernel multiplies, and that a layer is right whichever it is;
through Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pools import DEVICE, DTYPES, assert_products, tolerance

from twostep.model.kernels.triton_linear import LinearTile, RowTile, StreamedLinear, can_stream, choose_tile, linear_rows, linear_tiles
from twostep.model.kernels.triton_ops import TritonOps


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> torch.Tensor:
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("tokens", "num_out", "width", "rows", "dtype"),
    [(*s, d) for s, d in zip([(1, 10, 64, 4), (3, 7, 72, 2), (2, 5, 40, 1)], DTYPES, strict=True)],
)
def test_rows(tokens: int, num_out: int, width: int, rows: int, dtype: torch.dtype, gated: bool) -> None:
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
    assert_products(got, x, weight, bias, gated=True)


SHAPES = st.fixed_dictionaries({"num_out": st.integers(1, 200_000), "width": st.integers(1, 4000).map(lambda n: 8 * n)})


@given(
    tokens=st.integers(1, 300),
    shape=SHAPES,
    gated=st.booleans(),
    in_parts=st.booleans(),
    num_sms=st.integers(1, 200),
    shared=st.integers(0, 300_000),
)
def test_a_layout_keeps_to_what_is_asked(
    tokens: int, shape: dict[str, int], gated: bool, in_parts: bool, num_sms: int, shared: int
) -> None:
    tile = choose_tile(tokens, **shape, gated=gated, in_parts=in_parts and not gated, num_sms=num_sms, shared_bytes=shared)
    if isinstance(tile, RowTile):
        assert tokens <= 4
        # A thread's share of the weight fits its registers.
        assert tile.rows * shape["width"] * (1 + gated) <= 256 * 32 * tile.num_warps
    elif isinstance(tile, LinearTile):
        assert tile.parts == 1 or (in_parts and not gated)
        # One program more than that would wait for a place.
        assert tile.parts == 1 or tile.parts * shape["num_out"] <= 128 * num_sms
        # The tiles on their way fit a multiprocessor's shared memory.
        padded = max(16, 1 << (tokens - 1).bit_length())
        assert (tile.cols + padded) * tile.depth * 2 * tile.num_stages < shared


@settings(max_examples=12)
@given(
    tokens=st.sampled_from([1, 2, 3, 15, 16, 17, 33, 64, 65, 129]),
    num_out=st.integers(1, 150),
    width=st.integers(1, 20).map(lambda n: 8 * n),
    gated=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_a_layer_is_right(tokens: int, num_out: int, width: int, gated: bool, bias: bool, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    weight = (torch.randn(num_out * (1 + gated), width, device=DEVICE) * width**-0.5).to(dtype)
    b = torch.randn(len(weight), device=DEVICE).to(dtype) if bias else None
    x = torch.randn(tokens, width, device=DEVICE).to(dtype)
    assert can_stream(weight)
    layer = StreamedLinear(weight, b, gated=gated)
    got = layer(x)
    assert got.shape == (tokens, num_out)
    # cuBLAS rounds its product before the gate as well.
    between = dtype if gated else None
    assert_products(got, x, weight, b, gated=gated, between=between)
    parts = layer.parts(x)
    assert_products(parts.double().sum(0) if parts.dim() == 3 else parts, x, weight, b, gated=gated, between=between)
    assert torch.equal(parts, layer.parts(x))


@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_that_fails_its_trial_is_cublas(gated: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr("twostep.model.kernels.triton_linear._TRIAL_TOKENS", (1, 3))
    x = torch.randn(3, 64, device=DEVICE, dtype=torch.bfloat16)

    def prepared(num_out: int) -> tuple[object, torch.Tensor]:
        ops = TritonOps(DEVICE)
        ops.tries = True
        weight = torch.randn(num_out, 64, device=DEVICE, dtype=torch.bfloat16)
        layer = (ops.prepare_gated if gated else ops.prepare_linear)(weight, None)
        assert_products(layer(x), x, weight, None, gated=gated, between=x.dtype if gated else None)
        return layer, weight

    right, _ = prepared(48)
    assert isinstance(right, StreamedLinear)
    assert right.trial() == ""
    module = "twostep.model.kernels.triton_linear"
    real = importlib.import_module(module).linear_tiles
    # Sums are off by a hundredth of what they should be, or the compiler gives up.
    for broken, said in ((lambda *a, **k: real(*a, **k) * 1.05, "differs"), (_raise, "no room")):
        monkeypatch.setattr(f"{module}.linear_tiles", broken)
        caplog.clear()
        fallen_back, _ = prepared(48)
        assert not isinstance(fallen_back, StreamedLinear)
        assert said in caplog.text


def _raise(*args: object, **kwargs: object) -> torch.Tensor:
    raise RuntimeError("no room in shared memory")


def test_a_routers_product_is_no_librarys() -> None:
    """Few rows and up to 256 tokens are multiplied in parts, so that more multiprocessors have work."""
    chip = {"num_sms": 132, "shared_bytes": 227 * 1024}
    for tokens in (3, 16, 33, 64, 65, 128, 256):
        tile = choose_tile(tokens, 128, 2048, gated=False, in_parts=True, **chip)
        assert isinstance(tile, LinearTile)
        assert tile.parts > 1
    assert choose_tile(257, 128, 2048, gated=False, in_parts=True, **chip) is None
    assert choose_tile(65, 4096, 2048, gated=False, in_parts=True, **chip) is None
    assert choose_tile(65, 128, 2048, gated=False, in_parts=False, **chip) is None


def test_what_does_not_stream_is_multiplied_all_the_same() -> None:
    assert not can_stream(torch.zeros(8, 8))
    assert not can_stream(torch.zeros(8, 12, dtype=torch.bfloat16))
    torch.manual_seed(0)
    ops = TritonOps(DEVICE)
    weight, x = torch.randn(6, 12, device=DEVICE), torch.randn(3, 12, device=DEVICE)
    torch.testing.assert_close(ops.prepare_linear(weight, None)(x), x @ weight.T)
    torch.testing.assert_close(
        ops.prepare_gated(weight, None)(x).double(), product(x, weight, None, gated=True), **tolerance(torch.float32)
    )


@pytest.mark.parametrize("tokens", [1, 5])
def test_two_layers_and_the_norm_between(tokens: int) -> None:
    """Parts of the first product are added to the residual inside the norm."""
    torch.manual_seed(0)
    ops = TritonOps(DEVICE)
    dtype = torch.bfloat16
    first, then = (torch.randn(*shape, device=DEVICE).mul(0.1).to(dtype) for shape in ((64, 192), (40, 64)))
    x, residual = torch.randn(tokens, 192, device=DEVICE).to(dtype), torch.randn(tokens, 64, device=DEVICE).to(dtype)
    weight = torch.randn(64, device=DEVICE).to(dtype)
    product = x.double() @ first.double().T
    total = residual.double() + product
    # Some kernels round the product before it is added.
    limit = tolerance(dtype)["rtol"] * (total.abs() + product.abs())
    normed = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = ops.join_rms_norm(ops.prepare_linear(first, None), x, residual, weight, 1e-5, ops.prepare_linear(then, None))
    assert ((residual.double() - total).abs() <= limit).all()
    torch.testing.assert_close(got.double(), normed @ then.double().T, **tolerance(dtype, roundings=5))


@pytest.mark.parametrize("tokens", [1, 3, 20, 40, 130])
@pytest.mark.parametrize("width", [48, 520])
def test_exact_products(tokens: int, width: int) -> None:
    """In float32, whatever the inputs are in; of a weight that 16 bits hold, and of one that they do not."""
    x, weight = random(tokens, width, dtype=torch.bfloat16), random(24, width, dtype=torch.bfloat16).float()
    for each in (weight, weight + 1e-4):
        y = TritonOps(DEVICE).prepare_exact(each, torch.bfloat16)(x)
        assert y.dtype == torch.float32
        y = y.sum(0) if y.dim() == 3 else y
        assert_products(y, x, each, None)
