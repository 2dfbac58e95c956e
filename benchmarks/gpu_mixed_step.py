"""Steps with prompts on one GPU: captured, launched kernel by kernel, and what the kernels alone take.

    PYTHONPATH=.:benchmarks python benchmarks/gpu_mixed_step.py        # Llama-3.1-8B's shape, random weights, bfloat16

wall     of ModelRunner.run, greedy, tokens on the host at its end; decodes at a context of 1024, chunks of fresh prompts. Medians
launch   of it until ModelRunner.launch returns
device   between events on the device, behind work that keeps it busy until all is queued: no gaps between kernels. Of the captured step,
         and of the same kernels launched one by one and without padding: the ratio is what padding and replaying cost

A pause before each step lets the card's clocks recover, as they do between the prompts of an idle system; without it they do not.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from gpu_engine import batch_of, make, tables_for

from twostep.engine.batch import Batch
from twostep.lab.bench.shapes import LLAMA_8B
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.graph_ladder import mixed_ladder
from twostep.settings.reading import FlagParser

CONTEXT = 1024
CASES = (
    (0, 128),
    (0, 512),
    (0, 1000),
    (0, 2600),
    (8, 192),
    (64, 192),
    (128, 192),
    (128, 200),
    (256, 192),
    (100, 150),
    (128, 512),
    (0, 100),
)
# Longer than any of these steps takes to launch.
BUSY_CYCLES = 120_000_000


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--pause", type=float, default=30.0, help="before each step, in milliseconds")
    parser.add_argument("--max-graph-tokens", type=int, default=2048)
    parser.add_argument("--profile", action="store_true", help="also where the device's time goes in two of them")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    num_seqs, shapes = 256, mixed_ladder(args.max_graph_tokens, 256)
    for name, tokens in (("decode steps' graphs only", 0), (f"and {len(shapes)} of steps with prompts", args.max_graph_tokens)):
        torch.cuda.empty_cache()
        free, started = torch.cuda.mem_get_info()[0], time.perf_counter()
        runner = make(LLAMA_8B, num_blocks=24576, max_num_seqs=num_seqs, max_model_len=16384, max_graph_tokens=tokens)
        used = (free - torch.cuda.mem_get_info()[0]) / 2**30
        print(f"ready after {time.perf_counter() - started:.1f} s, {used:.2f} GiB taken: {name}", flush=True)
        if not tokens:
            runner.close()
            del runner
    captured = {case: (*measured(runner, batch(runner, *case), args), device_ms(runner, batch(runner, *case))) for case in CASES}
    for case in ((1, 0), (16, 0), (64, 0), (128, 0), (256, 0)):
        wall, launch = measured(runner, batch(runner, *case), args)
        print(f"{case[0]:4} decodes: captured {wall:6.2f} ms (launch {launch:.2f})", flush=True)
    if args.profile:
        for case in ((0, 128), (128, 192)):
            profiled(runner, batch(runner, *case))
    runner.close()  # frees the graphs: steps are launched kernel by kernel from here on
    for case, (wall, launch, device) in captured.items():
        work = batch(runner, *case)
        eager, eager_launch = measured(runner, work, args)
        alone = device_ms(runner, work)
        print(
            f"{case[0]:4} decodes + {case[1]:4} tokens: captured {wall:6.2f} ms (launch {launch:.2f}), eager {eager:6.2f} "
            f"(launch {eager_launch:.2f}); on the device {device:6.2f}, kernels without padding {alone:6.2f}: {device / alone:.3f}",
            flush=True,
        )


def batch(runner: ModelRunner, decodes: int, chunk: int) -> Batch:
    starts, counts = [CONTEXT - 1] * decodes, [1] * decodes
    if chunk:
        starts, counts = [*starts, 0], [*counts, chunk]
    return batch_of(starts, counts, tables_for(runner, len(starts), max(CONTEXT, chunk)))


def measured(runner: ModelRunner, work: Batch, args: argparse.Namespace) -> tuple[float, float]:
    """Returns the medians of wall and launch, in milliseconds."""
    walls, launches = [], []
    for _ in range(args.repeats + 3):
        torch.cuda.synchronize()
        time.sleep(args.pause / 1e3)
        start = time.perf_counter()
        step = runner.launch(work)
        launches.append(time.perf_counter() - start)
        step.result()
        walls.append(time.perf_counter() - start)
    return statistics.median(walls[3:]) * 1e3, statistics.median(launches[3:]) * 1e3


def device_ms(runner: ModelRunner, work: Batch) -> float:
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        step = runner.launch(work)
        end.record()
        step.result()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times[2:]))


def profiled(runner: ModelRunner, work: Batch) -> None:
    """Prints where the device's time goes. Kernels that overlap count twice."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            runner.run(work)
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)[:14]
    for row in rows:
        print(f"    {row.device_time_total / 5e3:7.3f} ms  {row.count / 5:6.1f} times  {row.key[:110]}", flush=True)


if __name__ == "__main__":
    main()
