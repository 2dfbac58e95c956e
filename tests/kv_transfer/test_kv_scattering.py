"""The clock of a fetch's last part, for each fetch apart."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.scattering import ScatterClock, scattering
from kv_transfer.waiting import finish


async def test_fetches_that_overlap_are_timed_apart() -> None:
    async def fetch(seconds: float, times: int) -> float:
        with ScatterClock() as clock:
            for _ in range(times):
                await asyncio.sleep(0.01)
                with scattering():
                    await finish(asyncio.to_thread(lambda: None))
                    await asyncio.sleep(seconds)
        return clock.seconds

    none, short, long = await asyncio.gather(fetch(0.5, 0), fetch(0.02, 1), fetch(0.05, 3))
    assert none == 0
    assert short >= 0.02
    assert long >= 0.15
    assert long > short


async def test_a_failure_stops_the_clock_too() -> None:
    async def damaged() -> None:
        with scattering():
            await asyncio.sleep(0.02)
            raise ValueError("damaged")

    with ScatterClock() as clock:
        with pytest.raises(ValueError, match="damaged"):
            await damaged()
        spent = clock.seconds
        await asyncio.sleep(0.02)
    assert clock.seconds == spent >= 0.02


async def test_without_a_clock_nothing_is_told() -> None:
    with scattering():
        pass
    with ScatterClock() as clock:
        pass
    with scattering():
        await asyncio.sleep(0.01)
    assert clock.seconds == 0
