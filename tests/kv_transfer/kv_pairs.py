"""Pairs of transports, the prefill's and the decode's side, of every kind; and a Ray for the session."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from agent_without_ray import RayOfOneProcess
from fake_nixl import fake_nixl
from local_ray import LocalRay
from one_sided import ArrayStore

from kv_transfer.cuda_ipc.transport import CudaIpcTransport, IpcProbeSize
from kv_transfer.local.transport import LocalHub, LocalTransport
from kv_transfer.nixl.memory import NixlMemory
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.ray.transport import RayTransport
from kv_transfer.transport import ChunkInfo, KvTransport
from twostep.engine.batch import KvShape, LayerRange
from twostep.model.kernels.triton_pull import PullShape
from twostep.model.step.kv_cache import KvCache

NUM_BLOCKS = 64
# Triton's interpreter takes its time for each program.
SMALL_PULLS = PullShape(num_programs=3, tile_words=1024, num_warps=1)
# For what comes at once, were it not for a busy machine.
SOON_S = 60.0
# Leases that a test does not let expire: they outlive every wait.
TTL_S = 600.0
# Ray takes about one second.
STORE_EMPTY_S = 60.0
_numbers = itertools.count(1)

Blocks = np.ndarray[Any, np.dtype[np.uint8]]


class GatedStore(ArrayStore):
    """Waits inside, while its gate is closed, as copies to and from a slow device would."""

    def __init__(self, block_bytes: int, num_layers: int = 1) -> None:
        super().__init__(np.zeros((NUM_BLOCKS, block_bytes), np.uint8), num_layers)
        self.inside, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def read_blocks(self, block_ids: Sequence[int], out: Blocks, layers: LayerRange | None = None) -> None:
        self._wait()
        super().read_blocks(block_ids, out, layers)

    def write_blocks(self, block_ids: Sequence[int], data: Blocks, layers: LayerRange | None = None) -> None:
        self._wait()
        super().write_blocks(block_ids, data, layers)

    def _wait(self) -> None:
        self.inside.set()
        assert self.gate.wait(300)


@dataclass(frozen=True, slots=True)
class Side:
    """A transport and the memory it serves, which may be on a GPU: uint8 [NUM_BLOCKS, block_bytes]."""

    transport: Any
    memory: torch.Tensor
    gated: Any = None

    @classmethod
    def of_store(cls, transport: KvTransport, store: ArrayStore) -> Side:
        return cls(transport, torch.from_numpy(store.blocks), store)

    def read(self, block_ids: Sequence[int] = range(NUM_BLOCKS)) -> Blocks:
        """A copy of blocks, uint8 [n, block_bytes]."""
        return self.memory[list(block_ids)].cpu().numpy()

    def write(self, block_ids: Sequence[int], data: Blocks) -> None:
        self.memory[list(block_ids)] = torch.from_numpy(np.ascontiguousarray(data)).to(self.memory.device)

    def fill(self, seed: int) -> None:
        self.write(range(NUM_BLOCKS), np.random.default_rng(seed).integers(0, 256, tuple(self.memory.shape), np.uint8))


class Clock:
    """The clock by which leases end. It stands still, but for what a test adds."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Side
    decode: Side
    # None: leases end by real time.
    clock: Clock | None = None
    # Lease ids are never used twice: a test puts this in front of its own.
    salt: str = ""

    async def publish(self, lease: str, index: int, blocks: Sequence[int], *, within_s: float = SOON_S, **options: Any) -> ChunkInfo:
        options = {"ttl_s": TTL_S, "deadline": in_s(within_s)} | options
        return await self.prefill.transport.publish(self.salt + lease, index, 0, blocks, **options)

    async def fetch(
        self, lease: str, chunk: ChunkInfo, blocks: Sequence[int], *, within_s: float = SOON_S, endpoint: str | None = None
    ) -> float:
        source = self.prefill.transport.endpoint if endpoint is None else endpoint
        return await self.decode.transport.fetch(source, self.salt + lease, chunk, blocks, deadline=in_s(within_s))

    async def probe(self, endpoint: str | None = None) -> Any:
        source = self.prefill.transport.endpoint if endpoint is None else endpoint
        return await self.decode.transport.probe(source, deadline=in_s(SOON_S))

    async def drop(self, lease: str) -> None:
        await self.prefill.transport.drop(self.salt + lease)

    async def pass_time(self, seconds: float) -> None:
        if self.clock is None:
            await asyncio.sleep(seconds)
        else:
            self.clock.now += seconds


MakePair = Callable[..., Awaitable[Pair]]


@pytest.fixture(scope="session")
def local_ray() -> Iterator[LocalRay]:
    with LocalRay() as ray, pytest.MonkeyPatch.context() as patch:
        for name, value in ray.environment.items():
            patch.setenv(name, value)
        yield ray


@asynccontextmanager
async def running(*sides: Side) -> AsyncIterator[None]:
    """Starts them, waits until they are ready, and closes them whatever happens."""
    try:
        for side in sides:
            await side.transport.start()
        for side in sides:
            await wait_until(lambda side=side: side.transport.ready)
        yield
    finally:
        await asyncio.gather(*(side.transport.close() for side in sides))


async def wait_until(condition: Callable[[], bool], *, every_s: float = 0.02) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(every_s)


async def wait_for_objects(transport: KvTransport, num_objects: int) -> None:
    end = time.monotonic() + SOON_S
    while (stats := await transport.stats()).num_objects != num_objects:
        assert time.monotonic() < end, f"still {stats}"
        await asyncio.sleep(0.02)


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes that a test asks of a pair."""

    layer_bytes: int = 4096
    num_layers: int = 1
    budget_bytes: int = 64 << 20

    @property
    def block_bytes(self) -> int:
        return self.layer_bytes * self.num_layers


def local_pair(shape: Shape, clock: Clock) -> Pair:
    hub = LocalHub()

    def side(name: str) -> Side:
        store, size = GatedStore(shape.block_bytes, shape.num_layers), shape.block_bytes
        options: dict[str, Any] = {"num_layers": shape.num_layers, "budget_bytes": shape.budget_bytes, "clock": clock}
        return Side.of_store(LocalTransport(store, size, hub, worker_id=name, **options), store)

    return Pair(side("p"), side("d"), clock)


def nixl_side(shape: Shape, clock: Clock, *, arena_bytes: int = 0) -> Side:
    """Over the library, or one within this process (fake_nixl.py). Chunks of more than four blocks are read in pieces."""
    pool, size = torch.zeros(NUM_BLOCKS, shape.block_bytes, dtype=torch.uint8), shape.block_bytes
    memory = NixlMemory(pool, arena_bytes=arena_bytes or max(20 * size, 1 << 16), probe_bytes=4096, shape=SMALL_PULLS)
    return Side(NixlTransport(memory, num_layers=shape.num_layers, piece_bytes=4 * size, grace_s=0.05, clock=clock), pool)


def cuda_ipc_side(shape: Shape, clock: Clock, **options: Any) -> Side:
    """Over the real kernels, on a GPU or in Triton's interpreter. K and V, one head, bfloat16."""
    sizes: dict[str, int] = {"num_layers": shape.num_layers, "num_kv_heads": 1, "head_dim": shape.layer_bytes // 4}
    cache = KvCache(KvShape(num_blocks=NUM_BLOCKS, block_size=1, dtype="bfloat16", **sizes), "cuda" if torch.cuda.is_available() else "cpu")
    probe_size = IpcProbeSize(num_bytes=1 << 14, piece_bytes=1 << 12, rounds=2)
    transport = CudaIpcTransport(cache, shape=SMALL_PULLS, probe_size=probe_size, clock=clock, **options)
    return Side(transport, cache.tensor.view(NUM_BLOCKS, -1).view(torch.uint8))


def one_sided_pair(side: Callable[[Shape, Clock], Side], shape: Shape, clock: Clock) -> Pair:
    return Pair(side(shape, clock), side(shape, clock), clock)


def ray_side(directory: Path, worker_id: str, shape: Shape, *, ray_address: str = "", **options: Any) -> Side:
    store = GatedStore(shape.block_bytes, shape.num_layers)
    number = next(_numbers)
    options = {"ring_bytes": 8 << 20, "budget_bytes": shape.budget_bytes, "num_layers": shape.num_layers, "epoch": number} | options
    run_dir = directory / f"{worker_id}{number}"
    return Side.of_store(
        RayTransport(store, shape.block_bytes, worker_id=worker_id, ray_address=ray_address, run_dir=run_dir, **options), store
    )


async def ray_is_there(address: str, within_s: float) -> None:
    """A RayTransport's `connect`."""


def ray_actor_pair(shape: Shape, clock: Clock, ray: RayOfOneProcess, directory: Path) -> Pair:
    """The ray transport over agents of this process (agent_without_ray.py)."""
    sides = (ray_side(directory, name, shape, launch=ray.launcher(clock), connect=ray_is_there) for name in "pd")
    return Pair(*sides, clock)


def ray_pair(shape: Shape, clock: Clock, ray: LocalRay) -> Pair:
    return Pair(*(ray_side(ray.directory, name, shape, ray_address=ray.address) for name in "pd"))


# How pairs of a kind are made, and what the bytes of a layer of a block are a multiple of.
PAIRS: dict[str, tuple[Callable[..., Pair], int]] = {
    "local": (local_pair, 1),
    "nixl": (partial(one_sided_pair, nixl_side), 8),
    "nixl_library": (partial(one_sided_pair, nixl_side), 8),
    "cuda_ipc": (partial(one_sided_pair, cuda_ipc_side), 8),
    "ray_actor": (ray_actor_pair, 1),
    "ray_unseen": (ray_actor_pair, 1),
    "ray": (ray_pair, 1),
}
_NO_NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the nixl package is not installed")
_PARAMS: dict[str, Any] = {name: name for name in PAIRS} | {
    "nixl_library": pytest.param("nixl_library", marks=_NO_NIXL),
    "ray": pytest.param("ray", marks=pytest.mark.ray),
}


def _only(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", [_PARAMS[name] for name in names], indirect=True, scope="module")


# Those whose source's blocks are free once they are published, and those whose readers take them from the pool itself.
copying = _only("local", "ray_actor", "ray_unseen", "ray")
one_sided = _only("nixl", "nixl_library", "cuda_ipc")


@dataclass(frozen=True, slots=True)
class TransportCase:
    """One kind of transport; keeps its pairs for the next test that asks for the same."""

    make: Callable[..., Pair]
    word: int
    pairs: dict[Shape, Pair]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(_PARAMS.values()))
async def kind(request: pytest.FixtureRequest) -> AsyncIterator[TransportCase]:
    make, word = PAIRS[request.param]
    if request.param == "ray":
        ray: LocalRay = request.getfixturevalue("local_ray")
        make = partial(make, ray=ray)
    with (
        pytest.MonkeyPatch.context() as patch,
        fake_nixl(patch) if request.param == "nixl" else nullcontext(),
        tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as directory,
    ):
        actors = RayOfOneProcess(patch, shown=request.param != "ray_unseen")
        if request.param in ("ray_actor", "ray_unseen"):
            make = partial(make, ray=actors, directory=Path(directory))
        case = TransportCase(make, word, {})
        yield case
        await asyncio.gather(*(side.transport.close() for pair in case.pairs.values() for side in (pair.prefill, pair.decode)))
        await actors.ended()
    if request.param == "ray":
        await check_store_empty(ray)


@pytest_asyncio.fixture(loop_scope="module")
async def make_pair(kind: TransportCase) -> AsyncIterator[MakePair]:
    """Ready pairs, the source's blocks random and the reader's zeros; when the test is over, neither side may hold anything."""
    used: list[Pair] = []

    async def make(*, layer_bytes: int = 4096, **sizes: int) -> Pair:
        shape = Shape(layer_bytes=-(-layer_bytes // kind.word) * kind.word, **sizes)
        pair = kind.pairs.get(shape)
        if pair is None or not (pair.prefill.transport.ready and pair.decode.transport.ready):
            if pair is not None:
                await asyncio.gather(pair.prefill.transport.close(), pair.decode.transport.close())
            pair = kind.pairs[shape] = kind.make(shape, Clock())
            for side in (pair.prefill, pair.decode):
                await side.transport.start()
            for side in (pair.prefill, pair.decode):
                await wait_until(lambda side=side: side.transport.ready)
        pair.prefill.fill(7)
        pair.decode.memory.zero_()
        used.append(pair)
        return replace(pair, salt=f"{next(_numbers)}/")

    yield make
    for pair in used:
        for side in (pair.prefill, pair.decode):
            stats = await side.transport.stats()
            assert (stats.num_leases, stats.num_objects, stats.stored_bytes) == (0, 0, 0)
            # A pull whose fetch was cancelled has its memory until it has ended.
            if isinstance(side.transport, RayTransport) and (session := side.transport.session) is not None:
                await wait_until(lambda session=session: session.ring_used_bytes == 0)
            if isinstance(side.transport, NixlTransport):
                await wait_until(lambda transport=side.transport: transport.arena.used_bytes == 0)


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
