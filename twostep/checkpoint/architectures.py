"""Which architectures are served, by config.json's names of them. Torch-free: known before anything starts."""

from __future__ import annotations

import re

from twostep.checkpoint.fields import Fields

# By `architectures`, the `model_type` that goes with it. twostep/model/families/registry.py has a class for each.
MODEL_TYPES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "FalconForCausalLM": "falcon",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GptOssForCausalLM": "gpt_oss",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GemmaForCausalLM": "gemma",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Starcoder2ForCausalLM": "starcoder2",
    "T5ForConditionalGeneration": "t5",
}


def model_type_of(architecture: str) -> str:
    """Returns what goes with one of `architectures`; empty: it is not served."""
    return MODEL_TYPES.get(_names().get(architecture, ""), "")


def take_architecture(fields: Fields) -> str:
    """Takes `architectures` and `model_type` out of a config.json, as read_config has it, and returns one of MODEL_TYPES. Raises
    SetupError, naming the key, for others."""
    names, model_type = fields.take("architectures", None), fields.take("model_type", None)
    if names is None:
        for name, known in MODEL_TYPES.items():
            if known == model_type:
                return name
    found = _names()
    supported = "supported are " + ", ".join(MODEL_TYPES)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or names[0] not in found:
        told = names[0] if isinstance(names, list) and len(names) == 1 else names if names is not None else model_type
        fields.refuse("architectures", told, f"{supported}. One of these by another name is served with --architecture NAME")
    if model_type not in (None, MODEL_TYPES[found[names[0]]]):
        fields.refuse("model_type", model_type, f"{names[0]} goes with {MODEL_TYPES[found[names[0]]]!r}; {supported}")
    return found[names[0]]


def _names() -> dict[str, str]:
    """Returns the names in MODEL_TYPES, and the name of each decoder without its head."""
    return {re.sub("(ForCausalLM|LMHeadModel)$", "Model", name): name for name in MODEL_TYPES} | {name: name for name in MODEL_TYPES}
