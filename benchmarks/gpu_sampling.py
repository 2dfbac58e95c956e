"""Picking and drawing tokens on one GPU: time over rows of Llama-3.1's vocabulary, and agreement with the CPU's sampler.

    PYTHONPATH=. python benchmarks/gpu_sampling.py            # --sweep: over the kernel's shapes

Device time, medians. The floor is one reading of the logits (bfloat16) at the rate measured here.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from twostep.engine.batch import Batch, SamplingRow
from twostep.model.kernels import triton_sample
from twostep.model.kernels.step_upload import StepUpload
from twostep.model.kernels.triton_sample import sample_rows
from twostep.model.kernels.triton_tokens import MAX_SAMPLED_ROWS, pick_greedy
from twostep.model.runner.device_sampler import DeviceSampler
from twostep.model.runner.sampler import sample, sampling_margin
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser

VOCAB = 128256
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "top-p 0.95, penalties": {"top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
}


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    words = torch.empty(1 << 29, dtype=torch.int32, device="cuda").random_()
    rate = words.numel() * 4 / seconds(lambda: torch.amax(words))
    print(f"{torch.cuda.get_device_name()}, read {rate / 1e12:.2f} TB/s", flush=True)
    agree()
    print(f"{'µs':28}" + "".join(f"{rows:9}" for rows in args.rows), flush=True)
    logits = {rows: model_like(rows) for rows in args.rows}
    print(f"{'one reading':28}" + "".join(f"{rows * VOCAB * 2 / rate * 1e6:9.1f}" for rows in args.rows), flush=True)
    tokens = torch.zeros(MAX_SAMPLED_ROWS, dtype=torch.int64, device="cuda")
    greedy = [micros(functools.partial(pick_greedy, logits[rows], tokens[:rows])) for rows in args.rows]
    print(f"{'greedy':28}" + "".join(f"{x:9.1f}" for x in greedy), flush=True)
    shapes = [(triton_sample._BLOCK, triton_sample._WARPS, triton_sample._STAGES)]
    if args.sweep:
        shapes += [(4096, 16, 3), (2048, 8, 3), (4096, 8, 3)]
    for shape in shapes:
        triton_sample._BLOCK, triton_sample._WARPS, triton_sample._STAGES = shape
        print(f"block, warps, stages: {shape}", flush=True)
        for name, params in KINDS.items():
            if shape != shapes[0] and name not in ("temperature", "top-k 50, top-p 0.95", "top-p 0.95, penalties"):
                continue
            times = [micros(drawing(logits[rows], params)) for rows in args.rows]
            print(f"{name:28}" + "".join(f"{x:9.1f}" for x in times), flush=True)


def model_like(rows: int) -> torch.Tensor:
    """Logits as peaked as a language model's: normal, with a few large ones."""
    generator = torch.Generator("cuda").manual_seed(rows)
    logits = torch.randn(rows, VOCAB, device="cuda", generator=generator) * 2.5
    logits[:, :200] += 6 * torch.rand(rows, 200, device="cuda", generator=generator)
    return logits.to(torch.bfloat16)


def drawing(logits: torch.Tensor, params: dict[str, Any]) -> Callable[[], None]:
    """One launch of the kernel, its inputs on the device already."""
    rows = len(logits)
    full = SamplingParams(**({"max_tokens": 1, "temperature": 0.8} | params))
    floats = torch.empty(len(triton_sample.FLOATS), rows, dtype=torch.float64, device="cuda")
    log_min_p = float(np.log(full.min_p)) if full.min_p else -torch.inf
    values = (full.temperature, log_min_p, full.top_p, full.repetition_penalty, full.frequency_penalty, full.presence_penalty)
    for i, value in enumerate(values):
        floats[i] = value
    floats[-1] = torch.linspace(0.01, 0.99, rows)
    ints = torch.zeros(3, rows, dtype=torch.int32, device="cuda")
    ints[0] = torch.arange(rows)
    ints[1] = torch.arange(rows) if full.has_penalties else -1
    ints[2] = full.top_k
    counts = torch.zeros(rows if full.has_penalties else 1, VOCAB, dtype=torch.int32, device="cuda")
    counts[:, :3000] = 1
    tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
    return lambda: sample_rows(logits, floats, ints, counts, tokens)


def agree() -> None:
    """The same tokens as the CPU's sampler but for near-ties, over all kinds and both kinds of logits."""
    wrong = near = total = 0
    names = list(KINDS)
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.cat((model_like(12), torch.randn(12, VOCAB, device="cuda").to(torch.bfloat16) * 0.2)).to(dtype)
        rows = [
            SamplingRow(
                params=SamplingParams(**({"max_tokens": 9, "temperature": 0.9, "seed": i} | KINDS[names[i % len(names)]])),
                position=i,
                history=list(range(100, 160 + i)),
                num_prompt_tokens=20,
                stop_ids=frozenset(),
            )
            for i in range(24)
        ]
        tokens = torch.zeros(64, dtype=torch.int64, device="cuda")
        sampler = DeviceSampler(StepUpload(torch.device("cuda")), tokens, VOCAB)
        zeros = np.zeros(24, np.int64)
        batch = Batch(
            token_ids=zeros,
            positions=zeros,
            query_start=np.arange(25, dtype=np.int32),
            seq_lens=np.ones(24, np.int32),
            block_tables=np.zeros((1, 24, 1), np.int32),
            slots=zeros[None],
            sample_rows=np.arange(24),
            sampling=rows,
        )
        on_host = logits.cpu()
        want = sample(on_host, rows).token_ids
        sampler.sample(logits, batch)
        for i, (got, expected) in enumerate(zip(tokens.tolist(), want, strict=False)):
            total += 1
            if got != expected:
                close = sampling_margin(on_host[i], rows[i]) < 1e-5
                near, wrong = near + close, wrong + (not close)
    print(f"agreement with the CPU's sampler: {total} rows, {near} near-ties, {wrong} wrong", flush=True)


def micros(work: Callable[[], object]) -> float:
    return seconds(work) * 1e6


def seconds(work: Callable[[], object], repeats: int = 15) -> float:
    """Median device time, in a CUDA graph of one launch, so that the host's share is not in it."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
