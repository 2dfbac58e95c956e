"""A Ray for the session, and a pair of transports (the prefill's and the decode's side) of either kind."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from local_ray import LocalRay
from one_sided import ArrayStore

from kv_transfer.local.transport import LocalHub, LocalTransport
from kv_transfer.ray.transport import RayTransport
from kv_transfer.transport import KvTransport

NUM_BLOCKS = 64
# For what comes at once, were it not for a busy machine.
SOON_S = 60.0
# Leases that a test does not let expire: they outlive every wait.
TTL_S = 600.0
# Ray takes about one second.
STORE_EMPTY_S = 60.0
_lives = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Side:
    transport: KvTransport
    store: ArrayStore


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Side
    decode: Side
    # Lease ids are never used twice: a test puts this in front of its own.
    salt: str = ""


MakePair = Callable[..., Awaitable[Pair]]


@pytest.fixture(scope="session")
def local_ray() -> Iterator[LocalRay]:
    with LocalRay() as ray, pytest.MonkeyPatch.context() as patch:
        for name, value in ray.environment.items():
            patch.setenv(name, value)
        yield ray


def make_store(block_bytes: int, *, fill: bool, num_layers: int = 1) -> ArrayStore:
    shape = (NUM_BLOCKS, block_bytes)
    return ArrayStore(np.random.default_rng(7).integers(0, 256, shape, np.uint8) if fill else np.zeros(shape, np.uint8), num_layers)


def ray_side(ray: LocalRay, store: ArrayStore, *, worker_id: str, budget_bytes: int = 64 << 20, ring_bytes: int = 8 << 20) -> Side:
    run_dir = ray.directory / f"{worker_id}{next(_lives)}"
    transport = RayTransport(
        store,
        store.blocks.shape[1],
        worker_id=worker_id,
        epoch=next(_lives),
        ray_address=ray.address,
        run_dir=run_dir,
        num_layers=store.num_layers,
        ring_bytes=ring_bytes,
        budget_bytes=budget_bytes,
    )
    return Side(transport, store)


@asynccontextmanager
async def running(*sides: Side) -> AsyncIterator[None]:
    """Starts them, waits until they are ready, and closes them whatever happens."""
    try:
        for side in sides:
            await side.transport.start()
        await asyncio.gather(*(wait_until(lambda side=side: side.transport.ready) for side in sides))
        yield
    finally:
        await asyncio.gather(*(side.transport.close() for side in sides))


async def wait_until(condition: Callable[[], bool], timeout_s: float = SOON_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(0.02)


async def wait_for_stats(transport: KvTransport, *, num_objects: int, timeout_s: float = SOON_S) -> None:
    end = time.monotonic() + timeout_s
    while (stats := await transport.stats()).num_objects != num_objects:
        assert time.monotonic() < end, f"still {stats}"
        await asyncio.sleep(0.02)


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


@dataclass(frozen=True, slots=True)
class Kind:
    """Makes pairs of one kind of transport, and keeps them for the next test that asks for the same."""

    name: str
    ray: LocalRay | None
    pairs: dict[tuple[int, int, int], Pair]

    def make(self, block_bytes: int, budget_bytes: int, num_layers: int) -> Pair:
        prefill_store = make_store(block_bytes, fill=True, num_layers=num_layers)
        decode_store = make_store(block_bytes, fill=False, num_layers=num_layers)
        if self.ray is not None:
            return Pair(
                ray_side(self.ray, prefill_store, worker_id="p", budget_bytes=budget_bytes),
                ray_side(self.ray, decode_store, worker_id="d", budget_bytes=budget_bytes),
            )
        hub = LocalHub()

        def local(store: ArrayStore, name: str) -> Side:
            return Side(LocalTransport(store, block_bytes, hub, worker_id=name, num_layers=num_layers, budget_bytes=budget_bytes), store)

        return Pair(local(prefill_store, "p"), local(decode_store, "d"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
async def kind(request: pytest.FixtureRequest) -> AsyncIterator[Kind]:
    ray: LocalRay | None = request.getfixturevalue("local_ray") if request.param == "ray" else None
    kind = Kind(request.param, ray, {})
    try:
        yield kind
    finally:
        await asyncio.gather(*(side.transport.close() for pair in kind.pairs.values() for side in (pair.prefill, pair.decode)))
    if ray is not None:
        await check_store_empty(ray)


@pytest_asyncio.fixture(loop_scope="module")
async def make_pair(kind: Kind) -> AsyncIterator[MakePair]:
    """Ready pairs with fresh contents; when the test is over, neither side may hold anything."""
    used: list[Pair] = []

    async def make(*, block_bytes: int = 4096, budget_bytes: int = 64 << 20, num_layers: int = 1) -> Pair:
        pair = kind.pairs.get((block_bytes, budget_bytes, num_layers))
        if pair is None or not (pair.prefill.transport.ready and pair.decode.transport.ready):
            pair = kind.pairs[block_bytes, budget_bytes, num_layers] = kind.make(block_bytes, budget_bytes, num_layers)
            for side in (pair.prefill, pair.decode):
                await side.transport.start()
            for side in (pair.prefill, pair.decode):
                await wait_until(lambda side=side: side.transport.ready)
        pair.prefill.store.blocks[:] = np.random.default_rng(7).integers(0, 256, pair.prefill.store.blocks.shape, np.uint8)
        pair.decode.store.blocks[:] = 0
        used.append(pair)
        return replace(pair, salt=f"{next(_lives)}/")

    yield make
    for pair in used:
        for side in (pair.prefill, pair.decode):
            stats = await side.transport.stats()
            assert (stats.num_leases, stats.num_objects, stats.stored_bytes) == (0, 0, 0)
            if isinstance(side.transport, RayTransport) and (session := side.transport.session) is not None:
                # A pull whose fetch was cancelled has its slot until the agent has answered.
                await wait_until(lambda session=session: session.ring_used_bytes == 0)


async def check_store_empty(ray: LocalRay) -> None:
    """Ray itself counts no object any more."""
    usage = await asyncio.to_thread(ray.store_usage, empty_within_s=STORE_EMPTY_S)
    assert usage.num_objects == 0, f"{usage} {STORE_EMPTY_S:g} s after the last reference has gone"


def rings_left() -> list[Path]:
    """Rings that no process but this one has mapped: what others on this machine use is theirs."""
    return [path for path in Path("/dev/shm").glob("twostep-*.ring") if not _mapped_by_others(path)]


def _mapped_by_others(path: Path) -> bool:
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            try:
                if str(path) in (process / "maps").read_text():
                    return True
            except OSError:  # it has ended, or is somebody else's
                continue
    return False


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose name leaves room for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as path:
        yield Path(path)
