"""Latent attention on a CPU beyond its logits (test_forward_logits.py): what a token keeps, chunks made and absorbed, quantized, preempted,
behind shared prefixes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from forward_helpers import VOCAB, make_batch, reference_logits, save_model, scattered_sequences
from safetensors.torch import load_file, save_file

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.errors import SetupError
from twostep.model.families.registry import parse_config
from twostep.model.runner.model_runner import ModelRunner, kv_shape
from twostep.sampling_params import SamplingParams

NUM_BLOCKS, BLOCK_SIZE = 60, 8


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("deepseek")
    return save_model("deepseek-v2", directory), directory


def runner_of(directory: Path, **options: Any) -> ModelRunner:
    return ModelRunner(directory, **{"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE} | options)


def test_a_token_keeps_one_vector_a_layer(made: tuple[Any, Path]) -> None:
    shape = runner_of(made[1]).kv_shape
    assert shape.block_bytes == BLOCK_SIZE * 3 * (40 + 8) * 4
    assert runner_of(made[1], kv_cache_dtype="fp8").kv_shape.block_bytes == BLOCK_SIZE * 3 * (40 + 8 + 2)


def test_long_chunks_beside_short_ones_and_decodes(made: tuple[Any, Path]) -> None:
    """In one step: keys and values made for a prompt, a few queries absorbed over many keys, a decode; then others' turns."""
    oracle, directory = made
    runner = runner_of(directory)
    sequences = scattered_sequences([100, 120, 70], BLOCK_SIZE, NUM_BLOCKS, random.Random(4))
    for counts in ([0, 110, 60], [90, 3, 1], [4, 6, 1], [6, 1, 8]):
        work = [(s, n) for s, n in zip(sequences, counts, strict=True) if n]
        logits = iter(runner.forward(make_batch(work, BLOCK_SIZE)))
        for sequence, count in work:
            for _ in range(count):
                sequence.logits[sequence.num_computed] = next(logits)
                sequence.num_computed += 1
    for sequence in sequences:
        assert sequence.num_computed == len(sequence.tokens)
        got = torch.stack([sequence.logits[p] for p in range(len(sequence.tokens))])
        torch.testing.assert_close(got, reference_logits(oracle, sequence.tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("quantization", ["exact", "fp8", "int8"])
def test_fewer_bits_stay_near(tmp_path: Path, quantization: str, dtype: str) -> None:
    """Their attention is neither flat nor all on one token."""
    save_model("deepseek-v2-yarn", tmp_path, initializer_range=0.08)
    found = []
    for options in ({}, {"dtype": dtype, "kv_cache_dtype": quantization}):
        runner = runner_of(tmp_path, **options)
        (sequence,) = scattered_sequences([90], BLOCK_SIZE, NUM_BLOCKS, random.Random(1))
        rows = []
        for count in (60, 20, *[1] * 10):
            rows.append(runner.forward(make_batch([(sequence, count)], BLOCK_SIZE)).float().clone())
            sequence.num_computed += count
        found.append(torch.cat(rows))
    error = float((found[1] - found[0]).norm() / found[0].norm())
    assert 1e-4 < error < 0.05, error


def answers(runner: ModelRunner, prompts: list[list[int]], *, together: bool = False, **options: Any) -> list[list[int]]:
    """Greedy tokens; the prompts one after the other, or all at once."""
    engine = Engine(runner, EngineConfig(**{"max_num_batched_tokens": 64, "hash_unit": BLOCK_SIZE} | options))
    requests = [
        EngineRequest(
            seq_id=str(i),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=40, temperature=0.0),
            eos_token_ids=frozenset(),
            prefix_key=b"k",
        )
        for i, prompt in enumerate(prompts)
    ]
    groups = [requests] if together else [[request] for request in requests]
    found = [[token.token_id for token in tokens] for group in groups for tokens in generate(engine, group)]
    if together:
        assert engine.stats().num_preemptions > 0
    return found


def test_preempted_chunked_and_behind_shared_prefixes_tokens_are_the_same(made: tuple[Any, Path]) -> None:
    rng = random.Random(3)
    first = [rng.randrange(VOCAB) for _ in range(70)]
    prompts = [first, first[:50] + [rng.randrange(VOCAB) for _ in range(9)], first]
    alone = [answers(runner_of(made[1]), [prompt], max_num_batched_tokens=512)[0] for prompt in prompts]
    assert answers(runner_of(made[1]), prompts, max_num_batched_tokens=13) == alone
    # Too few blocks for all of them at their ends.
    assert answers(runner_of(made[1], num_blocks=20), prompts, together=True) == alone


# What deepseek-ai/DeepSeek-V2-Lite and DeepSeek-V3 say of themselves.
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
_V3 = _LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "model_type": "deepseek_v3",
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
}


@pytest.mark.parametrize(("raw", "sharpness"), [(_LITE, 0.0707), (_V3, 0.1)], ids=["V2-Lite", "V3"])
def test_published_configs_are_understood(raw: dict[str, Any], sharpness: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = parse_config(tmp_path)
    assert (config.max_model_len, config.head_dim, config.num_kv_heads) == (163840, 576, 1)
    assert config.attention_scale == pytest.approx(192**-0.5 * (1 + sharpness * math.log(40)) ** 2)
    assert config.experts is not None
    assert config.experts.layers.count(False) == raw["first_k_dense_replace"]
    assert config.experts.router.top_groups == (4 if raw is _V3 else 1)
    per_token = kv_shape(config, "bfloat16", 1, 1).block_bytes
    assert per_token == 576 * 2 * raw["num_hidden_layers"]


_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (_EXPERTS | {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (_EXPERTS | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (_EXPERTS | {"topk_method": "noaux_tc"}, "topk_method"),
        (_EXPERTS | {"scoring_func": "sigmoid"}, "scoring_func"),
        (_EXPERTS | {"norm_topk_prob": True}, "norm_topk_prob"),
        (_EXPERTS | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}, "n_group"),
        (_EXPERTS | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1}, "topk_group"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"qk_rope_head_dim": 7, "head_dim": 7, "qk_head_dim": 19}, "qk_rope_head_dim"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"head_dim": 9}, "head_dim"),
        ({"mystery": 3}, "mystery"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(made: tuple[Any, Path], changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    config = json.loads((made[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(SetupError, match=says):
        parse_config(tmp_path)


def test_layers_that_predict_more_tokens_are_passed_over_and_no_others(tmp_path: Path) -> None:
    oracle = save_model("deepseek-v3", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    weights = load_file(file)
    name = "model.layers.3.self_attn.kv_a_layernorm.weight"
    save_file(weights | {name: torch.ones(40), "model.layers.3.eh_proj.weight": torch.ones(4, 8)}, file, metadata={"format": "pt"})
    (sequence,) = scattered_sequences([20], BLOCK_SIZE, NUM_BLOCKS, random.Random(1))
    got = runner_of(tmp_path).forward(make_batch([(sequence, 20)], BLOCK_SIZE))
    torch.testing.assert_close(got, reference_logits(oracle, sequence.tokens), rtol=0, atol=1e-4)
    save_file(weights | {name.replace("3.self", "2.other"): torch.ones(40)}, file, metadata={"format": "pt"})
    with pytest.raises(SetupError, match="other"):
        runner_of(tmp_path)
