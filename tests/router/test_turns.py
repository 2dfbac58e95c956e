"""Turns of callers at what a router does for all of them: by the time that they have used, whoever came first."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.waiting.fair_queue import Quota
from router.waiting.turns import Turn, Turns
from twostep.errors import ResourceExhausted


def turns(*, most: int = 64, at_once: int = 1, each: int = 1, quota: Quota | None = None) -> Turns:
    return Turns("questions wait", most=most, at_once=at_once, each=each, quota=quota or Quota())


class Asking:
    """Callers' questions at some turns, and those that have got theirs, in order."""

    def __init__(self, at: Turns) -> None:
        self.at = at
        self.held: list[tuple[str, Turn]] = []
        self.refused: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def ask(self, caller: str, count: int = 1) -> list[asyncio.Task[None]]:
        async def take() -> None:
            try:
                turn = await self.at.take(caller)
            except ResourceExhausted:
                self.refused.append(caller)
                return
            self.held.append((caller, turn))

        begun = [asyncio.create_task(take()) for _ in range(count)]
        self._tasks += begun
        await self.settled()
        return begun

    async def settled(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    async def answer(self, cpu_s: float) -> str:
        """Ends the question that has been held for longest. Returns whose it was."""
        caller, turn = self.held.pop(0)
        turn.over(cpu_s)
        await self.settled()
        return caller


async def test_whoever_asks_much_does_not_delay_another() -> None:
    asking = Asking(turns())
    await asking.ask("much", 16)
    await asking.ask("little")
    assert [await asking.answer(3.0) for _ in range(2)] == ["much", "little"]


async def test_turns_are_dealt_by_time_and_not_by_number() -> None:
    asking = Asking(turns())
    await asking.ask("slow", 20)
    await asking.ask("quick", 40)
    times = Counter[str]()
    for _ in range(30):
        caller = asking.held[0][0]
        times[caller] += (seconds := 100 if caller == "slow" else 10)
        await asking.answer(seconds / 100)
    assert abs(times["slow"] - times["quick"]) <= 200, "two of the longest"


async def test_weights_are_those_of_tenants() -> None:
    asking = Asking(turns(quota=Quota(weights={"heavy": 3.0})))
    await asking.ask("heavy", 30)
    await asking.ask("light", 30)
    told = Counter([await asking.answer(1.0) for _ in range(24)])
    assert told["heavy"] == pytest.approx(3 * told["light"], abs=3)


async def test_one_caller_leaves_a_place_to_the_next() -> None:
    asking = Asking(turns(at_once=2, each=1))
    await asking.ask("much", 5)
    assert [caller for caller, _ in asking.held] == ["much"]
    await asking.ask("little")
    assert [caller for caller, _ in asking.held] == ["much", "little"]


async def test_a_full_queue_sends_those_away_who_have_most_of_it() -> None:
    asking = Asking(turns(most=8))
    await asking.ask("a", 6)
    assert (len(asking.at), asking.refused) == (4, ["a"] * 2), "half of it is one caller's at most"
    await asking.ask("b", 4)
    assert (len(asking.at), asking.refused) == (8, ["a"] * 2)
    await asking.ask("c")
    assert len(asking.at) == 8
    assert len(asking.refused) == 3
    assert "c" not in asking.refused


async def test_whoever_leaves_takes_no_place_along() -> None:
    asking = Asking(turns())
    first, second, third = await asking.ask("a", 3)
    second.cancel()
    await asking.settled()
    assert len(asking.at) == 2
    # Its turn comes and it goes at the same time.
    asking.held.pop()[1].over(0.0)
    third.cancel()
    await asking.settled()
    assert (len(asking.at), first.done()) == (0, True)
    await asking.ask("a")
    assert len(asking.held) == 1


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=40),
)
async def test_places_are_neither_lost_nor_given_twice(at_once: int, each: int, steps: list[tuple[str, int, int, bool]]) -> None:
    asking = Asking(turns(most=12, at_once=at_once, each=each))
    waiting: list[asyncio.Task[None]] = []
    for caller, count, answered, leaves in steps:
        waiting += await asking.ask(caller, count)
        for _ in range(min(answered, len(asking.held))):
            await asking.answer(0.5)
        if leaves and waiting:
            waiting.pop().cancel()
            await asking.settled()
        held = Counter(caller for caller, _ in asking.held)
        assert held.total() <= at_once
        assert max(held.values(), default=0) <= each
        assert len(asking.at) <= 12
    while asking.held:
        await asking.answer(0.5)
    assert len(asking.at) == 0
