"""Latent attention's kernels over a scattered pool, against the same in float64 and without absorbing anything: keys and values of every
head are made from the numbers that the pool's bytes stand for. All that no sequence wrote is poison."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pools import DEVICE, poisoned_pool, relative_limit, tolerance

from twostep.model.kernels.latent import LatentDims, LatentWeights, absorb, values_of
from twostep.model.kernels.step_upload import StepUpload
from twostep.model.kernels.triton_latent import latent_chunks, latent_decode, latent_decode_plan, latent_program
from twostep.model.kernels.triton_latent_expanded import ExpandedScratch, attend_expanded, expanded_chunks
from twostep.model.kernels.triton_latent_write import write_latent
from twostep.model.kernels.triton_launch import DecodeWorkspace
from twostep.model.kernels.triton_prefill import plan_tiles
from twostep.model.step.kv_cache import KvCache

LAYER = 1
SCALE = 0.3
EPS = 1e-6


@dataclass
class Step:
    """Chunks of `counts` new tokens at the ends of sequences of `lengths`, whose latents are all in the pool."""

    cache: KvCache
    dims: LatentDims
    weights: LatentWeights
    lengths: list[int]
    counts: list[int]
    tables: torch.Tensor
    query: torch.Tensor  # [T, num_heads * dims.query], as the layer's product gave them
    kv: torch.Tensor  # [all tokens, dims.kept], likewise, sequence by sequence
    angles: torch.Tensor  # [positions, rope / 2]

    @property
    def rows(self) -> list[int]:
        """Which of all tokens are new."""
        starts = np.cumsum([0, *self.lengths])
        return [int(starts[s]) + p for s, n in enumerate(self.lengths) for p in range(n - self.counts[s], n)]


def step_of(
    lengths: list[int],
    counts: list[int],
    dims: LatentDims,
    num_heads: int,
    dtype: torch.dtype,
    quantization: str = "none",
    *,
    size: int = 16,
) -> Step:
    num_blocks = sum(-(-n // size) for n in lengths) + 2
    shape = {"num_blocks": num_blocks, "num_layers": 2, "num_kv_heads": 1, "block_size": size, "head_dim": dims.kept, "num_planes": 1}
    cache = poisoned_pool(dtype, quantization=quantization, **shape)
    free = random.Random(sum(lengths)).sample(range(num_blocks), num_blocks)
    tables = torch.full((len(lengths), max(1, -(-max(lengths) // size))), 2**31 - 1, dtype=torch.int32)
    for s, length in enumerate(lengths):
        for i in range(-(-length // size)):
            tables[s, i] = free.pop()
    weights = LatentWeights(
        norm=(1 + 0.3 * torch.randn(dims.latent)).to(dtype).to(DEVICE),
        eps=EPS,
        up=(torch.randn(num_heads, dims.nope + dims.value, dims.latent) / dims.latent**0.5).to(dtype).to(DEVICE),
    )
    angles = torch.outer(torch.arange(max(lengths) + 1.0), 10.0 ** -torch.linspace(0, 2, dims.rope // 2))
    # Slices of wider products, as a layer has them.
    query = torch.randn(sum(counts), num_heads * dims.query + 8, device=DEVICE).to(dtype)[:, : num_heads * dims.query]
    kv = torch.randn(sum(lengths), dims.kept + 24, device=DEVICE).to(dtype)[:, 24:]
    return Step(cache, dims, weights, lengths, counts, tables.to(DEVICE), query, kv, angles.to(DEVICE))


def slots_of(step: Step) -> torch.Tensor:
    size = step.cache.shape.block_size
    return torch.tensor(
        [int(step.tables[s, p // size]) * size + p % size for s, n in enumerate(step.lengths) for p in range(n)], device=DEVICE
    )


def positions_of(step: Step) -> torch.Tensor:
    return torch.tensor([p for n in step.lengths for p in range(n)], device=DEVICE)


def kept_of(step: Step) -> torch.Tensor:
    """float64 [all tokens, dims.kept]: latents normed, rope parts rotated."""
    x, latent = step.kv.double(), step.dims.latent
    normed = x[:, :latent] * (x[:, :latent].square().mean(-1, keepdim=True) + EPS).rsqrt() * step.weights.norm.double()
    return torch.cat((normed, halves(x[:, latent:], step.angles[positions_of(step)], step.dims)), -1)


def write(step: Step) -> torch.Tensor:
    """All tokens to the pool, the new ones by the kernel. Returns their absorbed queries."""
    new = torch.tensor(step.rows, device=DEVICE)
    old = torch.ones(len(step.kv), dtype=torch.bool, device=DEVICE).index_fill(0, new, False)
    block, slot = slots_of(step) // step.cache.shape.block_size, slots_of(step) % step.cache.shape.block_size
    vectors = kept_of(step).to(step.kv.dtype)[:, None]
    if step.cache.quantized is not None:
        step.cache.quantized.write(LAYER, block[old], slot[old], vectors[old])
    else:
        step.cache.tensor[block[old], LAYER, 0, 0, slot[old]] = vectors[old, 0]
    absorbed = absorb(step.query, step.weights, step.dims)
    absorbed[..., step.dims.latent :] = torch.nan
    write_latent(
        step.query,
        absorbed[..., step.dims.latent :],
        step.kv[new],
        positions_of(step)[new],
        slots_of(step)[new],
        step.angles.cos(),
        step.angles.sin(),
        step.cache,
        LAYER,
        weights=step.weights,
        dims=step.dims,
    )
    return absorbed


def halves(x: torch.Tensor, angles: torch.Tensor, dims: LatentDims) -> torch.Tensor:
    """Rotated, float64, pairs as halves: x [T, ..., rope], angles [T, rope / 2]."""
    x = x.double()
    low, high = (x[..., 0::2], x[..., 1::2]) if dims.interleaved else x.chunk(2, -1)
    angles = angles.double().view(len(x), *[1] * (x.dim() - 2), -1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)


def expected(step: Step) -> torch.Tensor:
    """float64 [T, num_heads * value]."""
    dims, up = step.dims, step.weights.up.double()
    out, row = [], 0
    for s, (length, count) in enumerate(zip(step.lengths, step.counts, strict=True)):
        size = step.cache.shape.block_size
        kept = step.cache.numbers(LAYER, step.tables[s, : -(-length // size)].long()).double().reshape(-1, dims.kept)[:length]
        made = torch.einsum("hdl,kl->khd", up, kept[:, : dims.latent])
        q = step.query[row : row + count].view(count, len(up), -1).double()
        position = torch.arange(length - count, length, device=DEVICE)
        turned = halves(q[..., dims.nope :], step.angles[position], dims)
        score = torch.einsum("thd,khd->htk", q[..., : dims.nope], made[..., : dims.nope])
        score += torch.einsum("thd,kd->htk", turned, kept[:, dims.latent :])
        hidden = torch.arange(length, device=DEVICE) > position[:, None]
        weight = (score * SCALE).masked_fill(hidden, -torch.inf).softmax(-1)
        out.append(torch.einsum("htk,khd->thd", weight, made[..., dims.nope :]).reshape(count, -1))
        row += count
    return torch.cat(out)


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Rounded are both parts of absorbed queries, or keys and values that are made, weights, weighted latents, and the result."""
    assert (got.double() - want).norm() / want.norm() < relative_limit(dtype, 6)


def made(step: Step) -> torch.Tensor:
    """[T, num_heads * value], with keys and values made. What the scratch held before is poison."""
    counts, lengths, num_heads = np.array(step.counts), np.array(step.lengths), len(step.weights.up)
    turned = write(step)[..., step.dims.latent :]
    scratch = ExpandedScratch(step.dims, num_heads, step.query.dtype, torch.device(DEVICE))
    scratch.kept[: 2 * sum(lengths)].fill_(torch.nan)
    scratch.made[: 2 * sum(lengths)].fill_(torch.nan)
    options = {"dims": step.dims, "scratch": scratch, "dtype": step.query.dtype, "upload": StepUpload(torch.device(DEVICE))}
    chunks = expanded_chunks(counts, lengths, **options)
    assert chunks is not None
    out = torch.full((len(step.query), num_heads * step.dims.value), torch.nan, dtype=step.query.dtype, device=DEVICE)
    inputs = {
        "query_start": torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=DEVICE),
        "seq_lens": torch.tensor(step.lengths, dtype=torch.int32, device=DEVICE),
        "block_tables": step.tables,
    }
    attend_expanded(step.query, turned, out, step.cache, LAYER, chunks=chunks, weights=step.weights, dims=step.dims, scale=SCALE, **inputs)
    return out


def attended(step: Step, *, num_sms: int = 6) -> torch.Tensor:
    """[T, num_heads * value], absorbed, by the decode kernel if all chunks are of one token."""
    absorbed, num_heads = write(step), len(step.weights.up)
    out = torch.full((len(absorbed), num_heads, step.dims.latent), torch.nan, dtype=step.query.dtype, device=DEVICE)
    lens = torch.tensor(step.lengths, dtype=torch.int32, device=DEVICE)
    program = latent_program(step.cache, step.dims, num_heads=num_heads, max_queries=max(step.counts))
    if max(step.counts) == 1:
        options = {"num_seqs": len(step.lengths), "device": DEVICE, "workspace": DecodeWorkspace(DEVICE), "num_sms": num_sms}
        plan = latent_decode_plan(step.cache.shape, program, **options)
        plan.parts.fill_(torch.nan)
        plan.scales.fill_(torch.nan)
        plan.refresh(lens)
        latent_decode(absorbed, out, step.cache, LAYER, step.tables, lens, plan=plan, program=program, scale=SCALE)
    else:
        counts = np.array(step.counts)
        tiles = torch.from_numpy(plan_tiles(counts, np.array(step.lengths), program.tokens)).to(DEVICE)
        query_start = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=DEVICE)
        inputs = {"tiles": tiles, "query_start": query_start, "seq_lens": lens, "block_tables": step.tables}
        latent_chunks(absorbed, out, step.cache, LAYER, program=program, scale=SCALE, **inputs)
    return values_of(out, step.weights, step.dims)


DIMS = LatentDims(nope=12, rope=8, value=10, latent=24)


FORMATS = [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "fp8"), (torch.float16, "int8")]


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS, ids=str)
def test_decodes_of_ragged_lengths(dtype: torch.dtype, quantization: str) -> None:
    step = step_of([1, 110, 33, 16], [1] * 4, DIMS, 3, dtype, quantization)
    assert_near(attended(step), expected(step), dtype)


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS, ids=str)
def test_chunks_at_the_ends_of_their_sequences(dtype: torch.dtype, quantization: str) -> None:
    step = step_of([24, 7, 50], [24, 7, 3] if quantization != "fp8" else [6, 2, 3], DIMS, 3, dtype, quantization)
    assert_near(attended(step), expected(step), dtype)


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS, ids=str)
def test_chunks_whose_keys_and_values_are_made(dtype: torch.dtype, quantization: str) -> None:
    if DEVICE == "cuda" and dtype == torch.float32:
        pytest.skip("a GPU's tensor cores do not multiply float32: it attends to latents as they are")
    lengths, counts = ([70, 7, 30], [66, 7, 20]) if quantization != "fp8" else ([24, 4, 9], [20, 4, 3])
    step = step_of(lengths, counts, DIMS, 2, dtype, quantization)
    assert_near(made(step), expected(step), dtype)


def test_chunks_that_are_short_or_too_many_are_not_expanded() -> None:
    dtype = torch.bfloat16
    scratch = ExpandedScratch(DIMS, 3, dtype, torch.device(DEVICE))
    options = {"dims": DIMS, "scratch": scratch, "dtype": dtype, "upload": StepUpload(torch.device(DEVICE))}
    for counts, lengths, wanted in (([0, 3], [5, 900], False), ([0, 90], [900, 90], True), ([99], [scratch.num_keys + 1], False)):
        assert (expanded_chunks(np.array(counts), np.array(lengths), **options) is not None) is wanted


@pytest.mark.system
def test_heads_in_groups_and_the_shape_of_deepseek() -> None:
    """128 heads, of which 64 are a program's; 576 numbers a token."""
    dims = LatentDims(nope=32, rope=64, value=32, latent=512)
    for counts in ([1, 1], [3, 1]):
        step = step_of([90, 5], counts, dims, 128, torch.bfloat16)
        assert_near(attended(step, num_sms=5), expected(step), torch.bfloat16)


@settings(max_examples=6, deadline=None)
@given(
    num_heads=st.integers(1, 9),
    dims=st.builds(
        LatentDims,
        nope=st.integers(1, 20),
        rope=st.sampled_from([2, 6, 16]),
        value=st.integers(1, 20),
        latent=st.integers(3, 40),
        interleaved=st.booleans(),
    ),
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=2),
    decodes=st.booleans(),
    size=st.sampled_from([16, 32]),
)
def test_any_shape(num_heads: int, dims: LatentDims, chunks: list[tuple[int, int]], decodes: bool, size: int) -> None:
    counts = [1 if decodes else count for _, count in chunks]
    step = step_of(
        [before + count for (before, _), count in zip(chunks, counts, strict=True)], counts, dims, num_heads, torch.float32, size=size
    )
    assert_near(attended(step), expected(step), torch.float32)


@pytest.mark.parametrize(("interleaved", "quantization"), [(True, "none"), (False, "fp8"), (True, "int8")])
def test_what_is_kept_of_a_token(interleaved: bool, quantization: str) -> None:
    """The latent normed and the rope part rotated, both rounded; by the torch pool's own way of writing, to the bit but for the norm."""
    dims = LatentDims(nope=4, rope=12, value=5, latent=20, interleaved=interleaved)
    step = step_of([9, 3], [9, 3], dims, 2, torch.float32, quantization)
    write(step)
    want = kept_of(step)
    slots = slots_of(step)
    got = step.cache.numbers(LAYER, slots // 16)[torch.arange(12), 0, 0, slots % 16]
    if quantization == "none":
        torch.testing.assert_close(got.double(), want, **tolerance(torch.float32))
    else:
        # Half a step of e4m3 of a number, of int8 of the largest.
        bound = want.abs() / 15 + 1e-3 if quantization == "fp8" else want.abs().amax(-1, keepdim=True) / 250
        assert bool(((got.double() - want).abs() <= bound).all())
    others = torch.ones(step.cache.shape.num_blocks * 16, dtype=torch.bool).index_fill(0, slots.cpu(), False)
    everywhere = step.cache.numbers(LAYER, torch.arange(step.cache.shape.num_blocks, device=DEVICE)).reshape(-1, dims.kept)
    assert bool(everywhere[others.to(DEVICE)].isnan().all())


def test_padding_is_not_written_and_not_attended() -> None:
    step = step_of([20, 5], [1, 1], DIMS, 3, torch.float32)
    write(step)
    want = expected(step)
    cos, sin = step.angles.cos(), step.angles.sin()
    rows = step.rows
    query, kv = step.query, step.kv[rows]
    padded = torch.cat((absorb(query, step.weights, DIMS), torch.full((2, 3, DIMS.kept), torch.nan, device=DEVICE)))
    before = step.cache.tensor.clone()
    slots = torch.cat((slots_of(step)[rows], torch.tensor([-1, -1], device=DEVICE)))
    positions = torch.cat((positions_of(step)[rows], torch.zeros(2, dtype=torch.long, device=DEVICE)))
    four = torch.cat((query, query)), torch.cat((kv, kv))
    write_latent(
        four[0], padded[..., DIMS.latent :], four[1], positions, slots, cos, sin, step.cache, LAYER, weights=step.weights, dims=DIMS
    )
    assert torch.equal(step.cache.tensor.nan_to_num(7.0), before.nan_to_num(7.0))
    lens = torch.tensor([20, 5, -1, -1], dtype=torch.int32, device=DEVICE)
    tables = torch.cat((step.tables, step.tables))
    program = latent_program(step.cache, DIMS, num_heads=3, max_queries=1)
    options = {"num_seqs": 4, "device": DEVICE, "workspace": DecodeWorkspace(DEVICE), "num_sms": 3}
    plan = latent_decode_plan(step.cache.shape, program, **options)
    plan.refresh(lens)
    out = torch.full((4, 3, DIMS.latent), 3.0, device=DEVICE)
    latent_decode(padded, out, step.cache, LAYER, tables, lens, plan=plan, program=program, scale=SCALE)
    assert bool((out[2:] == 3.0).all())
    assert_near(values_of(out[:2], step.weights, DIMS), want, torch.float32)
