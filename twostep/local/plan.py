"""Where everything of one system on this machine is: model, ports, GPUs, run directory. Settled before anything starts."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twostep.errors import SetupError
from twostep.lab.plan.model import weight_bytes
from twostep.local import redis_server
from twostep.local.capacity import CPU_KV_BYTES, need_of, room_for, this_machine
from twostep.local.gpus import GpuShare, check_device, count_gpus, describe, share_gpus
from twostep.local.options import LocalOptions
from twostep.local.ports import check_free, free_ports
from twostep.local.scaling import Bounds, Scale
from twostep.model.loading.store import default_cache_dir, resolve
from twostep.process.free_memory import check_memory, gib

LOOPBACK = "127.0.0.1"
# Ray would replace 127.0.0.1 by an address of this machine's own.
RAY_HOST = "127.0.0.2" if sys.platform == "linux" else LOOPBACK
# Of each worker, the least (kv_transfer/ray/ring.py).
_RING_BYTES = 64 << 20
# Ray's unix sockets lie deep below its directory, and a socket's name has 107 bytes.
_MAX_RUN_DIR_BYTES = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorker:
    """A worker's process: who it is, in which role it begins, where it listens, and on which GPU it runs; None: that is its own choice."""

    worker_id: str
    role: str
    port: int
    health_port: int
    metrics_port: int
    gpu: GpuShare | None = None

    @classmethod
    def new(cls, worker_id: str, role: str, gpu: GpuShare | None) -> LocalWorker:
        """On ports that are free now."""
        port, health_port, metrics_port = free_ports(3)
        return cls(worker_id=worker_id, role=role, port=port, health_port=health_port, metrics_port=metrics_port, gpu=gpu)

    @property
    def module(self) -> str:
        return f"{self.role}_worker"

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def health_address(self) -> str:
        return f"{LOOPBACK}:{self.health_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
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
    """Those of the start."""
    places: tuple[GpuShare | None, ...]
    """One for each worker that there may be at once; the first are those of `workers`."""
    scale: Scale | None = None
    """How many workers there may be; None: those of the start, always."""
    scaler_port: int = 0
    scaler_metrics_port: int = 0

    @property
    def scaler_address(self) -> str:
        return f"{LOOPBACK}:{self.scaler_port}"

    @property
    def secret_file(self) -> Path:
        """The deployment secret that all processes share."""
        return self.run_dir / "secret"

    @property
    def ray_dir(self) -> Path:
        return self.run_dir / "ray"


def make_plan(options: LocalOptions, *, environ: Mapping[str, str], progress: Callable[[str], None]) -> LocalPlan:
    """Checks what can be known before anything starts. Fetches and converts a model given by name. Blocks; raises SetupError."""
    if options.worker.runner == "model":
        # Before a model is fetched for nothing.
        check_device(options.worker.device, environ)
    model_dir = resolve(options.model, cache_dir=default_cache_dir(environ), progress=progress).resolve()
    _check_model(model_dir)
    if options.port:
        check_free(options.host, options.port, "--port")
    if options.wanted_http_port:
        check_free(options.host, options.wanted_http_port, "--http-port")
    if not options.redis_url:
        redis_server.server_binary()
    num_gpus = _num_gpus(options, environ)
    if options.worker.runner == "model" and not num_gpus and options.worker.device in ("auto", "cpu"):
        _check_memory(options, model_dir)
    if options.uses_ray:
        _check_shared_memory(options)
    scale = _scale(options, model_dir, num_gpus, progress) if options.autoscale else None
    ports = iter(free_ports(8))
    port = options.port or next(ports)
    roles = [("prefill", i) for i in range(options.num_prefill)] + [("decode", i) for i in range(options.decode)]
    names = [f"{role}-{index}" for role, index in roles]
    places = _deal_gpus(options, names, num_gpus, progress, num_places=scale.total if scale is not None else len(names))
    workers = tuple(LocalWorker.new(name, role, gpu) for name, (role, _), gpu in zip(names, roles, places, strict=False))
    ray_port = next(ports)
    run_dir = _make_run_dir()
    return LocalPlan(
        model_dir=model_dir,
        model_name=options.worker.served_model_name or (options.model if not Path(options.model).is_dir() else model_dir.name),
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
        places=tuple(places),
        scale=scale,
        scaler_port=next(ports),
        scaler_metrics_port=next(ports),
    )


def _check_memory(options: LocalOptions, model_dir: Path) -> None:
    """All workers take theirs at the same time, so each would find that there is enough. Raises SetupError."""
    num = options.num_workers
    own_ray = options.uses_ray and not options.ray_address
    check_memory(
        {
            f"weights of {num} workers": num * weight_bytes(model_dir, options.worker.dtype),
            "their KV caches": num * (options.worker.kv_cache_memory_bytes or CPU_KV_BYTES),
            "Ray's object store": options.store_bytes if own_ray else 0,
        },
        "lower --kv-cache-memory-bytes, --prefill or --decode"
        + (", or --ray-store-bytes" if own_ray else "")
        + ", take a smaller model, or end other processes",
    )


def _check_shared_memory(options: LocalOptions, directory: Path = Path("/dev/shm")) -> None:
    """Each worker takes its ring at its start, and would have no transport without it. Raises SetupError."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError:  # then rings lie in the run directory
        return
    rings = options.num_workers * (options.worker.kv_ring_bytes or _RING_BYTES)
    if rings > free:
        raise SetupError(
            f"{options.num_workers} workers share {gib(rings)} of memory with their KV agents, and {directory} has {gib(free)} left: make "
            f"it larger (mount -o remount,size=2G {directory}; docker run --shm-size 2g), remove what fills it, start fewer workers, or "
            "give --aggregated, which hands nothing over"
        )


def _num_gpus(options: LocalOptions, environ: Mapping[str, str]) -> int:
    """That are ours to deal out."""
    return (count_gpus(environ) or 0) if options.worker.runner == "model" and options.worker.device in ("auto", "cuda") else 0


def _deal_gpus(
    options: LocalOptions, names: Sequence[str], num_gpus: int, progress: Callable[[str], None], *, num_places: int
) -> Sequence[GpuShare | None]:
    """The GPU of each place, of which `names` have the first; None where it is not for us to choose."""
    utilization = options.worker.gpu_memory_utilization if "gpu-memory-utilization" in options.given else None
    shares = share_gpus(num_places, num_gpus, per_worker=options.worker.tensor_parallel_size, utilization=utilization)
    if not shares:
        return [None] * num_places
    progress(describe(names, shares[: len(names)]))
    return shares


def _scale(options: LocalOptions, model_dir: Path, num_gpus: int, progress: Callable[[str], None]) -> Scale:
    """Bounds that are not given are what the machine has room for, and so is that of both roles together."""
    need = need_of(
        model_dir,
        fake=options.worker.runner == "fake",
        num_gpus=min(options.worker.tensor_parallel_size, num_gpus),
        kv_cache_bytes=options.worker.kv_cache_memory_bytes,
    )
    room = room_for(this_machine(num_gpus), need)
    most = max(room.num_workers, options.num_workers)
    min_prefill, min_decode = options.least("prefill"), options.least("decode")
    prefill = Bounds(least=min_prefill, most=options.most("prefill") or max(options.num_prefill, most - min_decode))
    decode = Bounds(least=min_decode, most=options.most("decode") or max(options.decode, most - min_prefill))
    scale = Scale(prefill=prefill, decode=decode, total=min(most, prefill.most + decode.most))
    progress(
        f"autoscaler: {prefill.least} to {prefill.most} prefill, {decode.least} to {decode.most} decode workers, {scale.total} together at "
        f"most" + (f" for want of {room.limit}" if scale.total == room.num_workers < prefill.most + decode.most else "")
    )
    if scale.total <= options.num_workers:
        progress(f"autoscaler: the {options.num_workers} workers that start are all that there is room for: none will be added")
    return scale


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
