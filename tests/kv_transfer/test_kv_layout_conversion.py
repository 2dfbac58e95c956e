"""KV of one layout as KV of another, against torch and against the plainest way to say it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import kv_numbers, layout_conversion, wire_encoding
from kv_transfer.layout_conversion import Assembler, block_bytes, pack, unpack
from kv_transfer.ticket import fingerprint, layout_from_proto, layout_to_proto
from twostep.cluster.convertible import cache_key_fields, check_convertible, joinable, same_numbers
from twostep.cluster.records import STATE_LAYOUT, LayoutRecord
from twostep.engine.batch import KvShape
from twostep.errors import DataLoss, Incompatible, InvalidRequest
from twostep.model.step import kv_quantization
from twostep.model.step.kv_cache import DTYPES, KvCache
from twostep.worker.model import layout_of as told_layout

FORMATS = [("float32", "none"), ("bfloat16", "none"), ("float16", "none"), ("bfloat16", "int8"), ("float32", "fp8"), ("bfloat16", "fp8")]
FOUR_BITS = [("float32", "int4"), ("bfloat16", "int4")]
SPECIAL = [0.0, -0.0, 1.0, -448.0, 1e-40, 3e38, -3e38, float("inf"), float("-inf"), float("nan"), 65519.9, 65520.0, 2.0**-60, 1e-7]


def layout_of(**changes: object) -> LayoutRecord:
    base = LayoutRecord(model_fingerprint="m", dtype="float32", block_size=4, num_layers=2, num_kv_heads=2, head_dim=3)
    return replace(base, **changes)  # type: ignore[arg-type]


def numbers(seed: int, count: int, *, special: bool = True) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(seed)
    x = (random.standard_normal(count) * np.exp2(random.integers(-12, 12, count))).astype(np.float32)
    if special:
        where = random.random(count) < 0.03
        x[where] = random.choice(np.asarray(SPECIAL, np.float32), int(where.sum()))
    return x


# ---- number formats ---------------------------------------------------------------------------------------------------------


def test_bfloat16_and_float16_are_torch_s() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 80000, dtype=np.uint32)
    x = np.concatenate((bits.view(np.float32), numbers(0, 20000), np.asarray(SPECIAL, np.float32)))
    there = torch.from_numpy(x).bfloat16()
    here, known = kv_numbers.to_bfloat16(x), ~np.isnan(x)
    assert np.array_equal(here[known], there.view(torch.int16).numpy().view(np.uint16)[known])
    assert (here[~known] == 0x7FC0).all(), "one NaN for all"
    assert np.array_equal(kv_numbers.from_bfloat16(there.view(torch.int16).numpy().view(np.uint16)), there.float().numpy(), equal_nan=True)
    halves = kv_numbers.from_float32(x, "float16")
    assert np.array_equal(halves, torch.from_numpy(x).half().numpy(), equal_nan=True)
    assert np.array_equal(kv_numbers.to_float32(halves, "float16"), torch.from_numpy(x).half().float().numpy(), equal_nan=True)


def test_fp8_is_torch_s() -> None:
    codes = np.arange(256, dtype=np.uint8)
    there = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(kv_numbers.from_fp8(codes), there, equal_nan=True)
    steps = np.unique(there[np.isfinite(there)])
    middles = (steps[1:] + steps[:-1]) / 2
    around = np.concatenate([middles, np.nextafter(middles, np.float32(1e9)), np.nextafter(middles, np.float32(-1e9))])
    x = np.concatenate([steps, around, np.clip(numbers(1, 5000, special=False), -448, 448), [-0.0]]).astype(np.float32)
    assert np.array_equal(kv_numbers.to_fp8(x), torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy())


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
def test_quantization_is_the_engine_s(quantization: str) -> None:
    for module, name in ((kv_numbers, "LIMITS"), (kv_numbers, "LEAST_SCALE"), (kv_numbers, "FP8_SCALES")):
        assert getattr(module, name) == getattr(kv_quantization, name)
    x = np.concatenate((numbers(3, 64 * 3000).reshape(3000, 64), np.zeros((2, 64), np.float32)))
    values, scales = kv_numbers.quantize(x, quantization)
    theirs, their_scales = kv_quantization.quantize(torch.from_numpy(x), quantization)
    other = scales != their_scales.view(torch.int16).numpy().view(np.uint16)
    # Where two of fp8's scales are equally good but for a float32's last digits, sums in another order choose another one.
    assert other.mean() <= (0.001 if quantization == "fp8" else 0)
    assert np.array_equal(values[~other], theirs.numpy()[~other])
    back = kv_numbers.dequantize(theirs.numpy(), their_scales.view(torch.int16).numpy().view(np.uint16), quantization)
    assert np.array_equal(back, kv_quantization.dequantize(theirs, their_scales, quantization).numpy(), equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "quantization", "planes", "head_dim"),
    [(*format, planes, 5) for format in FORMATS for planes in (1, 2)] + [(*format, 2, 32) for format in FOUR_BITS],
)
def test_a_block_is_taken_apart_as_the_pool_has_it(dtype: str, quantization: str, planes: int, head_dim: int) -> None:
    sizes: dict[str, Any] = {"block_size": 8, "head_dim": head_dim, "num_planes": planes, "dtype": dtype, "quantization": quantization}
    shape = KvShape(num_blocks=3, num_layers=2, num_kv_heads=2, **sizes)
    layout = layout_of(**sizes)
    cache = KvCache(shape)
    slots = torch.arange(24)
    for layer in range(2):
        vectors = torch.from_numpy(numbers(layer, 24 * shape.vectors * head_dim, special=False).reshape(24, -1, head_dim)).to(DTYPES[dtype])
        rows = torch.arange(shape.vectors)
        index = (((slots // 8)[:, None] * 2 * shape.vectors) + rows) * 8 + (slots % 8)[:, None]
        cache.write_rows(layer, index.reshape(-1), vectors.reshape(-1, head_dim))
    blocks = np.empty((3, shape.block_bytes), np.uint8)
    cache.read_blocks([0, 1, 2], blocks)
    assert shape.block_bytes == block_bytes(layout)
    apart = unpack(blocks, layout)
    assert np.array_equal(pack(apart, layout), blocks)
    exact = layout_conversion.recode(apart, layout, layout_of(block_size=8, head_dim=head_dim, num_planes=planes))
    for layer in range(2):
        assert np.array_equal(exact.values[:, layer], cache.numbers(layer, torch.arange(3)).float().numpy())


# ---- unequal pairs ----------------------------------------------------------------------------------------------------------


def token_vectors(layout: LayoutRecord, num_tokens: int, seed: int) -> layout_conversion.Vectors:
    """[1, layers, planes, all heads, tokens, dim], in the layout's number format."""
    heads = layout.num_kv_heads * layout.tp_size
    shape = (1, layout.num_layers, layout.num_planes, heads, num_tokens, layout.head_dim)
    x = layout_conversion.Vectors(numbers(seed, int(np.prod(shape)), special=False).reshape(shape))
    return layout_conversion.recode(x, layout_of(), layout)


def blocks_of(
    vectors: layout_conversion.Vectors, layout: LayoutRecord, num_tokens: int, layers: slice, *, past_the_end: tuple[int, int] = (1, 7)
) -> npt.NDArray[np.uint8]:
    """The plainest way: one slot after the other, these numbers and scales past the end."""
    count = -(-num_tokens // layout.block_size)
    heads = range(layout.tp_rank * layout.num_kv_heads, (layout.tp_rank + 1) * layout.num_kv_heads)
    values = vectors.values[0, layers]
    out = np.full(
        (count, values.shape[0], layout.num_planes, len(heads), layout.block_size, values.shape[-1]), past_the_end[0], values.dtype
    )
    scales = None if vectors.scales is None else np.full(out.shape[:-1], past_the_end[1], np.uint16)
    for token in range(num_tokens):
        block, slot = divmod(token, layout.block_size)
        for i, head in enumerate(heads):
            out[block, :, :, i, slot] = values[:, :, head, token]
            if scales is not None:
                assert vectors.scales is not None
                scales[block, :, :, i, slot] = vectors.scales[0, layers, :, head, token]
    return pack(layout_conversion.Vectors(out, scales), layout)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[LayoutRecord, LayoutRecord]:
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    layers, dim, planes = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 8, 32])), draw(st.sampled_from([1, 2]))

    def one() -> LayoutRecord:
        dtype, quantization = draw(st.sampled_from(FORMATS + FOUR_BITS if (dim, planes) == (32, 2) else FORMATS))
        tp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if heads % n == 0]))
        size = draw(st.integers(1, 9)) * (4 if quantization != "none" else 1)
        shape = {"block_size": size, "num_layers": layers, "num_planes": planes, "num_kv_heads": heads // tp, "head_dim": dim}
        return layout_of(dtype=dtype, quantization=quantization, tp_size=tp, **shape)

    return one(), one()


@settings(max_examples=80)
@given(pair=pairs(), num_tokens=st.integers(1, 28), data=st.data())
def test_any_layout_becomes_any_other(pair: tuple[LayoutRecord, LayoutRecord], num_tokens: int, data: st.DataObject) -> None:
    source, target = pair
    vectors = token_vectors(source, num_tokens, seed=num_tokens)
    target = replace(target, tp_rank=data.draw(st.integers(0, target.tp_size - 1)))
    first = data.draw(st.integers(0, num_tokens // target.block_size))
    count = -(-num_tokens // source.block_size)
    assembler = Assembler(target, first_block=first, num_tokens=num_tokens)
    chunk, group = data.draw(st.integers(1, count)), data.draw(st.integers(1, source.num_layers))
    pieces = [
        (rank, start, layer)
        for rank in range(source.tp_size)
        for start in range(0, count, chunk)
        for layer in range(0, source.num_layers, group)
    ]
    made: dict[int, npt.NDArray[np.uint8]] = {}
    come: set[tuple[int, int, int]] = set()
    for rank, start, layer in data.draw(st.permutations(pieces + pieces[:2])):
        part = replace(source, tp_rank=rank)
        layers = slice(layer, min(layer + group, source.num_layers))
        blocks = blocks_of(vectors, part, num_tokens, layers)[start : start + chunk]
        done = assembler.add(part, start, blocks, first_layer=layer, num_layers=layers.stop - layer)
        come.add((rank, start, layer))
        for block in done:
            assert block.index not in made
            made[block.index] = block.data
            end = min((block.index + 1) * target.block_size, num_tokens)
            needed = {n // chunk * chunk for n in range(block.index * target.block_size // source.block_size, -(-end // source.block_size))}
            first_head, last_head = target.tp_rank * target.num_kv_heads, (target.tp_rank + 1) * target.num_kv_heads - 1
            ours = range(first_head // source.num_kv_heads, last_head // source.num_kv_heads + 1)
            assert all((r, s, g) in come for r in ours for s in needed for g in range(0, source.num_layers, group)), "it was not all there"
    assert sorted(made) == list(range(first, -(-num_tokens // target.block_size)))
    wanted = layout_conversion.recode(vectors, source, target)
    expected = blocks_of(wanted, target, num_tokens, slice(None), past_the_end=(0, 0))
    assert made or first * target.block_size >= num_tokens
    assert all(np.array_equal(data, expected[index]) for index, data in made.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"model_fingerprint": "n"},
        {"num_layers": 3},
        {"head_dim": 4},
        {"num_kv_heads": 3},
        {"num_planes": 1},
        {"num_planes": 3},
        {"tp_size": 2},
        {"dtype": "float64"},
        {"quantization": "int4"},
        {"quantization": "int4", "head_dim": 48},
        {"quantization": "int4", "head_dim": 64, "num_planes": 1},
        {"quantization": "int2"},
        {"quantization": "fp8", "block_size": 6},
        {"tp_rank": 1},
        {"block_size": 0},
    ],
)
def test_what_cannot_be_converted_is_refused(changes: dict[str, object]) -> None:
    check_convertible(layout_of(), layout_of())
    with pytest.raises(Incompatible):
        check_convertible(layout_of(**changes), layout_of())


def test_states_that_lie_differently_are_refused() -> None:
    """A worker of a version before the field says nothing of it: its states lie otherwise in blocks of the same size."""
    before, today = layout_of(num_state_blocks=6), layout_of(num_state_blocks=6, state_layout=STATE_LAYOUT)
    check_convertible(today, today)
    for source, target in ((before, today), (today, before)):
        with pytest.raises(Incompatible):
            check_convertible(source, target)
        assert not joinable(source, target)
    assert fingerprint(before) != fingerprint(today), "tickets of the one are refused by the other, too"
    assert layout_from_proto(layout_to_proto(today)) == today
    shape = KvShape(num_blocks=1, block_size=4, num_layers=2, num_kv_heads=2, head_dim=3, dtype="float32")
    assert "state_layout" not in told_layout(shape, "m").said(), "as before where there is no state"
    assert told_layout(replace(shape, num_state_blocks=6), "m").said()["state_layout"] == STATE_LAYOUT


def test_what_was_rounded_never_shares_a_key() -> None:
    layouts = [layout_of(dtype=dtype, quantization=quantization) for dtype, quantization in FORMATS + FOUR_BITS]
    native = {(layout.dtype, layout.quantization) for layout in layouts}
    for source in layouts:
        for target in layouts:
            fields = cache_key_fields(source, target)
            equal = (source.dtype, source.quantization) == (target.dtype, target.quantization)
            assert (fields in native) == equal
            assert not equal or same_numbers(source, target)
    assert cache_key_fields(layout_of(block_size=16), layout_of()) == ("float32", "none")


# ---- on the wire ------------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(pair=pairs(), count=st.integers(0, 4), encoding=st.sampled_from(["raw", "zstd", "int8", "fp8"]), seed=st.integers(0, 99))
def test_what_is_encoded_is_decoded(pair: tuple[LayoutRecord, LayoutRecord], count: int, encoding: str, seed: int) -> None:
    layout = pair[0]
    if encoding in wire_encoding.LOSSY and (layout.quantization != "none" or layout.block_size % 4):
        with pytest.raises(InvalidRequest, match="travel"):
            wire_encoding.check_encoding(encoding, layout)
        return
    vectors = token_vectors(layout, count * layout.block_size, seed)
    blocks = blocks_of(vectors, layout, count * layout.block_size, slice(None))
    wire = wire_encoding.encode(encoding, blocks, layout)
    back = wire_encoding.decode(encoding, wire, count, layout)
    if encoding not in wire_encoding.LOSSY:
        assert np.array_equal(back, blocks)
        return
    assert wire.size == count * block_bytes(replace(layout, quantization=encoding))
    exact, lossy = (kv_numbers.to_float32(unpack(x, layout).values, layout.dtype) for x in (blocks, back))
    peak = np.abs(exact).max(-1, keepdims=True, initial=0)
    assert (np.abs(exact - lossy) <= peak / (120 if encoding == "int8" else 12)).all()


def test_zstd_that_lies_is_refused() -> None:
    layout = layout_of()
    blocks = np.zeros((2, block_bytes(layout)), np.uint8)
    wire = wire_encoding.encode("zstd", blocks, layout)
    for damaged, count in ((wire, 1), (wire, 3), (wire[:-3], 2), (np.zeros(9, np.uint8), 2), (np.concatenate((wire, wire)), 2)):
        with pytest.raises(DataLoss, match="prefill again"):
            wire_encoding.decode("zstd", damaged, count, layout)
    with pytest.raises(DataLoss, match="came"):
        wire_encoding.decode("raw", wire, 2, layout)
    with pytest.raises(InvalidRequest, match="one of raw"):
        wire_encoding.encode("gzip", blocks, layout)
