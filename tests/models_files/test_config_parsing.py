"""config.json to ModelConfig: what transformers saves is understood, what cannot be honoured is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from twostep.errors import SetupError
from twostep.models.config import Llama3RopeScaling, ModelConfig, parse_config

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


def saved(model_dir: Path, config: PretrainedConfig) -> ModelConfig:
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.dtype = "float32"
    config.save_pretrained(model_dir)
    return parse_config(model_dir)


def written(model_dir: Path, **keys: Any) -> Path:
    """A config.json as an older release would write it; a key given as `...` is left out."""
    raw = SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"} | keys
    (model_dir / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return model_dir


def test_llama_as_transformers_saves_it(tmp_path: Path) -> None:
    assert saved(tmp_path, LlamaConfig(**SHAPE, rms_norm_eps=1e-5)) == ModelConfig(
        architecture="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_model_len=2048,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        dtype="float32",
    )


def test_llama_options(tmp_path: Path) -> None:
    config = saved(tmp_path, LlamaConfig(**SHAPE, head_dim=32, attention_bias=True, mlp_bias=True, tie_word_embeddings=True))
    assert (config.head_dim, config.qkv_bias, config.o_bias, config.mlp_bias, config.tie_word_embeddings) == (32, True, True, True, True)


def test_llama3_scaling_of_transformers_5(tmp_path: Path) -> None:
    config = saved(tmp_path, LlamaConfig(**SHAPE, rope_parameters=LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000.0}))
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == Llama3RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256
    )


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_llama3_scaling_of_transformers_4(tmp_path: Path, type_key: str) -> None:
    config = parse_config(written(tmp_path, rope_theta=500000, rope_scaling=LLAMA3 | {type_key: "llama3"}))
    assert config.rope_theta == 500000.0
    assert config.rope_scaling is not None
    assert config.rope_scaling.original_max_position_embeddings == 256
    assert config.dtype == "bfloat16"


def test_mistral_without_window(tmp_path: Path) -> None:
    config = saved(tmp_path, MistralConfig(**SHAPE, head_dim=24, sliding_window=None))
    assert (config.architecture, config.head_dim, config.qkv_bias, config.qk_norm) == ("mistral", 24, False, False)


def test_a_window_longer_than_the_context_is_none(tmp_path: Path) -> None:
    assert saved(tmp_path, MistralConfig(**SHAPE, sliding_window=2048)).architecture == "mistral"


def test_qwen2_has_bias_on_qkv_only(tmp_path: Path) -> None:
    config = saved(tmp_path, Qwen2Config(**SHAPE, use_sliding_window=False, sliding_window=512))
    assert (config.architecture, config.qkv_bias, config.o_bias, config.head_dim) == ("qwen2", True, False, 16)


def test_qwen3_has_norms_and_its_own_head_dim(tmp_path: Path) -> None:
    config = saved(tmp_path, Qwen3Config(**SHAPE))
    assert (config.architecture, config.qk_norm, config.qkv_bias, config.head_dim) == ("qwen3", True, False, 128)
    written(tmp_path, architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=True)
    config = parse_config(tmp_path)
    assert (config.qkv_bias, config.o_bias, config.head_dim) == (True, True, 128)


def test_missing_keys_take_transformers_defaults(tmp_path: Path) -> None:
    config = parse_config(written(tmp_path, num_key_value_heads=..., architectures=...))
    defaults = LlamaConfig(**{key: value for key, value in SHAPE.items() if key != "num_key_value_heads"})
    assert config.num_kv_heads == defaults.num_key_value_heads == 4
    assert config.rms_norm_eps == defaults.rms_norm_eps
    assert config.rope_theta == defaults.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == defaults.tie_word_embeddings


def test_a_missing_dtype_is_that_of_the_weights(tiny_llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tiny_llama_dir / "model.safetensors")
    assert parse_config(written(tmp_path, torch_dtype=...)).dtype == "float32"


def test_bookkeeping_and_unknown_keys_that_are_off_are_accepted(tmp_path: Path) -> None:
    keys = {
        "transformers_version": "4.40",
        "use_cache": True,
        "attention_dropout": 0.1,
        "rope_interleaved": False,
        "new_thing": None,
        "list": [],
    }
    assert parse_config(written(tmp_path, **keys)).architecture == "llama"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification"]),
        ({"architectures": ..., "model_type": "gemma"}, ["gemma"]),
        ({"architectures": ..., "model_type": ...}, ["architectures"]),
        ({"model_type": "mistral"}, ["model_type", "mistral"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config", "gptq", "unquantized"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling.rope_type", "yarn", "llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["linear"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["rope_scaling.low_freq_factor"]),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "mscale": 2.0}}, ["rope_scaling.mscale"]),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "high_freq_factor": 1.0}}, ["high_freq_factor", "low_freq_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters.full_attention"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({"rope_parameters": 3}, ["rope_parameters"]),
        ({"sliding_window": 128}, ["sliding_window", "128"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"layer_types": "sliding_attention"}, ["layer_types"]),
        ({"attention_multiplier": 0.5}, ["attention_multiplier", "0.5"]),
        ({"num_local_experts": 8}, ["num_local_experts"]),
        ({"hidden_size": ...}, ["hidden_size"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"hidden_size": 66}, ["hidden_size", "66", "num_attention_heads"]),
        ({"head_dim": 17}, ["head_dim", "17"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn"]),
        ({"mlp_bias": 1}, ["mlp_bias"]),
    ],
)
def test_refused_by_name(tmp_path: Path, keys: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SetupError) as caught:
        parse_config(written(tmp_path, **keys))
    assert str(tmp_path / "config.json") in caught.value.message
    for word in words:
        assert word in caught.value.message


def test_windows_in_use_are_refused(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    with pytest.raises(SetupError, match=r"sliding_window is 128;"):
        parse_config(written(tmp_path, **mistral, sliding_window=128))
    # Without the key transformers uses a window of 4096.
    with pytest.raises(SetupError, match=r"sliding_window is 4096;"):
        parse_config(written(tmp_path, **mistral, max_position_embeddings=8192))
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    with pytest.raises(SetupError, match=r"sliding_window is 512;"):
        parse_config(written(tmp_path, **qwen2, use_sliding_window=True, sliding_window=512))


def test_biases_where_the_architecture_has_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="attention_bias is True"):
        parse_config(
            written(tmp_path, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None, attention_bias=True)
        )


@pytest.mark.parametrize("content", ["{", "[]", "\udcff", "nul", '{"a": 1e999999', "[" * 100_000])
def test_broken_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SetupError, match=r"config\.json.*download it again"):
        parse_config(tmp_path)


def test_no_config_and_no_directory(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"config\.json does not exist; give a Hugging Face model directory"):
        parse_config(tmp_path)
    with pytest.raises(SetupError, match="is not a directory"):
        parse_config(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="is not a directory"):
        parse_config(tmp_path / "file")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(SetupError, match="cannot be read"):
        parse_config(tmp_path)
