"""A whole Twostep on one machine: which processes, with which flags, and when it serves.

1. plan(): model, ports, a given Redis are checked; a private run directory with the deployment secret is made
2. start(): Redis and, unless aggregated, Ray side by side; router and workers as soon as Redis answers
3. it serves when the router lists every worker and every worker that hands KV over has a transport that is ready
4. stop(): router, then workers, then Ray and Redis; clear(): the run directory goes, but for the logs of a failed start
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twostep.api_keys import system_key
from twostep.client import AsyncClient
from twostep.errors import SetupError, TwostepError
from twostep.local import redis_server
from twostep.local.gpus import GpuShare, count_gpus, describe, share_gpus
from twostep.local.options import LocalOptions
from twostep.local.ports import check_free, check_reachable, free_ports
from twostep.local.probes import Probes, ray_up
from twostep.local.supervisor import Component, ComponentFailed, Observer, Supervisor
from twostep.models.store import default_cache_dir, resolve
from twostep.secret import load_secret

# Ray's unix sockets lie deep below its directory, and a socket's name has 107 bytes.
_MAX_RUN_DIR_BYTES = 36
_POLL_S = 0.1
# Ray would replace 127.0.0.1 by an address of this machine's own.
_RAY_HOST = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
_LOOPBACK = "127.0.0.1"
# Meant for a client of another system, or true of one process only: wrong for every process of this one.
_NOT_FOR_CHILDREN = frozenset(f"TWOSTEP_{name}" for name in ("TLS_CA", "TLS_CERT", "TLS_KEY", "ADVERTISE_ADDRESS", "ROUTER_ID", "RUN_DIR"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorker:
    worker_id: str
    module: str
    port: int
    health_port: int
    metrics_port: int
    gpu: GpuShare | None = None

    @property
    def address(self) -> str:
        return f"{_LOOPBACK}:{self.port}"

    @property
    def health_address(self) -> str:
        return f"{_LOOPBACK}:{self.health_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where everything of one system is."""

    model_dir: Path
    model_name: str
    run_dir: Path
    port: int
    router_health_port: int
    router_metrics_port: int
    http_port: int
    redis_url: str
    own_redis: bool
    ray_address: str
    ray_port: int
    ray_client_port: int
    own_ray: bool
    workers: tuple[LocalWorker, ...]


def plan(options: LocalOptions, *, environ: Mapping[str, str], progress: Callable[[str], None]) -> Plan:
    """Checks what can be known before anything starts. Fetches and converts a model given by name. Blocks; raises SetupError."""
    model_dir = resolve(options.model, cache_dir=default_cache_dir(environ), progress=progress).resolve()
    _check_model(model_dir)
    if options.port:
        check_free(options.host, options.port, "--port")
    if options.wanted_http_port:
        check_free(options.host, options.wanted_http_port, "--http-port")
    if not options.redis_url:
        redis_server.server_binary()
    num_workers = options.num_prefill + options.num_decode
    ports = iter(free_ports(6 + 3 * num_workers))
    port = options.port or next(ports)
    roles = [("prefill", i) for i in range(options.num_prefill)] + [("decode", i) for i in range(options.num_decode)]
    names = [f"{role}-{index}" for role, index in roles]
    gpus = _deal_gpus(options, names, environ, progress)
    workers = tuple(
        LocalWorker(worker_id=name, module=f"{role}_worker", port=next(ports), health_port=next(ports), metrics_port=next(ports), gpu=gpu)
        for name, (role, _), gpu in zip(names, roles, gpus, strict=True)
    )
    ray_port = next(ports)
    run_dir = _make_run_dir()
    return Plan(
        model_dir=model_dir,
        model_name=options.served_model_name or (options.model if not Path(options.model).is_dir() else model_dir.name),
        run_dir=run_dir,
        port=port,
        router_health_port=next(ports),
        router_metrics_port=next(ports),
        http_port=options.wanted_http_port or next(ports),
        redis_url=options.redis_url or redis_server.server_url(run_dir / "redis"),
        own_redis=not options.redis_url,
        ray_address=options.ray_address or (f"{_RAY_HOST}:{ray_port}" if options.uses_ray else ""),
        ray_port=ray_port,
        ray_client_port=next(ports),
        own_ray=options.uses_ray and not options.ray_address,
        workers=workers,
    )


def _deal_gpus(
    options: LocalOptions, names: Sequence[str], environ: Mapping[str, str], progress: Callable[[str], None]
) -> Sequence[GpuShare | None]:
    """Each worker's GPU; None where it is not for us to choose."""
    num_gpus = count_gpus(environ) if options.runner == "model" and options.device in ("", "auto", "cuda") else 0
    shares = share_gpus(len(names), num_gpus, per_worker=options.tensor_parallel_size, utilization=options.gpu_memory_utilization)
    if not shares:
        return [None] * len(names)
    progress(describe(names, shares))
    return shares


def _check_model(directory: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise SetupError(f"{directory} is no model directory: it has no {name}; give a Hugging Face model directory, or a known name")
    try:
        json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise SetupError(f"{directory / 'config.json'} cannot be read: {error}; download the model again") from error


def _make_run_dir() -> Path:
    """Private, and short enough for the sockets in it."""
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if len(os.fsencode(parent)) + len("/ts-12345678") <= _MAX_RUN_DIR_BYTES and os.access(parent, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="ts-", dir=parent))
    raise SetupError("there is no short temporary directory to write to; set TMPDIR to one like /tmp")


def _clear(run_dir: Path, *, keep_logs: bool) -> None:
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        if not (keep_logs and path.name == "logs"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    if not keep_logs:
        shutil.rmtree(run_dir, ignore_errors=True)


def _write_secret(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


class LocalSystem:
    """The processes of one Plan. start(), then wait() or use it, then stop() in any case."""

    def __init__(self, options: LocalOptions, plan: Plan, *, environ: Mapping[str, str], observer: Observer) -> None:
        self.plan = plan
        self._options = options
        self._environ = environ
        self._probes = Probes()
        _write_secret(self._secret)
        self.supervisor = Supervisor(self._components(), run_dir=plan.run_dir, observer=observer)
        self._failed = False

    @property
    def drain_timeout_s(self) -> float:
        return self._options.drain_timeout_s

    @property
    def target(self) -> str:
        """Where a client on this machine finds the router."""
        host = self._options.host
        return f"{'localhost' if host in ('', '0.0.0.0', '::', _LOOPBACK) else host}:{self.plan.port}"

    @property
    def http_url(self) -> str:
        """Where OpenAI's clients find the router."""
        return f"http://{self.target.rpartition(':')[0]}:{self.plan.http_port}"

    @property
    def metrics_urls(self) -> dict[str, str]:
        """Where each process serves its metrics."""
        found = {"router": self.plan.router_metrics_port} | {worker.worker_id: worker.metrics_port for worker in self.plan.workers}
        hosts = {"router": self.target.rpartition(":")[0]}
        return {name: f"http://{hosts.get(name, _LOOPBACK)}:{port}/metrics" for name, port in found.items()}

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

    async def wait(self) -> None:
        """Until something happens that no restart can mend, which it raises."""
        await self.supervisor.wait()

    async def stop(self) -> None:
        """Drains and stops everything. Idempotent."""
        await self.supervisor.stop()
        await self._probes.close()

    async def clear(self) -> None:
        """After stop(): of the run directory only the logs of a failed start remain."""
        await asyncio.to_thread(_clear, self.plan.run_dir, keep_logs=self._failed)

    def kill(self) -> None:
        self.supervisor.kill()

    def interrupted(self) -> None:
        """The start was ended on purpose: stop() need not keep the logs."""
        self._failed = False

    async def held(self) -> dict[str, str]:
        """What each worker still holds; workers that hold nothing are left out."""
        states = {worker.worker_id: await self._probes.worker(worker.address) for worker in self.plan.workers}
        return {name: "does not answer" if state is None else state.held for name, state in states.items() if state is None or state.held}

    async def _until_serving(self) -> None:
        deadline = time.monotonic() + self._options.start_timeout_s
        missing = "the router does not answer"
        async with AsyncClient(self.target, api_key=self._key(), max_retries=0) as client:
            while time.monotonic() < deadline:
                missing = await self._missing(client)
                if not missing:
                    return
                await asyncio.sleep(_POLL_S)
        raise ComponentFailed(
            f"everything runs, but after {self._options.start_timeout_s:g} s {missing}; the logs are in {self.plan.run_dir / 'logs'}"
        )

    async def _missing(self, client: AsyncClient) -> str:
        """What keeps the system from serving; empty if nothing does."""
        try:
            models = await client.models(timeout=2)
        except TwostepError as error:
            return f"the router does not answer: {error.message}"
        wanted = (self._options.num_prefill, self._options.num_decode)
        found = (models[0].prefill_workers, models[0].decode_workers) if models else (0, 0)
        if found[0] < wanted[0] or found[1] < wanted[1]:
            return f"the router sees {found[0]} of {wanted[0]} prefill and {found[1]} of {wanted[1]} decode workers"
        for worker in self.plan.workers:
            state = await self._probes.worker(worker.address)
            if state is None:
                return f"{worker.worker_id} does not answer"
            if not state.transport_ready and not self._options.aggregated:
                return f"{worker.worker_id} has no KV transport that is ready"
        return ""

    def _key(self) -> str | None:
        """What this process shows the router, if it wants a key of everybody: its own way to them may be another variable."""
        if self._options.api_keys_file is None and not self._environ.get("TWOSTEP_API_KEYS"):
            return None
        return system_key(load_secret(self._secret))

    @property
    def _secret(self) -> Path:
        return self.plan.run_dir / "secret"

    @property
    def _ray_dir(self) -> Path:
        return self.plan.run_dir / "ray"

    def _components(self) -> list[Component]:
        plan, options = self.plan, self._options
        components: list[Component] = []
        if plan.own_redis:
            components.append(self._redis())
        if plan.own_ray:
            components.append(self._ray())
        needs = ("redis",) if plan.own_redis else ()
        shared: tuple[str, ...] = ("--model", str(plan.model_dir), "--redis-url", plan.redis_url, "--secret-file", str(self._secret))
        shared += ("--served-model-name", plan.model_name)
        if options.otlp_endpoint:
            shared += ("--otlp-endpoint", options.otlp_endpoint)
        parsers = (f"--reasoning-parser={options.reasoning_parser}", f"--tool-call-parser={options.tool_call_parser}")
        drain = ("--drain-timeout", f"{options.drain_timeout_s:g}")
        router_ports = [f"--host={options.host}", f"--port={plan.port}", f"--health-port={plan.router_health_port}"]
        router_ports += [f"--metrics-port={plan.router_metrics_port}", f"--http-port={plan.http_port}"]
        if options.api_keys_file is not None:
            router_ports.append(f"--api-keys-file={options.api_keys_file.resolve()}")
        batch_dir = options.batch_dir if options.batch_dir is not None else plan.run_dir / "batches"
        router_ports.append(f"--batch-dir={batch_dir.resolve()}")
        health_host = options.host if options.host not in ("", "0.0.0.0", "::") else _LOOPBACK
        components.append(
            Component(
                name="router",
                argv=(sys.executable, "-P", "-m", "router", *shared, *router_ports, *parsers, *drain),
                env=self._env(),
                ready=lambda: self._probes.healthy(f"{health_host}:{plan.router_health_port}", "liveness"),
                after=needs,
                ready_timeout_s=options.start_timeout_s,
                stop_order=0,
                stop_grace_s=options.drain_timeout_s + 5,
            )
        )
        components += [self._worker(worker, (*shared, *drain), needs) for worker in plan.workers]
        return components

    def _worker(self, worker: LocalWorker, shared: tuple[str, ...], needs: tuple[str, ...]) -> Component:
        options = self._options
        threads = str(options.threads_per_worker)
        flags = [*shared, "--host", _LOOPBACK, "--port", str(worker.port), "--health-port", str(worker.health_port)]
        flags += ["--metrics-port", str(worker.metrics_port)]
        flags += ["--worker-id", worker.worker_id, "--run-dir", str(self.plan.run_dir / worker.worker_id)]
        # Prefill workers are told too: they may change their role.
        flags.append("--local-prefill" if options.local_prefill else "--no-local-prefill")
        flags += ["--runner", options.runner, "--cpu-threads", threads]
        if self.plan.own_ray:
            flags += ["--kv-budget-bytes", str(options.budget_bytes)]
        for flag, value in (
            ("--ray-address", self.plan.ray_address),
            ("--kv-transfer", "none" if options.aggregated else options.kv_transfer),
            ("--kv-wire", options.kv_wire),
            ("--dtype", options.dtype),
            ("--kv-cache-dtype", options.kv_cache_dtype),
            ("--device", options.device if worker.gpu is None else f"{options.device or 'auto'}:{worker.gpu.index}"),
            ("--tensor-parallel-size", options.tensor_parallel_size if options.tensor_parallel_size > 1 else None),
            ("--gpu-memory-utilization", options.gpu_memory_utilization if worker.gpu is None else worker.gpu.utilization),
            ("--kv-cache-memory-bytes", options.kv_cache_memory_bytes),
            ("--block-size", options.block_size),
            ("--max-model-len", options.max_model_len),
            ("--max-num-seqs", options.max_num_seqs),
            ("--max-num-batched-tokens", options.max_num_batched_tokens),
        ):
            if value not in (None, ""):
                flags += [flag, str(value)]
        return Component(
            name=worker.worker_id,
            argv=(sys.executable, "-P", "-m", worker.module, *flags),
            env=self._env(OMP_NUM_THREADS=threads),
            ready=lambda: self._probes.healthy(worker.health_address, "readiness"),
            after=needs,
            ready_timeout_s=options.start_timeout_s,
            stop_order=1,
            stop_grace_s=options.drain_timeout_s + 5,
        )

    def _redis(self) -> Component:
        directory = self.plan.run_dir / "redis"
        directory.mkdir(mode=0o700)

        async def ready() -> bool:
            return not await redis_server.answers(self.plan.redis_url)

        return Component(
            name="redis",
            argv=redis_server.server_argv(redis_server.server_binary(), directory),
            env=self._env(),
            ready=ready,
            ready_timeout_s=20,
            stop_order=2,
            hint="Or run a Redis of your own and give --redis-url.",
        )

    def _ray(self) -> Component:
        directory = self._ray_dir
        _write_secret(directory / "token")
        flags = ["--port", str(self.plan.ray_port), "--client-port", str(self.plan.ray_client_port)]
        flags += ["--object-store-bytes", str(self._options.store_bytes)]
        return Component(
            name="ray",
            argv=(sys.executable, "-P", "-m", "kv_transfer.ray_local", "--temp-dir", str(directory), *flags),
            env=self._env(),
            ready=lambda: ray_up(directory, _RAY_HOST, self.plan.ray_port),
            # An earlier life's sign of being up.
            prepare=lambda: (directory / "ray_current_cluster").unlink(missing_ok=True),
            ready_timeout_s=self._options.start_timeout_s,
            stop_order=2,
            hint="Or join a Ray that runs already with --ray-address.",
        )

    def _env(self, **more: str) -> dict[str, str]:
        env = {name: value for name, value in self._environ.items() if name not in _NOT_FOR_CHILDREN}
        env |= {"PYTHONUNBUFFERED": "1", **more}
        # A proxy set for the internet knows nothing of this machine.
        local = ",".join(filter(None, (env.get("no_grpc_proxy") or env.get("no_proxy", ""), "localhost,127.0.0.1,127.0.0.2")))
        env["no_grpc_proxy"] = local
        if self.plan.own_ray:
            # Whoever joins this Ray needs its token. Its actors run at niceness 15 unless told: a busy machine would starve the hand-overs.
            env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._ray_dir / "token"), "RAY_USAGE_STATS_ENABLED": "0"}
            env |= {"RAY_enable_worker_prestart": "0", "RAY_worker_niceness": "0"}
        return env
