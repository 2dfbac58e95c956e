"""Logits of a model with an encoder equal transformers', whatever the block size and the batch mix."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forward_helpers import Sequence_, make_batch, scattered_sequences
from t5_models import KINDS, START, reference_logits, save_t5

from twostep.model.runner.model_runner import ModelRunner

TOLERANCE = 1e-4
NUM_BLOCKS = 200


@pytest.fixture(scope="module", params=list(KINDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp(request.param)
    return save_t5(request.param, directory), directory


def advance(runner: ModelRunner, work: list[tuple[Sequence_, int]], num_prompt: dict[int, int]) -> None:
    """The next tokens of each sequence; keeps the logits of those that the decoder reads."""
    batch = make_batch(work, runner.kv_shape.block_size, every_row=False)
    firsts, rows, places = batch.query_start, list[int](), list[tuple[Sequence_, int]]()
    for i, (sequence, count) in enumerate(work):
        start = sequence.num_computed
        decoded = range(max(start, num_prompt[id(sequence)] - 1), start + count)
        rows += [int(firsts[i]) + place - start for place in decoded]
        places += [(sequence, place) for place in decoded]
        sequence.num_computed += count
    encoded = np.array([num_prompt[id(sequence)] - 1 for sequence, _ in work], np.int32)
    batch = replace(batch, num_encoded=encoded, sample_rows=np.array(rows), sampling=[batch.sampling[0]] * len(rows))
    for (sequence, place), row in zip(places, runner.forward(batch), strict=True):
        sequence.logits[place] = row


@pytest.mark.parametrize(("block_size", "seed"), [(4, 0), (16, 1)])
def test_prompts_and_answers_in_any_company(model: tuple[Any, Path], block_size: int, seed: int) -> None:
    """Answers are computed one by one, and in part, as after a preemption, with the prompt."""
    oracle, directory = model
    rng = random.Random(seed)
    runner = ModelRunner(directory, num_blocks=NUM_BLOCKS, block_size=block_size)
    # Whose blocks these were may have had KV that is not finite.
    runner.kv_cache.tensor.fill_(torch.nan)
    prompts = [2, 3, 17, 40, 90, 150]
    answers = [rng.choice([1, 6, 30]) for _ in prompts]
    sequences = scattered_sequences([p + a for p, a in zip(prompts, answers, strict=True)], block_size, NUM_BLOCKS, rng)
    num_prompt = {id(sequence): count for sequence, count in zip(sequences, prompts, strict=True)}
    for sequence in sequences:
        sequence.tokens[num_prompt[id(sequence)] - 1] = START
    while open_ := [s for s in sequences if s.num_computed < len(s.tokens)]:
        rng.shuffle(open_)
        work = []
        for sequence in open_[: rng.randint(1, 6)]:
            least = 1 if sequence.num_computed else num_prompt[id(sequence)]
            work.append((sequence, min(least + rng.choice([0, 0, 1, 7]), len(sequence.tokens) - sequence.num_computed)))
        advance(runner, work, num_prompt)
    for sequence, length in zip(sequences, prompts, strict=True):
        want = reference_logits(oracle, sequence.tokens[:length], sequence.tokens[length:])
        got = torch.stack([sequence.logits[place] for place in range(length - 1, len(sequence.tokens))])
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
