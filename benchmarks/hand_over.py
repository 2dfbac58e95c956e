"""What moving KV over Ray's object store costs on this machine: publish and fetch, by size of the hand-over.

    python benchmarks/hand_over.py

A Ray of its own, two workers' ends of the `ray` transport in this process (each with its KV agent), chunks of 8 MB, four at a time as the
workers do it. The copy row is a plain numpy copy of the same bytes: what one pass over them costs here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from local_ray import LocalRay
from one_sided import ArrayStore

from kv_transfer.ray.transport import RayTransport
from kv_transfer.transport import ChunkInfo

CHUNK_BYTES = 8 << 20
AT_ONCE = 4
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Sample:
    copy_s: float
    publish_s: float
    fetch_s: float


def transport(ray: LocalRay, store: ArrayStore, name: str, budget_bytes: int) -> RayTransport:
    return RayTransport(
        store, CHUNK_BYTES, worker_id=name, epoch=1, ray_address=ray.address, run_dir=ray.directory / name, budget_bytes=budget_bytes
    )


async def hand_over(source: RayTransport, sink: RayTransport, lease_id: str, num_chunks: int) -> tuple[float, float]:
    """Seconds to publish all chunks, and then to fetch them."""
    room = asyncio.Semaphore(AT_ONCE)

    async def publish(index: int) -> ChunkInfo:
        async with room:
            return await source.publish(lease_id, index, index, [index], ttl_s=DEADLINE_S, deadline=time.monotonic() + DEADLINE_S)

    async def fetch(chunk: ChunkInfo) -> None:
        async with room:
            await sink.fetch(source.endpoint, lease_id, chunk, [chunk.first_block], deadline=time.monotonic() + DEADLINE_S)

    begin = time.perf_counter()
    chunks = await asyncio.gather(*(publish(index) for index in range(num_chunks)))
    published = time.perf_counter()
    await asyncio.gather(*(fetch(chunk) for chunk in chunks))
    fetched = time.perf_counter()
    await source.drop(lease_id)
    return published - begin, fetched - published


async def measure(ray: LocalRay, sizes: list[int], rounds: int) -> None:
    most = max(sizes)
    rng = np.random.default_rng(1)
    filled = ArrayStore(rng.integers(0, 256, (most, CHUNK_BYTES), np.uint8))
    empty = ArrayStore(np.zeros((most, CHUNK_BYTES), np.uint8))
    source, sink = (transport(ray, filled, "p", 3 * most * CHUNK_BYTES), transport(ray, empty, "d", CHUNK_BYTES))
    try:
        for side in (source, sink):
            await side.start()
        while not (source.ready and sink.ready):  # noqa: ASYNC110 - a transport is polled, by contract
            await asyncio.sleep(0.05)
        await hand_over(source, sink, "warm-up", most)
        print(f"{'MB':>6}{'chunks':>8}{'copy ms':>10}{'publish ms':>12}{'fetch ms':>10}   medians of {rounds}")
        for num_chunks in sizes:
            samples = []
            for n in range(rounds):
                begin = time.perf_counter()
                empty.blocks[:num_chunks] = filled.blocks[:num_chunks]
                copied = time.perf_counter() - begin
                empty.blocks[:num_chunks] = 0
                samples.append(Sample(copied, *await hand_over(source, sink, f"{num_chunks}-{n}", num_chunks)))
                assert np.array_equal(empty.blocks[:num_chunks], filled.blocks[:num_chunks]), "other bytes arrived than were sent"
            copy, publish, fetch = (
                statistics.median(getattr(s, field) for s in samples) * 1000 for field in ("copy_s", "publish_s", "fetch_s")
            )
            print(f"{num_chunks * CHUNK_BYTES / 1e6:>6.0f}{num_chunks:>8}{copy:>10.1f}{publish:>12.1f}{fetch:>10.1f}")
    finally:
        for side in (source, sink):
            await side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4, 16], help="sizes of the hand-over in chunks of 8 MB")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    with LocalRay(object_store_bytes=4 * max(args.chunks) * CHUNK_BYTES + (128 << 20)) as ray:
        os.environ.update(ray.environment)
        asyncio.run(measure(ray, args.chunks, args.rounds))


if __name__ == "__main__":
    main()
