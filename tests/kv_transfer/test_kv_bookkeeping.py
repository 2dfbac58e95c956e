"""Chunk plans, the ring, the book of objects, the fair gate."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_pairs import Clock, in_s

from kv_transfer.checksums import checksum
from kv_transfer.chunking import IN_PLACE, ChunkPlan, ChunkRange, ChunkSizes
from kv_transfer.object_book import ObjectBook
from kv_transfer.ray.ring import SharedMemory, default_ring_bytes, default_ring_dir
from kv_transfer.waiting import FifoGate, finish
from twostep.engine.batch import LayerRange
from twostep.errors import InvalidRequest, NotFound, ResourceExhausted, SetupError, Unavailable


@given(st.integers(0, 50), st.integers(0, 300), st.integers(1, 10_000), st.integers(1, 100_000), st.lists(st.integers(0, 400)))
def test_chunks_cover_the_blocks_once_in_order_whenever_they_become_final(
    first: int, count: int, block_bytes: int, target: int, finals: list[int]
) -> None:
    plan = ChunkPlan(first_block=first, num_blocks=count, block_bytes=block_bytes, sizes=ChunkSizes.of(target))
    taken: list[ChunkRange] = []
    for final in [*sorted(finals), first + count]:
        new = plan.take(final)
        assert all(c.first_block + c.num_blocks <= final for c in new)
        taken += new
    assert plan.done
    assert [c.index for c in taken] == list(range(plan.num_chunks))
    assert [b for c in taken for b in range(c.first_block, c.first_block + c.num_blocks)] == list(range(first, first + count))
    sizes = [c.num_blocks for c in taken]
    assert all(size == 1 or size * block_bytes <= target for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert plan.take(10**9) == []


@st.composite
def progress(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(final blocks, blocks and layers of the step under way), as steps of a prompt of 12 layers go on."""
    told, done = [], 0
    for step in draw(st.lists(st.integers(0, 120), max_size=5)):
        marks = sorted(draw(st.sets(st.integers(1, 12), max_size=4)))
        told += [(done, done + step, layers) for layers in marks]
        done += step
        told.append((done, done, 12))
    return told


@given(st.integers(0, 50), st.integers(0, 80), st.integers(1, 90), st.integers(1, 1000), st.integers(1, 100_000), progress())
def test_rectangles_tile_blocks_and_layers_and_are_handed_out_once_all_of_them_is_final(
    first: int, count: int, step: int, layer_bytes: int, target: int, told: list[tuple[int, int, int]]
) -> None:
    def plan() -> ChunkPlan:
        return ChunkPlan(
            first_block=first,
            num_blocks=count,
            block_bytes=12 * layer_bytes,
            num_layers=12,
            step_blocks=step,
            sizes=ChunkSizes.of(target),
        )

    cells = np.zeros((first + count, 12), np.int64)
    taking, taken = plan(), []
    assert taking.ranges == plan().ranges
    for final, step_blocks, step_layers in [*told, (first + count, 0, 0)]:
        for chunk in taking.take(final, step_blocks=step_blocks, step_layers=step_layers):
            layers = chunk.layers or LayerRange(0, 12)
            assert chunk.stop_block <= final or (chunk.stop_block <= step_blocks and layers.stop <= step_layers)
            cells[chunk.first_block : chunk.stop_block, layers.first : layers.stop] += 1
            taken.append(chunk)
        # Nothing that is final is kept back.
        known = {chunk.index for chunk in taken}
        for chunk in (chunk for chunk in taking.ranges if chunk.index not in known):
            layers = chunk.layers or LayerRange(0, 12)
            assert chunk.stop_block > final
            assert chunk.stop_block > step_blocks or layers.stop > step_layers or chunk.layers is None
    assert taking.done
    assert not cells[:first].any()
    assert (cells[first:] == 1).all()
    assert sorted(chunk.index for chunk in taken) == list(range(taking.num_chunks))
    groups = {chunk.layers for chunk in taken}
    sizes = [chunk.num_blocks * (chunk.layers.num_layers if chunk.layers else 12) * layer_bytes for chunk in taken]
    last = [
        size for chunk, size in zip(taken, sizes, strict=True) if chunk.num_blocks > 1 and (not chunk.layers or chunk.layers.stop == 12)
    ]
    assert all(size <= target for size in last)
    assert all(size <= 3 * target for chunk, size in zip(taken, sizes, strict=True) if chunk.num_blocks > 1)
    assert all(chunk.num_blocks <= step for chunk in taken if chunk.layers)
    # By layers only where that makes at least two groups that fill the target.
    assert groups == (set() if not count else {None}) or 2 * -(-target // (layer_bytes * min(step, count))) <= 12


def test_a_long_prompt_leaves_one_layer_to_the_end() -> None:
    """Llama-3.1-8B's shape, 2600 tokens: 163 blocks of 32 layers of 64 KiB."""
    plan = ChunkPlan(first_block=0, num_blocks=163, block_bytes=2 << 20, num_layers=32)
    assert plan.num_chunks == 18
    assert len(plan.take(0, step_blocks=163, step_layers=30)) == 15
    assert [chunk.num_blocks for chunk in plan.take(0, step_blocks=163, step_layers=31)] == [163]
    assert [chunk.num_blocks for chunk in plan.take(163)] == [82, 81]


def test_a_prompt_of_several_steps_leaves_step_by_step() -> None:
    plan = ChunkPlan(first_block=3, num_blocks=160, block_bytes=2 << 20, num_layers=32, step_blocks=32)
    sizes = []
    for step in range(6):
        early = plan.take(32 * step, step_blocks=32 * (step + 1), step_layers=26)
        sizes.append((len(early), len(plan.take(32 * (step + 1)))))
    assert plan.done
    assert all(early >= 3 and late >= 1 for early, late in sizes[1:5])


def test_checksum_is_xxh3_64() -> None:
    assert checksum(np.zeros(0, np.uint8)) == 0x2D06800538D394C2  # the algorithm's own value of nothing
    data = np.arange(100, dtype=np.uint8)
    assert checksum(data) == checksum(data.reshape(4, 25)) != checksum(data[::-1].copy())


def test_shared_memory_is_one_memory_without_a_name(tmp_path: Path) -> None:
    one = SharedMemory.create(tmp_path, 5000)
    assert one.path.stat().st_mode & 0o777 == 0o600
    other = SharedMemory.open(one.path)
    one.unlink()
    one.unlink()
    assert list(tmp_path.iterdir()) == []
    one.bytes[4999] = 7
    assert other.bytes.size == 5000
    assert other.bytes[4999] == 7


def test_no_room_for_the_ring_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Others on this machine have theirs in the same directory.
    ours = secrets.token_hex(8)
    monkeypatch.setattr("kv_transfer.ray.ring.secrets", SimpleNamespace(token_hex=lambda _: ours))
    with pytest.raises(SetupError):
        SharedMemory.create(tmp_path / "missing", 4096)
    with pytest.raises(SetupError):
        SharedMemory.create(default_ring_dir(tmp_path), 1 << 55)
    assert not list(default_ring_dir(tmp_path).glob(f"*{ours}*"))


def test_book_counts_bytes_over_any_way_out() -> None:
    clock = Clock()
    book: ObjectBook[str] = ObjectBook(100, clock=clock)
    one = book.reserve("a", 0, 60, ttl_s=10)
    assert one is not None
    assert book.get("a", 0) is None  # reserved is not there yet
    assert book.reserve("b", 0, 50, ttl_s=10) is None
    clock.now += 5
    book.fill(one, "x")
    clock.now += 1
    assert book.get("a", 0) == "x"
    clock.now += 9.9
    assert book.expire() == []
    clock.now += 0.1
    assert book.expire() == ["a"]
    assert book.stats.stored_bytes == 0
    two = book.reserve("b", 0, 50, ttl_s=10)
    assert two is not None
    book.cancel(two)
    book.cancel(two)
    assert (book.stats.num_leases, book.stats.stored_bytes) == (0, 0)
    three = book.reserve("c", 0, 50, ttl_s=10)
    assert three is not None
    assert book.drop("c") == 1
    assert book.drop("c") == 0
    with pytest.raises(NotFound):
        book.fill(three, "late")
    book.cancel(three)
    assert book.stats.stored_bytes == 0
    with pytest.raises(NotFound):
        book.reserve("c", 1, 1, ttl_s=10)
    with pytest.raises(InvalidRequest):
        book.reserve("d", 0, 101, ttl_s=10)


def test_a_mirror_forgets_without_refusing_later() -> None:
    clock = Clock()
    book: ObjectBook[str] = ObjectBook(100, clock=clock)
    assert book.reserve("a", 0, 60, ttl_s=1) is not None
    clock.now += 2
    assert book.expire(for_good=False) == ["a"]
    assert book.reserve("a", 1, 60, ttl_s=1) is not None


async def test_a_publisher_that_waits_for_room_gets_it_or_learns_that_the_transport_has_closed() -> None:
    closed: list[Exception] = []

    def check() -> None:
        if closed:
            raise closed[0]

    async def made() -> tuple[str, int]:
        return "x", 7

    async def failed() -> tuple[str, int]:
        raise ValueError("no")

    book: ObjectBook[str] = ObjectBook(100, check=check)
    with pytest.raises(ValueError, match="no"):
        await book.publish("a", 0, 100, failed, ttl_s=10, deadline=in_s(60))
    assert await book.publish("a", 0, 100, made, ttl_s=10, deadline=in_s(60)) == 7
    waiting = [asyncio.create_task(book.publish(lease, 0, 100, made, ttl_s=10, deadline=in_s(60))) for lease in "bc"]
    await asyncio.sleep(0)
    book.drop("a")
    assert await waiting[0] == 7
    assert book.get("b", 0) == "x"
    closed.append(Unavailable("closed"))
    book.drop_all()
    with pytest.raises(Unavailable):
        await waiting[1]
    assert book.stats.num_leases == 0


async def test_gate_is_fair_and_bounded() -> None:
    gate, room, order = FifoGate("room", max_waiting=2), [0], []

    async def take(name: str, size: int, seconds: float = 60.0) -> None:
        def attempt() -> int | None:
            if room[0] < size:
                return None
            room[0] -= size
            return size

        await gate.take(attempt, deadline=in_s(seconds))
        order.append(name)

    large = asyncio.create_task(take("large", 3))
    await asyncio.sleep(0)
    small = asyncio.create_task(take("small", 1))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted):
        await take("too many", 1)
    room[0] = 2
    gate.pump()
    await asyncio.sleep(0.01)
    assert order == []  # small would fit, but large came first
    room[0] = 4
    gate.pump()
    await asyncio.gather(large, small)
    assert order == ["large", "small"]
    with pytest.raises(ResourceExhausted):
        await take("late", 1, 0.05)
    waiting = asyncio.create_task(take("cancelled", 1))
    behind = asyncio.create_task(take("behind", 1))
    await asyncio.sleep(0.01)
    room[0] = 1
    waiting.cancel()
    await behind
    assert room[0] == 0


async def test_finish_outlives_cancels() -> None:
    go_on, done = asyncio.Event(), []

    async def work() -> None:
        await go_on.wait()
        done.append(1)
        raise ValueError("nobody asks any more")

    task = asyncio.create_task(finish(work()))
    for _ in range(3):
        await asyncio.sleep(0.01)
        task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [1]


def test_a_ring_on_a_gpu_machine_leaves_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    for free, want in ((100 << 30, 256), (1 << 30, 128), (64 * mib, 64)):
        monkeypatch.setattr("kv_transfer.ray.ring.shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert default_ring_bytes(tmp_path, on_gpu=True) == want * mib
        assert default_ring_bytes(tmp_path, on_gpu=False) == 64 * mib


def test_a_long_prompt_that_is_read_in_place_comes_in_three_pieces() -> None:
    """Each costs its reader a launch and some messages, and only the last one anybody's time."""
    plan = ChunkPlan(first_block=0, num_blocks=163, block_bytes=2 << 20, num_layers=32, sizes=IN_PLACE)
    assert [(chunk.num_blocks, chunk.layers) for chunk in plan.ranges] == [
        (163, LayerRange(0, 14)),
        (163, LayerRange(14, 14)),
        (163, LayerRange(28, 4)),
    ]
    short = ChunkPlan(first_block=0, num_blocks=20, block_bytes=2 << 20, num_layers=32, sizes=IN_PLACE)
    assert [(chunk.num_blocks, chunk.layers) for chunk in short.ranges] == [(20, None)]
