"""Fused elementwise kernels on one GPU against its memory's read rate.

    PYTHONPATH=. python benchmarks/gpu_elementwise.py
    PYTHONPATH=. python benchmarks/gpu_elementwise.py --sweep      other numbers of warps and tile sizes as well

Llama-3.1-8B's shape, bf16. A time is that of one call in a CUDA graph of many, each on tensors of its own (2 GB in all), so that they
come from memory, not from the second-level cache; calls overlap as they do in a step. Bytes are those that a call must read and write.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable

import torch
from gpu_linear import graph_us, read_rate

from twostep.engine.batch import KvShape
from twostep.model.kernels import triton_elementwise as kernels
from twostep.model.step.kv_cache import KvCache
from twostep.settings.reading import FlagParser

HIDDEN, FEED_FORWARD, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4096, 14336, 32, 8, 128, 16
BYTES = 2e9


def cases(rows: int) -> dict[str, tuple[float, Callable[[], Callable[[], object]]]]:
    """Name → bytes of a call, and what makes one on tensors of its own."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    weight = random(HIDDEN)
    cos, sin = (torch.rand(4096, HEAD_DIM // 2, device="cuda") for _ in range(2))
    num_blocks = -(-rows // BLOCK_SIZE)
    shape = KvShape(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16"
    )
    slots = (torch.randperm(num_blocks)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:rows].cuda()
    positions = torch.arange(rows, device="cuda") % 4096
    width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM

    def rms_norm() -> Callable[[], object]:
        x = random(rows, HIDDEN)
        return lambda: kernels.rms_norm(x, weight, 1e-5)

    def add_rms_norm() -> Callable[[], object]:
        x, residual = random(rows, HIDDEN), random(rows, HIDDEN)
        return lambda: kernels.add_rms_norm(x, residual, weight, 1e-5)

    def silu_mul() -> Callable[[], object]:
        x = random(rows, 2 * FEED_FORWARD)
        return lambda: kernels.silu_mul(x)

    def rotate_and_write() -> Callable[[], object]:
        qkv, cache = random(rows, width), KvCache(shape, "cuda")
        return lambda: kernels.rotate_and_write(qkv, positions, slots, cos, sin, cache, 0, NUM_HEADS)

    turned, written = (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM, 2 * NUM_KV_HEADS * HEAD_DIM
    return {
        "rms_norm": (rows * HIDDEN * 2 * 2.0, rms_norm),
        "add_rms_norm": (rows * HIDDEN * 4 * 2.0, add_rms_norm),
        "silu_mul": (rows * FEED_FORWARD * 3 * 2.0, silu_mul),
        "rotate_and_write": (rows * (width + turned + written) * 2.0, rotate_and_write),
    }


VARIANTS = {
    "rms_norm": ("_NORM_WARPS _TILE", ((4, 4096), (8, 4096), (8, 8192), (16, 8192), (16, 16384))),
    "add_rms_norm": ("_NORM_WARPS _TILE", ((4, 4096), (8, 4096), (8, 8192), (16, 8192), (16, 16384))),
    "silu_mul": ("_GATE_TILE _GATE_WARPS", ((1024, 4), (1024, 2), (2048, 4), (2048, 8), (4096, 8))),
    "rotate_and_write": ("HEADS_PER_PROGRAM _ROTATE_WARPS", ((8, 4), (16, 4), (16, 2), (16, 8), (32, 8))),
}


def measure(rows: int, name: str, rate: float) -> tuple[float, float]:
    """us of a call, and its share of the read rate."""
    size, make = cases(rows)[name]
    calls = [make() for _ in range(max(2, math.ceil(BYTES / size)))]
    calls[0]()
    # Results are kept to the graph's end: each lies in memory of its own.
    us = graph_us(lambda: [call() for call in calls] and None) / len(calls)
    return us, size / (us / 1e6) / rate


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048])
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    rate = read_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; read {rate / 1e12:.2f} TB/s", flush=True)
    for rows, name in itertools.product(args.rows, VARIANTS):
        us, share = measure(rows, name, rate)
        print(f"{name:17} {rows:5} rows {us:7.1f} us {share:5.2f} of the read rate", flush=True)
        if args.sweep:
            names, values = VARIANTS[name]
            for value in values:
                kept = [getattr(kernels, n) for n in names.split()]
                for n, v in zip(names.split(), value if isinstance(value, tuple) else (value,), strict=True):
                    setattr(kernels, n, v)
                us, share = measure(rows, name, rate)
                print(f"    {names} = {value}: {us:.1f} us {share:.2f}", flush=True)
                for n, v in zip(names.split(), kept, strict=True):
                    setattr(kernels, n, v)


if __name__ == "__main__":
    main()
