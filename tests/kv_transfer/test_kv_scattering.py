"""The clock of a fetch's last part, for each fetch apart."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest
from kv_pairs import Clock

from kv_transfer import scattering as module
from kv_transfer.scattering import ScatterClock, scattered, scattering
from kv_transfer.waiting import finish


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    return clock


async def test_fetches_that_overlap_are_timed_apart(time: Clock) -> None:
    """One scatters from 0 to 3, one from 1 to 4 and from 6 to 16, one not at all."""
    now, ticks = 0, [asyncio.Event() for _ in range(17)]

    async def fetch(*parts: tuple[int, int]) -> float:
        with ScatterClock() as clock:
            for begin, end in parts:
                await ticks[begin].wait()
                with scattering():
                    await finish(ticks[end].wait())
        return clock.seconds

    fetches = [asyncio.create_task(fetch(*parts)) for parts in ((), ((0, 3),), ((1, 4), (6, 16)))]
    for now, tick in enumerate(ticks):
        time.now = now
        tick.set()
        for _ in range(5):  # until all that waited for it has run
            await asyncio.sleep(0)
    assert await asyncio.gather(*fetches) == [0, 3, 3 + 10]


async def test_a_failure_stops_the_clock_too(time: Clock) -> None:
    with ScatterClock() as clock:
        with suppress(ValueError), scattering():
            time.now += 2
            raise ValueError("damaged")
        time.now += 3
    assert clock.seconds == 2


async def test_without_a_clock_nothing_is_counted(time: Clock) -> None:
    with scattering():
        time.now += 1
    with ScatterClock() as clock:
        pass
    scattered(1.0)
    assert clock.seconds == 0
