"""The whole model on one GPU with quantized weights and over quantized KV: right logits, then decode steps and prefill beside bfloat16, in
one run.

    PYTHONPATH=. python benchmarks/gpu_quantized.py                        # Llama-3.1-8B's shape, random weights, bfloat16
    PYTHONPATH=. python benchmarks/gpu_quantized.py --settings none none:fp8 fp8 fp8:fp8 int4      # weights, or weights:KV
    PYTHONPATH=. python benchmarks/gpu_quantized.py --check fp8 int8

Logits of a small model are those of the CPU over the same format, but for bytes that a rounding turns to their neighbours: their distance
is given as a share of what the format and the type's rounding cost. Steps are captured, those with prompts too. Times as in gpu_engine.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from gpu_engine import BLOCK_SIZE, CONTEXT, SMALL, batch_of, decode_ms, make, prefill_rate, tables_for
from safetensors.torch import save_file

from twostep.lab.bench.shapes import LLAMA_8B
from twostep.model.families.registry import build_model, parse_config
from twostep.model.kernels.ops import Ops
from twostep.model.runner.model_runner import ModelRunner
from twostep.settings.reading import FlagParser

# Wide enough for the Hopper kernel.
CHECKED = SMALL | {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}


def check(formats: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(CHECKED))
        places = build_model(parse_config(directory), torch.float32, Ops()).places()
        generator = torch.Generator().manual_seed(0)
        weights = {key: torch.randn(place.shape, generator=generator) * 0.05 + key.endswith("norm.weight") for key, place in places.items()}
        save_file(weights, directory / "model.safetensors")
        load = partial(ModelRunner, directory, num_blocks=256, block_size=BLOCK_SIZE)
        exact = load(dtype="float32")
        for quantization in formats:
            same = load(dtype="float32", kv_cache_dtype=quantization)
            for dtype in ("float32", "bfloat16"):
                gpu = load(dtype=dtype, device="cuda", kv_cache_dtype=quantization, max_num_seqs=8, max_graph_tokens=512)
                plain = load(dtype=dtype, device="cuda", max_num_seqs=8, max_graph_tokens=512)
                tables, shares = tables_for(gpu, 3, 600), []
                # The last one has more rows than are captured.
                steps = [([0, 0, 0], [300, 17, 1]), ([300, 17, 1], [1, 200, 1]), ([301, 217, 2], [1, 1, 1]), ([302, 218, 3], [280, 280, 9])]
                for i, (starts, counts) in enumerate(steps):
                    batch = batch_of(starts, counts, tables, seed=i)
                    want, lossless = same.forward(batch), exact.forward(batch)
                    rounding = float((plain.forward(batch).float().cpu() - lossless).norm())
                    error = float((gpu.forward(batch).float().cpu() - want).norm())
                    cost = float((want - lossless).norm())
                    shares.append(error / (cost + rounding))
                print(
                    f"check {quantization} {dtype}, {gpu.captured.count} captured steps: distance to the CPU's logits as a share: "
                    + " ".join(f"{share:.2f}" for share in shares),
                    flush=True,
                )
                assert max(shares) < 1.5, shares
                gpu.close()
                plain.close()


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    parser.add_argument("--settings", nargs="*", default=["none", "fp8", "fp8:fp8", "int4"], help="formats: weights, or weights:KV")
    parser.add_argument(
        "--check", nargs="*", default=[], choices=["fp8", "int8", "int4"], help="formats of KV whose logits are checked first"
    )
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a prefill step")
    parser.add_argument("--steps", type=int, default=60, help="decode steps measured, from a context of 1024 on")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    check(args.check)
    names = [*(f"{batch} decodes" for batch in args.batch), "128 + 192 mixed", "16 x 2048", "4 x 8192"]
    columns: dict[str, list[str]] = {}
    num_blocks = max(20480, max(args.batch) * -(-(CONTEXT + args.steps + 8) // BLOCK_SIZE))
    for setting in args.settings:
        weights, _, kv = setting.partition(":")
        started = time.perf_counter()
        runner = make(
            LLAMA_8B,
            num_blocks=num_blocks,
            max_num_seqs=max(args.batch),
            max_model_len=16384,
            kv_cache_dtype=kv or "auto",
            quantization=weights,
            max_graph_tokens=512,
        )
        print(f"{setting}: ready after {time.perf_counter() - started:.1f} s, {runner.captured.count} captured steps", flush=True)
        cells = [f"{decode_ms(runner, batch, args.steps):.2f} ms" for batch in args.batch]
        cells.append(f"{mixed_ms(runner, 128, 192):.2f} ms")
        cells += [f"{prefill_rate(runner, *shape, args.budget) / 1e3:.1f}k/s" for shape in ((16, 2048), (4, 8192))]
        columns[setting] = cells
        print(f"{setting}: " + ", ".join(cells), flush=True)
        runner.close()
        del runner
        torch.cuda.empty_cache()
    print(f"{'':16} " + " ".join(f"{name:>12}" for name in columns))
    for row, name in enumerate(names):
        print(f"{name:16} " + " ".join(f"{cells[row]:>12}" for cells in columns.values()), flush=True)


def mixed_ms(runner: ModelRunner, decodes: int, prompt: int) -> float:
    """A step of so many decodes of 1024 tokens beside a prompt's chunk."""
    tables = tables_for(runner, decodes + 1, CONTEXT + 8)
    work = batch_of([CONTEXT - 1] * decodes + [0], [1] * decodes + [prompt], tables)
    times = []
    for _ in range(25):
        start = time.perf_counter()
        runner.run(work)
        times.append(time.perf_counter() - start)
    return sorted(times[5:])[10] * 1e3


if __name__ == "__main__":
    main()
