"""What prompts are pooled to equals transformers' hidden states after the last norm: alone, and chunked beside answers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forward_helpers import FAMILIES, VOCAB, save_model
from safetensors.torch import load_file, save_file

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.types import EngineRequest
from twostep.errors import SetupError
from twostep.model.runner.model_runner import ModelRunner
from twostep.pooling import Pooling
from twostep.sampling_params import SamplingParams

TOLERANCE = 1e-4
# One of each kind of layers and caches.
QUICK = {"qwen3", "qwen3-windows", "deepseek-v2", "qwen3-moe", "qwen3-next", "gemma2", "gpt2", "opt"}
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
OPTIONS = {"num_blocks": 96, "block_size": 16}


def request(name: str, tokens: list[int], pooling: Pooling | None) -> EngineRequest:
    sampling = ONE_TOKEN if pooling else replace(ONE_TOKEN, max_tokens=20)
    return EngineRequest(seq_id=name, token_ids=tokens, num_prompt_tokens=len(tokens), sampling=sampling, prefix_key=b"k", pooling=pooling)


def vectors_of(runner: ModelRunner, requests: list[EngineRequest], budget: int) -> dict[str, torch.Tensor]:
    engine = Engine(runner, EngineConfig(max_num_batched_tokens=budget, max_num_seqs=8, hash_unit=16))
    for each in requests:
        engine.submit(each)
    found: dict[str, torch.Tensor] = {}
    while len(found) < sum(each.pooling is not None for each in requests):
        output = engine.step()
        assert not output.failures
        found |= {each.seq_id: torch.from_numpy(each.vector) for each in output.pooled}
    return found


def states_of(oracle, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0].float()


@pytest.mark.parametrize("family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in FAMILIES])
def test_vectors_are_transformers(family: str, tmp_path: Path) -> None:
    oracle = save_model(family, tmp_path)
    runner, rng = ModelRunner(tmp_path, **OPTIONS), random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 47, 90)]
    # The second one's beginning is found in the cache where the last token is pooled.
    prompts.append(prompts[1][:33] + prompts[2][:20])
    for budget in (256, 24):
        asked = [request(f"{kind.value} {i}", tokens, kind) for kind in Pooling for i, tokens in enumerate(prompts)]
        found = vectors_of(runner, [*asked, request("an answer", prompts[0], None)], budget)
        for each in asked:
            states = states_of(oracle, list(each.token_ids))
            want = states[-1] if each.pooling is Pooling.LAST else states.mean(0)
            torch.testing.assert_close(found[each.seq_id], want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_the_decoder_alone(tied: bool, tmp_path: Path) -> None:
    """As models that were trained for embeddings are saved: without a head, and without the names' prefix. Where the embedding is the
    head it generates as well."""
    oracle = save_model("qwen3", tmp_path, tie_word_embeddings=tied)
    (tmp_path / "model.safetensors").unlink()
    oracle.model.save_pretrained(tmp_path)
    assert not any(name.startswith(("model.", "lm_head")) for name in load_file(tmp_path / "model.safetensors"))
    runner = ModelRunner(tmp_path, **OPTIONS)
    assert runner.generates is tied
    tokens = list(range(3, 50))
    found = vectors_of(runner, [request("a", tokens, Pooling.LAST)], 64)
    torch.testing.assert_close(found["a"], states_of(oracle, tokens)[-1], rtol=0, atol=TOLERANCE)


def test_a_head_that_is_missing_is_one_where_nothing_speaks_of_embeddings(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if name != "lm_head.weight"}, file, metadata={"format": "pt"})
    with pytest.raises(SetupError, match="lm_head"):
        ModelRunner(tmp_path, **OPTIONS)
    (tmp_path / "modules.json").write_text("[]")
    assert not ModelRunner(tmp_path, **OPTIONS).generates
