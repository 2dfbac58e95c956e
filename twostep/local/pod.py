"""The workers of one pod: `python -P -m twostep.local.pod`, the one process of a container that has several GPUs.

CUDA IPC joins processes that see each other's GPUs and share their namespaces. Those of one container do, those of two pods do not.

1. Each worker is a process with its own name, ports and GPUs; every other flag it reads from the environment, as it would alone.
2. One that ends is started again; one that stands still for a minute is killed first. The others go on meanwhile.
3. The pod is live while this process is, and ready while every worker is (--health-port): from a worker's death to the look after its
   return it is not.
4. SIGTERM drains all workers at once; a second one kills what is left.

worker i, prefill first:   gRPC first + 10 i   health + 1   metrics + 2   GPUs from i * gpus per worker
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from twostep.errors import SetupError
from twostep.local.probes import Probes
from twostep.local.supervisor import Component, Observer, Supervisor, until_interrupted
from twostep.process.log import setup_logging
from twostep.rpc.health import READINESS, HealthBoard
from twostep.rpc.server import health_server
from twostep.settings.pod import PodSettings
from twostep.settings.reading import CONFIG_VARIABLE, read_settings
from twostep.worker.config import parse_config

log = logging.getLogger("twostep.local.pod")

_LOOK_EVERY_S = 2.0
# A worker says that it is not live once its work has seen no step for two minutes; so much longer it may take to come round.
_STALLED_S = 60.0
# From the drain's end to the worker's (twostep/rpc/lifecycle.py), and some more.
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class PodWorker:
    """One worker's process: the rest of its flags are the environment's."""

    name: str
    role: str
    port: int
    flags: tuple[str, ...]

    @property
    def health_address(self) -> str:
        return f"127.0.0.1:{self.port + 1}"

    @property
    def argv(self) -> tuple[str, ...]:
        ports = (f"--grpc-port={self.port}", f"--health-port={self.port + 1}", f"--metrics-port={self.port + 2}")
        return (sys.executable, "-P", "-m", f"{self.role}_worker", *ports, f"--worker-id={self.name}", *self.flags)


def pod_workers(config: PodSettings) -> list[PodWorker]:
    roles = [("prefill", i) for i in range(config.prefill)] + [("decode", i) for i in range(config.decode)]
    workers = []
    for index, (role, number) in enumerate(roles):
        flags = config.prefill_flags if role == "prefill" else config.decode_flags
        if config.gpus_per_worker:
            flags = (f"--device=cuda:{index * config.gpus_per_worker}", *flags)
        if config.gpus_per_worker > 1:
            flags = (f"--tensor-parallel-size={config.gpus_per_worker}", *flags)
        name = f"{config.pod_name}-{role}-{number}"
        workers.append(PodWorker(name, role, config.grpc_port + index * config.PORTS_EACH, flags))
    return workers


def parse_pod(argv: Sequence[str] | None = None) -> PodSettings:
    return read_settings(
        PodSettings, argv, prog="python -P -m twostep.local.pod", description="Several workers as processes of one container."
    )


def check_workers(config: PodSettings, environ: Mapping[str, str]) -> None:
    """Exits with a usage message for what a worker would refuse, as it would be started again and again for it. Raises SetupError for a
    drain that this process would not wait for."""
    for worker in {worker.role: worker for worker in pod_workers(config)}.values():
        drain_s = parse_config(worker.role, worker.argv[4:], environ).drain_timeout
        if drain_s > config.drain_timeout:
            raise SetupError(
                f"{worker.role} workers may drain for {drain_s:g} s, and their pod waits {config.drain_timeout:g}: raise --drain-timeout"
            )


class Pod(Observer):
    """start(), watch() until cancelled, stop(). The supervisor's observer."""

    def __init__(self, config: PodSettings, environ: Mapping[str, str], run_dir: Path) -> None:
        super().__init__(log.info)
        self._config = config
        self._workers = {worker.name: worker for worker in pod_workers(config)}
        self._probes = Probes()
        self.board = HealthBoard()
        # Of those that have been ready in their present life: when they last said that they are live.
        self._last_live: dict[str, float] = {}
        env = {**environ, "PYTHONUNBUFFERED": "1"}
        components = [self._component(worker, env) for worker in self._workers.values()]
        self.supervisor = Supervisor(components, run_dir=run_dir, observer=self, log_files=False)

    def _component(self, worker: PodWorker, env: Mapping[str, str]) -> Component:
        return Component(
            name=worker.name,
            argv=worker.argv,
            env=env,
            ready=lambda: self._probes.healthy(worker.health_address, READINESS),
            ready_timeout_s=self._config.start_timeout,
            stop_grace_s=self._config.drain_timeout + _STOP_S,
        )

    async def start(self) -> None:
        """Returns when every worker is ready. Raises SetupError for the first that does not get so far."""
        await self.supervisor.start()
        # One that was ready may have died while another was still coming up.
        self.board.set(READINESS, self._all_up())
        log.info("ready: %s", ", ".join(self._workers))

    async def watch(self) -> None:
        """Until cancelled, or until a worker cannot even be started again: raises why."""
        looking = asyncio.create_task(self._look_around())
        try:
            await self.supervisor.wait()
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking

    async def stop(self) -> None:
        """Drains all. Idempotent."""
        self.board.set(READINESS, False)
        await self.supervisor.stop()
        await self._probes.close()

    async def _look_around(self) -> None:
        while True:
            states = await asyncio.gather(*(self._look(worker) for worker in self._workers.values()))
            # One that answered may have died since.
            self.board.set(READINESS, all(states) and self._all_up())
            await asyncio.sleep(_LOOK_EVERY_S)

    def _all_up(self) -> bool:
        """Each has been ready in its present life."""
        return self._last_live.keys() == self._workers.keys()

    async def _look(self, worker: PodWorker) -> bool:
        health = worker.health_address
        live, ready = await asyncio.gather(self._probes.healthy(health, "liveness"), self._probes.healthy(health, READINESS))
        if worker.name not in self._last_live:
            return False
        now = time.monotonic()
        if live:
            self._last_live[worker.name] = now
        elif now - self._last_live[worker.name] > _STALLED_S:
            log.error("%s has stood still for %g s and is killed", worker.name, _STALLED_S)
            del self._last_live[worker.name]
            self.supervisor.kill_one(worker.name)
        return ready

    def ready(self, name: str, seconds: float) -> None:
        self._last_live[name] = time.monotonic()
        super().ready(name, seconds)

    def died(self, name: str, how: str, pause_s: float) -> None:
        self._last_live.pop(name, None)
        self.board.set(READINESS, False)
        log.warning("%s: %s; next start in %g s", name, how, pause_s)


async def _serve_health(config: PodSettings, board: HealthBoard) -> grpc.aio.Server:
    server = health_server(board)
    where = f"{config.host}:{config.health_port}"
    try:
        server.add_insecure_port(where)
    except RuntimeError as error:
        raise SetupError(f"cannot listen on {where}; choose another port with --health-port") from error
    await server.start()
    return server


async def run(config: PodSettings, environ: Mapping[str, str], run_dir: Path) -> None:
    """Until SIGTERM or SIGINT. Raises SetupError."""
    pod = Pod(config, environ, run_dir)
    health = await _serve_health(config, pod.board)

    async def live() -> None:
        await pod.start()
        await pod.watch()

    try:
        await until_interrupted(live(), pod.supervisor.kill)
    finally:
        await pod.stop()
        await health.stop(None)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a drain, 2 if a worker cannot start (the log says what to change)."""
    config = parse_pod(argv)
    setup_logging(level=config.log_level, json_lines=config.log_json, process="pod")
    # The file of --config has this process' settings, not the workers'.
    environ = {name: value for name, value in os.environ.items() if name != CONFIG_VARIABLE}
    with tempfile.TemporaryDirectory(prefix="ts-pod-") as run_dir:
        try:
            check_workers(config, environ)
            asyncio.run(run(config, environ, Path(run_dir)))
        except SetupError as error:
            log.error("cannot start: %s", error.message)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
