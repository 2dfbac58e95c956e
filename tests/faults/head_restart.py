"""Ray's head is lost and comes back, its state in Redis, under load: nothing of it may be seen but in Ray's own log.

    python tests/faults/head_restart.py                   three minutes on two cores; prints a table, exits with 1 if anything was lost
    python tests/faults/head_restart.py --away-s 20

A deployment of the fault matrix (namespaces, tests/faults/fault_system.py), whose raylets and head are kv_transfer.ray.node on fixed ports,
as in the chart. Every request is handed over by Ray: decode workers compute no prompts. Requests go through one router, and are never
repeated.

1. the GCS is killed: its node starts it again
2. the head ends in order and stays away, longer than Ray's own patience of 60 s; then a KV agent dies, which cannot join without it
3. the head is back: that agent's worker has one again, and another agent that is killed is replaced
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import namespaces
from components import Component
from fault_system import FaultSystem
from faulty_requests import Asker, Outcome, Probing
from namespaces import Host, Plane

from twostep.text.model_card import ModelCard

_ROOT = Path(__file__).parents[2]
# Longer than nodes and agents go on by themselves without one.
_AWAY_S = 90.0
_SETTLE_S = 15.0
_BACK_S = 300.0
_START_S = 300.0
_EVERY_S = 0.25
_STORE_BYTES = 160 << 20


class RayInRedis(FaultSystem):
    """A system whose Ray head keeps its state in Redis, as the chart runs it."""

    def __init__(self, model_dir: Path, parent: Path) -> None:
        super().__init__(model_dir, parent=parent)
        # For the workers' KV agents too.
        self.environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "600"
        state = {"RAY_REDIS_ADDRESS": f"{self.hosts['redis'].address(Plane.SERVICE)}:6379", "RAY_external_storage_namespace": "twostep"}
        self._node("head", self.hosts["head"], self.ray.temp_dir, "--ray-head", env=state, prepare=self.ray.prepare)
        for name in ("prefill", "decode", "spare"):
            self._node(f"raylet-{name}", self.hosts[name], self._ray_dir(name))

    def _node(
        self,
        name: str,
        host: Host,
        directory: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        argv = [sys.executable, "-P", "-m", "kv_transfer.ray.node", *flags, "--ray-address", self.ray.address]
        argv += ["--ray-node-ip", host.address(Plane.RAY), "--ray-temp-dir", str(directory), "--ray-store-bytes", str(_STORE_BYTES)]
        argv += ["--ray-first-port", "11001"]
        log = self.directory / f"{name}.log"
        self.components[name] = Component(name, host, argv, env=self.environment | (env or {}), log=log, prepare=prepare)

    async def start_ray(self) -> None:
        """One node after the other: Ray gives each 30 s, which is little for all at once on two cores."""
        await self.components["head"].start()
        await self.until_head_answers(_START_S)
        for name in ("prefill", "decode", "spare"):
            await self.components[f"raylet-{name}"].start()
            await self._wait(partial(asyncio.to_thread, self._joined, name), f"the node of {name} is up", _START_S)

    def _joined(self, name: str) -> bool:
        return (self._ray_dir(name) / "ray_current_cluster").exists()

    async def until_head_answers(self, timeout_s: float) -> float:
        """Seconds until its GCS does."""
        begin = time.monotonic()
        while not await asyncio.to_thread(self.ray.ready):
            if time.monotonic() - begin > timeout_s:
                raise TimeoutError(f"Ray's head does not answer after {timeout_s:g} s")
            await asyncio.sleep(0.1)
        return time.monotonic() - begin

    async def lives(self) -> tuple[int, ...]:
        """Epochs of all workers."""
        return tuple([(await self.stats(worker_id)).epoch for worker_id in self.workers])

    def agents(self) -> tuple[int, ...]:
        """Processes of all KV agents."""
        return tuple(
            sorted(pid for host in self.hosts.values() for kind in (self._is_helper, self._is_actor) for pid in self.pids(host, kind))
        )

    async def moved(self) -> int:
        """Hand-overs by Ray, since the decode workers started."""
        stats = [await self.stats(worker_id) for worker_id in self.workers if worker_id.startswith("decode")]
        return sum(transport.num_transfers for each in stats for transport in each.transports if transport.name == "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Outcomes of the requests that ended in one stage, and the number of hand-overs."""

    name: str
    seconds: float
    outcomes: tuple[Outcome, ...]
    moved: int
    remark: str = ""

    @property
    def lost(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.recovered]

    def __str__(self) -> str:
        slowest = max((outcome.seconds for outcome in self.outcomes), default=0.0)
        counts = f"{len(self.outcomes)} | {len(self.lost)} | {self.moved} | {slowest:.2f} s"
        return f"| {self.name} | {self.seconds:.1f} s | {counts} | {self.remark} |" + "".join(
            f"\n    {outcome.status} {outcome.num_wrong} wrong: {outcome.message}" for outcome in self.lost[:5]
        )


HEADER = "| | took | requests | lost or wrong | handed over by Ray | slowest | |\n|---|---|---|---|---|---|---|"


class Watch:
    """Watches a system under load, stage after stage."""

    def __init__(self, system: RayInRedis, probing: Probing) -> None:
        self._system, self._probing = system, probing
        self._seen = 0
        self._moved = 0
        self._begin = time.monotonic()
        self.stages: list[Stage] = []

    async def end(self, name: str, remark: str = "") -> None:
        """Ends and prints a stage that began with the end of the one before."""
        ended, moved, now = self._probing.ended, await self._system.moved(), time.monotonic()
        outcomes = tuple(outcome for _, outcome in ended[self._seen :])
        stage = Stage(name=name, seconds=now - self._begin, outcomes=outcomes, moved=moved - self._moved, remark=remark)
        self._seen, self._moved, self._begin = self._seen + len(outcomes), moved, now
        self.stages.append(stage)
        print(stage, flush=True)


async def run(system: RayInRedis, asker: Asker, away_s: float) -> list[Stage]:
    """Raises AssertionError for a worker or an agent that did not live on."""
    async with Probing(system.target(0), asker, every_s=_EVERY_S, timeout_s=60.0) as probing:
        watch = Watch(system, probing)
        print(HEADER, flush=True)
        await asyncio.sleep(_SETTLE_S)
        await watch.end("before")
        lives, agents = await system.lives(), system.agents()
        _kill(system.program("head", "gcs_server"))
        await asyncio.sleep(1.0)
        back_s = 1.0 + await system.until_head_answers(_BACK_S)
        await asyncio.sleep(_SETTLE_S)
        await watch.end("GCS killed", f"it answers again after {back_s:.1f} s")
        _same(await system.lives(), lives, system.agents(), agents)

        await system.components["head"].stop(grace_s=30.0)
        await asyncio.sleep(away_s)
        await watch.end("head away")
        _same(await system.lives(), lives, system.agents(), agents)
        _kill(system.agent_helper("prefill-0"))
        await asyncio.sleep(_SETTLE_S)
        await watch.end("head away, and a prefill worker's KV agent dies")
        await system.components["head"].start()
        back_s = await system.until_head_answers(_BACK_S)
        await asyncio.sleep(_SETTLE_S)
        await watch.end("head back", f"it answers {back_s:.1f} s after its start")
        await system.until_whole(_BACK_S)
        begin = time.monotonic()
        _kill(system.agent_helper("decode-0"))
        await asyncio.sleep(1.0)
        await system.until_whole(_BACK_S)
        joined_s = time.monotonic() - begin
        await asyncio.sleep(_SETTLE_S)
        await watch.end("a decode worker's KV agent dies", f"another one has joined {joined_s:.1f} s later")
    assert await system.lives() == lives, "a worker was started again"
    held = await system.until_empty(60.0)
    assert replace(held, markers=0).nothing, f"left behind: {held}"
    return watch.stages


def _kill(pids: list[int]) -> None:
    assert pids, "there is no such process"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _same(lives: tuple[int, ...], before: tuple[int, ...], agents: tuple[int, ...], agents_before: tuple[int, ...]) -> None:
    assert lives == before, f"a worker was started again: epochs {before}, then {lives}"
    assert agents == agents_before, f"a KV agent was lost: processes {agents_before}, then {agents}"


async def main(model: Path, parent: Path, away_s: float) -> int:
    system = RayInRedis(model, parent)
    try:
        await system.start(_START_S)
        stages = await run(system, Asker(ModelCard.load(model).vocab_size), away_s)
    except BaseException:
        print(system.log_tails(), file=sys.stderr)
        raise
    finally:
        await system.stop()
    lost = sum(len(stage.lost) for stage in stages)
    still = [stage.name for stage in stages if not stage.moved]
    print(f"{sum(len(stage.outcomes) for stage in stages)} requests, {lost} lost; epochs of all workers unchanged; nothing left behind")
    if still:
        print(f"nothing was handed over while: {', '.join(still)}")
    return 1 if lost or still else 0


def _save_model(directory: Path) -> None:
    """Runs in a process that ends, as it imports torch."""
    code = f"import sys; sys.path.insert(0, {str(_ROOT / 'tests')!r}); import tiny_models; from pathlib import Path\n"
    subprocess.run([sys.executable, "-c", code + "tiny_models.save_tiny_model(Path(sys.argv[1]))", str(directory)], check=True)


if __name__ == "__main__":
    namespaces.enter()
    parser = argparse.ArgumentParser(prog="head_restart.py")
    parser.add_argument("--away-s", type=float, default=_AWAY_S, help="how long the head stays away")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="h-", dir="/tmp") as scratch:
        _save_model(Path(scratch) / "model")
        sys.exit(asyncio.run(main(Path(scratch) / "model", Path(scratch), flags.away_s)))
