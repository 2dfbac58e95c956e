"""Masks on the device against the CPU's, and rows that they constrain among others."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pools import DEVICE

from twostep.engine.token_masks import TokenMasks, num_words
from twostep.model.kernels.step_upload import StepUpload
from twostep.model.kernels.triton_tokens import mask_rows
from twostep.model.runner.device_sampler import DeviceSampler
from twostep.model.runner.sampler import apply_masks, sample, sampling_margin

sys.path.insert(0, str(Path(__file__).parent))
from test_kernel_sample import batch_of, row_of, sampling_rows


def random_masks(rows: list[int], vocab_size: int, seed: int, share: float) -> TokenMasks:
    rng = np.random.default_rng(seed)
    flags = rng.random((len(rows), num_words(vocab_size) * 32)) < share
    flags[np.arange(len(rows)), rng.integers(0, vocab_size, len(rows))] = True
    flags[:, vocab_size:] = False
    return TokenMasks(np.array(rows, np.int64), np.packbits(flags, axis=1, bitorder="little").view(np.int32))


@settings(max_examples=30)
@given(
    vocab_size=st.sampled_from([1, 31, 32, 33, 97, 2048, 4099]),
    num_rows=st.integers(1, 5),
    chosen=st.sets(st.integers(0, 4)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    padded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_forbidden_is_out_and_nothing_else_is_touched(
    vocab_size: int, num_rows: int, chosen: set[int], dtype: torch.dtype, padded: bool, seed: int
) -> None:
    rows = sorted(row for row in chosen if row < num_rows)
    masks = (
        random_masks(rows, vocab_size, seed, 0.4)
        if rows
        else TokenMasks(np.zeros(0, np.int64), np.zeros((0, num_words(vocab_size)), np.int32))
    )
    memory = torch.randn(num_rows, vocab_size + 7 * padded, generator=torch.Generator().manual_seed(seed)).to(dtype)
    want = memory[:, :vocab_size].clone()
    if rows:
        apply_masks(want, masks)
    got = memory.to(DEVICE, copy=True)
    mask_rows(got[:, :vocab_size], torch.from_numpy(masks.rows).to(DEVICE), torch.from_numpy(masks.bits).to(DEVICE))
    assert torch.equal(got[:, :vocab_size].cpu(), want)
    assert torch.equal(got[:, vocab_size:].cpu(), memory[:, vocab_size:])


@settings(max_examples=10)
@given(data=st.data(), vocab_size=st.sampled_from([97, 4099]), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_constrained_rows_equal_the_cpu_s_up_to_near_ties(data: st.DataObject, vocab_size: int, dtype: torch.dtype) -> None:
    """In steps that replay a graph too: there the largest logits are picked before anything is known of masks."""
    rows = data.draw(st.lists(sampling_rows(vocab_size), min_size=1, max_size=4))
    held = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
    seed = data.draw(st.integers(0, 2**32 - 1))
    masks = random_masks(held, vocab_size, seed, data.draw(st.sampled_from([0.0, 0.01, 0.7])))
    logits = (torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    tokens = torch.full((64,), -7, dtype=torch.int64, device=DEVICE)
    batch = batch_of(rows)
    masked = type(batch)(**{name: getattr(batch, name) for name in batch.__slots__} | {"masks": masks})
    sampler = DeviceSampler(StepUpload(torch.device(DEVICE)), tokens, vocab_size)
    sampler.warm_up(dtype)
    picked = data.draw(st.booleans())
    if picked:
        tokens[: len(rows)] = logits.to(DEVICE).argmax(-1)
    on_device = logits.to(DEVICE, copy=True)
    logprobs = sampler.sample(on_device, masked, picked=picked)
    got, want = tokens[: len(rows)].tolist(), sample(logits, rows, masks)
    allowed = dict(zip(held, masks.allowed(vocab_size), strict=True))
    for i, row in enumerate(rows):
        own = TokenMasks(np.zeros(1, np.int64), masks.bits[held.index(i)][None]) if i in allowed else None
        assert i not in allowed or allowed[i][got[i]]
        assert got[i] == want.token_ids[i] or sampling_margin(logits[i], row, own) < 1e-5
    if logprobs is not None:
        for i, values in zip(logprobs.rows, logprobs.values.tolist(), strict=True):
            assert values[0] == pytest.approx(float(logits[i].double().log_softmax(-1)[got[i]]), abs=1e-4)


def test_a_stop_token_comes_before_min_tokens_only_by_its_mask() -> None:
    rows = [row_of(temperature=0.0, stops={2}, min_tokens=5), row_of(temperature=0.0, stops={2}, min_tokens=5)]
    tokens = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    batch = batch_of(rows)
    flags = np.zeros((1, 32), bool)
    flags[0, 2] = True
    masks = TokenMasks(np.array([1]), np.packbits(flags, axis=1, bitorder="little").view(np.int32))
    masked = type(batch)(**{name: getattr(batch, name) for name in batch.__slots__} | {"masks": masks})
    DeviceSampler(StepUpload(torch.device(DEVICE)), tokens, 5).sample(torch.tensor([[0.0, 1, 9, 2, 3]] * 2, device=DEVICE), masked)
    assert tokens[:2].tolist() == [4, 2]
