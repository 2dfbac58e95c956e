"""The clock of a fetch's last part, for each fetch apart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kv_transfer import scattering as module
from kv_transfer.scattering import ScatterClock, scattered, scattering
from kv_transfer.waiting import finish


class Time:
    """Goes on when it is told to."""

    now = 100.0


@pytest.fixture
def time() -> Iterator[Time]:
    time = Time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.now))
        yield time


async def test_fetches_that_overlap_are_timed_apart(time: Time) -> None:
    begins, inside, ends, outside = ([asyncio.Event() for _ in range(3)] for _ in range(4))

    async def fetch(*parts: int) -> float:
        with ScatterClock() as clock:
            for part in parts:
                await begins[part].wait()
                with scattering():
                    inside[part].set()
                    await finish(asyncio.to_thread(lambda: None))
                    await ends[part].wait()
                outside[part].set()
        return clock.seconds

    none, short, long = (asyncio.create_task(fetch(*parts)) for parts in ((), (0,), (1, 2)))
    for at, part, told, heard in (
        (100, 0, begins, inside),
        (101, 1, begins, inside),
        (103, 0, ends, outside),
        (104, 1, ends, outside),
        (106, 2, begins, inside),
        (116, 2, ends, outside),
    ):
        time.now = float(at)
        told[part].set()
        await asyncio.wait_for(heard[part].wait(), 60)
    assert (await none, await short, await long) == (0, 3, 3 + 10)


async def test_a_failure_stops_the_clock_too(time: Time) -> None:
    with ScatterClock() as clock:

        async def damaged() -> None:
            with scattering():
                time.now += 2
                raise ValueError("damaged")

        with pytest.raises(ValueError, match="damaged"):
            await damaged()
        time.now += 3
    assert clock.seconds == 2


async def test_without_a_clock_nothing_is_told(time: Time) -> None:
    with scattering():
        time.now += 1
    with ScatterClock() as clock:
        pass
    with scattering():
        time.now += 1
    scattered(1.0)
    assert clock.seconds == 0
