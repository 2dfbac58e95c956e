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
from dataclasses import dataclass, field, replace
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
from kv_transfer.ray.agent_session import reach
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

    def __init__(self, blocks: Blocks, num_layers: int = 1) -> None:
        super().__init__(blocks, num_layers)
        self.inside = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def close_gate(self) -> None:
        self.inside.clear()
        self.gate.clear()

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
    """A transport and the memory it serves: an array, or a tensor that may be on a GPU."""

    transport: KvTransport
    memory: ArrayStore | torch.Tensor

    @property
    def store(self) -> ArrayStore:
        assert isinstance(self.memory, ArrayStore)
        return self.memory

    @property
    def gated(self) -> GatedStore:
        assert isinstance(self.memory, GatedStore)
        return self.memory

    def read(self, block_ids: Sequence[int] = range(NUM_BLOCKS)) -> Blocks:
        """A copy of blocks, uint8 [n, block_bytes]."""
        if isinstance(self.memory, ArrayStore):
            return self.memory.blocks[list(block_ids)]
        return self.memory.cpu().numpy()[list(block_ids)]

    def write(self, block_ids: Sequence[int], data: Blocks) -> None:
        if isinstance(self.memory, ArrayStore):
            self.memory.blocks[list(block_ids)] = data
        else:
            self.memory[list(block_ids)] = torch.from_numpy(np.ascontiguousarray(data)).to(self.memory.device)


class Clock:
    """By which leases end. It stands still, but for what a test adds."""

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

    async def publish(
        self,
        lease: str,
        index: int,
        blocks: Sequence[int],
        *,
        layers: LayerRange | None = None,
        ttl_s: float = TTL_S,
        within_s: float = SOON_S,
    ) -> ChunkInfo:
        return await self.prefill.transport.publish(
            self.salt + lease, index, 0, blocks, layers=layers, ttl_s=ttl_s, deadline=in_s(within_s)
        )

    async def fetch(self, lease: str, chunk: ChunkInfo, blocks: Sequence[int], *, within_s: float = SOON_S) -> float:
        return await self.decode.transport.fetch(self.prefill.transport.endpoint, self.salt + lease, chunk, blocks, deadline=in_s(within_s))

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


def make_store(block_bytes: int, *, fill: bool, num_layers: int = 1) -> GatedStore:
    shape = (NUM_BLOCKS, block_bytes)
    return GatedStore(np.random.default_rng(7).integers(0, 256, shape, np.uint8) if fill else np.zeros(shape, np.uint8), num_layers)


def ray_side(
    ray: LocalRay,
    store: ArrayStore,
    *,
    worker_id: str,
    budget_bytes: int = 64 << 20,
    ring_bytes: int = 8 << 20,
    connect: Callable[[str, float], Awaitable[None]] = reach,
) -> Side:
    run_dir = ray.directory / f"{worker_id}{next(_numbers)}"
    transport = RayTransport(
        store,
        store.blocks.shape[1],
        worker_id=worker_id,
        epoch=next(_numbers),
        ray_address=ray.address,
        run_dir=run_dir,
        num_layers=store.num_layers,
        ring_bytes=ring_bytes,
        budget_bytes=budget_bytes,
        connect=connect,
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


async def wait_until(condition: Callable[[], bool], timeout_s: float = SOON_S, *, every_s: float = 0.02) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(every_s)


async def wait_for_stats(transport: KvTransport, *, num_objects: int, timeout_s: float = SOON_S) -> None:
    end = time.monotonic() + timeout_s
    while (stats := await transport.stats()).num_objects != num_objects:
        assert time.monotonic() < end, f"still {stats}"
        await asyncio.sleep(0.02)


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a test asks of a pair."""

    layer_bytes: int
    num_layers: int
    budget_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.layer_bytes * self.num_layers


def local_pair(shape: Shape, clock: Clock) -> Pair:
    hub = LocalHub()

    def side(name: str) -> Side:
        store = make_store(shape.block_bytes, fill=False, num_layers=shape.num_layers)
        return Side(
            LocalTransport(
                store,
                shape.block_bytes,
                hub,
                worker_id=name,
                num_layers=shape.num_layers,
                budget_bytes=shape.budget_bytes,
                clock=clock,
            ),
            store,
        )

    return Pair(side("p"), side("d"), clock)


def nixl_pair(shape: Shape, clock: Clock) -> Pair:
    """Over the library, or one within this process (fake_nixl.py). Chunks of more than four blocks are read in pieces."""

    def side() -> Side:
        store = make_store(shape.block_bytes, fill=False, num_layers=shape.num_layers)
        pool = torch.from_numpy(store.blocks)
        memory = NixlMemory(pool, arena_bytes=max(20 * shape.block_bytes, 1 << 16), probe_bytes=4096, shape=SMALL_PULLS)
        transport = NixlTransport(memory, num_layers=shape.num_layers, piece_bytes=4 * shape.block_bytes, grace_s=0.05, clock=clock)
        return Side(transport, store)

    return Pair(side(), side(), clock)


def cuda_ipc_pair(shape: Shape, clock: Clock) -> Pair:
    """Over the real kernels, on a GPU or in Triton's interpreter."""
    # K and V, one head, bfloat16
    kv_shape = KvShape(
        num_blocks=NUM_BLOCKS,
        block_size=1,
        num_layers=shape.num_layers,
        num_kv_heads=1,
        head_dim=shape.layer_bytes // 4,
        dtype="bfloat16",
    )
    probe_size = IpcProbeSize(num_bytes=1 << 14, piece_bytes=1 << 12, rounds=2)

    def side() -> Side:
        cache = KvCache(kv_shape, "cuda" if torch.cuda.is_available() else "cpu")
        transport = CudaIpcTransport(cache, shape=SMALL_PULLS, probe_size=probe_size, clock=clock)
        return Side(transport, cache.tensor.view(NUM_BLOCKS, -1).view(torch.uint8))

    return Pair(side(), side(), clock)


def ray_actor_pair(shape: Shape, clock: Clock, ray: RayOfOneProcess, directory: Path) -> Pair:
    """The ray transport over agents of this process (agent_without_ray.py)."""

    async def connect(address: str, within_s: float) -> None:
        """Ray is there."""

    def side(name: str) -> Side:
        store = make_store(shape.block_bytes, fill=False, num_layers=shape.num_layers)
        transport = RayTransport(
            store,
            shape.block_bytes,
            worker_id=name,
            epoch=next(_numbers),
            ray_address="",
            run_dir=directory / f"{name}{next(_numbers)}",
            num_layers=shape.num_layers,
            ring_bytes=8 << 20,
            budget_bytes=shape.budget_bytes,
            launch=ray.launcher(clock),
            connect=connect,
        )
        return Side(transport, store)

    return Pair(side("p"), side("d"), clock)


def ray_pair(shape: Shape, ray: LocalRay) -> Pair:
    def side(name: str) -> Side:
        store = make_store(shape.block_bytes, fill=False, num_layers=shape.num_layers)
        return ray_side(ray, store, worker_id=name, budget_bytes=shape.budget_bytes)

    return Pair(side("p"), side("d"))


@dataclass(frozen=True, slots=True)
class TransportCase:
    """One kind of transport: how its pairs are made. `word`: what the bytes of a layer of a block are a multiple of."""

    make: Callable[..., Pair]
    word: int = 1
    pairs: dict[Shape, Pair] = field(default_factory=dict)


PAIRS: dict[str, Callable[[], TransportCase]] = {
    "local": lambda: TransportCase(local_pair),
    "nixl": lambda: TransportCase(nixl_pair, word=8),
    "nixl_library": lambda: TransportCase(nixl_pair, word=8),
    "cuda_ipc": lambda: TransportCase(cuda_ipc_pair, word=8),
    "ray_actor": lambda: TransportCase(ray_actor_pair),
    "ray": lambda: TransportCase(ray_pair),
}
_NO_NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the nixl package is not installed")
_PARAMS: dict[str, Any] = {name: name for name in PAIRS} | {
    "nixl_library": pytest.param("nixl_library", marks=_NO_NIXL),
    "ray": pytest.param("ray", marks=pytest.mark.ray),
}
# Those whose source's blocks are free once they are published, and those whose readers take them from the pool itself.
copying = pytest.mark.parametrize("kind", [_PARAMS["local"], _PARAMS["ray_actor"], _PARAMS["ray"]], indirect=True, scope="module")
one_sided = pytest.mark.parametrize("kind", [_PARAMS["nixl"], _PARAMS["nixl_library"], _PARAMS["cuda_ipc"]], indirect=True, scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(_PARAMS.values()))
async def kind(request: pytest.FixtureRequest) -> AsyncIterator[TransportCase]:
    """Keeps its pairs for the next test that asks for the same."""
    case = PAIRS[request.param]()
    if request.param == "ray":
        ray: LocalRay = request.getfixturevalue("local_ray")
        case = replace(case, make=lambda shape, clock: ray_pair(shape, ray))
    with (
        pytest.MonkeyPatch.context() as patch,
        fake_nixl(patch) if request.param == "nixl" else nullcontext(),
        tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as directory,
    ):
        actors = RayOfOneProcess(patch)
        if request.param == "ray_actor":
            case = replace(case, make=partial(ray_actor_pair, ray=actors, directory=Path(directory)))
        yield case
        await asyncio.gather(*(side.transport.close() for pair in case.pairs.values() for side in (pair.prefill, pair.decode)))
        await actors.ended()
    if request.param == "ray":
        await check_store_empty(ray)


@pytest_asyncio.fixture(loop_scope="module")
async def make_pair(kind: TransportCase) -> AsyncIterator[MakePair]:
    """Ready pairs, the source's blocks random and the reader's zeros; when the test is over, neither side may hold anything."""
    used: list[Pair] = []

    async def make(*, layer_bytes: int = 4096, num_layers: int = 1, budget_bytes: int = 64 << 20) -> Pair:
        layer_bytes = -(-layer_bytes // kind.word) * kind.word
        shape = Shape(layer_bytes=layer_bytes, num_layers=num_layers, budget_bytes=budget_bytes)
        pair = kind.pairs.get(shape)
        if pair is None or not (pair.prefill.transport.ready and pair.decode.transport.ready):
            if pair is not None:
                await asyncio.gather(pair.prefill.transport.close(), pair.decode.transport.close())
            pair = kind.pairs[shape] = kind.make(shape, Clock())
            for side in (pair.prefill, pair.decode):
                await side.transport.start()
            for side in (pair.prefill, pair.decode):
                await wait_until(lambda side=side: side.transport.ready)
        contents = np.random.default_rng(7).integers(0, 256, (NUM_BLOCKS, shape.block_bytes), np.uint8)
        pair.prefill.write(range(NUM_BLOCKS), contents)
        pair.decode.write(range(NUM_BLOCKS), np.zeros_like(contents))
        used.append(pair)
        return replace(pair, salt=f"{next(_numbers)}/")

    yield make
    for pair in used:
        for side in (pair.prefill, pair.decode):
            stats = await side.transport.stats()
            assert (stats.num_leases, stats.num_objects, stats.stored_bytes) == (0, 0, 0)
            await nothing_on_its_way(side.transport)


async def nothing_on_its_way(transport: KvTransport) -> None:
    """A pull whose fetch was cancelled has its memory until it has ended."""
    if isinstance(transport, RayTransport) and (session := transport.session) is not None:
        await wait_until(lambda: session.ring_used_bytes == 0)
    if isinstance(transport, NixlTransport):
        await wait_until(lambda: transport.arena.used_bytes == 0)


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
