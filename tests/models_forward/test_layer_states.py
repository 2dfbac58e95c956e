"""What enters a layer is what transformers says of it, for every family, and nobody who asks changes what comes out."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from forward_helpers import make_batch, of_pool, save_model, scattered_sequences

from twostep.model.families.layer_states import LayerStates
from twostep.model.runner.model_runner import ModelRunner

# One of each way in which layers, embeddings and norms stand around the residual.
KINDS = ["llama", "gemma2", "olmo2", "gpt2", "falcon", "opt", "deepseek-v3-moe", "qwen3-next"]


@pytest.mark.parametrize("family", KINDS)
def test_states_are_what_enters_the_layers(family: str, tmp_path: Path) -> None:
    oracle = save_model(family, tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=64, block_size=4)
    shape = runner.kv_shape
    sequences = scattered_sequences([19, 7], 4, 64, random.Random(3), **of_pool(shape))
    # In two steps, of both sequences at once; only their last rows are sampled.
    first = make_batch([(sequences[0], 11), (sequences[1], 7)], 4, every_row=False)
    plain = runner.forward(first).clone()
    for sequence in sequences:
        sequence.num_computed = 0
    layers = (2, 0, 1)
    states = LayerStates(layers)
    torch.testing.assert_close(runner.forward(first, states), plain, rtol=0, atol=0)
    got = [states.joined()]
    sequences[0].num_computed = 11
    sequences[0].state_source = sequences[0].state_blocks
    runner.forward(make_batch([(sequences[0], 8)], 4, every_row=False), states)
    got.append(states.joined())
    with torch.inference_mode():
        seen = [oracle(torch.tensor([sequence.tokens]), output_hidden_states=True).hidden_states for sequence in sequences]
    want = [torch.cat([of_layers[layer][0] for layer in layers], -1) for of_layers in seen]
    torch.testing.assert_close(torch.cat((got[0][:11], got[1])), want[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(got[0][11:], want[1], rtol=0, atol=1e-4)
