"""A pool that is too small, on one GPU: right tokens in float32, what swapping moves per second, and what each way costs.

    PYTHONPATH=. python benchmarks/gpu_preemption.py             # --device cpu: the first part only

1. right tokens   a small random model, greedy and sampled requests, on a large pool and on small ones with either way of giving way
2. swap speed     blocks of Llama-3.1-8B's shape to fresh host memory and back
3. cost           that shape with random weights: 64 requests whose KV is twice the pool, the time for all of them
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from twostep.engine.batch import KvShape
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.preemption import PreemptionMode
from twostep.engine.types import EngineRequest, TokenOutput
from twostep.lab.bench.shapes import LLAMA_8B
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.kv_cache import KvCache
from twostep.sampling_params import SamplingParams

BLOCK_SIZE = 16
SMALL = LLAMA_8B | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1031,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    right_tokens(args.device)
    if args.device != "cpu":
        swap_speed()
        cost()


def make(config: dict[str, Any], device: str, num_blocks: int, bounds: EngineConfig) -> Engine:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        runner = ModelRunner(
            directory, num_blocks=num_blocks, block_size=BLOCK_SIZE, device=device, load_format="dummy", max_num_seqs=bounds.max_num_seqs
        )
    return Engine(runner, bounds)


def right_tokens(device: str) -> None:
    rng = np.random.default_rng(0)
    work = []
    for i in range(24):
        tokens = rng.integers(0, 1031, int(rng.integers(5, 150))).tolist()
        params = SamplingParams(max_tokens=int(rng.integers(60, 200)), temperature=0.0, ignore_eos=True)
        if i % 2:
            params = replace(params, temperature=0.8, top_p=0.9, seed=i, repetition_penalty=1.1)
        work.append(
            EngineRequest(
                seq_id=f"r{i}", token_ids=tokens, num_prompt_tokens=len(tokens), sampling=params, prefix_key=b"key" if i % 3 else b""
            )
        )
    # At most 22 blocks each.
    bounds = EngineConfig(max_num_batched_tokens=256, max_num_seqs=16, hash_unit=64)
    engine = make(SMALL, device, 600, bounds)
    want = generate(engine, work)
    runner = engine.runner
    print(f"right tokens: {sum(map(len, want))} in all, {engine.stats().num_preemptions} preemptions on 600 blocks", flush=True)
    for mode in (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP):
        # The same runner with a part of its pool: the others are never given out.
        small = Engine(Part(runner, 60), replace(bounds, preemption_mode=mode, swap_bytes=1 << 30))
        got = generate(small, work)
        small.check_integrity()
        stats = small.stats()
        print(
            f"  {mode.value:<9} on 60 blocks: {stats.num_preemptions} preemptions, {stats.swapped_bytes / 1e6:.1f} MB swapped; "
            f"{differing(want, got)}",
            flush=True,
        )


class Part:
    """A runner that has fewer blocks."""

    def __init__(self, runner: Any, num_blocks: int) -> None:
        self._runner = runner
        shape = runner.kv_shape
        self.kv_shape = type(shape)(**{name: getattr(shape, name) for name in shape.__slots__} | {"num_blocks": num_blocks})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def differing(want: list[list[TokenOutput]], got: list[list[TokenOutput]]) -> str:
    ends = []
    for a, b in zip(want, got, strict=True):
        pairs = [(x.token_id, y.token_id) for x, y in zip(a, b, strict=True)]
        ends += [i for i, (x, y) in enumerate(pairs) if x != y][:1]
    return "all tokens equal" if not ends else f"{len(ends)} of {len(want)} answers differ, from positions {ends} on"


def swap_speed() -> None:
    shape = KvShape(num_blocks=1536, block_size=BLOCK_SIZE, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    cache = KvCache(shape, "cuda")
    ids = np.random.default_rng(1).permutation(shape.num_blocks).tolist()
    cache.write_blocks(ids[:64], np.zeros((64, shape.block_bytes), np.uint8))
    for count in (16, 64, 256):
        times: dict[str, list[float]] = {}

        def timed(name: str, work: Callable[[], object], times: dict[str, list[float]] = times) -> None:
            begun = time.perf_counter()
            work()
            times.setdefault(name, []).append(time.perf_counter() - begun)

        pinned = cache.new_host_blocks(count)
        for _ in range(5):
            data = np.empty((count, shape.block_bytes), np.uint8)
            timed("pageable: out", partial(cache.read_blocks, ids[:count], data))
            timed("back", partial(cache.write_blocks, ids[count : 2 * count], data))
            timed("pinned: out", partial(cache.read_blocks, ids[:count], pinned))
            timed("back ", partial(cache.write_blocks, ids[count : 2 * count], pinned))
            assert np.array_equal(data, pinned)
        rates = ", ".join(f"{name} {data.nbytes / 1e9 / statistics.median(t):.1f}" for name, t in times.items())
        print(f"swap {count} scattered blocks, {data.nbytes / 1e6:.0f} MB, GB/s: {rates}", flush=True)
    begun = time.perf_counter()
    cache.new_host_blocks(64)
    print(f"new pinned memory: {time.perf_counter() - begun:.3f} s for {64 * shape.block_bytes / 1e6:.0f} MB", flush=True)


def cost() -> None:
    prompt, answer, count = 512, 384, 64
    needed = count * -(-(prompt + answer) // BLOCK_SIZE)
    bounds = EngineConfig(
        max_num_batched_tokens=4096, max_num_seqs=count, max_waiting=count, hash_unit=64, swap_bytes=16 << 30, enable_prefix_caching=False
    )
    runner = make(LLAMA_8B, "cuda", needed + 8, bounds).runner
    for mode in (None, None, *PreemptionMode):  # the first compiles
        part = Part(runner, needed + 8 if mode is None else needed // 2)
        engine = Engine(part, replace(bounds, preemption_mode=mode or PreemptionMode.AUTO))
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        work = [
            EngineRequest(seq_id=f"r{i}", token_ids=[(7 * i + k) % 1000 for k in range(prompt)], num_prompt_tokens=prompt, sampling=params)
            for i in range(count)
        ]
        begun = time.perf_counter()
        generate(engine, work)
        took = time.perf_counter() - begun
        stats, rates = engine.stats(), engine._swap.rates
        print(
            f"cost, {'all the room' if mode is None else 'half of it, ' + mode.value:<22}: {took:6.2f} s, "
            f"{count * answer / took:7.0f} tokens/s, {stats.num_preemptions} preemptions, {stats.swapped_bytes / 1e9:.1f} GB swapped; "
            f"seen: prefill {rates.prefill_tokens_per_s / 1e3:.1f}k tokens/s, copies {rates.copy_bytes_per_s / 1e9:.1f} GB/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
