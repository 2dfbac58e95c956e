"""Builds small random models as Hugging Face directories, saved by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

logging.disable_progress_bar()

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT, IM_START, IM_END = 0, 1, 2

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the capital of France is Paris.",
    "a serving system splits every request into two steps: prefill and decode.",
    "one two three four five six seven eight nine ten, and then the hundred and one",
    "Die Antwort lautet größer als übermäßig; ça va? naïve café, größte Straße.",
    "What is the answer to the question that the other one asked in the beginning?",
    "日本語のテキスト、中文文本, и немного русского текста 🙂🙃.",
]

_MODELS: dict[str, tuple[type[PretrainedConfig], Any]] = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


def train_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """A byte-level BPE that can write any text, with the ChatML special tokens as ids 0, 1, 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def save_tokenizer(model_dir: Path) -> int:
    """Writes tokenizer.json, tokenizer_config.json and the chat template. Returns the vocabulary's size."""
    inner = train_tokenizer()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    fast.save_pretrained(model_dir)
    return int(inner.get_vocab_size())


def save_tiny_model(
    model_dir: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """A random model of one architecture with its tokenizer, two end-of-sequence ids and a chat template.

    Weights are wide (initializer_range 0.2), so that the two best logits are seldom close and every position matters.
    `overrides` go to the transformers config."""
    model_dir.mkdir(parents=True, exist_ok=True)
    vocab_size = save_tokenizer(model_dir)
    config_class, model_class = _MODELS[architecture]
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": ENDOFTEXT,
        "tie_word_embeddings": False,
    }
    if architecture == "mistral":
        options["sliding_window"] = None
    if architecture in ("qwen3", "mistral"):
        options["head_dim"] = 16
    if architecture == "deepseek_v2":
        heads = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
        options |= heads | {"kv_lora_rank": 24, "q_lora_rank": 20, "first_k_dense_replace": 3}
    config = config_class(**(options | overrides))
    torch.manual_seed(seed)
    model = model_class(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms of one and biases of zero would hide a model that forgets them.
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(model_dir, max_shard_size=max_shard_size)
    (model_dir / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [IM_END, ENDOFTEXT], "pad_token_id": ENDOFTEXT, "do_sample": True, "temperature": 0.7, "top_p": 0.9})
    )
    return model_dir


def save_poisoned_model(model_dir: Path, token_id: int, *, value: float = 7e4, **options: Any) -> Path:
    """`save_tiny_model`, in bfloat16 unless told otherwise, with one number too large for float16 in the embedding of `token_id`: loaded as
    float16, all logits after that token are NaN. With infinity as the `value` they are in any type. No answer comes upon it by itself."""
    save_tiny_model(model_dir, **({"dtype": torch.bfloat16} | options))
    (file,) = model_dir.glob("*.safetensors")
    weights = load_file(file)
    weights["model.embed_tokens.weight"][token_id, 0] = value
    weights["lm_head.weight"][token_id] = 0.0
    save_file(weights, file, metadata={"format": "pt"})
    return model_dir
