"""Sums over ranks with the norm behind them, µs: this project's one-shot kernel beside NCCL's and torch's own one-shot all-reduce.

    PYTHONPATH=. python benchmarks/gpu_reduce.py --size 2      # hidden size 4096, bfloat16, graphs of 64 sums

Each line first checks the result against a float64 sum.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from twostep.model.kernels.triton_elementwise import add_rms_norm
from twostep.model.kernels.triton_reduce import RowExchange, inbox_bytes
from twostep.model.parallel.group import BackendGroup, Meeting
from twostep.model.parallel.triton_ops import PeerMemory

WIDTH = 4096
ROWS = [1, 16, 64, 128, 256, 512]
SUMS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--directory", type=Path)
    args = parser.parse_args()
    if args.directory is not None:
        measure(args.rank, args.size, args.directory)
        return
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, __file__, "--size", str(args.size), "--directory", name]
        others = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(1, args.size)]
        measure(0, args.size, Path(name))
        for process in others:
            process.wait(20)


def measure(rank: int, size: int, directory: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    meeting = Meeting(directory, rank, size, timeout_s=60.0)
    meeting.exchange(b"here")
    group = BackendGroup(meeting, device, timeout_s=30.0)
    memory = PeerMemory(meeting, device, inbox_bytes(WIDTH, 2, size=size, max_rows=max(ROWS)))
    exchange = RowExchange(memory.addresses, rank, max_rows=max(ROWS))
    weight = torch.ones(WIDTH, device=device, dtype=torch.bfloat16)
    peer = torch_one_shot(directory, rank, size, device)

    def with_norm(reduce: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return add_rms_norm(reduce(x), residual, weight, 1e-5)

    for rows in ROWS:
        torch.manual_seed(rows)
        terms = torch.randn(size, rows, WIDTH, device=device).bfloat16()
        x, residual = terms[rank].contiguous(), torch.zeros(rows, WIDTH, device=device, dtype=torch.bfloat16)
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "one shot": functools.partial(exchange.add_rms_norm, x, residual, weight, 1e-5),
            "NCCL + norm": functools.partial(with_norm, lambda x: group.all_reduce(x.clone()), x, residual),
            "norm alone": functools.partial(add_rms_norm, x, residual, weight, 1e-5),
        }
        if peer is not None:
            ways["torch one shot + norm"] = functools.partial(with_norm, peer, x, residual)
        want = terms.double().sum(0)
        line = []
        for name, way in ways.items():
            residual.zero_()
            way()
            if name != "norm alone":
                error = float((residual.double() - want).abs().max() / want.abs().max())
                assert error < 1e-2, (name, rows, error)
            line.append(f"{name} {microseconds(way, meeting):6.2f}")
        if rank == 0:
            print(f"reduce {rows:4} x {WIDTH}: " + ", ".join(line), flush=True)
    torch.cuda.synchronize()
    meeting.exchange(b"done")
    sys.stdout.flush()
    # Neither library's teardown is wanted: it may wait for ranks that are gone.
    __import__("os")._exit(0)


def torch_one_shot(directory: Path, rank: int, size: int, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """None where this build of torch does not offer it."""
    try:
        dist.init_process_group("nccl", init_method=f"file://{directory}/default", rank=rank, world_size=size, device_id=device)
        shared = symmetric.empty(max(ROWS), WIDTH, dtype=torch.bfloat16, device=device)
        world = dist.group.WORLD
        assert world is not None
        symmetric.rendezvous(shared, world)

        def reduce(x: torch.Tensor) -> torch.Tensor:
            part = shared[: len(x)]
            part.copy_(x)
            summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", world.group_name)
            return summed

        reduce(torch.zeros(1, WIDTH, dtype=torch.bfloat16, device=device))
        torch.cuda.synchronize()
        return reduce
    except Exception as error:  # noqa: BLE001 - the comparison is left out, whatever is missing
        print(f"rank {rank}: no torch one shot: {error}", flush=True)
        return None


def microseconds(way: Callable[[], torch.Tensor], meeting: Meeting) -> float:
    """Of one sum, in a graph of many."""
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
