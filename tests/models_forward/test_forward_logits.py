"""Logits of every family equal transformers', whatever the chunking, the block size and the batch mix."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forward_helpers import FAMILIES, VOCAB, make_batch, of_pool, reference_logits, save_model, scattered_sequences

from twostep.engine.batch import SamplingRow, ScoredRows
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams

TOLERANCE = 1e-4
NUM_BLOCKS = 320


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp(request.param)
    return save_model(request.param, directory), directory


def check(sequence, oracle) -> None:
    want = reference_logits(oracle, sequence.tokens)
    assert sorted(sequence.logits) == list(range(len(sequence.tokens)))
    got = torch.stack([sequence.logits[p] for p in range(len(sequence.tokens))])
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def advance(runner: ModelRunner, work) -> None:
    logits = runner.forward(make_batch(work, runner.kv_shape.block_size))
    row = 0
    for sequence, count in work:
        for _ in range(count):
            sequence.logits[sequence.num_computed] = logits[row]
            sequence.num_computed += 1
            row += 1
        sequence.state_source = sequence.state_blocks
    assert row == len(logits)


def test_whole_prompt_then_decode(model: tuple[object, Path]) -> None:
    oracle, directory = model
    runner = ModelRunner(directory, num_blocks=NUM_BLOCKS, block_size=16)
    assert runner.vocab_size == VOCAB
    (sequence,) = scattered_sequences([90], 16, NUM_BLOCKS, random.Random(1), **of_pool(runner.kv_shape))
    advance(runner, [(sequence, 70)])
    while sequence.num_computed < len(sequence.tokens):
        advance(runner, [(sequence, 1)])
    check(sequence, oracle)


@pytest.mark.parametrize(("block_size", "seed"), [(4, 0), (16, 1), pytest.param(32, 0, marks=pytest.mark.system)])
def test_random_chunks_mixed_with_decode(model: tuple[object, Path], block_size: int, seed: int) -> None:
    oracle, directory = model
    rng = random.Random(1000 * seed + block_size)
    runner = ModelRunner(directory, num_blocks=NUM_BLOCKS, block_size=block_size)
    # Whose blocks these were may have had KV that is not finite.
    runner.kv_cache.tensor.fill_(torch.nan)
    sequences = scattered_sequences(
        [rng.choice([1, 2, 7, 33, 90, 200]) for _ in range(6)],
        block_size,
        NUM_BLOCKS,
        rng,
        **of_pool(runner.kv_shape),
    )
    while open_ := [s for s in sequences if s.num_computed < len(s.tokens)]:
        rng.shuffle(open_)
        # One token (decode) and chunks of every size beside each other; some sequences sit the step out.
        work = [(s, min(rng.choice([1, 1, 3, 8, 30, 140]), len(s.tokens) - s.num_computed)) for s in open_[: rng.randint(1, 6)]]
        for sequence, _ in work:
            if rng.random() < 0.5:
                sequence.move_state()
        advance(runner, work)
    for sequence in sequences:
        check(sequence, oracle)


def test_a_context_within_the_original_one_turns_by_the_short_factors(tmp_path: Path) -> None:
    oracle = save_model("phi3-longrope", tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=16, max_model_len=oracle.config.original_max_position_embeddings)
    (sequence,) = scattered_sequences([39], 16, NUM_BLOCKS, random.Random(2))
    advance(runner, [(sequence, 39)])
    with torch.inference_mode():
        want = oracle(torch.tensor([sequence.tokens])).logits[0]
    torch.testing.assert_close(torch.stack([sequence.logits[p] for p in range(39)]), want, rtol=0, atol=TOLERANCE)
    with pytest.raises(AssertionError):
        check(sequence, oracle)


@pytest.mark.parametrize("num_top", [0, 4])
def test_log_probabilities_of_a_prompt(model: tuple[object, Path], num_top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices of few rows, beside rows that are sampled."""
    oracle, directory = model
    monkeypatch.setattr("twostep.model.step.prompt_readout._MAX_LOGITS", 7 * VOCAB)
    runner = ModelRunner(directory, num_blocks=NUM_BLOCKS, block_size=16)
    rng = random.Random(5)
    (sequence, other) = scattered_sequences([60, 9], 16, NUM_BLOCKS, rng, **of_pool(runner.kv_shape))
    batch = make_batch([(other, 9), (sequence, 60)], 16, every_row=False)
    rows = np.arange(9, 68)
    targets = np.array(sequence.tokens[1:60])
    sampling = [SamplingRow(params=SamplingParams(max_tokens=1), position=0, history=[], num_prompt_tokens=1, stop_ids=frozenset())] * 2
    scored = replace(batch, sampling=sampling, scored=ScoredRows(rows, targets, num_top))
    sampled = runner.run(scored)
    assert sampled.token_ids == runner.run(replace(scored, scored=None)).token_ids
    scores = torch.from_numpy(sampled.scores)
    want = reference_logits(oracle, sequence.tokens[:60]).log_softmax(-1)[:-1].double()
    own = want.gather(1, torch.from_numpy(targets)[:, None])
    torch.testing.assert_close(scores[:, :1], own, rtol=0, atol=TOLERANCE)
    assert scores.shape == (59, 2 + 2 * num_top)
    ranks = ((want > own + TOLERANCE).sum(-1) + 1, (want > own - TOLERANCE).sum(-1))
    assert ((ranks[0] <= scores[:, 1]) & (scores[:, 1] <= ranks[1])).all()
    torch.testing.assert_close(scores[:, 2 : 2 + num_top], want.topk(num_top).values, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(want.gather(1, scores[:, 2 + num_top :].long()), want.topk(num_top).values, rtol=0, atol=TOLERANCE)
