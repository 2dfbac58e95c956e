"""Threads beside the event loop, when they hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from router_fakes import until

from router.batches.disk import Threads
from twostep.errors import Unavailable
from twostep.process.bounded_threads import BoundedThreads


class Hanging:
    """Work that goes on when it is told to."""

    def __init__(self) -> None:
        self.go_on, self.begun = threading.Event(), list[int]()

    def __call__(self, number: int) -> int:
        self.begun.append(number)
        assert self.go_on.wait(120)
        if number % 2:
            raise ZeroDivisionError(number)
        return number


@pytest.fixture
async def hanging() -> AsyncIterator[Hanging]:
    made = Hanging()
    yield made
    made.go_on.set()


def gave_up(call: Callable[[int], Awaitable[object]], numbers: range) -> list[asyncio.Task[object]]:
    async def one(number: int) -> object:
        async with asyncio.timeout(0.1):
            return await call(number)

    return [asyncio.create_task(one(number)) for number in numbers]


async def test_who_gives_up_leaves_nothing_behind(hanging: Hanging) -> None:
    threads = BoundedThreads(3, "test")
    tasks = gave_up(lambda number: threads.run(hanging, number), range(20))
    assert all(isinstance(each, TimeoutError) for each in await asyncio.gather(*tasks, return_exceptions=True))
    await until(lambda: len(hanging.begun) == 3, "the first have begun")
    assert sorted(hanging.begun) == [0, 1, 2]
    assert threads._pool._work_queue.empty()
    hanging.go_on.set()
    assert await threads.run(hanging, 20) == 20
    with pytest.raises(ZeroDivisionError):
        await threads.run(hanging, 21)
    assert hanging.begun[3:] == [20, 21], "and nobody's work is done who is gone"
    threads.close()


async def test_after_the_end_all_who_wait_are_told(hanging: Hanging) -> None:
    threads = BoundedThreads(1, "test")
    tasks = [asyncio.create_task(threads.run(hanging, number)) for number in (0, 2, 4)]
    await until(lambda: hanging.begun == [0], "the first has begun")
    threads.close()
    hanging.go_on.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert found[0] == 0
    assert all(isinstance(each, RuntimeError) for each in found[1:])


async def test_a_volume_that_hangs_costs_its_own_callers_their_patience(hanging: Hanging) -> None:
    threads = Threads(timeout_s=0.1)
    found = await asyncio.gather(*(threads.short(hanging, number) for number in range(12)), return_exceptions=True)
    assert all(isinstance(each, Unavailable) for each in found)
    await until(lambda: len(hanging.begun) == 4, "the threads have begun")
    hanging.go_on.set()
    assert await threads.long(lambda: 7) == 7
    threads.close()
