"""Quantized tensors become the numbers that their format says, bit by bit, whatever part of a weight is wanted."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_tensors import KINDS, Kind, Quantized, config_of, float8_values, quantize, rounded_input, to_float8
from safetensors.torch import save_file

from twostep.checkpoint.quantization import read_quantization
from twostep.errors import SetupError
from twostep.model.families.modules import Place
from twostep.model.families.quantized_part import QuantizedPart
from twostep.model.kernels import quantized_weight
from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.quantized_weight import QuantizedWeight
from twostep.model.loading import quantized
from twostep.model.loading.quantized import QuantizedTensors, check_part
from twostep.model.loading.weight_files import read_weights, stored_tensors

NAME = "model.layers.0.mlp.down_proj"


def loaded(kind: Kind, made: Quantized, rows: slice, columns: slice, dtype: torch.dtype) -> QuantizedWeight | torch.Tensor:
    """Reads this part of the weight."""
    found = read_quantization(Path("nowhere"), {"quantization_config": config_of(kind)})
    assert found is not None
    format = found.format_of(NAME)
    assert format is not None
    part = QuantizedPart(format, stored=True, dtype=dtype, device=torch.device("cpu"))
    nowhere = torch.empty(rows.stop - rows.start, columns.stop - columns.start, dtype=dtype, device="meta")
    place = Place(nowhere, made.dense.shape, (rows.start, columns.start), part=part)
    with tempfile.TemporaryDirectory() as folder:
        save_file(made.tensors, Path(folder, "model.safetensors"))
        stored = {tensor.name: tensor for tensor in stored_tensors(Path(folder))}
        parts = {part.role: (stored[part.suffix], part) for part in format.parts if part.suffix in stored}
        for tensor, stored_part in parts.values():
            check_part(tensor, stored_part, place)
        weight = QuantizedTensors(place, {role: tensor for role, (tensor, _) in parts.items()})
        seen = [0]
        read_weights(weight.reads(), lambda done, total: seen.append(total))
        assert seen[-1] == weight.num_bytes
        return weight.take()


def whole(kind: Kind, made: Quantized, dtype: torch.dtype = torch.float32) -> QuantizedWeight | torch.Tensor:
    rows, columns = made.dense.shape
    return loaded(kind, made, slice(0, rows), slice(0, columns), dtype)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Kind, tuple[int, int], slice, slice, torch.dtype, torch.dtype, int]:
    kind = draw(st.sampled_from(list(KINDS.values())))
    rows, columns = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    if kind.method in ("awq", "gptq", "gptq_v2"):
        rows, columns = 8 * -(-rows // 8), 8 * -(-columns // 8)  # the formats have no others
    if kind.method == "awq":
        group = draw(st.sampled_from([n for n in (0, 8, 16, 32) if not n or columns % n == 0]))
    else:
        group = draw(st.sampled_from([0, 8, 16, 24, 32]))
    if kind.group:
        kind = replace(kind, group=group)
    parts = []
    for size in (rows, columns):
        begin = draw(st.integers(0, size - 1))
        parts.append(slice(begin, draw(st.integers(begin + 1, size))))
    dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
    return kind, (rows, columns), *parts, draw(dtypes), draw(dtypes), draw(st.integers(0, 9))


@settings(max_examples=100)
@given(cases(), st.sampled_from([300, 1 << 20]))
def test_any_part_of_a_weight_is_what_its_format_says(
    case: tuple[Kind, tuple[int, int], slice, slice, torch.dtype, torch.dtype, int], at_once: int
) -> None:
    kind, shape, rows, columns, scale_dtype, dtype, seed = case
    weight = np.random.default_rng(seed).normal(0.05, 1, shape).astype(np.float32)
    made = quantize(kind, weight, scale_dtype=scale_dtype, seed=seed)
    wanted = torch.from_numpy(made.dense[rows, columns]).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        for module in (quantized, quantized_weight):
            patch.setattr(module, "_ELEMENTS_AT_ONCE", at_once)
        got = loaded(kind, made, rows, columns, dtype)
        assert torch.equal(got.dequantize(dtype) if isinstance(got, QuantizedWeight) else got, wanted)
        if isinstance(got, QuantizedWeight):
            halves = kind.bits == 4 and kind.method != "int8" and kind.method != "fp8" and not wanted.shape[1] % 2
            assert got.values.nbytes == wanted.numel() // (2 if halves else 1)
        else:
            # A part that begins within a group, or columns in an order of their own.
            assert kind.ordered or columns.start % (kind.group or kind.block[1] or 1)


@pytest.mark.parametrize("name", KINDS)
def test_the_packers_lose_no_more_than_the_bits(name: str) -> None:
    """The oracle itself is right: what it writes is near what it was given."""
    kind = KINDS[name]
    weight = np.random.default_rng(1).normal(0.05, 1, (64, 96)).astype(np.float32)
    dense = quantize(kind, weight).dense
    assert np.abs(dense - weight).max() < (0.15 if kind.method == "fp8" else 0.03 if kind.bits == 8 else 0.45)


def test_float8_is_torchs() -> None:
    values = float8_values()
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(values, theirs, equal_nan=True)
    x = np.random.default_rng(0).normal(0, 1, 4000).astype(np.float32)
    x *= 10.0 ** np.random.default_rng(1).uniform(-4, 2.6, 4000).astype(np.float32)
    x = np.concatenate([x, values[np.isfinite(values)], (values[:126] + values[1:127]) / 2]).clip(-448, 448)
    assert np.array_equal(to_float8(x), torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy())


@settings(max_examples=60)
@given(st.sampled_from([kind for kind in KINDS.values() if kind.activations]), st.integers(1, 5), st.integers(1, 90), st.integers(0, 9))
def test_inputs_are_rounded_as_the_format_says(kind: Kind, tokens: int, width: int, seed: int) -> None:
    found = read_quantization(Path("nowhere"), {"quantization_config": config_of(kind)})
    assert found is not None
    format = found.format_of(NAME)
    assert format is not None
    assert format.activations is not None
    quantizer = InputQuantizer(format.activations, torch.device("cpu"))
    if quantizer.scale is not None:
        quantizer.scale.fill_(0.02)
    x = np.random.default_rng(seed).normal(0, 3, (tokens, width)).astype(np.float32)
    np.testing.assert_allclose(quantizer(torch.from_numpy(x)).numpy(), rounded_input(kind, x), rtol=1e-6, atol=1e-6)


def test_a_token_of_zeros_stays_one() -> None:
    for kind in KINDS.values():
        found = read_quantization(Path("nowhere"), {"quantization_config": config_of(kind)})
        format = None if found is None else found.format_of(NAME)
        if format is not None and format.activations is not None:
            assert not InputQuantizer(format.activations, torch.device("cpu"))(torch.zeros(2, 40)).any()


def change(made: Quantized, name: str, value: torch.Tensor) -> Quantized:
    return Quantized(made.tensors | {name: value}, made.dense)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_refused(name: str, bad: float) -> None:
    kind = KINDS[name]
    made = quantize(kind, np.ones((32, 32), np.float32))
    scale = next(part for part in made.tensors if "scale" in part and part != "input_scale")
    broken = made.tensors[scale].clone()
    broken.view(-1)[-1] = bad
    with pytest.raises(SetupError, match=scale):
        whole(kind, change(made, scale, broken))


@pytest.mark.parametrize("name", KINDS)
def test_tensors_of_another_shape_or_dtype_are_refused(name: str) -> None:
    kind = KINDS[name]
    made = quantize(kind, np.ones((32, 48), np.float32))
    for part, tensor in made.tensors.items():
        if part == "input_scale":
            continue
        for wrong in (torch.cat([tensor, tensor]), torch.zeros(tensor.shape, dtype=torch.uint8)):
            with pytest.raises(SetupError, match=part):
                whole(kind, change(made, part, wrong))


def test_values_that_cannot_be_are_refused() -> None:
    ones = np.ones((32, 32), np.float32)
    fp8 = quantize(KINDS["fp8"], ones)
    broken = fp8.tensors["weight"].view(torch.uint8).clone()
    broken[3, 4] = 0x7F
    with pytest.raises(SetupError, match="weight"):
        whole(KINDS["fp8"], change(fp8, "weight", broken.view(torch.float8_e4m3fn)))
    large = quantize(KINDS["fp8"], ones * 1e6, scale_dtype=torch.float32)
    with pytest.raises(SetupError, match="float16"):
        whole(KINDS["fp8"], large, torch.float16)
    # What `gptq` calls 8 is another number in `gptq_v2`: the one cannot be taken for the other unnoticed.
    with pytest.raises(SetupError, match="qzeros"):
        whole(KINDS["gptq_v2"], quantize(KINDS["gptq"], ones))
    ordered = quantize(KINDS["gptq in order of activations"], ones)
    with pytest.raises(SetupError, match="g_idx"):
        whole(KINDS["gptq"], change(ordered, "g_idx", torch.full((32,), 2, dtype=torch.int32)))
    packed = quantize(KINDS["packed"], ones)
    with pytest.raises(SetupError, match="weight_shape"):
        whole(KINDS["packed"], change(packed, "weight_shape", torch.tensor([32, 31])))
