"""Sampling and masks on the device against the CPU's sampler, their oracle: the same tokens but for near-ties."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pools import DEVICE
from sampling_cases import row_of, sampling_rows

from twostep.engine.batch import Batch, RowsBehind, SamplingRow, TokenMasks, num_words
from twostep.model.kernels.step_upload import StepUpload
from twostep.model.kernels.triton_tokens import NO_TOKEN, carry_tokens, go_on, mask_rows, pick_greedy
from twostep.model.runner.device_sampler import DeviceSampler
from twostep.model.runner.sampler import apply_masks, sample, sampling_margin
from twostep.sampling_params import SamplingParams

INFINITY = float("inf")


def batch_of(rows: list[SamplingRow], carried: list[int] | None = None) -> Batch:
    """One decoded token for each row; the sampler looks at no more of it than this."""
    count, zeros = len(rows), np.zeros(len(rows), np.int32)
    return Batch(
        token_ids=zeros.astype(np.int64),
        positions=zeros.astype(np.int64),
        query_start=np.arange(count + 1, dtype=np.int32),
        seq_lens=zeros + 1,
        block_tables=zeros[None, :, None],
        slots=zeros[None].astype(np.int64),
        sample_rows=np.arange(count),
        sampling=rows,
        carried=None if carried is None else np.array(carried, np.int32),
    )


class Device:
    def __init__(self, vocab_size: int) -> None:
        self.tokens = torch.full((64,), -7, dtype=torch.int64, device=DEVICE)
        self.sampler = DeviceSampler(StepUpload(torch.device(DEVICE)), self.tokens, vocab_size)

    def sample(self, logits: torch.Tensor, rows: list[SamplingRow], carried: list[int] | None = None) -> list[int]:
        self.logprobs = self.sampler.sample(logits.to(DEVICE, copy=True), batch_of(rows, carried))
        return self.tokens[: len(rows)].tolist()


@settings(max_examples=10)
@given(data=st.data(), vocab_size=st.sampled_from([97, 4099]), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows_equal_the_cpu_s_up_to_near_ties(data: st.DataObject, vocab_size: int, dtype: torch.dtype) -> None:
    rows = data.draw(st.lists(sampling_rows(vocab_size), min_size=1, max_size=4))
    spread = data.draw(st.sampled_from([0.3, 3.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    logits = (torch.randn(len(rows), vocab_size, generator=generator) * spread).to(dtype)
    device = Device(vocab_size)
    got, want = device.sample(logits, rows), sample(logits, rows)
    for i, row in enumerate(rows):
        assert got[i] == want.token_ids[i] or sampling_margin(logits[i], row) < 1e-5
    if device.logprobs is not None:
        for i, values in zip(device.logprobs.rows, device.logprobs.values.tolist(), strict=True):
            assert values[0] == pytest.approx(float(logits[i].double().log_softmax(-1)[got[i]]), abs=1e-4)
            best = [top.logprob for top in want.top_logprobs[i]]
            assert values[1 : 1 + len(best)] == pytest.approx(best, abs=1e-4)
            assert len(set(values[1 + len(values) // 2 :])) == len(values) // 2


def test_equal_logits_at_a_cut_stay_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).repeat(24, 1)
    for params in ({"top_k": 2}, {"top_p": 0.6}, {"min_p": float(np.exp(-1.0)) * 0.999}):
        drawn = Device(5).sample(logits, [row_of(i, **params) for i in range(24)])
        assert set(drawn) == {0, 1, 2, 3}


def test_every_token_has_its_share() -> None:
    """Draws of nearly flat logits: what is kept is drawn, what is not never is."""
    logits = torch.linspace(0.1, 0.0, 8).expand(24, 8)
    counts = Counter(Device(8).sample(logits, [row_of(i, top_k=4) for i in range(24)]))
    assert set(counts) == set(range(4))
    assert max(counts.values()) < 15


def test_broken_logits_give_no_token_and_carry_nothing_wild() -> None:
    logits = torch.tensor(
        [[0.0, float("nan"), 1.0], [-INFINITY] * 3, [1.0, INFINITY, 0.0], [-INFINITY, 5.0, 5.0], [0.0, 1.0, float("nan")]]
    )
    rows = [row_of(temperature=0.0), row_of(), row_of(temperature=0.0), row_of(temperature=0.0), row_of(seed=4, top_p=0.5)]
    device = Device(3)
    assert device.sample(logits, rows) == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 1, NO_TOKEN]
    token_ids = torch.tensor([9, 9, 9], dtype=torch.int32, device=DEVICE)
    carry_tokens(token_ids, torch.tensor([0, -1, 3], dtype=torch.int32, device=DEVICE), device.tokens)
    assert token_ids.tolist() == [0, 9, 1]


@settings(max_examples=15)
@given(rows=st.integers(1, 5), vocab_size=st.sampled_from([1, 31, 2048, 5000]), seed=st.integers(0, 999), few=st.booleans(), data=st.data())
def test_greedy_is_the_first_of_the_largest(rows: int, vocab_size: int, seed: int, few: bool, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few values: the largest comes many times, as +0.0 and -0.0 too.
    logits = torch.randn(rows, vocab_size, generator=generator)
    logits = (logits.clamp(-1, 0).round() if few else logits).to(data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    tokens = torch.full((rows,), -7, dtype=torch.int64, device=DEVICE)
    pick_greedy(logits.to(DEVICE), tokens)
    best = logits.double().amax(-1, keepdim=True)
    assert tokens.tolist() == [(row == top).nonzero()[0].item() for row, top in zip(logits.double(), best, strict=True)]


def test_counts_follow_sequences_that_come_go_and_return() -> None:
    """Penalized sequences in steps of a random few, each token carried or known, with more sequences than rows of the table; now and then
    one loses its last tokens, as one that is computed again."""
    vocab_size, rng = 61, np.random.default_rng(5)
    device = Device(vocab_size)
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.4}
    histories = {f"s{i}": rng.integers(0, vocab_size, 4).tolist() for i in range(7)}
    last: list[str] = []
    for step in range(24):
        logits = torch.from_numpy(rng.normal(size=(3, vocab_size)).astype(np.float32))
        names = rng.permutation(list(histories))[:3].tolist()
        if step % 7 == 6 and names[0] not in last:
            del histories[names[0]][3:]
        known = [row_of(len(histories[n]) - 3, tuple(histories[n]), 3, seq_id=n, temperature=[0.0, 0.8][step % 2], **params) for n in names]
        carried = [last.index(n) if n in last and rng.random() < 0.7 else -1 for n in names]
        given = [replace(row, history=row.history[:-1]) if c >= 0 else row for row, c in zip(known, carried, strict=True)]
        got, want = device.sample(logits, given, carried), sample(logits, known).token_ids
        for i, row in enumerate(known):
            assert got[i] == want[i] or sampling_margin(logits[i], row) < 1e-5
            histories[names[i]].append(got[i])
        last = names
    assert len(device.sampler._counts.table) == 3


def test_rows_of_a_wider_tensor_are_sampled() -> None:
    """As columns gathered from several devices are: rows dense, but apart."""
    logits = torch.randn(4, 48, generator=torch.Generator().manual_seed(3))
    logits[:, 40:] = 99.0
    rows = [row_of(i, stops={0, 7}, min_tokens=9, temperature=[0.0, 1.0][i % 2], logprobs=1) for i in range(4)]
    tokens = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    DeviceSampler(StepUpload(torch.device(DEVICE)), tokens, 40).sample(logits.to(DEVICE)[:, :40], batch_of(rows))
    assert tokens[:4].tolist() == list(sample(logits[:, :40], rows).token_ids)


def random_masks(rows: list[int], vocab_size: int, seed: int, share: float) -> TokenMasks:
    rng = np.random.default_rng(seed)
    flags = rng.random((len(rows), num_words(vocab_size) * 32)) < share
    flags[np.arange(len(rows)), rng.integers(0, vocab_size, len(rows))] = True
    flags[:, vocab_size:] = False
    return TokenMasks(np.array(rows, np.int64), np.packbits(flags, axis=1, bitorder="little").view(np.int32))


@settings(max_examples=20)
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


@settings(max_examples=6)
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
    masked = replace(batch, masks=masks)
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
    masked = replace(batch, masks=masks)
    DeviceSampler(StepUpload(torch.device(DEVICE)), tokens, 5).sample(torch.tensor([[0.0, 1, 9, 2, 3]] * 2, device=DEVICE), masked)
    assert tokens[:2].tolist() == [4, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_rows", "most"), [(1, 1), (5, 4), (64, 3), (200, 7)])
def test_rows_behind_drafts_go_on_as_on_the_host(num_rows: int, most: int, dtype: torch.dtype) -> None:
    """Its oracle is Batch.with_carried. Tokens are few, so that drafts are often right; some rows have sampled none."""
    rng = np.random.default_rng(num_rows)
    total = num_rows + 7
    sampled = rng.integers(-1, 3, 300)
    rows = np.sort(rng.choice(total, num_rows, replace=False))
    drafted = rng.integers(0, 3, (num_rows, most))
    drafted[np.arange(most) >= rng.integers(1, most + 1, num_rows)[:, None]] = -1
    behind = RowsBehind.of(
        rows,
        rng.integers(0, 300 - most - 1, num_rows),
        drafted,
        rng.integers(-1, 50, (num_rows, most + 1)),
        rng.integers(0, 1 << 30, (num_rows, most + 1)),
    )
    positions = rng.integers(0, 1000, total)
    batch = Batch(
        token_ids=rng.integers(0, 50, total),
        positions=positions,
        query_start=np.arange(total + 1, dtype=np.int32),
        seq_lens=positions.astype(np.int32) + 1,
        block_tables=np.zeros((1, total, 1), np.int32),
        slots=rng.integers(0, 1 << 30, (1, total)),
        sample_rows=np.arange(total),
        sampling=[SamplingRow(SamplingParams(max_tokens=5), int(position), (), 0, frozenset()) for position in positions],
        behind=behind,
    )
    want = batch.with_carried(sampled.tolist())
    assert behind.num_before <= len(sampled)
    given = [torch.from_numpy(each.copy()).to(DEVICE, dtype) for each in (batch.token_ids, batch.positions, batch.slots[0])]
    lengths = torch.from_numpy(batch.seq_lens.copy()).to(DEVICE)
    accepted = torch.zeros(total, dtype=torch.int32, device=DEVICE)
    go_on(torch.from_numpy(behind.table).to(DEVICE), torch.from_numpy(sampled).to(DEVICE), *given, lengths, accepted)
    for got, expected in zip((*given, lengths), (want.token_ids, want.positions, want.slots[0], want.seq_lens), strict=True):
        assert got.tolist() == expected.tolist()
    assert [row.position for row in want.sampling] == want.positions.tolist()
    assert accepted.tolist() == (want.positions - positions).tolist()
    assert num_rows < 5 or 0 < int(accepted.sum()) < num_rows * most
