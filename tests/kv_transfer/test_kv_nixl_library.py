"""The nixl transport over the library itself, host memory to host memory, where the package is installed; and processes that are killed
or stopped while they are read."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import nixl_source
import numpy as np
import pytest
import torch
from kv_pairs import in_s, wait_until

from kv_transfer.nixl.memory import NixlMemory
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.transport import ChunkInfo
from twostep.errors import DataLoss, TwostepError, Unavailable

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the nixl package is not installed")

# Over TCP a read needs the source's process, so that a stopped one stops it. Other paths within a host do not.
TCP = {"engine_config": "TLS=tcp"}
LARGE = (64, 1 << 20)


@asynccontextmanager
async def transport_of(pool: np.ndarray, *, arena_bytes: int = 1 << 20, **params: str) -> AsyncIterator[NixlTransport]:
    transport = NixlTransport(NixlMemory(torch.from_numpy(pool), arena_bytes=arena_bytes, probe_bytes=1 << 20), backend_params=params)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.close()


@contextmanager
def other_process(num_blocks: int, block_bytes: int, **params: str) -> Iterator[tuple[subprocess.Popen[str], str, ChunkInfo]]:
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, nixl_source.__file__, json.dumps(params), str(num_blocks), str(block_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])},
    )
    try:
        assert process.stdout is not None
        endpoint, fields = json.loads(process.stdout.readline())
        yield process, endpoint, ChunkInfo(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    finally:
        process.kill()
        process.communicate()


async def test_another_process_is_probed_and_read() -> None:
    pool = np.zeros((8, 5000), np.uint8)
    with other_process(8, 5000) as (_, endpoint, chunk):
        async with transport_of(pool) as reader:
            probe = await reader.probe(endpoint, deadline=in_s(60))
            assert probe.num_bytes == 1 << 20
            assert probe.bytes_per_s > 1e6
            with pytest.raises(DataLoss):
                await reader.fetch(endpoint, "a", replace(chunk, checksum=chunk.checksum ^ 1), range(8), deadline=in_s(60))
            await reader.fetch(endpoint, "a", chunk, range(8), deadline=in_s(60))
            np.testing.assert_array_equal(pool, nixl_source.contents(8, 5000))


async def test_a_source_killed_in_mid_read_is_unavailable_and_another_is_read() -> None:
    pool = np.zeros(LARGE, np.uint8)
    async with transport_of(pool, arena_bytes=256 << 20, **TCP) as reader:
        with other_process(*LARGE, **TCP) as (process, endpoint, chunk):
            await reader.probe(endpoint, deadline=in_s(60))
            reads = [asyncio.create_task(reader.fetch(endpoint, "a", chunk, range(64), deadline=in_s(60))) for _ in range(2)]
            await wait_until(lambda: reader.arena.used_bytes > 0, every_s=0.001)
            process.kill()
            outcomes = await asyncio.gather(*reads, return_exceptions=True)
            # One that was quicker than the kill is no failure, both are no test.
            assert any(isinstance(o, Unavailable) for o in outcomes), outcomes
            assert all(isinstance(o, float | Unavailable) for o in outcomes), outcomes
            with pytest.raises(Unavailable):
                await reader.fetch(endpoint, "a", chunk, range(64), deadline=in_s(60))
        await wait_until(lambda: reader.arena.used_bytes == 0)
        with other_process(*LARGE, **TCP) as (_, endpoint, chunk):
            await reader.fetch(endpoint, "a", chunk, range(64), deadline=in_s(60))
            np.testing.assert_array_equal(pool, nixl_source.contents(*LARGE))


async def test_a_stopped_source_costs_its_calls_their_deadline_and_nothing_later() -> None:
    pool = np.zeros(LARGE, np.uint8)
    async with transport_of(pool, arena_bytes=256 << 20, **TCP) as reader:
        with other_process(*LARGE, **TCP) as (process, endpoint, chunk):
            await reader.probe(endpoint, deadline=in_s(60))
            read = asyncio.create_task(reader.fetch(endpoint, "a", chunk, range(64), deadline=in_s(1.0)))
            await wait_until(lambda: reader.arena.used_bytes > 0, every_s=0.001)
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(Unavailable, match="deadline"):
                await read
            assert reader.arena.quarantined_bytes == chunk.num_bytes
            with pytest.raises(Unavailable, match="have not ended"):
                await reader.fetch(endpoint, "a", chunk, range(64), deadline=in_s(60))
            pool[:] = 7  # somebody else's by now
            process.send_signal(signal.SIGCONT)
            await wait_until(lambda: reader.arena.used_bytes == 0)
            assert (pool == 7).all()
            await reader.fetch(endpoint, "a", chunk, range(64), deadline=in_s(60))
            np.testing.assert_array_equal(pool, nixl_source.contents(*LARGE))


async def test_a_source_that_is_gone_is_unavailable_at_once() -> None:
    with other_process(4, 64) as (process, endpoint, chunk):
        process.kill()
        process.wait()
        async with transport_of(np.zeros((4, 64), np.uint8)) as reader:
            for call in (reader.fetch(endpoint, "a", chunk, range(4), deadline=in_s(60)), reader.probe(endpoint, deadline=in_s(60))):
                with pytest.raises(TwostepError) as caught:
                    await call
                assert isinstance(caught.value, Unavailable)
