"""config.json to ModelConfig: what transformers saves is understood, what cannot be honoured is refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from twostep.checkpoint.context import context_of
from twostep.errors import SetupError
from twostep.model.families.config import ExpertsConfig, ModelConfig
from twostep.model.families.registry import parse_config
from twostep.model.families.rope import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling
from twostep.model.kernels.experts import ExpertRouter
from twostep.text.model_card import ModelCard

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 128, "intermediate_size": ..., "num_key_value_heads": ...}
GEMMA = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
STARCODER2 = {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"}
NEOX = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "num_key_value_heads": ...}
FALCON = {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "intermediate_size": ..., "num_key_value_heads": ...}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 96}
GPT2 |= dict.fromkeys([key for key in SHAPE if key != "vocab_size"], ...)
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "rope_theta": 1e6}
MIXTRAL |= {"num_local_experts": 4, "num_experts_per_tok": 2}
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN3_MOE: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
QWEN3_MOE |= MOE
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


LLAMA = ModelConfig(
    architecture="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    rope=Rope(theta=10000.0),
    num_positions=0,
    windows=(0, 0),
    max_model_len=2048,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    dtype="float32",
)


def saved(model_dir: Path, config: PretrainedConfig) -> ModelConfig:
    config.architectures = [type(config).__name__.replace("TextConfig", "Config").replace("Config", "ForCausalLM")]
    config.dtype = "float32"
    config.save_pretrained(model_dir)
    return parse_config(model_dir)


def written(model_dir: Path, **keys: Any) -> Path:
    """A config.json as an older release would write it; a key given as `...` is left out."""
    raw = SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"} | keys
    (model_dir / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return model_dir


def test_llama_as_transformers_saves_it(tmp_path: Path) -> None:
    assert saved(tmp_path, LlamaConfig(**SHAPE, rms_norm_eps=1e-5)) == LLAMA


def test_llama_options(tmp_path: Path) -> None:
    config = saved(tmp_path, LlamaConfig(**SHAPE, head_dim=32, attention_bias=True, mlp_bias=True, tie_word_embeddings=True))
    assert (config.head_dim, config.qkv_bias, config.o_bias, config.mlp_bias, config.tie_word_embeddings) == (32, True, True, True, True)


def test_llama3_scaling_of_transformers_5(tmp_path: Path) -> None:
    config = saved(tmp_path, LlamaConfig(**SHAPE, rope_parameters=LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000.0}))
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256)
    assert config.rope == Rope(theta=500000.0, scaling=scaling)


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_llama3_scaling_of_transformers_4(tmp_path: Path, type_key: str) -> None:
    config = parse_config(written(tmp_path, rope_theta=500000, rope_scaling=LLAMA3 | {type_key: "llama3"}))
    assert config.rope is not None
    assert config.rope.theta == 500000.0
    assert isinstance(config.rope.scaling, Llama3Scaling)
    assert config.rope.scaling.original_max_position_embeddings == 256
    assert config.dtype == "bfloat16"


def test_linear_scaling(tmp_path: Path) -> None:
    config = parse_config(written(tmp_path, rope_scaling={"type": "linear", "factor": 2}))
    assert config.rope == Rope(theta=10000.0, scaling=LinearScaling(factor=2.0))
    assert config.max_model_len == 2048


def test_yarn_scaling_and_the_context_it_makes(tmp_path: Path) -> None:
    full = {"factor": 4, "original_max_position_embeddings": 1024, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5}
    full |= {"mscale": 0.7, "mscale_all_dim": 0.8, "truncate": False}
    config = saved(tmp_path, LlamaConfig(**SHAPE, rope_parameters=full | {"rope_type": "yarn", "rope_theta": 1e6}))
    assert config.rope == Rope(theta=1e6, scaling=YarnScaling(**full))
    assert config.max_model_len == 4096
    # As Qwen2.5's makers write it: max_position_embeddings stays at the original one. Null means absent, but in `truncate`.
    short = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "beta_fast": None, "mscale": None, "truncate": None}
    config = parse_config(written(tmp_path, rope_scaling=short))
    assert config.rope is not None
    assert config.rope.scaling == YarnScaling(factor=4.0, original_max_position_embeddings=2048, truncate=False)
    assert config.max_model_len == 8192
    config = parse_config(written(tmp_path, rope_scaling=short | {"factor": None, "original_max_position_embeddings": 512}))
    assert config.rope is not None
    assert config.rope.scaling == YarnScaling(factor=4.0, original_max_position_embeddings=512, truncate=False)
    assert config.max_model_len == 2048


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 2.5}, 5120),
        ({"rope_type": "yarn", "type": "linear", "factor": 2}, 4096),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        (LLAMA3 | {"rope_type": "llama3"}, 2048),
        ({"rope_type": "default", "factor": 4.0}, 2048),
        (None, 2048),
    ],
)
def test_routers_and_workers_agree_on_the_context(tmp_path: Path, key: str, rope: dict[str, Any] | None, expected: int) -> None:
    written(tmp_path, **{key: rope})
    assert (ModelCard.load(tmp_path).max_model_len, parse_config(tmp_path).max_model_len) == (expected, expected)


@pytest.mark.parametrize("factor", [0.5, "4", True, 1e300, 10**400, float("inf"), float("nan"), ...])
def test_no_context_comes_of_a_factor_that_is_none(tmp_path: Path, factor: object) -> None:
    written(tmp_path, rope_scaling={"rope_type": "yarn"} | ({} if factor is ... else {"factor": factor}))
    for load in (ModelCard.load, parse_config):
        with pytest.raises(SetupError, match=r"rope_scaling\.factor"):
            load(tmp_path)


def test_parameters_of_a_scaling_that_is_off_are_nothing(tmp_path: Path) -> None:
    config = parse_config(written(tmp_path, rope_scaling={"rope_type": "default", "factor": 4.0, "beta_fast": 32, "mscale": 1.0}))
    assert config.rope == Rope(theta=10000.0)


def test_mistrals_window_holds_for_all_layers(tmp_path: Path) -> None:
    config = saved(tmp_path, MistralConfig(**SHAPE, head_dim=24, sliding_window=None))
    assert (config.architecture, config.head_dim, config.qkv_bias) == ("mistral", 24, False)
    assert config.windows == (0, 0)
    assert saved(tmp_path, MistralConfig(**SHAPE, sliding_window=128)).windows == (128, 128)
    assert parse_config(written(tmp_path, **MISTRAL, sliding_window=128, layer_types=["sliding_attention"] * 2)).windows == (128, 128)
    # Without the key transformers uses a window of 4096.
    assert parse_config(written(tmp_path, **MISTRAL, max_position_embeddings=8192)).windows == (4096, 4096)


def test_a_window_longer_than_the_context_is_none(tmp_path: Path) -> None:
    assert saved(tmp_path, MistralConfig(**SHAPE, sliding_window=2048)).windows == (0, 0)
    assert parse_config(written(tmp_path, sliding_window=2048)).windows == (0, 0)


@pytest.mark.parametrize("config_class", [Qwen2Config, Qwen3Config])
@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, (0, 0)),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, (0, 64)),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, (64, 64)),
        ({"use_sliding_window": True, "sliding_window": 64}, (0, 0)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (0, 0)),
        ({"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}, (64, 0)),
    ],
)
def test_qwens_windows_are_transformers(
    tmp_path: Path, config_class: type[PretrainedConfig], keys: dict[str, Any], windows: tuple[int, ...]
) -> None:
    theirs = config_class(**SHAPE, **keys)
    assert [theirs.sliding_window if kind == "sliding_attention" else 0 for kind in theirs.layer_types] == list(windows)
    assert saved(tmp_path, theirs).windows == windows
    # As an older release writes it: without layer_types, unless they were given.
    name = config_class.__name__.removesuffix("Config")
    assert parse_config(written(tmp_path, architectures=[f"{name}ForCausalLM"], model_type=name.lower(), **keys)).windows == windows


def test_opt(tmp_path: Path) -> None:
    keys = {"vocab_size": 512, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    bare = replace(LLAMA, architecture="opt", num_kv_heads=4, rope=None, num_positions=96, max_model_len=96, tie_word_embeddings=True)
    biased = replace(bare, qkv_bias=True, o_bias=True, mlp_bias=True, gated_mlp=False, activation="relu")
    assert saved(tmp_path, OPTConfig(**keys, max_position_embeddings=96)) == biased


def test_qwen2_has_bias_on_qkv_only(tmp_path: Path) -> None:
    config = saved(tmp_path, Qwen2Config(**SHAPE, use_sliding_window=False, sliding_window=512))
    assert (config.architecture, config.qkv_bias, config.o_bias, config.head_dim) == ("qwen2", True, False, 16)


def test_qwen3_has_norms_and_its_own_head_dim(tmp_path: Path) -> None:
    config = saved(tmp_path, Qwen3Config(**SHAPE))
    assert (config.architecture, config.qkv_bias, config.head_dim) == ("qwen3", False, 128)
    written(tmp_path, architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=True)
    config = parse_config(tmp_path)
    assert (config.qkv_bias, config.o_bias, config.head_dim) == (True, True, 128)


def test_gemma_2s_numbers(tmp_path: Path) -> None:
    config = saved(tmp_path, Gemma2Config(**SHAPE, head_dim=16, sliding_window=100, query_pre_attn_scalar=64))
    assert (config.attention_scale, config.attention_softcap, config.logit_softcap, config.embedding_scale) == (0.125, 50.0, 30.0, 8.0)
    assert config.windows == (100, 0)
    assert (config.tie_word_embeddings, config.activation) == (True, "gelu_tanh")
    uncapped = saved(tmp_path, Gemma2Config(**SHAPE, attn_logit_softcapping=None, final_logit_softcapping=None))
    assert (uncapped.attention_softcap, uncapped.logit_softcap, uncapped.head_dim) == (0.0, 0.0, 256)


def test_gemma_3_turns_layers_with_a_window_at_their_own_rate(tmp_path: Path) -> None:
    """As transformers 5 and 4 write it; also where a window is longer than the context."""
    shape = SHAPE | {"num_hidden_layers": 3}
    local, whole = Rope(theta=10000.0), Rope(theta=1e6, scaling=LinearScaling(factor=8.0))
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}
    config = saved(tmp_path, Gemma3TextConfig(**shape, sliding_window=4096, sliding_window_pattern=2, rope_parameters=rope))
    assert (config.windows, config.layer_ropes) == ((0, 0, 0), (local, whole, local))
    old = {"sliding_window": 64, "sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 10000}
    config = parse_config(written(tmp_path, **(GEMMA3 | old), num_hidden_layers=3, rope_scaling={"rope_type": "linear", "factor": 8.0}))
    assert (config.windows, config.layer_ropes) == ((64, 0, 64), (local, whole, local))


def test_phi_3s_long_contexts(tmp_path: Path) -> None:
    """`su` is the old name; the original length stands beside the parameters."""
    for kind in ("su", "longrope"):
        config = parse_config(written(tmp_path, **PHI3, rope_scaling=LONGROPE | {"type": kind}, original_max_position_embeddings=512))
        assert config.rope is not None
        assert isinstance(config.rope.scaling, LongRopeScaling)
        assert config.rope.scaling.magnitude == pytest.approx((1 + math.log(4) / math.log(512)) ** 0.5)
        assert config.max_model_len == 2048
    assert parse_config(written(tmp_path, **PHI3, partial_rotary_factor=0.75)).rope == Rope(theta=10000.0, dim=12)


def test_phi_4_minis_keys(tmp_path: Path) -> None:
    keys = {"attention_bias": False, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0, "full_attn_mod": 1}
    keys |= {"interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "sliding_window": 262144, "tie_word_embeddings": True}
    scaling = LONGROPE | {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    config = parse_config(written(tmp_path, **PHI3, **keys, partial_rotary_factor=0.75, rope_scaling=scaling))
    assert config.windows == (0, 0)
    assert config.rope is not None
    assert config.rope.dim == 12
    with pytest.raises(SetupError, match="full_attn_mod"):
        parse_config(written(tmp_path, **PHI3, full_attn_mod=2))


def test_falcons_heads(tmp_path: Path) -> None:
    """Without a context of its own it is 2048; its KV heads by its three kinds of layers."""
    keys = FALCON | {"max_position_embeddings": ...}
    for more, num_kv_heads, num_norms in (
        ({"multi_query": True, "num_kv_heads": 4}, 1, 1),
        ({"multi_query": False}, 4, 1),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2, 2),
        ({"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ff_factor": 4}, 2, 1),
    ):
        config = parse_config(written(tmp_path, **keys, **more))
        assert (config.num_kv_heads, config.norms_per_layer, config.max_model_len, config.intermediate_size) == (
            num_kv_heads,
            num_norms,
            2048,
            256,
        )
        assert context_of(json.loads((tmp_path / "config.json").read_text()), tmp_path) == 2048


def test_gpt_2s_names(tmp_path: Path) -> None:
    config = parse_config(written(tmp_path, **GPT2, n_ctx=96, n_inner=None, summary_type="cls_index", attn_pdrop=0.1))
    assert (config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads, config.max_model_len) == (64, 256, 2, 4, 96)
    assert context_of(json.loads((tmp_path / "config.json").read_text()), tmp_path) == 96


@pytest.mark.parametrize("normalized", [False, True])
def test_experts_of_mixtral_and_qwen(tmp_path: Path, normalized: bool) -> None:
    config = saved(tmp_path, MixtralConfig(**SHAPE, num_local_experts=5, num_experts_per_tok=3))
    router = ExpertRouter(num_experts=5, top_k=3, renormalize=True)
    assert config.experts == ExpertsConfig(router=router, layers=(True, True), intermediate_size=128)
    assert config.windows == (0, 0)
    router = ExpertRouter(num_experts=6, top_k=2, renormalize=normalized)
    config = saved(tmp_path, Qwen3MoeConfig(**SHAPE, **MOE, norm_topk_prob=normalized, decoder_sparse_step=2))
    assert config.experts == ExpertsConfig(router=router, layers=(False, True), intermediate_size=32)
    assert (config.qkv_bias, config.intermediate_size) == (False, 128)
    theirs = Qwen2MoeConfig(**SHAPE, **MOE, norm_topk_prob=normalized, mlp_only_layers=[1], shared_expert_intermediate_size=48)
    want = ExpertsConfig(router=router, layers=(True, False), intermediate_size=32, shared_size=48, shared_gated=True)
    assert saved(tmp_path, theirs).experts == want


def test_missing_keys_take_transformers_defaults(tmp_path: Path) -> None:
    config = parse_config(written(tmp_path, num_key_value_heads=..., architectures=...))
    defaults = LlamaConfig(**{key: value for key, value in SHAPE.items() if key != "num_key_value_heads"})
    assert config.num_kv_heads == defaults.num_key_value_heads == 4
    assert config.norm_eps == defaults.rms_norm_eps
    assert config.rope == Rope(theta=defaults.rope_parameters["rope_theta"])
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
        ({"architectures": ["BloomForCausalLM"]}, ["architectures", "BloomForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification"]),
        ({"architectures": ..., "model_type": "bloom"}, ["bloom"]),
        ({"architectures": ..., "model_type": ...}, ["architectures"]),
        ({"model_type": "mistral"}, ["model_type", "mistral"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config.group_size"]),
        ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, ["quantization_config.quant_method", "hqq", "awq"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        (QWEN3_MOE | {"num_experts_per_tok": 7}, ["num_experts_per_tok", "7", "num_experts"]),
        (QWEN3_MOE | {"num_local_experts": 8}, ["num_local_experts", "8", "num_experts"]),
        (QWEN3_MOE | {"num_experts": 0}, ["num_experts", "0"]),
        (QWEN3_MOE | {"num_experts": ...}, ["num_experts"]),
        (QWEN3_MOE | {"mlp_only_layers": [2]}, ["mlp_only_layers", "2"]),
        (QWEN3_MOE | {"mlp_only_layers": [0, 1]}, ["decoder_sparse_step"]),
        (QWEN3_MOE | {"use_sliding_window": True}, ["use_sliding_window"]),
        (QWEN3_MOE | {"n_group": 2}, ["n_group"]),
        (MIXTRAL | {"rope_theta": None}, ["rope_theta"]),
        (MIXTRAL | {"num_local_experts": ...}, ["num_local_experts"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["rope_scaling.rope_type", "dynamic", "linear, yarn, llama3"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ["rope_scaling.short_factor"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["rope_scaling.factor", "0"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "truncate": True}}, ["rope_scaling.truncate"]),
        ({"rope_scaling": {"type": "yarn"}}, ["rope_scaling.factor"]),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, ["rope_scaling.factor", "0.5"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "rope_theta": 0.5}}, ["rope_scaling.rope_theta", "0.5"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}}, ["beta_fast", "beta_slow"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "apply_yarn": True}}, ["rope_scaling.apply_yarn"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, ["rope_scaling.truncate"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0}}, ["rope_scaling.mscale", "0"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["rope_scaling.low_freq_factor"]),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "mscale": 2.0}}, ["rope_scaling.mscale"]),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "high_freq_factor": 1.0}}, ["high_freq_factor", "low_freq_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters.full_attention"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({"rope_parameters": 3}, ["rope_parameters"]),
        ({"sliding_window": 128}, ["sliding_window", "128"]),
        ({"sliding_window": 0}, ["sliding_window", "0"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"layer_types": ["full_attention", "chunked_attention"]}, ["layer_types", "chunked_attention"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers", "2"]),
        ({"layer_types": "sliding_attention"}, ["layer_types"]),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": "64"}, ["sliding_window", "'64'"]),
        (QWEN2 | {"max_window_layers": -1}, ["max_window_layers", "-1"]),
        (QWEN2 | {"use_sliding_window": "on"}, ["use_sliding_window", "on"]),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 2}, ["layer_types", "sliding_window"]),
        (MISTRAL | {"sliding_window": 64, "layer_types": ["full_attention"] * 2}, ["layer_types", "sliding_window", "mistral"]),
        (MISTRAL | {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "mistral"]),
        (OPT | {"activation_function": "gelu"}, ["activation_function", "gelu", "relu"]),
        (OPT | {"do_layer_norm_before": False}, ["do_layer_norm_before", "False"]),
        (OPT | {"word_embed_proj_dim": 32}, ["word_embed_proj_dim", "32", "64"]),
        (OPT | {"layer_norm_elementwise_affine": False}, ["layer_norm_elementwise_affine"]),
        (OPT | {"_remove_final_layer_norm": True}, ["_remove_final_layer_norm"]),
        (OPT | {"num_attention_heads": 5}, ["hidden_size", "64", "num_attention_heads"]),
        (OPT | {"ffn_dim": ...}, ["ffn_dim"]),
        (OPT | {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling"]),
        (GEMMA | {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        (GEMMA | {"hidden_activation": "silu"}, ["hidden_activation", "silu"]),
        (GEMMA2 | {"hidden_activation": "quick_gelu"}, ["hidden_activation", "quick_gelu"]),
        (GEMMA2 | {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, ["layer_types"]),
        (GEMMA3 | {"architectures": ["Gemma3ForConditionalGeneration"]}, ["Gemma3ForConditionalGeneration"]),
        (GEMMA3 | {"vision_config": {"hidden_size": 8}}, ["vision_config"]),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        (GEMMA3 | {"rope_parameters": {"rope_type": "default"}}, ["rope_parameters", "full_attention"]),
        (
            GEMMA3 | {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            ["rope_parameters.full_attention.rope_type", "dynamic"],
        ),
        (PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 3}}, ["rope_scaling.long_factor"]),
        (PHI3 | {"rope_scaling": LONGROPE | {"short_factor": [0.0] * 8}}, ["rope_scaling.short_factor"]),
        (PHI3 | {"partial_rotary_factor": 0.3, "hidden_size": 120}, ["partial_rotary_factor", "0.3", "30"]),
        (NEOX | {"rotary_pct": 2.0}, ["partial_rotary_factor", "2.0"]),
        (NEOX | {"hidden_act": "quick_gelu"}, ["hidden_act", "quick_gelu"]),
        (FALCON | {"alibi": True}, ["alibi"]),
        (FALCON | {"new_decoder_architecture": True, "parallel_attn": False}, ["parallel_attn"]),
        (FALCON | {"num_ln_in_parallel_attn": 2}, ["num_ln_in_parallel_attn", "2"]),
        (FALCON | {"multi_query": False, "num_kv_heads": 2}, ["num_kv_heads", "2"]),
        (FALCON | {"ff_factor": 3}, ["ff_factor", "3"]),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        (GPT2 | {"add_cross_attention": True}, ["add_cross_attention"]),
        (GPT2 | {"n_head": 5}, ["n_embd", "n_head", "5"]),
        (GPT2 | {"n_positions": 0}, ["n_positions", "0"]),
        (STARCODER2 | {"mlp_type": "gated"}, ["mlp_type", "gated"]),
        (OLMO2 | {"clip_qkv": 8.0}, ["clip_qkv", "8.0"]),
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


def test_biases_where_the_architecture_has_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="attention_bias"):
        parse_config(
            written(tmp_path, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None, attention_bias=True)
        )


@pytest.mark.parametrize("content", ["{", "[]", "\udcff", "nul", '{"a": 1e999999', "[" * 100_000])
def test_broken_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SetupError, match=r"config\.json"):
        parse_config(tmp_path)


def test_no_config_and_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(SetupError, match=directory.name):
            parse_config(directory)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(SetupError, match=r"config\.json"):
        parse_config(tmp_path)
