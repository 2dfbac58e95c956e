"""Sums over ranks with the norm behind them, µs: this project's one-shot kernel beside NCCL's all-reduce, in graphs of 64 sums.

    PYTHONPATH=. python -P benchmarks/gpu_reduce.py --sizes 2 4        # hidden sizes of an 8B and of a 70B model, bfloat16

Each result is first checked against a float64 sum. Up to which rows the kernel is faster is what `_MAX_ROWS_OF_ALL` says
(twostep/model/parallel/triton_ops.py).
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from twostep.model.kernels.triton_elementwise import add_rms_norm
from twostep.model.kernels.triton_reduce import RowExchange, inbox_bytes
from twostep.model.parallel.group import BackendGroup, Meeting
from twostep.model.parallel.triton_ops import PeerMemory
from twostep.settings.reading import FlagParser

ROWS = (1, 16, 64, 128, 256, 512, 1024)
SUMS = 64


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2])
    parser.add_argument("--widths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds that each size may take")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        measure(args.rank, args.sizes[0], args.widths, args.directory)
        # Neither library's end is wanted: it may wait for ranks that are gone.
        os._exit(0)
    failed = False
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as name:
            words = [sys.executable, "-P", str(Path(__file__).resolve()), "--sizes", str(size), "--directory", name]
            words += ["--widths", *map(str, args.widths)]
            ranks = [subprocess.Popen([*words, "--rank", str(rank)]) for rank in range(size)]
            timer = threading.Timer(args.deadline, lambda ranks=ranks: [rank.kill() for rank in ranks])
            timer.start()
            codes = [rank.wait() for rank in ranks]
            timer.cancel()
            failed |= any(codes)
    sys.exit(failed)


def measure(rank: int, size: int, widths: list[int], directory: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    meeting = Meeting(directory, rank, size, timeout_s=50.0)
    meeting.exchange(b"here")
    group = BackendGroup(meeting, device, timeout_s=30.0)
    for width in widths:
        memory = PeerMemory(meeting, device, inbox_bytes(width, 2, size=size, max_rows=max(ROWS)))
        exchange = RowExchange(memory.addresses, rank, max_rows=max(ROWS))
        weight = torch.ones(width, device=device, dtype=torch.bfloat16)
        for rows in ROWS:
            # The same terms on all ranks.
            terms = torch.randn(size, rows, width, generator=torch.Generator(device).manual_seed(rows), device=device).bfloat16()
            x, residual = terms[rank].contiguous(), torch.zeros(rows, width, device=device, dtype=torch.bfloat16)
            ways: dict[str, Callable[[], torch.Tensor]] = {
                "one shot": functools.partial(exchange.add_rms_norm, x, residual, weight, 1e-5),
                "NCCL + norm": functools.partial(_by_nccl, group, x, residual, weight),
            }
            want, times = terms.double().sum(0), {}
            for name, way in ways.items():
                residual.zero_()
                way()
                error = float((residual.double() - want).abs().max() / want.abs().max())
                assert error < 1e-2, (name, rows, error)
                times[name] = microseconds(way, meeting)
            if rank == 0:
                line = ", ".join(f"{name} {time:7.2f}" for name, time in times.items())
                print(f"{size} ranks, {rows:4} x {width}: {line}; x{times['one shot'] / times['NCCL + norm']:.2f}", flush=True)
    torch.cuda.synchronize()
    meeting.exchange(b"done")


def _by_nccl(group: BackendGroup, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return add_rms_norm(group.all_reduce(x.clone()), residual, weight, 1e-5)


def microseconds(way: Callable[[], torch.Tensor], meeting: Meeting) -> float:
    """Times one sum, in a graph of many."""
    way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(SUMS):
            way()
    meeting.exchange(b"captured")
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for _ in range(10):
        torch.cuda.synchronize()
        meeting.exchange(b"go")
        start.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (2 * SUMS))
    return min(times)


if __name__ == "__main__":
    main()
