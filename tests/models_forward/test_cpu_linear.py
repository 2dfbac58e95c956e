"""Products of packed weights on CPUs are those of the dense weights, however many rows there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from twostep.checkpoint.held import held_bytes
from twostep.checkpoint.linear_format import Activations
from twostep.checkpoint.quantization import quantization_at_load
from twostep.model.kernels import cpu_linear
from twostep.model.kernels.cpu_linear import Int4Linear, Int8Linear, pack, split
from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.ops import Ops
from twostep.model.kernels.quantized_weight import QuantizedWeight, multiply_dense

PER_TOKEN = Activations(is_float=False, dynamic=True)
STATIC = Activations(is_float=False, dynamic=False)
needs_int8 = pytest.mark.skipif(not cpu_linear.int8_works(), reason="this CPU or torch has no exact product of whole numbers")
needs_int4 = pytest.mark.skipif(not cpu_linear.int4_rows_together(), reason="this torch has no product of 4-bit numbers")


def int8_weight(rows: int, columns: int, how: Activations | None = None) -> QuantizedWeight:
    values = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    activations = None if how is None else InputQuantizer(how, torch.device("cpu"))
    if activations is not None and activations.scale is not None:
        activations.scale.fill_(0.03)
    return QuantizedWeight(values=values, scales=torch.rand(rows, 1) + 0.1, group=columns, activations=activations)


def int4_weight(rows: int, columns: int, group: int, *, zeros: bool) -> QuantizedWeight:
    shape = rows, -(-columns // group)
    return QuantizedWeight(
        values=torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
        scales=torch.rand(shape) + 0.1,
        group=group,
        zeros=torch.randint(0, 16, shape, dtype=torch.uint8) if zeros else None,
    )


def error_of(got: torch.Tensor, weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> float:
    """The largest difference, as a share of the largest number."""
    wanted = multiply_dense(weight, x.float(), None if bias is None else bias.float())
    assert got.shape == wanted.shape
    assert got.dtype == x.dtype
    assert got.is_contiguous()
    return float((got.float() - wanted).abs().max() / wanted.abs().max())


@needs_int8
@example(rows=2, columns=1, tokens=1, how=None, biased=False, seed=0)
@given(
    st.integers(1, 300),
    st.integers(1, 200),
    st.sampled_from([1, 2, 7, 63, 64, 130]),
    st.sampled_from([None, PER_TOKEN, STATIC]),
    st.booleans(),
    st.integers(0, 99),
)
def test_int8(rows: int, columns: int, tokens: int, how: Activations | None, biased: bool, seed: int) -> None:
    torch.manual_seed(seed)
    weight, x = int8_weight(rows, columns, how), torch.randn(tokens, columns)
    bias = torch.randn(rows) if biased else None
    assert isinstance(pack(weight, bias), Int8Linear)
    # A number on the edge between two steps of the inputs may go to either.
    allowed = 2e-6 if how is None else 0.02
    for some in (x[:1], x[:2], x.repeat(300, 1)[:300]) if how is None else (x[:2],):
        narrow = some.to(torch.bfloat16)
        assert error_of(Int8Linear(weight, None)(narrow), weight, narrow, None) < max(allowed, 1e-2)
    assert error_of(Int8Linear(weight, bias)(x), weight, x, bias) < allowed


@needs_int8
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    layer = Int8Linear(int8_weight(96, 64), None)
    x = torch.randn(200, 64)
    together = layer(x)
    for at in (slice(0, 2), slice(3, 90), slice(100, 200)):
        assert torch.equal(layer(x[at]), together[at])


@given(
    st.integers(1, 5),
    st.integers(1, 90),
    st.integers(-20, 20),
    st.sampled_from([(torch.float32, 24), (torch.bfloat16, 16), (torch.float16, 16)]),
    st.integers(0, 99),
)
def test_parts_of_8_bits_are_a_number_of_more(tokens: int, columns: int, exponent: int, kind: tuple[torch.dtype, int], seed: int) -> None:
    torch.manual_seed(seed)
    dtype, bits = kind
    x = (torch.randn(tokens, columns) * 2.0 ** min(exponent, 12)).to(dtype)
    x[0] = 0
    parts, scale = split(x)
    total = sum((part.double() - 128) * 256.0**place for place, part in enumerate(parts.view(bits // 8, tokens, columns)))
    assert (total * scale - x).abs().le(scale * 0.75).all()
    assert bool((scale <= x.abs().amax(-1, keepdim=True).float() / 2.0 ** (bits - 1.1) + 1e-30).all())


@needs_int4
@given(
    st.integers(2, 200),
    st.sampled_from([(64, 32), (96, 32), (128, 128), (256, 64), (512, 512), (576, 576)]),
    st.sampled_from([1, 5, 63, 64, 130]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
def test_int4(rows: int, width: tuple[int, int], tokens: int, zeros: bool, biased: bool, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    weight, x = int4_weight(rows, *width, zeros=zeros), torch.randn(tokens, width[0]).to(dtype)
    bias = torch.randn(rows).to(dtype) if biased else None
    layer = pack(weight, bias)
    assert isinstance(layer, Int4Linear)
    assert error_of(layer(x), weight, x, bias) < 1e-2


@needs_int4
@needs_int8
def test_what_no_product_takes_is_unpacked() -> None:
    torch.manual_seed(0)
    grouped = QuantizedWeight(values=int8_weight(8, 64).values, scales=torch.rand(8, 4) + 0.1, group=16)
    shifted = QuantizedWeight(values=grouped.values, scales=torch.ones(8, 1), group=64, zeros=torch.ones(8, 1, dtype=torch.int8))
    fp8 = QuantizedWeight(values=torch.randn(8, 64).to(torch.float8_e4m3fn), scales=torch.ones(8, 1), group=64)
    others = [int4_weight(8, 64, 16, zeros=False), int4_weight(8, 80, 80, zeros=False)]
    for weight in (grouped, shifted, fp8, *others):
        assert pack(weight, None) is None
        x = torch.randn(3, weight.shape[1])
        torch.testing.assert_close(Ops().prepare_quantized(weight, None, torch.float32)(x), multiply_dense(weight, x))


def test_without_torchs_operators_weights_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "int8_works", lambda: False)
    monkeypatch.setattr(cpu_linear, "int4_rows_together", lambda: 0)
    for weight in (int8_weight(24, 64, PER_TOKEN), int4_weight(24, 64, 32, zeros=True)):
        assert pack(weight, None) is None
        x = torch.randn(5, 64)
        torch.testing.assert_close(Ops().prepare_quantized(weight, None, torch.float32)(x), multiply_dense(weight, x))


def test_int8_layers_that_are_kept_twice_are_counted_so() -> None:
    format = quantization_at_load("int8").groups[0].format
    in_tokens = replace(format, activations=PER_TOKEN)
    for kind, shape, copies in ((format, (64, 96), 2), (in_tokens, (64, 96), 1), (format, (4096, 2048), 1)):
        once = held_bytes(kind, *shape, item_bytes=2, on_cpu=False)
        assert held_bytes(kind, *shape, item_bytes=2, on_cpu=True) == once + (copies - 1) * shape[0] * shape[1]
