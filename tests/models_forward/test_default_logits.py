"""Logits are transformers' where config.json leaves keys out, or has null for them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from forward_helpers import FAMILIES, SMALL, make_batch, of_pool, reference_logits, scattered_sequences

from twostep.model.runner.model_runner import ModelRunner

_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
_LEGACY = {"rope_parameters": ...}
# By family, changes of its file: ... takes a key away.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt-oss", {"rope_parameters": ...}),
    ("gpt-oss", {"rope_parameters": None}),
    ("gpt-oss", {"rope_parameters": _YARN | {"truncate": False}}),
    ("gpt-oss", {"rope_parameters": _YARN | {"rope_theta": 1e4, "truncate": None}}),
    ("mixtral", {"rope_parameters": ...}),
    ("mixtral", {"rope_parameters": {"rope_type": "default"}}),
    ("mixtral", {"rms_norm_eps": ...}),
    ("yarn-rope", {"rope_parameters": _YARN | {"rope_theta": 1e4, "truncate": None}}),
    ("deepseek-v3-moe", {"norm_topk_prob": None}),
    ("deepseek-v3-moe", {"rope_interleave": None}),
    ("deepseek-v3-moe", {"n_shared_experts": ..., "first_k_dense_replace": 1}),
    ("deepseek-v2-moe", {"n_shared_experts": ...}),
    ("deepseek-v2", {"q_lora_rank": None}),
    ("qwen2-moe", {"norm_topk_prob": ...}),
    ("qwen3", {"num_key_value_heads": None}),
    ("gpt-neox", _LEGACY | {"rotary_emb_base": 20000, "rotary_pct": 0.5}),
    ("gpt-neox", _LEGACY),
    ("falcon-old", {"parallel_attn": None, "multi_query": None, "bias": None}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": ...}),
]


@pytest.mark.parametrize(("family", "changes"), CASES, ids=str)
def test_logits(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config_class, extra = FAMILIES[family]
    full = getattr(transformers, config_class)(**{key: value for key, value in (SMALL | extra).items() if value is not ...})
    written = json.loads(full.to_json_string(use_diff=False)) | changes
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in written.items() if value is not ...}))
    text = (tmp_path / "config.json").read_text()
    torch.manual_seed(1)
    oracle = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path), dtype=torch.float32).eval()
    oracle.save_pretrained(tmp_path)
    architecture = type(oracle).__name__
    # What transformers saved has all keys.
    (tmp_path / "config.json").write_text(json.dumps(json.loads(text) | {"architectures": [architecture]}))
    runner = ModelRunner(tmp_path, num_blocks=40, block_size=16)
    (sequence,) = scattered_sequences([120], 16, 40, random.Random(1), **of_pool(runner.kv_shape))
    got = runner.forward(make_batch([(sequence, 120)], 16))
    torch.testing.assert_close(got, reference_logits(oracle, sequence.tokens), rtol=0, atol=1e-4)
