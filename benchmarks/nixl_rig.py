"""What benchmarks of the `nixl` transport stand on: pools of a prompt's size, a source in a process of its own, median times.

The source is a process on cuda:0, the reader the one that imports this, on cuda:1. `--cpu` among its arguments: both pools in host memory,
to try a script itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from kv_transfer.nixl.memory import NixlMemory
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.transport import ChunkInfo

BLOCK_BYTES = 2 << 20
NUM_BLOCKS = 163
POOL_BLOCKS = 400
NUM_BYTES = NUM_BLOCKS * BLOCK_BYTES
ARENA_BYTES = 1 << 30
ON_CPU = "--cpu" in sys.argv
FAR, NEAR, MEMORY = ("cpu", "cpu", "DRAM") if ON_CPU else ("cuda:0", "cuda:1", "VRAM")
PROBE_BYTES = 16 << 20


def pool_of(device: str, seed: int) -> torch.Tensor:
    if not seed:
        return torch.zeros(POOL_BLOCKS, BLOCK_BYTES, dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (POOL_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device=device, generator=generator)


def memory_of(pool: torch.Tensor) -> NixlMemory:
    return NixlMemory(pool, arena_bytes=ARENA_BYTES, probe_bytes=PROBE_BYTES)


def transport_of(pool: torch.Tensor, piece_bytes: int = 0, **params: str) -> NixlTransport:
    return NixlTransport(memory_of(pool), piece_bytes=piece_bytes, backend_params=params or None)


def wait_for(device: str) -> None:
    if not ON_CPU:
        torch.cuda.synchronize(device)


def median_ms(run: Callable[[], object], repeats: int = 9, warm: int = 2) -> float:
    times = []
    for _ in range(warm + repeats):
        wait_for(NEAR)
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[warm:]) * 1e3


def show(what: str, ms: float, num_bytes: int = NUM_BYTES) -> None:
    print(f"{what:66s} {ms:8.3f} ms {num_bytes / ms / 1e6:7.1f} GB/s", flush=True)


async def be_source() -> None:
    """Says where it is, then publishes what standard input asks for."""
    transport = transport_of(pool_of(FAR, 1))
    await transport.start()
    print("ANSWER", json.dumps(transport.endpoint), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        lease, index, ids = json.loads(line)
        start = time.perf_counter()
        chunk = await transport.publish(lease, index, 0, ids, ttl_s=60, deadline=time.monotonic() + 10)
        print("ANSWER", json.dumps([asdict(chunk), time.perf_counter() - start]), flush=True)
    await transport.close()


class Source:
    """The other process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *(["--cpu"] if ON_CPU else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        self.endpoint: str = self._answer()
        self._leases = 0

    def publish(self, ids: list[int], num_chunks: int = 1) -> tuple[list[ChunkInfo], float]:
        assert self.process.stdin is not None
        self._leases += 1
        chunks, seconds = [], 0.0
        for index, part in enumerate(np.array_split(ids, num_chunks)):
            self.process.stdin.write(json.dumps([f"l{self._leases}", index, part.tolist()]) + "\n")
            self.process.stdin.flush()
            fields, took = self._answer()
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
            chunks.append(ChunkInfo(**values))
            seconds += took
        return chunks, seconds

    def _answer(self) -> Any:
        """What JSON it printed next."""
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith("ANSWER "):
            assert line, "the source ended"
            print("source:", line, end="")
        return json.loads(line.removeprefix("ANSWER "))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    asyncio.run(be_source())
