"""Tests of the transports' books: chunk plans, checksums, slots, the ring, published objects, the fair gate, clocks."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_pairs import Clock, in_s

from kv_transfer import checksums, telemetry
from kv_transfer.checksums import block_sums, checksum, chunk_sum, chunk_sums
from kv_transfer.chunking import IN_PLACE, ChunkPlan, ChunkSizes
from kv_transfer.object_book import ObjectBook
from kv_transfer.ray.ring import SharedMemory, default_ring_bytes, default_ring_dir
from kv_transfer.slots import ArenaSlot, StagingArena
from kv_transfer.waiting import FifoGate, finish
from twostep.engine.batch import LayerRange
from twostep.errors import InvalidRequest, NotFound, ResourceExhausted, SetupError, Unavailable

# ---- chunk plans ------------------------------------------------------------------------------------------------------------


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


@given(
    st.integers(0, 50), st.integers(0, 300), st.integers(1, 90), st.integers(1, 1000), st.integers(1, 100_000), progress(), st.booleans()
)  # fmt: skip
def test_rectangles_tile_blocks_and_layers_and_are_handed_out_once_all_of_them_is_final(
    first: int, count: int, step: int, layer_bytes: int, target: int, told: list[tuple[int, int, int]], in_groups: bool
) -> None:
    """Also where a source says only which blocks are final: then chunks are of all layers."""
    options = {"first_block": first, "num_blocks": count, "block_bytes": 12 * layer_bytes, "num_layers": 12 if in_groups else 1}
    taking, again = (ChunkPlan(**options, step_blocks=step, sizes=ChunkSizes.of(target)) for _ in range(2))
    assert taking.ranges == again.ranges
    cells, taken = np.zeros((first + count, 12), np.int64), []
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
    assert taking.take(10**9) == []
    assert not cells[:first].any()
    assert (cells[first:] == 1).all()
    assert [chunk.index for chunk in sorted(taken, key=lambda chunk: chunk.index)] == list(range(taking.num_chunks))
    for chunk in taken:
        size = chunk.num_blocks * (chunk.layers.num_layers if chunk.layers else 12) * layer_bytes
        is_last = not chunk.layers or chunk.layers.stop == 12
        assert chunk.num_blocks == 1 or size <= (target if is_last else 3 * target)
        assert chunk.num_blocks <= step or not chunk.layers
    # By layers only where that makes at least two groups that fill the target; equal in size to within one block.
    groups = {chunk.layers for chunk in taken}
    if groups <= {None}:
        sizes = [chunk.num_blocks for chunk in taken]
        assert not sizes or max(sizes) - min(sizes) <= 1
    else:
        assert in_groups
        assert 2 * -(-target // (layer_bytes * min(step, count))) <= 12


def test_a_long_prompt_leaves_one_layer_to_the_end() -> None:
    """Llama-3.1-8B's shape, 2600 tokens: 163 blocks of 32 layers of 64 KiB. What is read in place comes in three pieces: each costs its
    reader a launch and some messages, and only the last one anybody's time."""
    plan = ChunkPlan(first_block=0, num_blocks=163, block_bytes=2 << 20, num_layers=32)
    assert plan.num_chunks == 18
    assert len(plan.take(0, step_blocks=163, step_layers=30)) == 15
    assert [chunk.num_blocks for chunk in plan.take(0, step_blocks=163, step_layers=31)] == [163]
    assert [chunk.num_blocks for chunk in plan.take(163)] == [82, 81]
    plan = ChunkPlan(first_block=0, num_blocks=163, block_bytes=2 << 20, num_layers=32, sizes=IN_PLACE)
    groups = [LayerRange(0, 14), LayerRange(14, 14), LayerRange(28, 4)]
    assert [(chunk.num_blocks, chunk.layers) for chunk in plan.ranges] == [(163, group) for group in groups]
    assert plan.mark_layers == (14, 28, 32)
    short = ChunkPlan(first_block=0, num_blocks=20, block_bytes=2 << 20, num_layers=32, sizes=IN_PLACE)
    assert [(chunk.num_blocks, chunk.layers) for chunk in short.ranges] == [(20, None)]


def test_a_prompt_of_several_steps_leaves_step_by_step() -> None:
    plan = ChunkPlan(first_block=3, num_blocks=160, block_bytes=2 << 20, num_layers=32, step_blocks=32)
    sizes = []
    for step in range(6):
        early = plan.take(32 * step, step_blocks=32 * (step + 1), step_layers=26)
        sizes.append((len(early), len(plan.take(32 * (step + 1)))))
    assert plan.done
    assert all(early >= 3 and late >= 1 for early, late in sizes[1:5])


# ---- checksums --------------------------------------------------------------------------------------------------------------

BLOCKS = st.tuples(st.integers(1, 4), st.integers(1, 24), st.randoms(use_true_random=False)).map(
    lambda drawn: np.frombuffer(drawn[2].randbytes(drawn[0] * drawn[1] * 8), np.uint8).reshape(drawn[0], drawn[1] * 8).copy()
)


def by_definition(blocks: np.ndarray) -> int:
    """sum64, in Python's own integers."""
    mask = (1 << 64) - 1

    def mixed(word: int, place: int) -> int:
        x = (word + (place + 1) * 0x9E3779B97F4A7C15) & mask
        x ^= x >> 32
        x = x * 0xBF58476D1CE4E5B9 & mask
        x ^= x >> 29
        x = x * 0x94D049BB133111EB & mask
        return x ^ (x >> 32)

    sums = [sum(mixed(int.from_bytes(b[i : i + 8], "little"), i // 8) for i in range(0, len(b), 8)) & mask for b in map(bytes, blocks)]
    return sum(mixed(s, i) for i, s in enumerate(sums)) & mask


@given(BLOCKS, st.integers(1, 23))
def test_sum64_is_what_it_says_also_of_layers_that_travel_by_themselves(blocks: np.ndarray, cut: int) -> None:
    assert chunk_sum(block_sums(blocks)) == by_definition(blocks)
    cut = min(cut * 8, blocks.shape[1])
    parts = block_sums(blocks[:, :cut]) + block_sums(blocks[:, cut:], cut)
    np.testing.assert_array_equal(parts, block_sums(blocks))


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=5), max_size=6))
def test_several_chunks_at_once(chunks: list[list[int]]) -> None:
    flat = np.array([x for chunk in chunks for x in chunk], np.uint64)
    assert chunk_sums(flat, [len(chunk) for chunk in chunks]) == [chunk_sum(chunk) for chunk in chunks]


def test_known_checksums_which_both_sides_agree_on_over_versions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checksum(np.zeros(0, np.uint8)) == 0x2D06800538D394C2
    assert chunk_sum([]) == 0
    assert chunk_sum(block_sums(np.zeros((1, 8), np.uint8))) == 0xEC4EB5788BCAC3C3
    for size, first in ((12, 0), (16, 4)):
        with pytest.raises(ValueError, match="64-bit"):
            block_sums(np.zeros((2, size), np.uint8), first)
    monkeypatch.setattr(checksums, "_AT_ONCE", 7)  # long blocks are taken in parts
    blocks = np.random.default_rng(3).integers(0, 256, (3, 400), np.uint8)
    assert chunk_sum(block_sums(blocks)) == by_definition(blocks)


# ---- the arena's slots, and the ring ------------------------------------------------------------------------------------------

PAGE = 4096
SIZE = 16 * PAGE


class Arena(RuleBasedStateMachine):
    """Slots are apart, inside, shared fairly, and each is freed once."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = StagingArena(SIZE)
        self.live: list[ArenaSlot] = []
        self.gone: list[ArenaSlot] = []

    @rule(owner=st.sampled_from("abc"), num_bytes=st.integers(1, SIZE + PAGE))
    def take(self, owner: str, num_bytes: int) -> None:
        held = sum(s.num_bytes for s in self.live if s.owner == owner)
        slot = self.arena.take(owner, num_bytes)
        if slot is None:
            holes = [b[0] - a[1] for a, b in pairwise([(0, 0), *self.places(), (SIZE, SIZE)])]
            assert (held and held + num_bytes > SIZE // 2) or max(holes) < -(-num_bytes // PAGE) * PAGE
            return
        assert (slot.num_bytes, slot.owner) == (num_bytes, owner)
        assert not held or held + num_bytes <= SIZE // 2
        self.live.append(slot)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), quarantine=st.booleans())
    def ends(self, data: st.DataObject, quarantine: bool) -> None:
        slot = data.draw(st.sampled_from(self.live))
        if quarantine and not slot.quarantined:
            self.arena.quarantine(slot)
            return
        self.arena.give_back(slot)
        self.live.remove(slot)
        self.gone.append(slot)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def what_is_gone_cannot_be_freed_again(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.gone))
        for call in (self.arena.give_back, self.arena.quarantine):
            with pytest.raises(KeyError):
                call(slot)

    def places(self) -> list[tuple[int, int]]:
        return sorted((s.offset, s.offset + -(-s.num_bytes // PAGE) * PAGE) for s in self.live)

    @invariant()
    def slots_are_apart_and_counted(self) -> None:
        assert all(0 <= start < end <= SIZE for start, end in self.places())
        assert all(a[1] <= b[0] for a, b in pairwise(self.places()))
        assert self.arena.used_bytes == sum(end - start for start, end in self.places())
        assert self.arena.quarantined_bytes == sum(s.num_bytes for s in self.live if s.quarantined)


TestArena = Arena.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_shared_memory_is_one_memory_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = SharedMemory.create(tmp_path, 5000)
    assert one.path.stat().st_mode & 0o777 == 0o600
    other = SharedMemory.open(one.path)
    for _ in range(2):
        one.unlink()
    assert list(tmp_path.iterdir()) == []
    one.bytes[4999] = 7
    assert other.bytes.size == 5000
    assert other.bytes[4999] == 7
    # No room is an error at once. Others on this machine have theirs in the same directory.
    ours = secrets.token_hex(8)
    monkeypatch.setattr("kv_transfer.ray.ring.secrets", SimpleNamespace(token_hex=lambda _: ours))
    for directory, num_bytes in ((tmp_path / "missing", 4096), (default_ring_dir(tmp_path), 1 << 55)):
        with pytest.raises(SetupError):
            SharedMemory.create(directory, num_bytes)
    assert not list(default_ring_dir(tmp_path).glob(f"*{ours}*"))


def test_a_ring_on_a_gpu_machine_leaves_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    for free, want in ((100 << 30, 256), (1 << 30, 128), (64 * mib, 64)):
        monkeypatch.setattr("kv_transfer.ray.ring.shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert default_ring_bytes(tmp_path, on_gpu=True) == want * mib
        assert default_ring_bytes(tmp_path, on_gpu=False) == 64 * mib


# ---- published objects, the gate, clocks ----------------------------------------------------------------------------------------


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
    for seconds, due in ((9.9, []), (0.1, ["a"])):
        clock.now += seconds
        assert book.expire() == due
    assert book.stats.stored_bytes == 0
    two = book.reserve("b", 0, 50, ttl_s=10)
    assert two is not None
    for _ in range(2):
        book.cancel(two)
    assert (book.stats.num_leases, book.stats.stored_bytes) == (0, 0)
    three = book.reserve("c", 0, 50, ttl_s=10)
    assert three is not None
    assert [book.drop("c"), book.drop("c")] == [1, 0]
    with pytest.raises(NotFound):
        book.fill(three, "late")
    book.cancel(three)
    assert book.stats.stored_bytes == 0
    with pytest.raises(NotFound):
        book.reserve("c", 1, 1, ttl_s=10)
    with pytest.raises(InvalidRequest):
        book.reserve("d", 0, 101, ttl_s=10)
    # One that only mirrors another book forgets without refusing later.
    assert book.reserve("m", 0, 60, ttl_s=1) is not None
    clock.now += 2
    assert book.expire(for_good=False) == ["m"]
    assert book.reserve("m", 1, 60, ttl_s=1) is not None


async def test_a_publisher_that_waits_for_room_gets_it_or_learns_that_the_transport_has_closed() -> None:
    closed: list[Exception] = []

    def check() -> None:
        if closed:
            raise closed[0]

    async def made() -> tuple[str, int]:
        return "x", 7

    async def failed() -> tuple[str, int]:
        await asyncio.sleep(0)
        raise ValueError("no")

    book: ObjectBook[str] = ObjectBook(100, check=check)
    failing = asyncio.create_task(book.publish("f", 0, 100, failed, ttl_s=10, deadline=in_s(60)))
    await asyncio.sleep(0)
    assert await book.publish("a", 0, 100, made, ttl_s=10, deadline=in_s(60)) == 7  # once that one's room is free
    with pytest.raises(ValueError, match="no"):
        await failing
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

    async def waiting(name: str, size: int) -> asyncio.Task[None]:
        task = asyncio.create_task(take(name, size))
        await asyncio.sleep(0)
        return task

    large, small = await waiting("large", 3), await waiting("small", 1)
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
    cancelled, behind = await waiting("cancelled", 1), await waiting("behind", 1)
    room[0] = 1
    cancelled.cancel()
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


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15)).map(lambda t: (t[0], t[0] + t[1])), max_size=8))
def test_the_copy_clock_adds_up_chunks_and_the_time_they_cover(intervals: list[tuple[int, int]]) -> None:
    now, clock, running = 0.0, telemetry.CopyClock(), {i: ExitStack() for i in range(len(intervals))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry.time, "monotonic", lambda: now)
        # One that ends at an instant ends before one that begins there: the sum is the same either way.
        for moment, begins, i in sorted((at, place == 0, i) for i, pair in enumerate(intervals) for place, at in enumerate(pair)):
            now = float(moment)
            if begins:
                running[i].enter_context(clock.running())
            else:
                running[i].close()
    assert clock.summed_s == sum(end - start for start, end in intervals)
    assert clock.busy_s == len({instant for start, end in intervals for instant in range(start, end)})
