"""One caller's answers, however many, leave the event loop to others."""

from __future__ import annotations

import asyncio

from router.serving.loop_share import LoopShare

SHARE = 10


async def test_a_neighbour_waits_for_one_share_and_not_for_all() -> None:
    share, done = LoopShare(SHARE), list[str]()

    async def answer(caller: str, cost: int) -> None:
        await share.take(caller, cost)
        done.append(caller)

    async with asyncio.TaskGroup() as group:
        for _ in range(200):
            group.create_task(answer("many", 2))
        group.create_task(answer("one", 2))
    assert done.index("one") <= SHARE // 2
    assert done.count("many") == 200


async def test_one_turn_of_the_loop_holds_one_share() -> None:
    share, turns, of_turn = LoopShare(SHARE), 0, list[int]()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def answer() -> None:
        await share.take("many", 2)
        of_turn.append(turns)

    counting = asyncio.create_task(count())
    await asyncio.gather(*(answer() for _ in range(100)))
    counting.cancel()
    # The first turn of all may share the loop's with the second.
    assert max(of_turn.count(turn) for turn in set(of_turn)) <= 2 * SHARE // 2


async def test_answers_go_on_in_their_order_and_those_that_left_take_nothing() -> None:
    share, done = LoopShare(SHARE), list[int]()

    async def answer(number: int) -> None:
        await share.take("many", SHARE)
        done.append(number)

    tasks = [asyncio.create_task(answer(number)) for number in range(20)]
    await asyncio.sleep(0)
    for task in tasks[5:10]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [*range(5), *range(10, 20)]
