"""Tests of the index of prefixes: it is asked in two trips at most, and requests never wait long for it, whatever Redis does."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisAway

from router.workers.prefix_index import CachedPrefix, PrefixIndex, PrefixProbe, WorkerLife
from twostep.cluster.records import host_prefix_key, prefix_key
from twostep.cluster.shared_connection import Command
from twostep.keys.secret import DeploymentSecret

UNIT = 64
LIFE = A = WorkerLife("a", 1)
B, C = WorkerLife("b", 1), WorkerLife("c", 1)


def ask(probe: PrefixProbe, pool: list[bool], host: list[bool], stride: int) -> int:
    """Both trips; returns how many units were asked for."""
    num_asked = 0
    for trip in (probe.first, probe.rest):
        indices = trip()
        units = [(i + 1) * stride - 1 for i in indices]
        probe.learn(indices, [pool[u] for u in units], [host[u] for u in units])
        num_asked += len(units)
    return num_asked


# Mostly held from the start on, as prefixes are, with gaps; or anything.
flags = st.one_of(
    st.builds(
        lambda held, more, gaps: [i < held and i not in gaps for i in range(held + more)],
        *[st.integers(0, 150)] * 2,
        st.sets(st.integers(0, 150), max_size=2),
    ),
    st.lists(st.booleans(), max_size=100),
)


@settings(max_examples=500)
@given(flags, flags, st.booleans(), st.integers(1, 5))
def test_two_trips_find_what_one_question_for_all_would(pool: list[bool], host: list[bool], tiered: bool, stride: int) -> None:
    size = max(len(pool), len(host))
    pool, host = pool + [False] * (size - len(pool)), host + [False] * (size - len(host))
    if not tiered:
        host = pool
    probe = PrefixProbe(LIFE, [bytes([i % 256]) for i in range(size)], stride, tiered=tiered)
    ask(probe, pool, host, stride)
    asked = range(stride - 1, size, stride)
    in_pool = next((k for k, i in enumerate(asked) if not pool[i]), len(asked))
    in_either = next((k for k, i in enumerate(asked) if not (pool[i] or host[i])), len(asked))
    assert probe.held(UNIT) == CachedPrefix(in_pool * stride * UNIT, (in_either - in_pool) * stride * UNIT)


@given(st.lists(st.booleans(), max_size=100))
def test_what_is_told_at_states_alone_is_found_in_one_trip_whatever_lacks_before(pool: list[bool]) -> None:
    probe = PrefixProbe(LIFE, [bytes([i]) for i in range(len(pool))], 1, tiered=False, sparse=True)
    assert ask(probe, pool, pool, 1) == min(64, len(pool))
    held = [i + 1 for i, each in enumerate(pool) if each and (i < 16 or i >= len(pool) - 48)]
    assert probe.held(UNIT) == CachedPrefix(max(held, default=0) * UNIT)


def test_a_worker_that_holds_nothing_is_asked_little() -> None:
    probe = PrefixProbe(LIFE, [b""] * 1000, 1, tiered=False)
    assert ask(probe, [False] * 1000, [False] * 1000, 1) == 10
    assert probe.held(UNIT) == CachedPrefix(0)


# ---- Redis ---------------------------------------------------------------------------------------------------------------


class Sets:
    """Redis as the index asks it. It answers when `up` is set, or fails if it is `away`."""

    def __init__(self) -> None:
        self.sets: defaultdict[str, set[bytes]] = defaultdict(set)
        self.up = asyncio.Event()
        self.up.set()
        self.away = False
        self.num_asked = 0

    async def ask(self, commands: Sequence[Command]) -> list[object]:
        self.num_asked += 1
        await self.up.wait()
        if self.away:
            raise RedisAway("nothing listens")
        return [[int(each in self.sets[str(key)]) for each in hashes] for name, key, *hashes in commands if name == "SMISMEMBER"]

    async def close(self) -> None:
        """There is nothing to close."""


@pytest.fixture
async def sets() -> Sets:
    return Sets()


def index_of(sets: Sets, **options: Any) -> PrefixIndex:
    return PrefixIndex(sets, DeploymentSecret(b"secret"), UNIT, **({"timeout_s": 60.0} | options))


def units(num: int) -> list[bytes]:
    return [i.to_bytes(2, "big") * 8 for i in range(num)]


async def test_the_longest_unbroken_prefix_of_each_life_in_its_pool_and_behind_it_in_host_memory(sets: Sets) -> None:
    ten = units(10)
    sets.sets |= {
        prefix_key("a", 1): set(ten[:4]),
        prefix_key("b", 1): {*ten[:2], *ten[5:]},
        prefix_key("c", 2): set(ten),
        host_prefix_key("a", 1): {*ten[2:7], ten[9]},
        host_prefix_key("b", 1): set(ten[:3]),
    }
    index = index_of(sets)
    assert await index.lookup(dict.fromkeys((A, B, C), ten)) == {A: CachedPrefix(4 * UNIT), B: CachedPrefix(2 * UNIT)}, "C has a new life"
    assert await index.lookup(dict.fromkeys((A, B), ten), {A, B}) == {A: CachedPrefix(4 * UNIT, 3 * UNIT), B: CachedPrefix(2 * UNIT, UNIT)}
    assert await index.lookup({A: []}) == {}
    told = await index.lookup(dict.fromkeys((A, B), ten), sparse={B})
    assert told == {A: CachedPrefix(4 * UNIT), B: CachedPrefix(10 * UNIT)}, "B tells of few boundaries"


async def test_very_long_prompts_are_probed_at_fewer_places(sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.prefix_index._MAX_PROBES", 250)
    sets.sets[prefix_key("a", 1)] = set(units(602))
    assert await index_of(sets).lookup({A: units(1000)}) == {A: CachedPrefix(600 * UNIT)}


async def test_a_slow_redis_is_waited_for_once_and_not_again_while_its_answer_is_late(sets: Sets) -> None:
    sets.sets[prefix_key("a", 1)] = set(units(4))
    index = index_of(sets, timeout_s=0.002)
    for num_tries in range(1, 4):
        sets.up.clear()
        for _ in range(50):
            assert await index.lookup({A: units(4)}) == {}
        assert sets.num_asked == num_tries
        sets.up.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await index.close()


async def test_a_redis_that_is_away_is_asked_once_a_second(sets: Sets) -> None:
    now = 0.0
    sets.sets[prefix_key("a", 1)] = set(units(4))
    index, sets.away = index_of(sets, clock=lambda: now), True
    await index.open()
    sets.num_asked = 0
    for second in range(3):
        now = float(second)
        for _ in range(100):
            assert await index.lookup({A: units(4)}) == {}
        assert sets.num_asked == second + 1
    now, sets.away = 4.0, False
    assert await index.lookup({A: units(4)}) == {A: CachedPrefix(4 * UNIT)}
