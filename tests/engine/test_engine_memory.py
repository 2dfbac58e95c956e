"""Tests of the size of the pool that fits, and of the message when none does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from t5_models import save_t5

from twostep.engine.batch import Batch
from twostep.errors import SetupError
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.pool_sizing import (
    GIB,
    MemoryProfile,
    PoolSizing,
    measured_blocks,
    num_blocks_within,
    widest_batch,
)
from twostep.process.startup import NoProgress

MIB = 1 << 20


@st.composite
def profiles(draw: st.DrawFn) -> MemoryProfile:
    total = draw(st.integers(GIB, 200 * GIB))

    def part(low: int, high: int) -> int:
        return total * draw(st.integers(low, high)) // 100 + draw(st.integers(0, 1000))

    at_start = total - part(0, 40)
    # Others may have left since: then there is more.
    free = min(total, max(0, at_start - part(-2, 60)))
    return MemoryProfile(total=total, free_at_start=at_start, free=free, step=part(0, 20), graphs=part(0, 5))


@given(profiles(), st.floats(0.01, 1.0), st.integers(1, 64 * MIB), st.integers(1, 300))
def test_a_pool_fits_its_share_and_what_is_free_and_wastes_less_than_a_block(
    profile: MemoryProfile, utilization: float, block_bytes: int, least: int
) -> None:
    try:
        num_blocks = num_blocks_within(profile, utilization, block_bytes=block_bytes, least_blocks=least, device="cuda:0")
    except SetupError:
        assert profile.pool_bytes(utilization) < least * block_bytes
        return
    assert num_blocks >= least
    taken = num_blocks * block_bytes + profile.step + profile.graphs
    assert taken <= profile.free
    assert taken + profile.own <= profile.total * utilization
    more = taken + block_bytes
    assert more > profile.free or more + profile.own > int(profile.total * utilization)


@given(profiles(), st.floats(0.01, 1.0), st.integers(1, 64 * MIB), st.integers(1, 300))
@example(MemoryProfile(total=100, free_at_start=100, free=50, step=3, graphs=0), 0.5, 1, 1)
def test_following_the_advice_helps(profile: MemoryProfile, utilization: float, block_bytes: int, least: int) -> None:
    try:
        num_blocks_within(profile, utilization, block_bytes=block_bytes, least_blocks=least, device="cuda:0")
    except SetupError as error:
        advised = re.search(r"give --gpu-memory-utilization ([\d.]+) or more", error.message)
        if advised is None:
            return
        assert utilization < float(advised[1]) <= 1.0
        num_blocks_within(profile, float(advised[1]), block_bytes=block_bytes, least_blocks=least, device="cuda:0")


def test_what_is_missing_is_said() -> None:
    small = MemoryProfile(total=24 * GIB, free_at_start=23 * GIB, free=8 * GIB, step=1 * GIB, graphs=0)
    # 12 GiB allowed; 15 + 1 + 0.5 wanted.
    with pytest.raises(SetupError, match=r"4\.50 GiB.*--gpu-memory-utilization 0\.69"):
        num_blocks_within(small, 0.5, block_bytes=MIB, least_blocks=512, device="cuda:1")
    large = MemoryProfile(total=24 * GIB, free_at_start=24 * GIB, free=1 * GIB, step=2 * GIB, graphs=0)
    with pytest.raises(SetupError, match="--max-num-batched-tokens"):
        num_blocks_within(large, 0.9, block_bytes=MIB, least_blocks=512, device="cuda:1")


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 64), st.sampled_from([1, 4, 16]), st.integers(1, 5))
def test_the_widest_step_is_a_sound_batch(num_tokens: int, num_seqs: int, longest: int, block_size: int, num_blocks: int) -> None:
    batch = widest_batch(num_tokens, num_seqs, vocab_size=50, max_model_len=longest, block_size=block_size, num_blocks=num_blocks)
    counts = np.diff(batch.query_start)
    rows = np.repeat(np.arange(len(counts)), counts)
    assert len(batch.token_ids) == len(batch.positions) == batch.slots.shape[1] == min(num_tokens, sum(counts))
    assert len(counts) == len(batch.sampling) == min(num_seqs, num_tokens)
    assert (counts >= 1).all()
    assert counts.max() <= longest
    assert counts.sum() == num_tokens or counts.max() == longest
    assert np.array_equal(batch.seq_lens, counts)
    assert np.array_equal(batch.positions[batch.sample_rows] + 1, batch.seq_lens)
    assert batch.token_ids.max() < 50
    assert batch.block_tables.max() < num_blocks
    assert np.array_equal(batch.block_tables[:, rows, batch.positions // block_size], batch.slots // block_size)


def test_a_pool_is_sized_by_running_the_widest_step(monkeypatch: pytest.MonkeyPatch, tiny_llama_dir: Path) -> None:
    """A CPU's model stands in for a GPU's, and made-up figures for its memory."""
    runner = ModelRunner(tiny_llama_dir, num_blocks=1, block_size=4, max_model_len=64)
    steps: list[int] = []

    def blocks(*, fails_at: int) -> int:
        def step(batch: Batch) -> object:
            steps.append(len(batch.token_ids))
            if len(batch.token_ids) == fails_at:
                raise torch.OutOfMemoryError("tried to allocate")
            return runner.run(batch)

        return measured_blocks(
            step,
            runner.kv_shape,
            PoolSizing(utilization=0.5, max_num_batched_tokens=40, max_num_seqs=3),
            device=torch.device("cuda", 0),
            free_at_start=19 * GIB,
            graphs=MIB,
            vocab_size=runner.vocab_size,
            max_model_len=64,
            progress=NoProgress(),
        )

    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 5 * GIB)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda device: 6 * GIB)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (14 * GIB, 20 * GIB))
    # Half of 20, less 5 of its own, 1 for the step and the graphs.
    assert blocks(fails_at=0) == (4 * GIB - MIB) // runner.kv_shape.block_bytes
    assert steps == [1, 8, 40]
    with pytest.raises(SetupError, match="--max-num-batched-tokens"):
        blocks(fails_at=40)


@pytest.mark.parametrize(("most", "context"), [(40, 64), (40, 24), (1, 64)])
def test_with_an_encoder_the_longest_prompt_and_answer_are_steps_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, most: int, context: int
) -> None:
    save_t5("t5", tmp_path, n_positions=context)
    runner = ModelRunner(tmp_path, num_blocks=1, block_size=4, max_model_len=context)
    steps: list[tuple[int, int, list[int] | None]] = []  # sequences, tokens, and how many of them the encoder reads

    def step(batch: Batch) -> object:
        steps.append((len(batch.seq_lens), len(batch.token_ids), None if batch.num_encoded is None else batch.num_encoded.tolist()))
        return runner.run(batch)

    for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device=None: None)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 5 * GIB)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda device: 6 * GIB)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (14 * GIB, 20 * GIB))
    measured_blocks(
        step,
        runner.kv_shape,
        PoolSizing(utilization=0.5, max_num_batched_tokens=most, max_num_seqs=3),
        device=torch.device("cuda", 0),
        free_at_start=19 * GIB,
        graphs=0,
        vocab_size=runner.vocab_size,
        max_model_len=context,
        progress=NoProgress(),
    )
    longest = min(most, context)
    assert steps[2:] == [(min(3, most), most, None), (1, longest, None), (1, longest, [min(1, longest - 1)])]
