"""Small random models saved by transformers, and hand-made batches over a block pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from twostep.engine.batch import Batch, KvShape, SamplingRow
from twostep.sampling_params import SamplingParams

VOCAB = 211

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
# Settings that OPT has no use for are left out.
_SMALL_OPT = {
    "intermediate_size": ...,
    "num_key_value_heads": ...,
    "initializer_range": ...,
    "rms_norm_eps": ...,
    "ffn_dim": 80,
    "init_std": 0.2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_YARN_FULL = _YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.5, "mscale_all_dim": 0.7, "truncate": False}

_YARN_LATENT = _YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 3,
}
_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "intermediate_size": 36,
    "head_dim": 12,
    "sliding_window": 21,
    "swiglu_limit": 1.5,
    "rope_parameters": _YARN | {"truncate": False},
}
_MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
# Of heads of 8 numbers 6 turn.
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.5, 9.0],
    "partial_rotary_factor": 0.75,
}
_SMALL_GPT2 = {
    **dict.fromkeys(SMALL, ...),
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_inner": 80,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 512,
    "initializer_range": 0.2,
}
_SMALL_FALCON = {"intermediate_size": ..., "num_key_value_heads": ..., "rms_norm_eps": ..., "ffn_hidden_size": 80}
_SMALL_NEOX = {"num_key_value_heads": ..., "rms_norm_eps": ..., "num_attention_heads": 2}

_DEEPSEEK_MOE = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
}

# name: (config class, extra fields)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": _LLAMA3, "num_key_value_heads": 6}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 16, "num_key_value_heads": 3}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": False, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 12, "tie_word_embeddings": False}),
    "mistral-window": ("MistralConfig", {"sliding_window": 21}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1}),
    "qwen3-windows": (
        "Qwen3Config",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "linear-rope": ("LlamaConfig", {"rope_parameters": _LINEAR}),
    "yarn-rope": ("LlamaConfig", {"rope_parameters": _YARN, "head_dim": 24}),
    "yarn-rope-full": ("Qwen2Config", {"rope_parameters": _YARN_FULL}),
    "deepseek-v2": ("DeepseekV2Config", _LATENT | {"q_lora_rank": 28}),
    "deepseek-v2-yarn": (
        "DeepseekV2Config",
        _LATENT | {"q_lora_rank": None, "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}},
    ),
    "deepseek-v3": ("DeepseekV3Config", _LATENT | {"q_lora_rank": 20, "rope_interleave": False}),
    "deepseek-v2-moe": ("DeepseekV2Config", _LATENT | _DEEPSEEK_MOE | {"q_lora_rank": None, "routed_scaling_factor": 1.7}),
    "deepseek-v2-groups": (
        "DeepseekV2Config",
        _LATENT | _DEEPSEEK_MOE | {"q_lora_rank": 28, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3-moe": ("DeepseekV3Config", _LATENT | _DEEPSEEK_MOE | {"q_lora_rank": 20, "n_group": 4, "topk_group": 2}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 36}),
    "qwen2-moe": ("Qwen2MoeConfig", _MOE | {"shared_expert_intermediate_size": 44, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "gpt-oss": ("GptOssConfig", _OSS),
    "qwen3-moe": ("Qwen3MoeConfig", _MOE | {"head_dim": 12, "mlp_only_layers": [1]}),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            # With 0.2, transformers' own logits are off by 7e-5 from those in float64: many sums hang on each other.
            "initializer_range": 0.1,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "mlp_only_layers": [1],
        },
    ),
    "starcoder2": ("Starcoder2Config", {"rms_norm_eps": ..., "sliding_window": 29}),
    "gemma": ("GemmaConfig", {"head_dim": 12}),
    "gemma2": ("Gemma2Config", {"head_dim": 12, "sliding_window": 17, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 12, "sliding_window": 9, "layer_types": _LAYERS, "query_pre_attn_scalar": 20}),
    "phi3": ("Phi3Config", {"sliding_window": 40, "pad_token_id": None}),
    "phi3-longrope": ("Phi3Config", {"pad_token_id": None, "original_max_position_embeddings": 40, "rope_parameters": _LONGROPE}),
    "olmo2": ("Olmo2Config", {"attention_bias": True}),
    "gpt-neox": ("GPTNeoXConfig", _SMALL_NEOX),
    "gpt-neox-in-turn": ("GPTNeoXConfig", _SMALL_NEOX | {"use_parallel_residual": False, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", _SMALL_GPT2),
    "falcon": ("FalconConfig", _SMALL_FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-old": ("FalconConfig", _SMALL_FALCON | {"bias": True}),
    "falcon-in-turn": ("FalconConfig", _SMALL_FALCON | {"parallel_attn": False, "multi_query": False}),
    "opt": ("OPTConfig", _SMALL_OPT | {"word_embed_proj_dim": 48, "num_attention_heads": 2}),
    "opt-untied": ("OPTConfig", _SMALL_OPT | {"enable_bias": False, "tie_word_embeddings": False}),
}


def save_model(family: str, directory: Path, **changes: Any) -> transformers.PreTrainedModel:
    """A random float32 model of a family, with `changes` to its config, saved to `directory` and returned as transformers' own."""
    config_class, extra = FAMILIES[family]
    config = getattr(transformers, config_class)(**{key: value for key, value in (SMALL | extra | changes).items() if value is not ...})
    torch.manual_seed(len(family))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # initialized to 0 and 1, which would hide a mistake
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(directory)
    return model


def reference_logits(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """transformers' logits of every position, float32 [len(tokens), VOCAB], of a context that may grow as long as the model's."""
    behind = 0
    if (getattr(model.config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        # Its factors follow the longest position of a call.
        behind = model.config.original_max_position_embeddings
    with torch.inference_mode():
        return model(torch.tensor([[*tokens, *[0] * behind]])).logits[0, : len(tokens)].float()


@dataclass
class Sequence_:
    """A sequence being computed: `tokens` to the end, the first `num_computed` of them in the pool."""

    tokens: list[int]
    blocks: list[int]  # of the first group of layers
    num_computed: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    # Where its state is read, where it is left, and blocks beside them.
    state_source: list[int] = field(default_factory=list)
    state_blocks: list[int] = field(default_factory=list)
    spare_state_blocks: list[int] = field(default_factory=list)
    # Of the other groups of layers.
    more_blocks: list[list[int]] = field(default_factory=list)

    @property
    def groups(self) -> list[list[int]]:
        return [self.blocks, *self.more_blocks]

    def move_state(self) -> None:
        """The next step leaves its state elsewhere than where it finds it."""
        self.state_blocks, self.spare_state_blocks = self.spare_state_blocks, self.state_blocks


def scattered_sequences(
    lengths: Sequence[int], block_size: int, num_blocks: int, rng: random.Random, *, num_state_blocks: int = 0, num_groups: int = 1
) -> list[Sequence_]:
    """Sequences of random tokens over blocks that are in no order, block 0 among them."""
    free = list(range(num_blocks))
    rng.shuffle(free)
    made = []
    for length in lengths:
        blocks, *more = ([free.pop() for _ in range(-(-length // block_size))] for _ in range(num_groups))
        made.append(Sequence_([rng.randrange(VOCAB) for _ in range(length)], blocks, more_blocks=more))
        made[-1].state_source = made[-1].state_blocks = [free.pop() for _ in range(num_state_blocks)]
        made[-1].spare_state_blocks = [free.pop() for _ in range(num_state_blocks)]
    return made


def of_pool(shape: KvShape) -> dict[str, int]:
    """Returns what scattered_sequences has to know of a pool."""
    return {"num_state_blocks": shape.num_state_blocks, "num_groups": shape.num_groups}


GREEDY = SamplingRow(
    params=SamplingParams(max_tokens=1, temperature=0.0), position=0, history=(), num_prompt_tokens=0, stop_ids=frozenset()
)


def make_batch(work: Sequence[tuple[Sequence_, int]], block_size: int, *, every_row: bool = True) -> Batch:
    """The next `n` tokens of each sequence; logits of every row, or of the last of each sequence."""
    token_ids: list[int] = []
    positions: list[int] = []
    num_groups = len(work[0][0].groups)
    slots: list[list[int]] = [[] for _ in range(num_groups)]
    starts = [0]
    for sequence, count in work:
        chosen = range(sequence.num_computed, sequence.num_computed + count)
        token_ids += [sequence.tokens[p] for p in chosen]
        positions += chosen
        for group, blocks in enumerate(sequence.groups):
            slots[group] += [blocks[p // block_size] * block_size + p % block_size for p in chosen]
        starts.append(len(token_ids))
    lengths = [sequence.num_computed + count for sequence, count in work]
    tables = np.zeros((num_groups, len(work), max(-(-n // block_size) for n in lengths) + 1), np.int32)
    for row, (sequence, _) in enumerate(work):
        used = -(-lengths[row] // block_size)
        tables[:, row, :used] = [blocks[:used] for blocks in sequence.groups]
    rows = range(len(token_ids)) if every_row else [s - 1 for s in starts[1:]]
    sources = np.array([sequence.state_source for sequence, _ in work], np.int32) if work[0][0].state_blocks else None
    return Batch(
        token_ids=np.array(token_ids, np.int64),
        positions=np.array(positions, np.int64),
        query_start=np.array(starts, np.int32),
        seq_lens=np.array(lengths, np.int32),
        block_tables=tables,
        slots=np.array(slots, np.int64),
        sample_rows=np.array(list(rows), np.int64),
        sampling=[GREEDY] * len(rows),
        state_sources=sources,
        state_tables=None if sources is None else np.array([sequence.state_blocks for sequence, _ in work], np.int32),
    )
