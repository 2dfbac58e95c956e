"""Quantized KV in the whole engine on one GPU: what it costs in logits, and what it saves in time.

    PYTHONPATH=.:benchmarks python benchmarks/gpu_quantized_kv.py          # Llama-3.1-8B's shape, random weights, bfloat16

1. A small model on both devices: chunks, a mixed step, decode by graph. GPU against CPU in the same format, and either against exact KV.
2. The 8B shape, exact, fp8 and int8 one after the other with the same weights: relative error of the logits against those of exact
   KV over two prompts and teacher-forced decode steps; prefill rate; decode steps (wall time of ModelRunner.run, medians).
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gpu_engine import BLOCK_SIZE, SMALL, batch_of, make, prefill_rate, tables_for
from safetensors.torch import save_file

from twostep.lab.bench.shapes import LLAMA_8B
from twostep.model.families.registry import build_model, parse_config
from twostep.model.kernels.ops import Ops
from twostep.model.runner.model_runner import ModelRunner

FORMATS = ("auto", "fp8", "int8")


def small() -> None:
    """Weights of 0.02, as models begin: larger random ones magnify every rounding."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(SMALL))
        places = build_model(parse_config(directory), torch.float32, Ops()).places()
        generator = torch.Generator().manual_seed(0)
        weights = {key: torch.randn(place.shape, generator=generator) * 0.02 + key.endswith("norm.weight") for key, place in places.items()}
        save_file(weights, directory / "model.safetensors")
        load = partial(ModelRunner, directory, num_blocks=256, block_size=BLOCK_SIZE)
        exact = load(dtype="float32")
        for kv in FORMATS[1:]:
            cpu = load(dtype="float32", kv_cache_dtype=kv)
            for dtype in ("float32", "bfloat16"):
                started = time.perf_counter()
                gpu = load(device="cuda", dtype=dtype, kv_cache_dtype=kv, max_num_seqs=4)
                tables = tables_for(gpu, 3, 600)
                steps = [([0, 0, 0], [300, 17, 1]), ([300, 17, 1], [1, 200, 1]), ([301, 217, 2], [1, 1, 1]), ([302, 218, 3], [1, 1, 1])]
                errors = []
                for i, (starts, counts) in enumerate(steps):
                    batch = batch_of(starts, counts, tables, seed=i)
                    want, same, got = (r.forward(batch).float().cpu() for r in (exact, cpu, gpu))
                    errors.append([relative(got, same), relative(got, want), relative(same, want)])
                print(
                    f"small {kv} {dtype} ({time.perf_counter() - started:.0f} s): GPU to CPU, GPU to exact, CPU to exact: "
                    + "; ".join(" ".join(f"{e:.1e}" for e in x) for x in errors)
                )


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def logits(runner: ModelRunner, length: int, steps: int) -> list[torch.Tensor]:
    """Of the last row of two prompts, prefilled in halves, and of `steps` decode steps; the same tokens for every runner."""
    tables = tables_for(runner, 2, length + steps)
    found = []
    for start in (0, length // 2):
        found.append(runner.forward(batch_of([start] * 2, [length // 2] * 2, tables, seed=start)).float().cpu())
    for step in range(steps):
        found.append(runner.forward(batch_of([length + step] * 2, [1] * 2, tables, seed=step)).float().cpu())
    return found


def step_ms(runner: ModelRunner, batch: int, context: int, steps: int) -> float:
    tables = tables_for(runner, batch, context + steps + 8)
    times = []
    for step in range(steps + 3):
        work = batch_of([context - 1 + step] * batch, [1] * batch, tables, seed=step)
        start = time.perf_counter()
        runner.run(work)
        times.append(time.perf_counter() - start)
    return float(np.median(times[3:])) * 1e3


def large(layers: int, steps: int) -> None:
    config = LLAMA_8B | {"num_hidden_layers": layers}
    exact: list[torch.Tensor] = []
    for kv in FORMATS:
        started = time.perf_counter()
        shapes = [(64, 1024), (64, 8192)]
        num_blocks = max(batch * -(-(context + steps + 16) // BLOCK_SIZE) for batch, context in shapes)
        runner = make(config, num_blocks=num_blocks, max_num_seqs=64, max_model_len=16384, kv_cache_dtype=kv)
        print(
            f"{kv}: ready after {time.perf_counter() - started:.1f} s, pool {num_blocks * runner.kv_shape.block_bytes / 1e9:.1f} GB",
            flush=True,
        )
        found = logits(runner, 2048, 8)
        exact = exact or found
        errors = [relative(a, b) for a, b in zip(found, exact, strict=True)]
        times = "  ".join(f"{batch} x {context}: {step_ms(runner, batch, context, steps):.2f} ms" for batch, context in shapes)
        rate = prefill_rate(runner, 4, 4096, 8192)
        print(
            f"{kv}: logits' error, prompt {max(errors[:2]):.1e}, decode {max(errors[2:]):.1e}; steps {times}; prefill 4 x 4096 "
            f"{rate / 1e3:.1f}k tokens/s",
            flush=True,
        )
        del runner
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="of the 8B shape; 0: the small model alone")
    parser.add_argument("--steps", type=int, default=100, help="decode steps measured")
    parser.add_argument("--skip-small", action="store_true")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if not args.skip_small:
        small()
    if args.layers:
        large(args.layers, args.steps)


if __name__ == "__main__":
    main()
