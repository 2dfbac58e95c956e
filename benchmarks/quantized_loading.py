"""Measures how long it takes to load the quantized weights of a random llama, beside reading its files.

    python benchmarks/quantized_loading.py --threads 1 --formats packed gptq awq    on a CPU, 973 million weights in its layers
    python benchmarks/quantized_loading.py --device cuda --formats packed awq    on a GPU, Llama-3.1-8B's shape; how many blocks are left

Files are written to a temporary directory and read once before, so that they are in the page cache. `cpu` is the time of this process on
all its threads, which other work on the machine changes less than the time on the clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from twostep.lab.bench.shapes import LLAMA_8B
from twostep.model.families.modules import Place
from twostep.model.families.registry import build_model, parse_config
from twostep.model.loading.weight_files import read_weights, stored_tensors
from twostep.model.loading.weights import load_weights
from twostep.model.parallel.member import ops_of
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.pool_sizing import PoolSizing
from twostep.settings.reading import FlagParser

GROUP = 128
SMALL = LLAMA_8B | {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 1024, "head_dim": 64}
_INTS = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
CONFIGS = {
    "packed": _INTS
    | {"format": "pack-quantized", "config_groups": {"0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": GROUP}}}},
    "int8": _INTS | {"format": "int-quantized", "config_groups": {"0": {"targets": ["Linear"], "weights": {"strategy": "channel"}}}},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def layer(kind: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of a layer, of random numbers."""

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)

    scales = (torch.rand(rows, columns // GROUP) * 0.01 + 0.001).half()
    if kind == "packed":
        return {"weight_packed": words(rows, columns // 8), "weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}
    if kind == "int8":
        return {"weight": torch.randint(-127, 128, (rows, columns), dtype=torch.int8), "weight_scale": scales[:, :1].contiguous()}
    turned = {"scales": scales.T.contiguous()}
    if kind == "awq":
        return turned | {"qweight": words(columns, rows // 8), "qzeros": words(columns // GROUP, rows // 8)}
    zeros = torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32)
    return turned | {"qweight": words(columns // 8, rows), "qzeros": zeros, "g_idx": (torch.arange(columns) // GROUP).int()}


def save(kind: str, directory: Path, shape: Mapping[str, Any]) -> int:
    """Writes a model directory; returns its weights' bytes."""
    width, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    kv = shape["num_key_value_heads"] * shape.get("head_dim", width // shape["num_attention_heads"])
    layers = {f"self_attn.{name}_proj": (rows, width) for name, rows in (("q", width), ("k", kv), ("v", kv), ("o", width))}
    layers |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    tensors = {name: torch.randn(vocab, width).bfloat16() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    norms = ["model.norm"]
    for number in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{number}"
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
        for name, (rows, columns) in layers.items():
            tensors |= {f"{prefix}.{name}.{part}": tensor for part, tensor in layer(kind, rows, columns).items()}
    save_file(tensors | {f"{name}.weight": torch.ones(width).bfloat16() for name in norms}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**shape, "quantization_config": CONFIGS[kind]}))
    return (directory / "model.safetensors").stat().st_size


def timed(work: Callable[[], object], repeats: int) -> str:
    """Returns the shortest times of some."""
    seconds, of_cpu = [], []
    for _ in range(repeats):
        began, cpu = time.perf_counter(), time.process_time()
        work()
        seconds.append(time.perf_counter() - began)
        of_cpu.append(time.process_time() - cpu)
    return f"{min(seconds):6.2f} s, cpu {min(of_cpu):5.2f}"


def load(directory: Path, device: str) -> None:
    load_weights(build_model(parse_config(directory), torch.bfloat16, ops_of(torch.device(device)), device), directory)
    if device != "cpu":
        torch.cuda.synchronize()


def blocks(directory: Path, device: str) -> str:
    sizing = PoolSizing(utilization=0.9, max_num_batched_tokens=8192, max_num_seqs=256)
    began = time.perf_counter()
    runner = ModelRunner(directory, num_blocks=sizing, device=device, max_model_len=8192)
    seconds = time.perf_counter() - began
    text = f"   runner ready {seconds:5.2f} s, {runner.kv_shape.num_blocks} blocks of {runner.kv_shape.block_size} tokens"
    runner.close()
    return text


def main() -> None:
    flags = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--formats", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    flags.add_argument("--threads", type=int, default=1)
    flags.add_argument("--device", default="cpu")
    flags.add_argument("--repeats", type=int, default=3)
    args = flags.parse_args()
    torch.set_num_threads(args.threads)
    for kind in args.formats:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            num_bytes = save(kind, directory, SMALL if args.device == "cpu" else LLAMA_8B)
            stored = stored_tensors(directory)
            work = [(tensor, Place.whole(torch.empty(tensor.shape, dtype=tensor.dtype))) for tensor in stored]
            alone = timed(partial(read_weights, work), args.repeats)
            loaded = timed(partial(load, directory, args.device), args.repeats)
            left = "" if args.device == "cpu" else blocks(directory, args.device)
        print(f"{kind:<8} {num_bytes / 1e6:6.0f} MB   read {alone}   loaded {loaded}{left}", flush=True)


if __name__ == "__main__":
    main()
