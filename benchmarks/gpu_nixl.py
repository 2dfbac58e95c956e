"""NIXL between two GPUs of one host, two processes: the link's copy rate, raw reads by layout and size of descriptors, and whole fetches
of the `nixl` transport; then a peer that is killed or stopped in mid-read.

    PYTHONPATH=. python benchmarks/gpu_nixl.py [--section link raw fetch kill stop probe] [--cpu]

341 MB: 163 blocks of 2 MiB, a prompt of 2600 tokens of Llama-3.1-8B's shape in bfloat16. Wall times on the host, medians. The source is
a process on cuda:0, the reader this one on cuda:1 (nixl_rig.py). What arrives is compared bit for bit. `--cpu`: both pools in host
memory, to try the script itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TypedDict

import numpy as np
import torch
from nixl_rig import (
    BLOCK_BYTES,
    FAR,
    MEMORY,
    NEAR,
    NUM_BLOCKS,
    NUM_BYTES,
    ON_CPU,
    POOL_BLOCKS,
    Source,
    median_ms,
    memory_of,
    pool_of,
    show,
    transport_of,
    wait_for,
)

from kv_transfer.nixl.agent import NixlAgent, NixlPeer, NixlRead
from kv_transfer.nixl.endpoint import NixlEndpoint, laid_out
from kv_transfer.transport import ChunkInfo
from twostep.errors import TwostepError
from twostep.model.kernels.triton_pull import PullShape, pull_blocks


class BackendParams(TypedDict):
    """Of UCX's backend, as NIXL takes them."""

    num_threads: str
    split_batch_size: str


THREADED: BackendParams = {"num_threads": "4", "split_batch_size": "8"}


def link() -> None:
    """What copies of torch reach in one process, and a kernel's local gather and scatter."""
    far, near = pool_of(FAR, 1), pool_of(NEAR, 0)
    flat_far, flat_near = far.view(-1)[:NUM_BYTES], near.view(-1)[:NUM_BYTES]

    def copy() -> None:
        flat_near.copy_(flat_far, non_blocking=True)
        wait_for(FAR)
        wait_for(NEAR)

    show("link: one copy of 341 MB, one process", median_ms(copy))
    rng = np.random.default_rng(5)
    ids = torch.from_numpy(rng.permutation(POOL_BLOCKS)[:NUM_BLOCKS]).to(NEAR)
    rows, arena = near.view(torch.int64), torch.empty(NUM_BLOCKS, BLOCK_BYTES // 8, dtype=torch.int64, device=NEAR)

    def scatter() -> None:
        rows.index_copy_(0, ids, arena)
        wait_for(NEAR)

    def gather() -> None:
        torch.index_select(rows, 0, ids, out=arena)
        wait_for(NEAR)

    show("torch: scatter 163 blocks, local", median_ms(scatter))
    show("torch: gather 163 blocks, local", median_ms(gather))
    if ON_CPU:
        return
    kernels(near)


def kernels(pool: torch.Tensor) -> None:
    """What verifying costs: the copy from the arena into the pool with its sums, and sums alone, as the transport calls them."""
    memory = memory_of(pool)
    memory.enter_thread()
    targets = np.random.default_rng(5).permutation(POOL_BLOCKS)[:NUM_BLOCKS].tolist()

    def land() -> None:
        landing = memory.landing(0, targets, slice(0, BLOCK_BYTES))
        landing.prepare()
        landing.begin()
        while not landing.done():
            pass

    default = memory.shape
    for num_programs, tile_words, num_warps in ((128, 4096, 16), (132, 2048, 8), (264, 2048, 8), (264, 4096, 8), (528, 2048, 8)):
        memory.shape = PullShape(num_programs=num_programs, tile_words=tile_words, num_warps=num_warps)
        name = f"{num_programs} programs of {num_warps} warps, {tile_words} words"
        show(f"arena -> pool with sums, {name}", median_ms(land))
        show(f"sums of blocks alone, {name}", median_ms(lambda: memory.block_sums(targets, slice(0, BLOCK_BYTES))))
    memory.shape = default
    ids = torch.tensor([list(range(NUM_BLOCKS)), targets], dtype=torch.int32, device=NEAR)

    def copy_only() -> None:
        pull_blocks(
            memory.arena.address,
            memory.pool.address,
            ids,
            None,
            block_bytes=BLOCK_BYTES,
            first_byte=0,
            num_bytes=BLOCK_BYTES,
            shape=default,
        )
        wait_for(NEAR)

    with torch.cuda.device(NEAR):
        show("arena -> pool without sums", median_ms(copy_only))


def raw(source: Source, sizes: tuple[int, ...] = (BLOCK_BYTES, 512 << 10, 128 << 10, 32 << 10), **params: str) -> None:
    print(f"raw reads, backend parameters {params}")
    endpoint = NixlEndpoint.parse(source.endpoint)
    pool = pool_of(NEAR, 0)
    memory = memory_of(pool)
    agent = NixlAgent(
        f"raw-reader-{len(params)}-{params.get('num_threads')}",
        [memory.pool, memory.arena],
        enter_thread=memory.enter_thread,
        backend_params=params,
    )
    agent.start()
    peer = NixlPeer(endpoint.agent, endpoint.metadata)
    print(f"endpoint {len(source.endpoint)} characters, metadata {len(endpoint.metadata)} bytes")
    rng = np.random.default_rng(6)
    far_ids, near_ids = rng.permutation(POOL_BLOCKS)[:NUM_BLOCKS], rng.permutation(POOL_BLOCKS)[:NUM_BLOCKS]

    def rows(base: int, device: int, ids: np.ndarray, size: int) -> np.ndarray:
        """Blocks cut into pieces of `size`."""
        per = BLOCK_BYTES // size
        places = (ids[:, None] * per + np.arange(per)).reshape(-1) * size + base
        return np.stack([places, np.full_like(places, size), np.full_like(places, device)], axis=1).astype(np.uint64)

    def read(near: np.ndarray, far: np.ndarray, at_once: int = 1) -> None:
        parts = zip(np.array_split(near, at_once), np.array_split(far, at_once), strict=True)
        reads = [NixlRead(peer, n, MEMORY, f, MEMORY, None) for n, f in parts]
        for one in reads:
            agent.start_read(one)
        for one in reads:
            one.ended.result(30)

    start = time.perf_counter()
    read(
        rows(memory.arena.address, memory.arena.device, near_ids[:1], BLOCK_BYTES), rows(endpoint.pool_address, 0, far_ids[:1], BLOCK_BYTES)
    )
    print(f"first read, connecting: {1e3 * (time.perf_counter() - start):.1f} ms")
    for size in sizes:
        far, near = rows(endpoint.pool_address, 0, far_ids, size), rows(memory.pool.address, memory.pool.device, near_ids, size)
        few = {"repeats": 5, "warm": 1} if size < BLOCK_BYTES else {}
        show(f"(a) pool -> pool, {len(far)} descriptors of {size >> 10} KiB", median_ms(partial(read, near, far), **few))
    far, near = rows(endpoint.pool_address, 0, far_ids, BLOCK_BYTES), rows(memory.pool.address, memory.pool.device, near_ids, BLOCK_BYTES)
    same = (pool[near_ids.tolist()].cpu() == pool_of(FAR, 1)[far_ids.tolist()].cpu()).all()
    print("bit for bit:", bool(same))
    arena = laid_out(memory.arena.address, far[:, 1], memory.arena.device)
    show("(c) pool -> arena, 163 descriptors of 2 MiB", median_ms(lambda: read(arena, far)))
    for at_once in (2, 4):
        show(f"(c) in {at_once} reads at once", median_ms(partial(read, arena, far, at_once)))
    one = np.array([[endpoint.pool_address, NUM_BYTES, 0]], np.uint64)
    slot = np.array([[memory.arena.address, NUM_BYTES, memory.arena.device]], np.uint64)
    show("(b) contiguous -> contiguous, 1 descriptor", median_ms(lambda: read(slot, one)))
    cut = NUM_BYTES // 4
    slots = np.array([[memory.arena.address + i * cut, cut, memory.arena.device] for i in range(4)], np.uint64)
    ones = np.array([[endpoint.pool_address + i * cut, cut, 0] for i in range(4)], np.uint64)
    show("(b) in 4 reads at once", median_ms(lambda: read(slots, ones, 4)))
    show("    1 descriptor of 2 MiB", median_ms(lambda: read(near[:1], far[:1])), BLOCK_BYTES)
    agent.close()


async def fetches(source: Source, cuts: tuple[tuple[int, int], ...], piece_mib: int, *, consecutive: bool = False, **params: str) -> None:
    """`cuts`: into how many chunks, how many of them at once."""
    pool = pool_of(NEAR, 0)
    reader = transport_of(pool, piece_mib << 20, **params)
    await reader.start()
    start = time.perf_counter()
    probe = await reader.probe(source.endpoint, deadline=time.monotonic() + 20)
    print(
        f"fetches in pieces of {piece_mib} MiB, backend parameters {params}: probe {probe.bytes_per_s / 1e9:.1f} GB/s, "
        f"in all {1e3 * (time.perf_counter() - start):.1f} ms"
    )
    # The source's pool, for comparison.
    truth = pool_of(FAR, 1).cpu()
    rng = np.random.default_rng(7)
    far, near = rng.permutation(POOL_BLOCKS)[:NUM_BLOCKS].tolist(), rng.permutation(POOL_BLOCKS)[:NUM_BLOCKS].tolist()
    if consecutive:
        far = list(range(NUM_BLOCKS))
        print("blocks that are consecutive in the source's pool:")
    for num_chunks, at_once in cuts:
        chunks, published = source.publish(far, num_chunks)
        targets = np.array_split(near, num_chunks)
        times = []
        for _ in range(11):
            pool.zero_()
            wait_for(NEAR)
            room = asyncio.Semaphore(at_once)

            async def one(chunk: ChunkInfo, ids: np.ndarray, room: asyncio.Semaphore = room) -> None:
                async with room:
                    await reader.fetch(source.endpoint, "l", chunk, ids.tolist(), deadline=time.monotonic() + 10)

            start = time.perf_counter()
            await asyncio.gather(*(one(c, t) for c, t in zip(chunks, targets, strict=True)))
            times.append((time.perf_counter() - start) * 1e3)
        lows = sorted(times[2:])
        show(
            f"fetch, {num_chunks} chunks, {at_once} at once (best {lows[0]:.2f}); published in {1e3 * published:.2f} ms",
            lows[len(lows) // 2],
        )
        assert torch.equal(pool[near].cpu(), truth[far]), "what arrived differs"
    await reader.close()


async def faults(name: str) -> None:
    """Four readers fetch chunks without end; the source is killed or stopped among them. Then: does our context live, is memory given
    back, and can a new source be read?"""
    signum = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[name]
    source = Source()
    pool = pool_of(NEAR, 0)
    reader = transport_of(pool, **THREADED)
    await reader.start()
    far = np.random.default_rng(8).permutation(POOL_BLOCKS)[:NUM_BLOCKS].tolist()
    chunks, _ = source.publish(far, 8)
    targets = [part.tolist() for part in np.array_split(np.arange(200, 200 + NUM_BLOCKS), 8)]
    over = time.monotonic() + 60.0

    async def fetch(endpoint: str, chunk: ChunkInfo, ids: list[int], within_s: float) -> None:
        await reader.fetch(endpoint, "l", chunk, ids, deadline=time.monotonic() + within_s)

    async def read_on(index: int) -> tuple[int, str, float]:
        count = 0
        while time.monotonic() < over:
            try:
                await fetch(source.endpoint, chunks[index], targets[index], 2.0)
                count += 1
            except TwostepError as error:
                return count, f"{type(error).__name__}: {str(error)[:90]}", time.perf_counter()
        return count, "went on", time.perf_counter()

    tasks = [asyncio.create_task(read_on(n)) for n in range(4)]
    await asyncio.sleep(1.0)
    in_flight = reader.arena.used_bytes
    source.process.send_signal(signum)
    at = time.perf_counter()
    over = time.monotonic() + 3.0
    outcomes = await asyncio.gather(*tasks)
    print(f"{name}: {in_flight >> 20} MiB on their way; {sum(o[0] for o in outcomes)} fetched in all")
    for said in sorted({o[1] for o in outcomes}):
        print(f"    {said}, at the latest {max(o[2] for o in outcomes if o[1] == said) - at:.3f} s after the signal")
    for attempt in range(2):
        start = time.perf_counter()
        try:
            await fetch(source.endpoint, chunks[0], targets[0], 3.0)
            print(f"    fetched again in {time.perf_counter() - start:.3f} s")
        except TwostepError as error:
            print(f"    again ({attempt}): {type(error).__name__} in {time.perf_counter() - start:.3f} s: {str(error)[:90]}")
    if signum == signal.SIGSTOP:
        source.process.send_signal(signal.SIGCONT)
    await asyncio.sleep(2.5)
    assert float((torch.ones(1 << 20, device=NEAR) * 2).sum()) == 2 << 20, "the survivor's context is broken"
    fresh = Source()
    again, _ = fresh.publish(far, 8)
    start = time.perf_counter()
    for chunk, ids in zip(again, targets, strict=True):
        await fetch(fresh.endpoint, chunk, ids, 10.0)
    took = time.perf_counter() - start
    whole = torch.equal(pool[200 : 200 + NUM_BLOCKS].cpu(), pool_of(FAR, 1)[far].cpu())
    print(f"    context lives; arena in use {reader.arena.used_bytes}; a new source: {took:.3f} s, bit for bit: {whole}", flush=True)
    fresh.close()
    source.close()
    await reader.close()


async def only_probe(source: Source) -> None:
    reader = transport_of(pool_of(NEAR, 0))
    await reader.start()
    probe = await reader.probe(source.endpoint, deadline=time.monotonic() + 20)
    print(f"probe with UCX_TLS={os.environ.get('UCX_TLS', '')}: {probe.bytes_per_s / 1e9:.2f} GB/s")
    await reader.close()


def attempt(section: Callable[[], None]) -> None:
    """One that fails does not cost the others."""
    try:
        section()
    except Exception:  # noqa: BLE001
        traceback.print_exc()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", default=["link", "raw", "fetch", "kill", "stop"])
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    if "link" in args.section:
        link()
    if {"raw", "fetch", "probe"} & set(args.section):
        source = Source()
        try:
            if "fetch" in args.section:
                one, many = ((1, 1),), ((1, 1), (2, 2), (4, 4), (11, 4), (43, 4))

                def threaded(cuts: tuple[tuple[int, int], ...], piece_mib: int) -> None:
                    asyncio.run(fetches(source, cuts, piece_mib, **THREADED))

                attempt(lambda: asyncio.run(fetches(source, one, 64)))
                attempt(partial(threaded, many, 64))
                for piece_mib in (48, 128, 341):
                    attempt(partial(threaded, one, piece_mib))
                attempt(lambda: asyncio.run(fetches(source, one, 64, consecutive=True)))
            if "raw" in args.section:
                attempt(lambda: raw(source))
                for num_threads in ("2", "4", "8"):
                    attempt(partial(raw, source, (BLOCK_BYTES,), num_threads=num_threads, split_batch_size="8"))
            if "probe" in args.section:
                asyncio.run(only_probe(source))
        finally:
            source.close()
    for name in ("kill", "stop"):
        if name in args.section:
            asyncio.run(faults(name))


if __name__ == "__main__":
    main()
