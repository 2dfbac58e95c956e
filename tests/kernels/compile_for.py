"""Compiles the kernels that steps of known shapes launch, for a GPU that is not here: what Triton's interpreter cannot see, that a kernel
does not compile or does not fit a multiprocessor's shared memory, is seen before there is one. Nothing runs.

    make compile-kernels COMPILE_FLAGS="--only llama deepseek"

Layers are whole, models are one or two of them. Seconds to minutes a shape the first time; Triton's cache keeps what has not changed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from twostep.model.kernels import triton_launch

CAPABILITY, NUM_SMS, SHARED_BYTES = (9, 0), 132, 227 * 1024

# What kernels are told where the interpreter computes, as they are told it on the card.
ON_GPU = {"IN_FLOAT32": False, "ON_GPU": True, "CONVERTS": True}
# The same in the records that some kernels are told it by.
FIELDS_ON_GPU = {"in_float32": False, "converts_fp8": True}

# Before anything takes them by name.
triton_launch.overlaps = lambda device: True
triton_launch.num_sms_of = lambda device: NUM_SMS
triton_launch.shared_bytes_of = lambda device: SHARED_BYTES

from twostep.engine.batch import Batch, KvShape  # noqa: E402
from twostep.errors import SetupError  # noqa: E402
from twostep.lab.bench.shapes import LLAMA_8B, QWEN3_30B_A3B  # noqa: E402
from twostep.model.families.registry import build_model, parse_config  # noqa: E402
from twostep.model.kernels.triton_ops import TritonOps  # noqa: E402
from twostep.model.loading.weights import fill_random  # noqa: E402
from twostep.model.runner.model_runner import kv_shape, with_quantization  # noqa: E402
from twostep.model.step.kv_cache import KvCache  # noqa: E402

BLOCK = 16
_SMALL = {"num_hidden_layers": 2, "vocab_size": 1024, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}


def _kind(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, "tie_word_embeddings": True} | keys


_HEADS = {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA_8B,
    "qwen3-moe": QWEN3_30B_A3B | {"num_experts": 16},
    "deepseek-v2-lite": _kind(
        "DeepseekV2ForCausalLM", "deepseek_v2", **_HEADS | {"num_key_value_heads": 16}, kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=8, num_experts_per_tok=6, n_shared_experts=2,
        moe_intermediate_size=1408, first_k_dense_replace=0, rms_norm_eps=1e-6,
    ),
    "gemma2": _kind("Gemma2ForCausalLM", "gemma2", **_HEADS, head_dim=256),
    "gpt-oss": _kind(
        "GptOssForCausalLM", "gpt_oss", hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, num_local_experts=8, num_experts_per_tok=4,
    ),
    "qwen3-next": _kind(
        "Qwen3NextForCausalLM", "qwen3_next", hidden_size=2048, intermediate_size=5120, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=16, num_experts_per_tok=10,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, partial_rotary_factor=0.25, rope_theta=10000000.0,
        rms_norm_eps=1e-6,
    ),
    "neox": _kind("GPTNeoXForCausalLM", "gpt_neox", hidden_size=2560, intermediate_size=10240, num_attention_heads=32, rotary_pct=0.25),
}  # fmt: skip
# Sequences' tokens in a step, and how many they have after it: few and many decodes, a prompt, both.
STEPS = [([1], [100]), ([1] * 16, [500] * 16), ([1] * 256, [300] * 256), ([300], [300]), ([1, 1, 600], [40, 500, 900])]


class AbsentGpu:
    """Triton's driver of a GPU that is not here."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only() -> dict[str, set[str]]:
    """Makes launches compile and nothing more. Returns what they compile to from now on, by the kernels' names."""
    driver.set_active(AbsentGpu())
    found: dict[str, set[str]] = {}
    launch = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        options |= {name: value for name, value in ON_GPU.items() if name in options}
        if is_dataclass(record := options.get("P")):
            named = {field.name for field in fields(record)}
            options["P"] = replace(record, **{name: value for name, value in FIELDS_ON_GPU.items() if name in named})
        compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
        if compiled.metadata.shared > SHARED_BYTES:
            raise MemoryError(f"{kernel.__name__} takes {compiled.metadata.shared} bytes of shared memory")
        found.setdefault(kernel.__name__, set()).add(compiled.hash)
        return compiled

    JITFunction.run = run
    return found


def batch_of(counts: list[int], lengths: list[int], shape: KvShape) -> Batch:
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    tables = np.zeros((len(counts), -(-max(lengths) // BLOCK)), np.int32)
    positions = np.concatenate([np.arange(length - count, length) for count, length in zip(counts, lengths, strict=True)])
    return Batch(
        token_ids=np.zeros(len(positions), np.int64),
        positions=positions.astype(np.int64),
        query_start=query_start,
        seq_lens=np.array(lengths, np.int32),
        block_tables=shape.in_groups(tables),
        slots=shape.in_groups((positions % BLOCK).astype(np.int64)),
        sample_rows=query_start[1:].astype(np.int64) - 1,
        sampling=(),
        state_sources=shape.trial_states(len(counts)),
        state_tables=shape.trial_states(len(counts)),
    )


def compile_shape(raw: dict[str, Any], quantization: str, kv_cache_dtype: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(raw | _SMALL))
        config = with_quantization(parse_config(Path(directory)), quantization)
    cache = KvCache(kv_shape(config, "bfloat16", 8, BLOCK, kv_cache_dtype))
    ops = TritonOps("cpu")
    ops._capability = CAPABILITY
    model = build_model(config, torch.bfloat16, ops)
    fill_random(model)
    with torch.inference_mode():
        for counts, lengths in STEPS:
            model.forward(batch_of(counts, lengths, cache.shape), cache)
        ops.warm_up_drafts()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"beginnings of {', '.join(SHAPES)}")
    parser.add_argument("--formats", nargs="+", default=["none:auto", "fp8:fp8", "int4:int8", "none:int4"], metavar="WEIGHTS:KV")
    args = parser.parse_args()
    found, failed = compile_only(), 0
    for name, raw in SHAPES.items():
        if args.only and not name.startswith(tuple(args.only)):
            continue
        for each in args.formats:
            since, before = time.monotonic(), {kernel: set(kinds) for kernel, kinds in found.items()}
            try:
                compile_shape(raw, *each.split(":"))
            except SetupError as error:
                print(f"{name:<18} {each:<10} refused: {error.message}", flush=True)
                continue
            except Exception:  # noqa: BLE001  whatever a compiler raises
                failed += 1
                traceback.print_exc(limit=-4)
            new = sum(len(kinds - before.get(kernel, set())) for kernel, kinds in found.items())
            print(f"{name:<18} {each:<10} {new:>3} kernels more, {time.monotonic() - since:6.1f} s", flush=True)
    print(f"{sum(map(len, found.values()))} kernels of {len(found)} names, {failed} of the shapes failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
