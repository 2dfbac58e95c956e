"""cuda_ipc as workers call it: how long publishing and fetching 341 MB takes, checksums included, between two processes on two GPUs.

PYTHONPATH=. python benchmarks/gpu_fetch.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from gpu_elementwise import BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS
from gpu_transfer import NUM_BLOCKS, NUM_LAYERS, POOL_BLOCKS, fill

from kv_transfer.cuda_ipc.transport import CudaIpcTransport
from kv_transfer.transport import ChunkInfo
from twostep.engine.batch import KvShape, LayerRange
from twostep.errors import DataLoss
from twostep.model.kernels.triton_pull import slot_sums
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.kv_sums import KvSums

SHAPE = KvShape(
    num_blocks=POOL_BLOCKS, block_size=BLOCK_SIZE, num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16"
)
SMALL = 4
# What is published: name, blocks of a chunk, layers.
SETS: tuple[tuple[str, int, LayerRange | None], ...] = (
    ("one chunk", NUM_BLOCKS, None),
    (f"chunks of {SMALL} blocks, all at once", SMALL, None),
    ("four layers of all blocks", NUM_BLOCKS, LayerRange(8, 4)),
)


def pool(device: str) -> KvCache:
    numbers = fill(device).view(torch.bfloat16)
    return KvCache(SHAPE, device, tensor=numbers.view(POOL_BLOCKS, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM))


async def serve(device: str) -> None:
    """Publishes the sets of chunks, says so, and lives until its input ends."""
    cache = pool(device)
    cache.sums = KvSums(cache.tensor, cache.shape, NUM_HEADS, HEAD_DIM, slot_sums)
    transport = CudaIpcTransport(cache)
    await transport.start()
    ids = torch.randperm(POOL_BLOCKS, generator=torch.Generator().manual_seed(1))[:NUM_BLOCKS].tolist()
    for name, size, layers in SETS:
        taken: list[float] = []
        for turn in range(20):
            start = time.perf_counter()
            chunks = await asyncio.gather(
                *(
                    transport.publish(f"{name}{turn}", i, first, ids[first : first + size], layers=layers, ttl_s=600, deadline=start + 600)
                    for i, first in enumerate(range(0, NUM_BLOCKS, size))
                )
            )
            taken.append((time.perf_counter() - start) * 1e3)
        told = {"name": name, "endpoint": transport.endpoint, "chunks": [asdict(c) for c in chunks], "ms": statistics.median(taken)}
        print(json.dumps(told), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


def start_source() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, "--serve", "cuda:0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def read(source: subprocess.Popen[str], *, blocking: bool) -> None:
    assert source.stdout is not None
    torch.cuda.set_device(1)
    cache = KvCache(SHAPE, "cuda:1")
    transport = CudaIpcTransport(cache, blocking=blocking)
    await transport.start()
    want = fill("cuda:1").view(POOL_BLOCKS, -1)
    got = cache.tensor.view(POOL_BLOCKS, -1).view(torch.uint8)
    targets = torch.randperm(POOL_BLOCKS, generator=torch.Generator().manual_seed(2))[:NUM_BLOCKS].tolist()
    for _ in SETS:
        told: dict[str, Any] = json.loads(await asyncio.to_thread(source.stdout.readline))
        chunks = [ChunkInfo(**c | {"source_blocks": tuple(c["source_blocks"]), "generations": ()}) for c in told["chunks"]]
        endpoint = told["endpoint"]
        start = time.perf_counter()
        probe = await transport.probe(endpoint, deadline=time.monotonic() + 20)
        probed = (time.perf_counter() - start) * 1e3

        async def fetch(chunk: ChunkInfo, endpoint: str = endpoint) -> None:
            place = targets[chunk.first_block : chunk.first_block + chunk.num_blocks]
            await transport.fetch(endpoint, "lease", chunk, place, deadline=time.monotonic() + 10)

        got.zero_()
        taken = []
        for _ in range(30):
            start = time.perf_counter()
            await asyncio.gather(*map(fetch, chunks))
            taken.append((time.perf_counter() - start) * 1e3)
        sources = [block for chunk in chunks for block in chunk.source_blocks]
        columns = slice(0, None) if chunks[0].layers is None else SHAPE.bytes_of(chunks[0].layers)
        assert torch.equal(got[targets, columns], want[sources, columns]), "bytes differ"
        try:
            await fetch(replace(chunks[0], checksum=chunks[0].checksum ^ 1))
            raise AssertionError("a wrong checksum was not found")
        except DataLoss:
            pass
        taken.sort()
        print(
            f"{'sleeping' if blocking else 'spinning'} threads, {told['name']}: {sum(c.num_bytes for c in chunks) / 1e6:.0f} MB in "
            f"{statistics.median(taken):.3f} ms (least {taken[0]:.3f}, p90 {taken[26]:.3f}); published in {told['ms']:.3f} ms; probe "
            f"{probe.bytes_per_s / 1e9:.0f} GB/s, taking {probed:.0f} ms",
            flush=True,
        )
    source.kill()
    source.wait()
    closed = await wait_for(lambda: transport.peers.num_open == 0)
    print(f"source killed: its pool is closed after {closed:.1f} s; GPU 0 has {torch.cuda.mem_get_info(0)[0] / 2**30:.1f} GiB free")
    await transport.close()


async def wait_for(condition: Callable[[], bool]) -> float:
    start = time.perf_counter()
    while not condition():  # noqa: ASYNC110 - a threads' number
        await asyncio.sleep(0.02)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", metavar="DEVICE")
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve))
        return
    for blocking in (True, False):
        asyncio.run(read(start_source(), blocking=blocking))


if __name__ == "__main__":
    main()
