"""Where everything of one system on this machine is: model, ports, GPUs, run directory. Settled before anything starts."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twostep.errors import SetupError
from twostep.local import redis_server
from twostep.local.gpus import GpuShare, check_device, count_gpus, describe, share_gpus
from twostep.local.options import LocalOptions
from twostep.local.ports import check_free, free_ports
from twostep.models.store import default_cache_dir, resolve

LOOPBACK = "127.0.0.1"
# Ray would replace 127.0.0.1 by an address of this machine's own.
RAY_HOST = "127.0.0.2" if sys.platform == "linux" else LOOPBACK
# Ray's unix sockets lie deep below its directory, and a socket's name has 107 bytes.
_MAX_RUN_DIR_BYTES = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorker:
    """A worker's process: who it is, where it listens, and on which GPU it runs; None: that is its own choice."""

    worker_id: str
    module: str
    port: int
    health_port: int
    metrics_port: int
    gpu: GpuShare | None = None

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def health_address(self) -> str:
        return f"{LOOPBACK}:{self.health_port}"


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

    @property
    def secret_file(self) -> Path:
        """The deployment secret that all processes share."""
        return self.run_dir / "secret"

    @property
    def ray_dir(self) -> Path:
        return self.run_dir / "ray"


def make_plan(options: LocalOptions, *, environ: Mapping[str, str], progress: Callable[[str], None]) -> Plan:
    """Checks what can be known before anything starts. Fetches and converts a model given by name. Blocks; raises SetupError."""
    if options.runner == "model":
        # Before a model is fetched for nothing.
        check_device(options.device, environ)
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
        ray_address=options.ray_address or (f"{RAY_HOST}:{ray_port}" if options.uses_ray else ""),
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
    shares = share_gpus(len(names), num_gpus or 0, per_worker=options.tensor_parallel_size, utilization=options.gpu_memory_utilization)
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
