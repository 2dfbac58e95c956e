"""Full garbage collections come in quiet moments, or at long last."""

from __future__ import annotations

import asyncio
import gc
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.rpc import collector


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.activity = 0
        self.collections: list[float] = []
        self.thawed: list[float] = []
        self.resident = 1 << 30
        self.growth_per_s = 0
        # What a collection takes of each second since the one before.
        self.garbage_s = 0.0


@asynccontextmanager
async def collecting(*, busy: bool, growth_per_s: int = 0, garbage_s: float = 0.0, until_s: float = 8000.0) -> AsyncIterator[World]:
    world, real_sleep = World(), asyncio.sleep
    world.growth_per_s, world.garbage_s = growth_per_s, garbage_s

    async def sleep(seconds: float) -> None:
        world.now += seconds
        world.activity += busy
        world.resident += int(seconds * world.growth_per_s)
        await real_sleep(0)

    def collect(*_: Any) -> int:
        since = world.now - world.collections[-1] if world.collections else 0.0
        world.collections.append(world.now)
        world.now += world.garbage_s * since
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        patch.setattr(gc, "collect", collect)
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: world.thawed.append(world.now))
        task = asyncio.create_task(
            collector.collect_in_quiet_moments(lambda: world.activity, clock=lambda: world.now, resident=lambda: world.resident)
        )
        while world.now < until_s:
            await real_sleep(0)
        assert gc.get_threshold()[2] > 1_000_000, "Python does not collect all of it by itself"
        task.cancel()
        await asyncio.wait([task])
    yield world


async def test_it_is_often_while_idle_and_rare_under_load() -> None:
    before = gc.get_threshold()
    async with collecting(busy=False) as world:
        assert 780 <= len(world.collections) <= 801
    # Collections of all objects: at the start, after each hour, and when Python's own rule is back.
    assert world.thawed[:-1] == [0.0, 3600.0, 7200.0]
    async with collecting(busy=True) as world:
        assert np.diff(world.collections[-4:]).tolist() == [30.0, 30.0, 30.0], "there is nothing to find"
        assert world.thawed[:-1] == [0.0], "everything waits for a quiet second"
    assert gc.get_threshold() == before


@given(garbage_s=st.floats(1e-5, 6e-3))
@settings(max_examples=20)
async def test_under_load_each_takes_milliseconds(garbage_s: float) -> None:
    async with collecting(busy=True, garbage_s=garbage_s, until_s=600.0) as world:
        took = [garbage_s * float(apart) for apart in np.diff(world.collections)]
    assert max(took[2:]) < 0.0065
    assert sum(took) < 600.0 * garbage_s + 1e-6
    assert garbage_s < 1e-3 or statistics.median(took) > 0.001, "no oftener than that"


async def test_a_process_that_grows_uses_the_next_quiet_second_and_waits_for_it_only_so_long() -> None:
    async with collecting(busy=False, growth_per_s=4 << 20) as world:
        assert world.thawed[:3] == [0.0, 70.0, 140.0]
    # Under load everything after a whole GiB.
    async with collecting(busy=True, growth_per_s=4 << 20) as world:
        # At the first look after it has grown by so much, of those that come each half minute in the end.
        assert len(world.thawed) > 20
        assert all(256.0 <= apart <= 290.0 for apart in np.diff(world.thawed[:-1]))
