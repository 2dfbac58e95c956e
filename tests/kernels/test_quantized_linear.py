"""Products with quantized weights against float64, on shapes that fit no tile, through Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_pools import DEVICE, assert_products, tolerance
from quantized_weights import FP8_GROUP, FP8_STATIC, FP8_TOKEN, INT8_TOKEN, product, random_weight, weight_forms

from twostep.checkpoint.linear_format import Activations
from twostep.model.kernels.ops import Linear
from twostep.model.kernels.quantized_weight import QuantizedWeight
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.kernels.triton_quantized_input import round_input
from twostep.model.kernels.triton_quantized_linear import QuantizedLinear, bytes_on_their_way, choose_tile, prepare, quantized_linear
from twostep.model.kernels.triton_quantized_linear_rows import QuantizedRowTile
from twostep.model.kernels.triton_quantized_linear_tiles import QuantizedTile


def assert_right(
    got: torch.Tensor, weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False
) -> None:
    """`dtype`: what inputs that are rounded to 8 bits may be kept in, and weights that are made dense."""
    rounded = x if weight.activations is None else weight.activations(x.float())
    assert_products(got, rounded, weight.dequantize(torch.float64), bias, gated=gated, operands=dtype, between=dtype if gated else None)


@settings(max_examples=12)
@given(
    form=weight_forms(),
    tokens=st.sampled_from([1, 2, 7, 16, 17, 33, 65, 130]),
    rows=st.integers(1, 80).map(lambda n: 2 * n),
    columns=st.integers(1, 20).map(lambda n: 16 * n),
    gated=st.booleans(),
    with_bias=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_a_layer_is_right(
    form: dict[str, object], tokens: int, rows: int, columns: int, gated: bool, with_bias: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = random_weight(rows=rows, columns=columns, **form)
    bias = torch.randn(rows, device=DEVICE).to(dtype) if with_bias else None
    x = torch.randn(tokens, columns, device=DEVICE).to(dtype)
    layer = QuantizedLinear(prepare(weight, DEVICE), bias, gated=gated)
    got = layer(x)
    assert got.dtype == dtype
    assert_right(got, weight, x, bias, dtype, gated=gated)
    parts = layer.parts(x)
    assert_right(parts.double().sum(0) if parts.dim() == 3 else parts, weight, x, bias, dtype, gated=gated)
    # Nothing is left over from a product for the next.
    assert torch.equal(layer(x), got)


@given(
    form=weight_forms(),
    tokens=st.integers(1, 9000),
    rows=st.integers(1, 100_000).map(lambda n: 2 * n),
    columns=st.integers(1, 64).map(lambda n: 256 * n),
    gated=st.booleans(),
    num_sms=st.integers(1, 200),
)
def test_a_layout_fits_the_chip(form: dict[str, object], tokens: int, rows: int, columns: int, gated: bool, num_sms: int) -> None:
    packed = prepare(random_weight(rows=2, columns=256, **form), DEVICE).packed
    assume(packed is not None)
    packed = replace(packed, num_out=rows, width=columns)
    tile = choose_tile(packed, tokens, gated=gated, num_sms=num_sms, shared_bytes=227 * 1024)
    if isinstance(tile, QuantizedTile):
        assert bytes_on_their_way(packed, tile) < 227 * 1024
        assert tile.parts == 1 or not gated
        # One counter for each tile whose parts are merged.
        assert tile.parts == 1 or -(-rows // tile.cols) * -(-tokens // tile.tokens) <= len(packed.counters)
    elif isinstance(tile, QuantizedRowTile):
        assert tokens <= 2
        # A thread's share of the weight fits its registers.
        assert tile.rows * columns * (1 + gated) <= 256 * 32 * tile.num_warps


TILES = [
    QuantizedTile(tokens=16, cols=32, parts=3, num_warps=2, num_stages=2),
    QuantizedTile(tokens=32, cols=64, parts=1, num_warps=2, num_stages=3, bulk=False),
    QuantizedTile(tokens=128, cols=64, parts=1, num_warps=4, num_stages=3),
    QuantizedTile(tokens=16, cols=32, parts=1, num_warps=2, num_stages=2, turned=False, exact=False),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    ("kind", "group", "activations"),
    [("fp8", 0, FP8_TOKEN), ("fp8", 128, FP8_GROUP), ("int8", 0, INT8_TOKEN), ("int4", 64, None), ("int8", 0, None)],
)
@pytest.mark.parametrize("tokens", [5, 40])
def test_every_layout_of_programs(kind: str, group: int, activations: object, tile: QuantizedTile, tokens: int) -> None:
    weight = random_weight(kind, 72, 528, group=group, activations=activations)
    prepared = prepare(weight, DEVICE)
    assert prepared.packed is not None
    if not tile.turned and not prepared.takes_rounded:
        pytest.skip("unpacked weights are always turned")
    x = torch.randn(tokens, 528, device=DEVICE).to(torch.bfloat16)
    bias = torch.randn(72, device=DEVICE)
    assert_right(quantized_linear(prepared, x, bias, tile=tile), weight, x, bias, x.dtype)
    parts = quantized_linear(prepared, x, bias, tile=tile, in_parts=True)
    assert parts.dim() == (3 if tile.parts > 1 else 2)
    assert_right(parts.double().sum(0) if parts.dim() == 3 else parts, weight, x, bias, x.dtype)


@pytest.mark.parametrize("activations", [FP8_TOKEN, FP8_STATIC], ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_an_input_rounded_before(tokens: int, activations: Activations) -> None:
    """The same to the last bit as one that is rounded by the layer, or, of one token, by each of its programs."""
    weight = random_weight("fp8", 40, 160, activations=activations)
    prepared = prepare(weight, DEVICE)
    assert prepared.takes_rounded
    assert weight.activations is not None
    x = torch.randn(tokens, 200, device=DEVICE).to(torch.bfloat16)[:, 8:168]
    layer = QuantizedLinear(prepared, None)
    assert torch.equal(layer.of_rounded(round_input(x, weight.activations), x.dtype), layer(x))


@pytest.mark.parametrize(("kind", "columns", "group"), [("int4", 72, 24), ("fp8", 100, 0), ("int8", 96, 16)])
def test_what_no_kernel_takes_is_multiplied_all_the_same(kind: str, columns: int, group: int) -> None:
    weight = random_weight(kind, 20, columns, group=group, zeros=kind != "fp8")
    prepared = prepare(weight, DEVICE)
    assert prepared.packed is None
    x = torch.randn(3, columns, device=DEVICE).to(torch.bfloat16)
    assert_right(QuantizedLinear(prepared, None)(x), weight, x, None, x.dtype)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_no_tokens_and_float32(kind: str) -> None:
    weight = random_weight(kind, 32, 64, activations=FP8_TOKEN if kind == "fp8" else None)
    ops = TritonOps(DEVICE)
    assert ops.prepare_quantized(weight, None, torch.bfloat16)(torch.empty(0, 64, device=DEVICE, dtype=torch.bfloat16)).shape == (0, 32)
    x = torch.randn(3, 64, device=DEVICE)
    assert_right(ops.prepare_quantized(weight, None, torch.float32)(x), weight, x, None, torch.bfloat16)


@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_that_fails_its_trial_is_made_dense(gated: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    module = "twostep.model.kernels.triton_quantized_linear"
    monkeypatch.setattr(f"{module}._TRIAL_TOKENS", (1, 3))
    dtype = torch.bfloat16
    x = torch.randn(3, 64, device=DEVICE).to(dtype)

    def prepared() -> Linear:
        ops = TritonOps(DEVICE)
        ops.tries = True
        weight = random_weight("int4", 48, 64, group=32)
        layer = ops.prepare_quantized(weight, None, dtype, gated=gated)
        assert_right(layer(x), weight, x, None, dtype, gated=gated)
        return layer

    assert isinstance(prepared(), QuantizedLinear)
    real = importlib.import_module(module).multiply_unpacked
    monkeypatch.setattr(f"{module}.multiply_unpacked", lambda *args, **options: real(*args, **options) * 1.05)
    assert not isinstance(prepared(), QuantizedLinear)
    assert caplog.text


@pytest.mark.parametrize("norms_first", [False, True])
@pytest.mark.parametrize("how", [FP8_TOKEN, FP8_GROUP, INT8_TOKEN], ids=str)
def test_two_layers_and_the_norm_between(how: Activations, norms_first: bool) -> None:
    """Parts of the first product are added to the residual inside the norm, which rounds for the second."""
    ops, dtype = TritonOps(DEVICE), torch.bfloat16
    kind, group = ("fp8", how.group) if how.is_float else ("int8", 0)
    first, then = random_weight("int4", 192, 512, group=64), random_weight(kind, 40, 192, group=group, activations=how)
    x, residual = torch.randn(5, 512, device=DEVICE).to(dtype), torch.randn(5, 192, device=DEVICE).to(dtype)
    # Norms may have weights in float32.
    weights = [torch.randn(192, device=DEVICE) for _ in range(2)] if norms_first else [torch.randn(192, device=DEVICE).to(dtype)]
    total = product(first, x, None)
    if norms_first:
        total = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[0].double()
    total = residual.double() + total
    linears = [ops.prepare_quantized(each, None, dtype) for each in (first, then)]
    assert all(isinstance(linear, QuantizedLinear) for linear in linears)
    join = ops.join_normed if norms_first else ops.join_rms_norm
    got = join(linears[0], x, residual, *weights, 1e-5, linears[1])
    torch.testing.assert_close(residual.double(), total, **tolerance(dtype, roundings=3))
    assert torch.equal(got, linears[1](ops.rms_norm(residual, weights[-1], 1e-5)))
