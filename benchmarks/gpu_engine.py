"""The whole model on one GPU: correctness against the CPU, prefill tokens per second, decode step times.

    PYTHONPATH=. python benchmarks/gpu_engine.py            # Llama-3.1-8B's shape, random weights, bfloat16

A decode step is the wall time of ModelRunner.run, greedy, tokens on the host at its end; contexts grow from 1024. A prefill is a
batch of prompts in chunks of the budget, all tokens and the first samples included. Medians. vLLM 0.24.0 and the floor (cuBLAS and KV
bytes) are figures of the same kind of machine, an H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from twostep.engine.batch import Batch, Runner, SamplingRow
from twostep.lab.bench.shapes import LLAMA_8B
from twostep.model.families.registry import build_model, parse_config
from twostep.model.kernels.ops import Ops
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser

BLOCK_SIZE = 16
CONTEXT = 1024
VLLM = {1: 4.90, 16: 5.55, 64: 7.70, 128: 10.67, 256: 17.09}
FLOOR = {1: 4.03, 16: 4.63, 64: 6.56, 128: 9.2, 256: 15.4}
VLLM_PREFILL = {(16, 2048): 42.3, (4, 8192): 37.5}
SMALL = LLAMA_8B | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 1031,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=list(VLLM))
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a prefill step")
    parser.add_argument("--steps", type=int, default=300, help="decode steps measured, from a context of 1024 on")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    limits()
    check()
    started = time.perf_counter()
    # Room for the largest decode batch at its last step, and for the prefills.
    num_blocks = max(20480, max(args.batch) * (-(-(CONTEXT + args.steps + 8) // BLOCK_SIZE)))
    runner = make(LLAMA_8B, num_blocks=num_blocks, max_num_seqs=max(args.batch), max_model_len=16384)
    print(f"ready after {time.perf_counter() - started:.1f} s (random weights, kernels compiled, graphs captured)", flush=True)
    for batch in args.batch:
        graph = decode_ms(runner, batch, args.steps)
        peer = f"{VLLM.get(batch, 0):9.2f}{FLOOR.get(batch, 0):9.2f}"
        print(f"decode  {batch:4} x 1024: graph {graph:7.2f} ms   vLLM, floor {peer}", flush=True)
    runner.close()  # frees the graphs: steps are eager from here on
    for batch in (1, 64):
        print(f"decode  {batch:4} x 1024: eager {decode_ms(runner, batch, args.steps // 2):7.2f} ms", flush=True)
    for (count, length), peer_rate in VLLM_PREFILL.items():
        rate = prefill_rate(runner, count, length, args.budget)
        print(f"prefill {count:4} x {length}: {rate / 1e3:6.1f}k tokens/s   vLLM {peer_rate}k", flush=True)


def limits() -> None:
    """Prints what this card can do, in this run: reading memory, multiplying bf16 matrices."""
    words = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    read = words.numel() * 4 / seconds(lambda: torch.amax(words))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / seconds(lambda: a @ b)
    print(f"limits: read {read / 1e12:.2f} TB/s, bf16 matmul {rate / 1e12:.0f} TFLOP/s", flush=True)


def seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median device time."""
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def make(
    config: dict[str, object],
    *,
    num_blocks: int,
    max_num_seqs: int,
    max_model_len: int,
    device: str = "cuda",
    kv_cache_dtype: str = "auto",
    quantization: str = "none",
    keep_kv_sums: bool = False,
    max_graph_tokens: int = 0,
) -> ModelRunner:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        return ModelRunner(
            directory,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            kv_cache_dtype=kv_cache_dtype,
            quantization=quantization,
            device=device,
            max_model_len=max_model_len,
            load_format="dummy",
            max_num_seqs=max_num_seqs,
            keep_kv_sums=keep_kv_sums,
            max_graph_tokens=max_graph_tokens,
        )


def batch_of(starts: Sequence[int], counts: Sequence[int], tables: np.ndarray, seed: int = 0, vocab: int = 1000) -> Batch:
    rng = np.random.default_rng(seed)
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    seq = np.repeat(np.arange(len(counts)), counts)
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    row = SamplingRow(
        params=SamplingParams(max_tokens=1, temperature=0.0), position=0, history=(), num_prompt_tokens=0, stop_ids=frozenset()
    )
    return Batch(
        token_ids=rng.integers(0, vocab, len(positions)),
        positions=positions,
        query_start=query_start,
        seq_lens=np.asarray(starts, np.int32) + np.asarray(counts, np.int32),
        block_tables=tables[None],
        slots=tables[None, seq, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        sample_rows=query_start[1:].astype(np.int64) - 1,
        sampling=[row] * len(counts),
    )


def tables_for(runner: Runner, count: int, length: int) -> np.ndarray:
    blocks = np.random.default_rng(1).permutation(runner.kv_shape.num_blocks).astype(np.int32)
    width = -(-length // BLOCK_SIZE)
    return blocks[: count * width].reshape(count, width)


def check() -> None:
    """The same random weights on both devices: chunks, a mixed step, decode by graph; float32 and bfloat16 against CPU float32."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(SMALL))
        places = build_model(parse_config(directory), torch.float32, Ops()).places()
        generator = torch.Generator().manual_seed(0)
        weights = {key: torch.randn(place.shape, generator=generator) * 0.05 + key.endswith("norm.weight") for key, place in places.items()}
        save_file(weights, directory / "model.safetensors")
        load = partial(ModelRunner, directory, num_blocks=256, block_size=BLOCK_SIZE)
        cpu, rounded = (load(dtype=d) for d in ("float32", "bfloat16"))
        on_gpu = {
            (d, n): load(device="cuda", dtype=d, max_num_seqs=8, max_graph_tokens=n) for d in ("float32", "bfloat16") for n in (0, 512)
        }
    for (dtype, max_graph_tokens), gpu in on_gpu.items():
        tables = tables_for(gpu, 3, 600)
        steps = [([0, 0, 0], [300, 17, 1]), ([300, 17, 1], [1, 200, 1]), ([301, 217, 2], [1, 1, 1]), ([302, 218, 3], [1, 1, 1])]
        for i, (starts, counts) in enumerate(steps):
            batch = batch_of(starts, counts, tables, seed=i)
            want, got, peer = cpu.forward(batch), gpu.forward(batch).float().cpu(), rounded.forward(batch).float()
            error, peer_error = (float((x - want).norm() / want.norm()) for x in (got, peer))
            kind = "graph" if max(counts) == 1 or max_graph_tokens else "eager"
            print(
                f"check {dtype} step {i} ({kind}): relative error of the logits {error:.1e} (CPU in bfloat16: {peer_error:.1e})", flush=True
            )
            # Random weights magnify every rounding: bfloat16 is held to what the CPU's own bfloat16 does.
            assert error < (1e-4 if dtype == "float32" else 1.5 * peer_error), error
        data = np.random.default_rng(2).integers(0, 256, (40, gpu.kv_shape.block_bytes), dtype=np.uint8)
        ids, back = list(range(50, 10, -1)), np.empty_like(data)
        gpu.write_blocks(ids, data)
        gpu.read_blocks(ids, back)
        assert np.array_equal(data, back)


def decode_ms(runner: ModelRunner, batch: int, steps: int) -> float:
    tables = tables_for(runner, batch, CONTEXT + steps + 8)
    times = []
    for step in range(steps + 5):
        work = batch_of([CONTEXT - 1 + step] * batch, [1] * batch, tables, seed=step)
        start = time.perf_counter()
        runner.run(work)
        times.append(time.perf_counter() - start)
    return statistics.median(times[5:]) * 1e3


def prefill_rate(runner: ModelRunner, count: int, length: int, budget: int) -> float:
    tables = tables_for(runner, count, length)
    at_once, chunk = max(1, budget // length), min(budget, length)
    rates = []
    for _ in range(4):
        start = time.perf_counter()
        for first in range(0, count, at_once):
            part = tables[first : first + at_once]
            for begin in range(0, length, chunk):
                runner.run(batch_of([begin] * len(part), [chunk] * len(part), part))
        rates.append(count * length / (time.perf_counter() - start))
    return statistics.median(rates[1:])


if __name__ == "__main__":
    main()
