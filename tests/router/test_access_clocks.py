"""A key's daily quota over routers whose hosts' clocks are wrong, and a Redis whose clock is set: pure, every clock is handed in."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any, cast

from hypothesis import example, given
from hypothesis import strategies as st
from redis.asyncio import Redis

from router.access.account import DAY_S, HOUR_S, STEP_S, Account
from router.access.share import UsageShare
from router.request.targets import Refused
from twostep.cluster.shared_clock import SharedClock
from twostep.keys.api_keys import Limits, make_key

LIMIT = 1000


class World:
    """The true time, and a store that answers as Redis does: its clock is its own."""

    def __init__(self) -> None:
        self.now, self.redis_ahead_s = 5e8, 1e9
        self.away = False
        self._hashes: dict[str, dict[bytes, bytes]] = {}
        self._expires: dict[str, float] = {}

    @property
    def redis_now(self) -> float:
        return self.now + self.redis_ahead_s

    async def time(self) -> tuple[int, int]:
        return int(self.redis_now), int(self.redis_now % 1 * 1e6)

    def pipeline(self, transaction: bool = True) -> Pipeline:
        return Pipeline(self)

    def execute(self, command: str, name: str, value: Any) -> Any:
        if command == "time":
            return int(self.redis_now), int(self.redis_now % 1 * 1e6)
        for each in [each for each, at in self._expires.items() if at <= self.redis_now]:
            del self._expires[each], self._hashes[each]
        if command == "hset":
            self._hashes.setdefault(name, {}).update({field.encode(): total.encode() for field, total in value.items()})
        elif command == "expire":
            self._expires[name] = self.redis_now + value
        return [list(chain.from_iterable(self._hashes.get(each, {}).items())) for each in value] if command == "eval" else None


class Pipeline:
    def __init__(self, world: World) -> None:
        self._world = world
        self._commands: list[tuple[str, str, Any]] = []

    def time(self) -> None:
        self._commands.append(("time", "", None))

    def hset(self, name: str, mapping: dict[str, str]) -> None:
        self._commands.append(("hset", name, mapping))

    def expire(self, name: str, seconds: int) -> None:
        self._commands.append(("expire", name, seconds))

    def eval(self, _script: str, num_keys: int, *arguments: str) -> None:
        self._commands.append(("eval", "", arguments[:num_keys]))

    async def execute(self) -> list[Any]:
        if self._world.away:
            raise OSError
        return [self._world.execute(*command) for command in self._commands]


class OneRouter:
    """Its host's wall clock shows anything; its monotonic one begins anywhere, and is not set."""

    def __init__(self, world: World, wall_ahead_s: float, began_s: float) -> None:
        def monotonic() -> float:
            return world.now - began_s

        clock = SharedClock(monotonic=monotonic, wall=lambda: world.now + wall_ahead_s)
        self.share = UsageShare(
            cast(Redis, world),
            "router",
            clock,
            on_minute=lambda use: self.account.elsewhere_tokens(use.amount),
            on_day=lambda use: self.account.elsewhere_day(use.amount, use.age_s),
        )
        key = make_key(limits=Limits(tokens_per_day=LIMIT))[1]
        self.account = Account(type(key)(id="key", hash=key.hash, limits=key.limits), self.share.used, monotonic=monotonic)

    def ask(self, num_tokens: int) -> bool:
        try:
            with self.account.spending(num_tokens) as spending:
                spending.placed = True
        except Refused:
            return False
        return True


hours = st.floats(-60, 60)
routers = st.tuples(st.just("ask"), st.integers(0, 2), st.integers(1, 900))
pauses = st.tuples(st.just("pass"), st.integers(0, 2), st.integers(0, 30 * 3600))
jumps = st.tuples(st.just("set"), st.integers(0, 2), st.integers(-30 * 3600, 30 * 3600))
restarts = st.tuples(st.just("restart"), st.integers(0, 2), st.integers(-30 * 3600, 30 * 3600))


async def play(walls: list[float], steps: list[tuple[str, int, int]], *, late_s: float) -> None:
    """After each step every router hears of all that the others gave. `late_s`: for how much longer than a day something may count."""
    world = World()
    members = [OneRouter(world, ahead * HOUR_S, world.now * (i + 1) / 7) for i, ahead in enumerate(walls)]
    given: list[tuple[float, int]] = []
    for what, who, amount in steps:
        match what:
            case "ask":
                granted = members[who].ask(amount)
                last_day = sum(n for at, n in given if at > world.now - DAY_S)
                if granted:
                    assert last_day + amount <= LIMIT, "a day gets no more than its limit"
                    given.append((world.now, amount))
                else:
                    counted = sum(n for at, n in given if at >= world.now - DAY_S - late_s)
                    assert counted + amount > LIMIT, "nothing is refused for a clock"
            case "pass":
                world.now += amount
            case "set":
                world.redis_ahead_s += amount
            case "restart":
                members[who] = OneRouter(world, amount, world.now / 3)
        for _ in range(2):
            for member in members:
                await member.share.exchange(whole=True)
                assert member.share.connected


@given(st.lists(hours, min_size=3, max_size=3), st.lists(st.one_of(routers, pauses, jumps), max_size=30))
@example([0, -1, 26], [("ask", i % 3, 900) for i in range(6)])
@example([0, 0, 0], [("ask", 0, 900), ("set", 0, -3600), ("ask", 0, 50), ("ask", 1, 900)])
@example([0, 0, 0], [("ask", 0, 900), ("set", 0, 26 * 3600), ("ask", 0, 900), ("set", 0, -26 * 3600), ("ask", 0, 900), ("ask", 1, 900)])
def test_a_day_gets_its_limit_whatever_clocks_are_set_to(walls: list[float], steps: list[tuple[str, int, int]]) -> None:
    asyncio.run(play(walls, steps, late_s=STEP_S))


@given(st.lists(hours, min_size=3, max_size=3), st.lists(st.one_of(routers, pauses, restarts), max_size=30))
@example([0, 5, -5], [("ask", 0, 900), ("restart", 0, -7 * 3600), ("ask", 0, 900), ("restart", 1, 40 * 3600), ("ask", 1, 900)])
def test_a_restart_is_no_new_day_on_a_host_whose_clock_is_wrong(walls: list[float], steps: list[tuple[str, int, int]]) -> None:
    # Redis knows hours of what was used.
    asyncio.run(play(walls, steps, late_s=STEP_S + HOUR_S))


async def test_hours_without_redis_are_heard_of_afterwards() -> None:
    world = World()
    one, other = OneRouter(world, 0.0, 0.0), OneRouter(world, 0.0, 0.0)
    for member in (one, other):
        await member.share.exchange(whole=True)
    assert other.ask(900)
    await other.share.exchange(whole=True)
    world.away = True
    await one.share.exchange(whole=True)
    assert not one.share.connected
    world.away, world.now = False, world.now + 5 * HOUR_S
    await one.share.exchange(whole=True)
    assert not one.ask(200)
