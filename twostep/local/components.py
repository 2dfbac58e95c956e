"""Which processes a system on this machine consists of, and with which flags and environment each is started."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from twostep.local import redis_server
from twostep.local.autoscale import ROLES, Scale
from twostep.local.plan import LOOPBACK, RAY_HOST, LocalOptions, LocalPlan, LocalWorker
from twostep.local.ports import free_ports
from twostep.local.probes import Probes, ray_up
from twostep.local.supervisor import Component
from twostep.model.loading.store import chat_template_of

# Meant for a client of another system, true of one process only, or settled for all: wrong for every process of this one.
_NOT_FOR_CHILDREN = frozenset(
    f"TWOSTEP_{name}" for name in ("TLS_CA", "TLS_CERT", "TLS_KEY", "ADVERTISE_ADDRESS", "ROUTER_ID", "RUN_DIR", "CONFIG", "MODEL_REVISION")
)


def write_secret(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


class Components:
    """Makes the components of one plan. `all` also makes what the processes find in the run directory."""

    def __init__(self, options: LocalOptions, plan: LocalPlan, *, environ: Mapping[str, str], probes: Probes) -> None:
        self._options = options
        self._plan = plan
        self._environ = environ
        self._probes = probes

    def all(self) -> list[Component]:
        """In the order in which they are started, as far as none waits for another."""
        plan = self._plan
        components: list[Component] = []
        if plan.own_redis:
            components.append(self._redis())
        if plan.own_ray:
            components.append(self._ray())
        needs = self._needs()
        components.append(self._router(needs))
        components += [self.worker(worker) for worker in plan.workers]
        if plan.scale is not None:
            components.append(self._autoscaler(plan.scale, needs))
        return components

    def _needs(self) -> tuple[str, ...]:
        return ("redis",) if self._plan.own_redis else ()

    def _shared(self) -> tuple[str, ...]:
        """Flags of router and workers. What is not settled here they read from their environment (_env)."""
        plan = self._plan
        shared = ("--model", str(plan.model_dir), "--redis-url", plan.redis_url, "--secret-file", str(plan.secret_file))
        return (*shared, "--served-model-name", *plan.model_names, "--drain-timeout", f"{self._options.drain_timeout:g}")

    def _router(self, needs: tuple[str, ...]) -> Component:
        plan, options = self._plan, self._options
        flags = [*self._shared(), f"--host={options.host}", f"--port={plan.http_port}", f"--grpc-port={plan.grpc_port}"]
        flags += [f"--health-port={plan.router_health_port}", f"--metrics-port={plan.router_metrics_port}"]
        batch_dir = options.batch_dir if options.batch_dir is not None else plan.run_dir / "batches"
        flags.append(f"--batch-dir={batch_dir.resolve()}")
        if (template := options.router.chat_template or chat_template_of(options.model)) is not None:
            flags.append(f"--chat-template={template.resolve()}")
        health_host = options.host if options.host not in ("", "0.0.0.0", "::") else LOOPBACK
        return Component(
            name="router",
            argv=(sys.executable, "-P", "-m", "router", *flags),
            env=self._env(),
            ready=lambda: self._probes.healthy(f"{health_host}:{plan.router_health_port}", "liveness"),
            after=needs,
            ready_timeout_s=options.start_timeout,
            stop_order=0,
            stop_grace_s=options.drain_timeout + 5,
        )

    def worker(self, worker: LocalWorker) -> Component:
        options, most = self._options, len(self._plan.places)
        threads = str(options.threads_of_each(most))
        flags = [*self._shared(), "--host", LOOPBACK, "--grpc-port", str(worker.port), "--health-port", str(worker.health_port)]
        flags += ["--metrics-port", str(worker.metrics_port)]
        flags += ["--worker-id", worker.worker_id, "--run-dir", str(self._plan.run_dir / worker.worker_id)]
        # Prefill workers are told too: they may change their role.
        flags.append("--local-prefill" if options.worker.local_prefill else "--no-local-prefill")
        flags += ["--cpu-threads", threads]
        if self._plan.own_ray:
            flags += ["--kv-budget-bytes", str(options.budget_bytes(most))]
        if self._plan.scale is not None:
            # Whatever its role comes to be, it counts for the one that it was started in.
            flags += ["--pod-owner", worker.role]
        if self._plan.ray_address:
            flags += ["--ray-address", self._plan.ray_address]
        if options.aggregated:
            flags += ["--kv-transfer", "none"]
        if worker.gpu is not None:
            flags += ["--device", f"{options.worker.device}:{worker.gpu.index}", "--gpu-memory-utilization", str(worker.gpu.utilization)]
        return Component(
            name=worker.worker_id,
            argv=(sys.executable, "-P", "-m", worker.module, *flags),
            env=self._env(OMP_NUM_THREADS=threads),
            ready=lambda: self._probes.healthy(worker.health_address, "readiness"),
            after=self._needs(),
            ready_timeout_s=options.start_timeout,
            stop_order=1,
            stop_grace_s=options.drain_timeout + 5,
        )

    def _autoscaler(self, scale: Scale, needs: tuple[str, ...]) -> Component:
        """The same as on Kubernetes; what else it can be told, it is told by its TWOSTEP_ variables."""
        plan, options = self._plan, self._options
        (health_port,) = free_ports(1)
        num_gpus = str(options.worker.tensor_parallel_size)
        flags = ["--redis-url", plan.redis_url, "--secret-file", str(plan.secret_file), "--host", LOOPBACK]
        flags += ["--grpc-port", str(plan.scaler_port), "--health-port", str(health_port)]
        flags += ["--metrics-port", str(plan.scaler_metrics_port)]
        for role in ROLES:
            bounds = scale.of(role)
            flags += [f"--{role}-min-workers", str(bounds.least), f"--{role}-max-workers", str(bounds.most)]
            flags += [f"--{role}-gpus-per-worker", num_gpus]
        # Nobody rounds between it and the workers, and there are no pods to be marked.
        flags += ["--worker-drain", f"{options.drain_timeout:g}", "--hpa-tolerance", "0", "--kubernetes-api", "none"]
        flags += ["--max-workers", str(scale.total)]
        return Component(
            name="autoscaler",
            argv=(sys.executable, "-P", "-m", "twostep.autoscaler", *flags),
            env=self._env(),
            ready=lambda: self._probes.healthy(f"{LOOPBACK}:{health_port}", "readiness"),
            after=needs,
            ready_timeout_s=options.start_timeout,
            stop_order=0,
        )

    def _redis(self) -> Component:
        directory = self._plan.run_dir / "redis"
        directory.mkdir(mode=0o700)

        async def ready() -> bool:
            return not await redis_server.answers(self._plan.redis_url)

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
        directory = self._plan.ray_dir
        write_secret(directory / "token")
        flags = ["--port", str(self._plan.ray_port), "--client-port", str(self._plan.ray_client_port)]
        flags += ["--object-store-bytes", str(self._options.store_bytes)]
        return Component(
            name="ray",
            argv=(sys.executable, "-P", "-m", "kv_transfer.ray.head", "--temp-dir", str(directory), *flags),
            env=self._env(),
            ready=lambda: ray_up(directory, RAY_HOST, self._plan.ray_port),
            # An earlier life's sign of being up.
            prepare=lambda: (directory / "ray_current_cluster").unlink(missing_ok=True),
            ready_timeout_s=self._options.start_timeout,
            # It gives its own parts 30 s to come up, whatever it is told, and a busy machine may not.
            start_attempts=2,
            stop_order=2,
            hint="Is the machine very busy? Ray gives itself 30 s to start. Or join a Ray that runs already with --ray-address.",
        )

    def _env(self, **more: str) -> dict[str, str]:
        env = {name: value for name, value in self._environ.items() if name not in _NOT_FOR_CHILDREN}
        env |= {**self._options.variables, "PYTHONUNBUFFERED": "1", **more}
        # A proxy set for the internet knows nothing of this machine.
        local = ",".join(filter(None, (env.get("no_grpc_proxy") or env.get("no_proxy", ""), "localhost,127.0.0.1,127.0.0.2")))
        env["no_grpc_proxy"] = local
        if self._plan.own_ray:
            # Whoever joins this Ray needs its token. Its actors run at niceness 15 unless told: a busy machine would starve the hand-overs.
            env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._plan.ray_dir / "token"), "RAY_USAGE_STATS_ENABLED": "0"}
            env |= {"RAY_enable_worker_prestart": "0", "RAY_worker_niceness": "0"}
        return env
