"""Layers with windows in blocks of their own, beside all layers in one group: the same tokens, step times, and what sequences own.

    PYTHONPATH=. python benchmarks/gpu_windows.py            # shapes of gpt-oss-20b's and Gemma 3 1B's attention, random weights, bfloat16
    PYTHONPATH=. python benchmarks/gpu_windows.py --tiny     # a minute on a CPU

Each line is one engine that computes the prompts, in chunks and captured steps, and decodes them greedily, all at once. Tokens of the
second line of a pair are those of the first, but where logits of random weights are close: `same first` is the share of answers whose
first token, which hangs on the whole prompt, is the same, and `same` that of all tokens up to the first that differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.types import EngineRequest
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser

BLOCK_SIZE = 16
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "swiglu_limit": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}, "attention_bias": True,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 32000,
    "sliding_window": 512, "layer_types": [("full" if i % 6 == 5 else "sliding") + "_attention" for i in range(26)],
    "max_position_embeddings": 32768, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500,
        "torch_dtype": "float32", "max_position_embeddings": 2048, "sliding_window": 32}  # fmt: skip


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.prompt, args.sequences, args.answer = 600, 3, 12
    device = "cpu" if args.tiny else "cuda"
    print(f"{device if args.tiny else torch.cuda.get_device_name()}, {args.sequences} prompts of {args.prompt} tokens")
    print(f"{'model':10} {'groups':>6} {'prefill s':>9} {'decode ms':>9} {'KV MiB each':>11} {'same first':>10} {'same':>6}")
    for name, raw in (("gpt-oss", GPT_OSS), ("gemma-3", GEMMA)):
        before: list[list[int]] | None = None
        for one_group in (True, False):
            answers, figures, num_groups = measure(raw | (TINY if args.tiny else {}), args, device, one_group=one_group)
            before = before or answers
            firsts = statistics.mean(a[0] == b[0] for a, b in zip(answers, before, strict=True))
            same = sum(agreed(a, b) for a, b in zip(answers, before, strict=True)) / sum(map(len, answers))
            print(f"{name:10} {num_groups:6} {figures[0]:9.2f} {figures[1]:9.2f} {figures[2]:11.1f} {firsts:10.2f} {same:6.2f}", flush=True)


def agreed(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def measure(
    raw: dict[str, Any], args: argparse.Namespace, device: str, *, one_group: bool
) -> tuple[list[list[int]], tuple[float, float, float], int]:
    """Returns the answers; seconds of the prompts, median milliseconds of a decode step and MiB of a decoding sequence; and the groups."""
    columns = -(-(args.prompt + args.answer) // BLOCK_SIZE) + 1
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(raw))
        torch.manual_seed(0)
        options: dict[str, Any] = {"block_size": BLOCK_SIZE, "device": device, "load_format": "dummy", "one_group": one_group}
        num_groups = 1 if one_group else 8
        graphs = {} if args.tiny else {"max_num_seqs": args.sequences, "max_graph_tokens": 512}
        runner = ModelRunner(directory, num_blocks=columns * args.sequences * num_groups, **options, **graphs)
    shape = runner.kv_shape
    engine = Engine(runner, EngineConfig(max_num_batched_tokens=2048, max_num_seqs=args.sequences, hash_unit=BLOCK_SIZE))
    for i in range(args.sequences):
        tokens = [(7 * place + place * place // 11 + 13 * i) % raw["vocab_size"] for place in range(args.prompt)]
        sampling = SamplingParams(max_tokens=args.answer, temperature=0.0, ignore_eos=True)
        engine.submit(EngineRequest(seq_id=str(i), token_ids=tokens, num_prompt_tokens=len(tokens), sampling=sampling))
    answers: list[list[int]] = [[] for _ in range(args.sequences)]
    steps: list[float] = []
    began, prefill_s, owned = time.perf_counter(), 0.0, 0
    while engine.wait_for_work(0.0):
        output = engine.step()
        for token in output.tokens:
            answers[int(token.seq_id)].append(token.token_id)
        if output.num_decode_tokens == args.sequences and not output.num_prefill_tokens:
            prefill_s = prefill_s or time.perf_counter() - began
            steps.append(output.duration_s * 1e3)
            stats = engine.stats()
            owned = max(owned, stats.num_blocks - stats.num_available_blocks)
    return answers, (prefill_s, statistics.median(steps), owned * shape.block_bytes / args.sequences / 2**20), shape.num_groups


if __name__ == "__main__":
    main()
