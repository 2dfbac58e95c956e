"""`make rolling`: a rolling update of each role and of Redis under load, with figures (docs/upgrades.md).

    python tests/system/rolling.py                  all of it, some minutes on two cores
    python tests/system/rolling.py --clients 12 --stages short redis
    python tests/system/rolling.py --from TREE      begins with processes of another checkout, such as that of the release before

Two routers, two prefill and two decode workers, each a process, serve a small model in float32 to clients of the SDK that ask without a
pause. Each stage prints a line; the exit status is 0 if no request failed, all tokens were right and nothing was left over.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio

# The modules that tests share lie one folder up.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from fleet import BLOCK_SIZE, Fleet
from loads import Outcome, SteadyLoad, model_cases
from oracle import Oracle

LONG_S, SHORT_S = 60.0, 0.05
ROLES = ("prefill", "decode", "router")
STAGES = ("long", "short", "in-place", "redis")
ROUTERS = tuple(f"router-{n}" for n in range(6))
FLAGS = ("--dtype", "float32", "--num-blocks", "256", "--block-size", str(BLOCK_SIZE))
# Without a time to live: it is there after a restart only if Redis came back with what it had.
_MARK = "twostep:test:mark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Outcomes of the requests that were under way in one stage of an update."""

    name: str
    seconds: float
    outcomes: tuple[Outcome, ...]

    @property
    def num_moved(self) -> int:
        return sum(outcome.moved for outcome in self.outcomes)

    @property
    def errors(self) -> list[str]:
        return [outcome.error for outcome in self.outcomes if outcome.error]

    @property
    def longest_gap_s(self) -> float:
        return max(outcome.gap_s for outcome in self.outcomes)

    @property
    def longest_first_s(self) -> float:
        return max(outcome.first_s for outcome in self.outcomes)

    def __str__(self) -> str:
        return (
            f"| {self.name} | {self.seconds:.1f} s | {len(self.outcomes)} | {self.num_moved} | {len(self.errors)} "
            f"| {self.longest_first_s:.2f} s | {self.longest_gap_s:.2f} s |"
        )


HEADER = "| | took | requests | moved | failed | longest wait for the first token | longest gap |\n|---|---|---|---|---|---|---|"


class Update:
    """Updates a fleet under load, stage after stage."""

    def __init__(self, fleet: Fleet, load: SteadyLoad, say: Callable[[str], None] = lambda _: None) -> None:
        self.fleet, self.load = fleet, load
        self.stages: list[Stage] = []
        self._say = say
        self._seen = 0

    async def stage(self, name: str, work: Awaitable[object]) -> Stage:
        """Does it, and waits until all that was under way has ended."""
        begun = time.monotonic()
        await work
        seconds = time.monotonic() - begun
        await self.load.settled()
        stage = Stage(name=name, seconds=seconds, outcomes=tuple(self.load.ended[self._seen :]))
        self._seen += len(stage.outcomes)
        self.stages.append(stage)
        self._say(str(stage))
        return stage

    async def replace(self, old: Sequence[str], new: Sequence[str], *, drain_s: float) -> None:
        """One after the other: the new one serves before the old one is told to end. The new ones will drain for `drain_s`."""
        for leaving, coming in zip(old, new, strict=True):
            await self.fleet.start({coming: drain_s})
            await self.drain(leaving)

    async def drain(self, name: str) -> None:
        """Drains it while it has something to do."""
        await self._until_busy(name)
        await self.fleet.drain(name)
        await self.fleet.until_whole()

    async def restart(self, *names: str) -> None:
        """Each in place. A worker comes back under a newer epoch."""
        for name in names:
            await self._until_busy(name)
            worker = not name.startswith("router")
            before = (await self.fleet.stats(name)).epoch if worker else 0
            await self.fleet.restart(name)
            after = (await self.fleet.stats(name)).epoch if worker else 1
            assert after > before, f"{name} came back under epoch {after} after {before}"

    async def restart_redis(self, *, down_s: float) -> None:
        async with redis.asyncio.Redis.from_url(self.fleet.redis_url) as store:
            await store.set(_MARK, "kept")
        await self.fleet.stop_redis()
        await asyncio.sleep(down_s)
        await self.fleet.start_redis()
        async with redis.asyncio.Redis.from_url(self.fleet.redis_url) as store:
            assert await store.get(_MARK) == b"kept", "what Redis had is lost with its restart"
        await self.fleet.until_whole()

    async def _until_busy(self, name: str) -> None:
        if name.startswith("decode"):
            await self.fleet.until_busy(name, 1)


def check(stages: Sequence[Stage], oracle: Oracle) -> int:
    """Fails for a request that failed, and for a wrong token. How many comparisons ended at a near-tie of the oracle's own."""
    return sum(oracle.compare(outcome.case.token_ids, outcome.case.options, outcome.token_ids) for outcome in differing(stages))


def differing(stages: Sequence[Stage]) -> list[Outcome]:
    """Answers with other tokens than expected. Fails for a request that failed."""
    errors = [f"{stage.name}: {error}" for stage in stages for error in stage.errors]
    assert not errors, errors
    return [outcome for stage in stages for outcome in stage.outcomes if list(outcome.token_ids) != list(outcome.case.expected)]


async def roll_all(fleet: Fleet, load: SteadyLoad, stages: Sequence[str], say: Callable[[str], None]) -> list[Stage]:
    """`stages` of STAGES. The fleet has two members of each role, which will drain for a long time if that is the first stage."""
    update = Update(fleet, load, say)
    await update.stage("nothing happens", load.more(30))
    present = {role: [f"{role}-{n}" for n in (0, 1)] for role in ROLES}
    for stage, drain_s in (("long", LONG_S), ("short", SHORT_S)):
        for role in ROLES if stage in stages else ():
            old = present[role]
            new = present[role] = [f"{role}-{int(name.partition('-')[2]) + 2}" for name in old]
            await update.stage(f"{role}: replaced, drained for {drain_s:g} s at most", update.replace(old, new, drain_s=SHORT_S))
    for role in ROLES if "in-place" in stages else ():
        await update.stage(f"{role}: restarted in place, drained for {SHORT_S:g} s", update.restart(*present[role]))
    if "redis" in stages:
        await update.stage("Redis restarted, away for 3 s", update.restart_redis(down_s=3.0))
    return update.stages


async def _main(args: argparse.Namespace, model_dir: Path, oracle: Oracle) -> int:
    cases = model_cases(oracle, 20, max_tokens=(100, 400))
    async with Fleet(model_dir, flags=FLAGS, routers=ROUTERS) as fleet:
        names = [f"{role}-{n}" for role in ROLES for n in (0, 1)]
        fleet.tree = args.from_tree
        await fleet.start(dict.fromkeys(names, LONG_S if "long" in args.stages else SHORT_S))
        fleet.tree = None
        print(HEADER, flush=True)
        async with SteadyLoad(fleet.targets, cases, num_clients=args.clients) as load:
            stages = await roll_all(fleet, load, args.stages, lambda line: print(line, flush=True))
        await fleet.until_empty()
        near_ties = check(stages, oracle)
    outcomes = [outcome for stage in stages for outcome in stage.outcomes]
    num_tokens, num_moved = sum(len(outcome.token_ids) for outcome in outcomes), sum(outcome.moved for outcome in outcomes)
    print(f"{len(outcomes)} requests, {num_tokens} tokens, {num_moved} moved, 0 failed, 0 wrong tokens, nothing left over")
    print(f"{near_ties} comparisons ended at a near-tie of the oracle's own")
    return 0 if _moved_when_they_should(stages) else 1


def _moved_when_they_should(stages: Sequence[Stage]) -> bool:
    """Tells whether decode workers and routers without time give their streams away, and those that have time do not."""
    given = {stage.name: stage.num_moved > 0 for stage in stages if "drain" in stage.name}
    wrong = [name for name, moved in given.items() if moved and f"{LONG_S:g} s" in name]
    wrong += [name for name, moved in given.items() if not moved and f"{SHORT_S:g} s" in name and not name.startswith("prefill")]
    print("".join(f"streams should {'not ' if given[name] else ''}have moved: {name}\n" for name in wrong), end="")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stages", nargs="+", choices=STAGES, default=STAGES, help="drains with time and without, restarts, Redis; all if not given"
    )
    parser.add_argument("--from", dest="from_tree", type=Path, metavar="TREE", help="a checkout whose routers and workers are replaced")
    parser.add_argument("--clients", type=int, default=6, help="requests at any time")
    args = parser.parse_args()
    tiny_models = importlib.import_module("tiny_models")  # imports torch
    with tempfile.TemporaryDirectory(prefix="ts-") as scratch:
        model_dir = tiny_models.save_tiny_model(Path(scratch) / "tiny-llama")
        return asyncio.run(_main(args, model_dir, Oracle(model_dir)))


if __name__ == "__main__":
    sys.exit(main())
