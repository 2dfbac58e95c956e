"""A whole Twostep on one machine: its life, and when it serves.

1. make_plan() (plan.py): model, GPUs, ports, a given Redis are checked; a private run directory is made
2. start(): Redis and, unless aggregated, Ray side by side; router and workers (components.py) as soon as Redis answers
3. it serves when the router lists every worker and every worker that hands KV over has a transport that is ready
4. with --autoscale, workers come and go from now on (autoscale.py)
5. stop(): router, then workers, then Ray and Redis; clear(): the run directory goes, but for the logs of a failed start
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from twostep.client import AsyncClient
from twostep.errors import SetupError, TwostepError
from twostep.keys.api_keys import system_key
from twostep.keys.exposure import open_door
from twostep.keys.secret import load_secret
from twostep.local import redis_server
from twostep.local.autoscale import LocalAutoscale, Scale, ScalerClient
from twostep.local.components import Components, write_secret
from twostep.local.plan import LOOPBACK, LocalOptions, LocalPlan, LocalWorker
from twostep.local.ports import check_reachable
from twostep.local.probes import Probes
from twostep.local.supervisor import Component, ComponentFailed, Observer, Supervisor

_POLL_S = 0.1


class LocalSystem:
    """The processes of one LocalPlan. start(), then wait() or use it, then stop() in any case."""

    def __init__(self, options: LocalOptions, plan: LocalPlan, *, environ: Mapping[str, str], observer: Observer) -> None:
        self.plan = plan
        self._options = options
        self._probes = Probes()
        write_secret(plan.secret_file)
        self._secret = load_secret(plan.secret_file)
        self._components = Components(options, plan, environ=environ, probes=self._probes)
        self.supervisor = Supervisor(self._components.all(), run_dir=plan.run_dir, observer=observer)
        self._observer = observer
        self._failed = False
        self._scaling: asyncio.Task[None] | None = None

    @property
    def drain_timeout_s(self) -> float:
        return self._options.drain_timeout

    @property
    def target(self) -> str:
        """Where a client on this machine finds the router."""
        host = self._options.host
        return f"{'localhost' if host in ('', '0.0.0.0', '::', LOOPBACK) else host}:{self.plan.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://{self.target.rpartition(':')[0]}:{self.plan.http_port}"

    @property
    def open_door(self) -> str:
        """Returns a warning of a router that lets everybody in; empty if it does not."""
        return open_door(
            self._options.host,
            {"gRPC": self.plan.grpc_port, "HTTP": self.plan.http_port},
            asks_for_keys=self._options.asks_for_keys,
            # The router's certificate, if it had one, would have to come from a variable, and those are a client's (components.py).
            asks_for_certificates=False,
        )

    @property
    def metrics_urls(self) -> dict[str, str]:
        found = {"router": self.plan.router_metrics_port} | {worker.worker_id: worker.metrics_port for worker in self.plan.workers}
        if self.plan.scale is not None:
            found["autoscaler"] = self.plan.scaler_metrics_port
        hosts = {"router": self.target.rpartition(":")[0]}
        return {name: f"http://{hosts.get(name, LOOPBACK)}:{port}/metrics" for name, port in found.items()}

    async def start(self) -> None:
        """Returns when the system serves. Raises SetupError, with the end of a log and what to do."""
        self._failed = True
        if not self.plan.own_redis:
            reason = await redis_server.answers(self.plan.redis_url)
            if reason:
                raise SetupError(
                    f"no Redis answers at {self.plan.redis_url} ({reason}); start it, or leave out --redis-url to get one here"
                )
        if self._options.uses_ray and not self.plan.own_ray:
            await check_reachable(self.plan.ray_address, "--ray-address", "start that Ray, or leave the flag out to get one here")
        await self.supervisor.start()
        await self._until_serving()
        self._failed = False
        if self.plan.scale is not None:
            self._scaling = asyncio.create_task(self._autoscale(self.plan.scale), name="autoscale")

    async def wait(self) -> None:
        """Until something happens that no restart can mend, which it raises."""
        ended = asyncio.ensure_future(self.supervisor.wait())
        try:
            await asyncio.wait([ended, *([self._scaling] if self._scaling is not None else [])], return_when=asyncio.FIRST_COMPLETED)
            if self._scaling is not None and self._scaling.done():
                self._scaling.result()
            await ended
        finally:
            ended.cancel()

    async def stop(self) -> None:
        """Drains and stops everything. Idempotent."""
        if self._scaling is not None:
            # Nothing is started from here on.
            self._scaling.cancel()
            await asyncio.wait([self._scaling])
        await self.supervisor.stop()
        await self._probes.close()

    async def clear(self) -> None:
        """After stop(): of the run directory only the logs of a failed start remain."""
        await asyncio.to_thread(_clear, self.plan.run_dir, keep_logs=self._failed)

    def kill(self) -> None:
        self.supervisor.kill()

    def interrupted(self) -> None:
        """The start was ended on purpose: clear() need not keep the logs."""
        self._failed = False

    async def held(self) -> dict[str, str]:
        """Returns what each worker still holds; workers that hold nothing are left out."""
        states = {
            worker.worker_id: await self._probes.worker(worker.address, self._secret, check_integrity=True) for worker in self.plan.workers
        }
        return {name: "does not answer" if state is None else state.held for name, state in states.items() if state is None or state.held}

    async def _autoscale(self, scale: Scale) -> None:
        client = ScalerClient(self.plan.scaler_address, self.plan.redis_url, load_secret(self.plan.secret_file))

        def make(worker_id: str, role: str, place: int) -> Component:
            return self._components.worker(LocalWorker.new(worker_id, role, self.plan.places[place]))

        first = [(worker.worker_id, worker.role) for worker in self.plan.workers]
        try:
            scaling = LocalAutoscale(
                scale, self.supervisor, first, make=make, ask=client.wanted, roles=client.roles, say=self._observer.line
            )
            await scaling.run()
        finally:
            await client.close()

    async def _until_serving(self) -> None:
        deadline = time.monotonic() + self._options.start_timeout
        missing = "the router does not answer"
        async with AsyncClient(self.target, api_key=self.key(), max_retries=0) as client:
            while time.monotonic() < deadline:
                missing = await self._missing(client)
                if not missing:
                    return
                await asyncio.sleep(_POLL_S)
        raise ComponentFailed(
            f"everything runs, but after {self._options.start_timeout:g} s {missing}; the logs are in {self.plan.run_dir / 'logs'}"
        )

    async def _missing(self, client: AsyncClient) -> str:
        """Returns what keeps the system from serving; empty if nothing does."""
        try:
            models = await client.models(timeout=2)
        except TwostepError as error:
            return f"the router does not answer: {error.message}"
        wanted = (self._options.num_prefill, self._options.decode)
        found = (models[0].prefill_workers, models[0].decode_workers) if models else (0, 0)
        if found[0] < wanted[0] or found[1] < wanted[1]:
            return f"the router sees {found[0]} of {wanted[0]} prefill and {found[1]} of {wanted[1]} decode workers"
        for worker in self.plan.workers:
            state = await self._probes.worker(worker.address, self._secret)
            if state is None:
                return f"{worker.worker_id} does not answer"
            if not state.transport_ready and not self._options.aggregated:
                return f"{worker.worker_id} has no KV transport that is ready"
        return ""

    def key(self) -> str | None:
        """Returns the key that this process shows the router, if that wants one of everybody."""
        if not self._options.asks_for_keys:
            return None
        return system_key(self._secret)


def _clear(run_dir: Path, *, keep_logs: bool) -> None:
    # What failed before any process began has written nothing that would be worth keeping.
    keep_logs = keep_logs and (run_dir / "logs").is_dir() and any((run_dir / "logs").iterdir())
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        if not (keep_logs and path.name == "logs"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    if not keep_logs:
        shutil.rmtree(run_dir, ignore_errors=True)
