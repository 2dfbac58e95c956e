"""Full garbage collections come in quiet moments, or at long last."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from twostep.rpc import collector


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.activity = 0
        self.collections: list[float] = []
        self.thawed: list[float] = []
        self.resident = 1 << 30
        self.growth_per_s = 0


@asynccontextmanager
async def collecting(monkeypatch: pytest.MonkeyPatch, *, busy: bool, growth_per_s: int = 0) -> AsyncIterator[World]:
    world, real_sleep = World(), asyncio.sleep
    world.growth_per_s = growth_per_s

    async def sleep(seconds: float) -> None:
        world.now += seconds
        world.activity += busy
        world.resident += int(seconds * world.growth_per_s)
        await real_sleep(0)

    def collect(*_: Any) -> int:
        world.collections.append(world.now)
        return 0

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(gc, "collect", collect)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "unfreeze", lambda: world.thawed.append(world.now))
    task = asyncio.create_task(
        collector.collect_in_quiet_moments(lambda: world.activity, clock=lambda: world.now, resident=lambda: world.resident)
    )
    while world.now < 8000.0:
        await real_sleep(0)
    assert gc.get_threshold()[2] > 1_000_000, "Python does not collect all of it by itself"
    task.cancel()
    await asyncio.wait([task])
    yield world


async def test_it_is_often_while_idle_and_rare_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    async with collecting(monkeypatch, busy=False) as world:
        assert 780 <= len(world.collections) <= 801
    # Collections of all objects: at the start, after each hour, and when Python's own rule is back.
    assert world.thawed[:-1] == [0.0, 3600.0, 7200.0]
    async with collecting(monkeypatch, busy=True) as world:
        assert world.collections[:4] == [0.0, 30.0, 60.0, 90.0]
        assert world.thawed[:-1] == [0.0], "everything waits for a quiet second"
    assert gc.get_threshold() == before


async def test_a_process_that_grows_uses_the_next_quiet_second_and_waits_for_it_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting(monkeypatch, busy=False, growth_per_s=4 << 20) as world:
        assert world.thawed[:3] == [0.0, 70.0, 140.0]
    # Under load what is new, each ten seconds from a quarter of a GiB on, and everything after a whole one.
    async with collecting(monkeypatch, busy=True, growth_per_s=4 << 20) as world:
        assert world.thawed[:3] == [0.0, 260.0, 520.0]
        assert world.collections[:6] == [0.0, 30.0, 60.0, 70.0, 80.0, 90.0]
