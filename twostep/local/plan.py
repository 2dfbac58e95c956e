"""Settles what `twostep up` was told, and where everything of the system is: model, ports, GPUs, run directory, before anything starts."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from twostep.checkpoint.agreement import check_formats
from twostep.checkpoint.architectures import take_architecture
from twostep.checkpoint.config_file import read_config
from twostep.checkpoint.context import context_of
from twostep.checkpoint.fields import Fields
from twostep.checkpoint.model_name import name_of
from twostep.checkpoint.parts import check_parts
from twostep.engine.config import check_pool
from twostep.errors import SetupError, WrongSettings
from twostep.lab.plan.model import dtype_on_cpu, read_model, weight_bytes
from twostep.local import redis_server
from twostep.local.autoscale import Bounds, Scale
from twostep.local.machine import (
    CPU_KV_BYTES,
    FAKES_PER_CORE,
    GpuShare,
    check_device,
    count_gpus,
    describe,
    memory_of,
    num_cores,
    room_for,
    share_gpus,
)
from twostep.local.ports import claim, free_ports
from twostep.model.loading.store import default_cache_dir, resolve
from twostep.process.files import file_problems
from twostep.process.free_memory import check_memory, free_memory, gib
from twostep.process.ports import check_free
from twostep.settings.autoscaler import AutoscalerSettings
from twostep.settings.reading import Texts, build
from twostep.settings.router import RouterSettings
from twostep.settings.speculative import DRAFT_MODEL, SpeculativeConfig, from_any_directory
from twostep.settings.table import Rule
from twostep.settings.up import ALL, FORWARDED, UpSettings
from twostep.settings.worker import WorkerSettings

LOOPBACK = "127.0.0.1"
# Ray would replace 127.0.0.1 by an address of this machine's own.
RAY_HOST = "127.0.0.2" if sys.platform == "linux" else LOOPBACK
# Of each worker, the least (kv_transfer/ray/ring.py).
_RING_BYTES = 64 << 20
# Ray's unix sockets lie deep below its directory, and a socket's name has 107 bytes.
_MAX_RUN_DIR_BYTES = 36
_LEAST_STORE_BYTES = 512 << 20
_MAX_WORKERS = 128
# Raises SetupError, or returns what is wrong.
_Check = Callable[[], Iterable[str] | None]
# So many times the cores that workers want are slow, and more do not come up in any time that one would wait for.
_MOST_OVERCOMMITTED = 4
# They compute elsewhere, and launch steps in turn.
_ON_GPU_PER_CORE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions(UpSettings):
    """Everything `twostep up` was told: its own settings, and those of the processes, who read them again from `variables`, besides their
    environment. `given`: names of those that were told at all. `aggregated`: no prefill workers, and so no hand-overs and no Ray; every
    decode worker computes its prompts itself."""

    worker: WorkerSettings = field(default_factory=WorkerSettings)
    router: RouterSettings = field(default_factory=lambda: RouterSettings(model=Path()))
    autoscaler: AutoscalerSettings = field(default_factory=AutoscalerSettings)
    variables: Mapping[str, str] = field(default_factory=dict)
    given: frozenset[str] = frozenset()

    @classmethod
    def of(cls, texts: Texts) -> LocalOptions:
        """Returns the options of these texts. Raises WrongSettings for all that makes no sense: here, rather than by a process whose log
        nobody reads."""
        variables = {}
        for each in (each for settings in FORWARDED.values() for each in settings):
            if each.name in texts:
                text = texts[each.name].text
                # The processes have a directory of their own.
                if each.name == "speculative-config":
                    text = from_any_directory(text)
                variables[each.variable] = os.path.abspath(text) if each.read is Path else text
        problems: list[str] = []
        options: dict[str, Any] = {"variables": variables, "given": frozenset(texts)}
        # The ports beside a process' own are chosen here.
        alone = {"health_port": -1, "metrics_port": -1}
        for name, table, defaults in (
            ("worker", WorkerSettings, alone),
            ("router", RouterSettings, {**alone, "model": Path()}),
            ("autoscaler", AutoscalerSettings, alone),
        ):
            try:
                options[name] = build(table, texts, defaults)
            except WrongSettings as error:
                problems += error.problems
        try:
            found = build(cls, texts, options, others=ALL)
        except WrongSettings as error:
            problems += error.problems
        if problems:
            raise WrongSettings(problems)
        return found

    def _autoscale_wrong(self) -> str:
        if not self.autoscale or self.aggregated:
            return ""
        for role, first in (("prefill", self.num_prefill), ("decode", self.decode)):
            least, most = self.least(role), self.most(role)
            if not 1 <= least <= first:
                return f"{{{role}-min-workers}} and {{{role}}}: give 1 at least, and start with no fewer than that"
            if most is not None and not first <= most <= _MAX_WORKERS:
                return f"{{{role}}} and {{{role}-max-workers}}: start with no more than that, and give {_MAX_WORKERS} at most"
        return ""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda up: not up.aggregated and (up.num_prefill < 1 or up.decode < 1),
            "a system needs at least one prefill and one decode worker; give --prefill and --decode of 1 or more, or --aggregated",
        ),
        Rule(
            lambda up: not up.aggregated and up.worker.kv_transfer == "none",
            "{kv-transfer} leaves prefill workers nothing to do; give --aggregated for a system without them",
        ),
        Rule(lambda up: up.aggregated and up.num_prefill, "{aggregated} and {prefill} contradict each other; leave one of them out"),
        Rule(
            lambda up: up.aggregated and up.decode < 1,
            "an aggregated system needs at least one worker, and {decode} is none; give --decode of 1 or more",
        ),
        Rule(
            lambda up: up.aggregated and not up.worker.local_prefill,
            "{aggregated} and {local-prefill} contradict each other: nobody would compute prompts; leave one of them out",
        ),
        Rule(
            lambda up: up.aggregated and up.worker.kv_transfer not in ("auto", "none"),
            "{aggregated} hands no KV over; leave {kv-transfer} out",
        ),
        Rule(lambda up: up.aggregated and up.ray_address, "{aggregated} hands no KV over; leave {ray-address} out"),
        Rule(
            lambda up: up.aggregated and up.autoscale,
            "{autoscale} holds the ratio of prefill to decode workers, and {aggregated} has none of the first; leave one of them out",
        ),
        Rule(
            lambda up: up.num_workers > _MAX_WORKERS,
            f"{{prefill}} and {{decode}} are too many for one machine; give at most {_MAX_WORKERS} together",
        ),
        Rule(
            lambda up: up.api_keys_file is not None and not up.api_keys_file.is_file(),
            "{api-keys-file} is no file; make the first key with `twostep keys create --api-keys-file FILE`",
        ),
        Rule(_autoscale_wrong),
        Rule(
            lambda up: up.ray_address and up.ray_store_bytes,
            "{ray-store-bytes} is of a Ray that is started here, and {ray-address} joins another one; leave one of them out",
        ),
    )

    def least(self, role: str) -> int:
        """Returns how few workers of a role an autoscaler may leave."""
        return (self.autoscaler.prefill if role == "prefill" else self.autoscaler.decode).min_workers

    def most(self, role: str) -> int | None:
        """Returns how many it may have; None: as many as the machine has room for."""
        pool = self.autoscaler.prefill if role == "prefill" else self.autoscaler.decode
        return pool.max_workers if f"{role}-max-workers" in self.given else None

    @property
    def num_prefill(self) -> int:
        """As told; if not, one, and in an aggregated system none."""
        return self.prefill if self.prefill is not None else 0 if self.aggregated else 1

    @property
    def api_keys_file(self) -> Path | None:
        return self.router.api_keys_file

    @property
    def asks_for_keys(self) -> bool:
        return self.router.asks_for_keys

    @property
    def uses_ray(self) -> bool:
        """Returns whether a Ray is needed, of its own or of --ray-address."""
        return not self.aggregated and not {"auto", "ray"}.isdisjoint(self.worker.kv_transfer.split(","))

    @property
    def store_bytes(self) -> int:
        """Size of the object store that KV caches travel through; it takes memory only as it is used."""
        if self.ray_store_bytes:
            return self.ray_store_bytes
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        wanted = max(_LEAST_STORE_BYTES, memory // 8)
        try:
            shared = os.statvfs("/dev/shm")
        except OSError:
            return wanted
        return max(_LEAST_STORE_BYTES, min(wanted, shared.f_bavail * shared.f_frsize // 2))

    def budget_bytes(self, num_workers: int) -> int:
        """Returns the bytes that each of so many workers may keep published while it has the prefill role, which all but one may come to
        have: their shares leave room for what is being copied."""
        return self.store_bytes * 7 // 10 // max(1, num_workers - 1)

    def threads_of_each(self, num_workers: int) -> int:
        """This machine's cores shared out to so many workers, at least one each."""
        return self.worker.cpu_threads if "cpu-threads" in self.given else max(1, num_cores() // num_workers)

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.decode


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
    model_dir: Path
    model_names: tuple[str, ...]
    run_dir: Path
    http_port: int
    grpc_port: int
    router_health_port: int
    router_metrics_port: int
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
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def scaler_address(self) -> str:
        return f"{LOOPBACK}:{self.scaler_port}"

    @property
    def secret_file(self) -> Path:
        return self.run_dir / "secret"

    @property
    def ray_dir(self) -> Path:
        return self.run_dir / "ray"


def make_plan(options: LocalOptions, *, environ: Mapping[str, str], progress: Callable[[str], None]) -> LocalPlan:
    """Checks what can be known before anything starts. Fetches and converts a model given by name. Blocks; raises SetupError."""
    tables = (options, options.router, options.worker, options.autoscaler)
    checks: list[_Check] = [lambda: chain.from_iterable(map(file_problems, tables))]
    if options.worker.runner == "model":
        checks.append(lambda: check_device(options.worker.device, environ))
    if not options.redis_url:
        checks.append(_check_redis)
    if options.uses_ray:
        checks += [lambda: _check_shared_memory(options), lambda: _check_store(options)]
    num_gpus = _num_gpus(options, environ)
    on_gpu = bool(num_gpus) or options.worker.device not in ("auto", "cpu")
    checks += [lambda: _check_ports(options), lambda: _check_cores(options, on_gpu, progress)]
    if not Path(options.model).is_dir():
        # Before a model is fetched for nothing.
        _check_all(checks)
        checks.clear()
    weights = not options.worker.dummy_weights
    found = resolve(
        options.model, revision=options.model_revision, weights=weights, cache_dir=default_cache_dir(environ), progress=progress
    )
    model_dir = found.resolve()
    _check_all([*checks, lambda: _check_model(options, model_dir, on_gpu)])
    _fetch_draft(options, environ, progress)
    scale = _scale(options, model_dir, num_gpus, progress) if options.autoscale else None
    ports = iter(free_ports(8))
    roles = [("prefill", i) for i in range(options.num_prefill)] + [("decode", i) for i in range(options.decode)]
    names = [f"{role}-{index}" for role, index in roles]
    places = _deal_gpus(options, names, num_gpus, progress, num_places=scale.total if scale is not None else len(names))
    workers = tuple(LocalWorker.new(name, role, gpu) for name, (role, _), gpu in zip(names, roles, places, strict=False))
    ray_port = next(ports)
    run_dir = _make_run_dir()
    return LocalPlan(
        model_dir=model_dir,
        model_names=options.worker.served_model_name or (name_of(options.model),),
        run_dir=run_dir,
        http_port=options.port or next(ports),
        grpc_port=options.wanted_grpc_port or next(ports),
        router_health_port=next(ports),
        router_metrics_port=next(ports),
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


def _problems(checks: Iterable[_Check]) -> Iterator[str]:
    for check in checks:
        try:
            yield from check() or ()
        except SetupError as error:
            yield error.message


def _check_all(checks: Iterable[_Check]) -> None:
    """Raises SetupError with what all of them say."""
    if problems := list(_problems(checks)):
        raise SetupError(WrongSettings(problems).message)


def _check_redis() -> None:
    redis_server.server_binary()


def _check_ports(options: LocalOptions) -> Iterator[str]:
    ports = {"--port": options.port, "--grpc-port": options.wanted_grpc_port, "--admin-port": options.router.admin_port}
    hosts = {"--admin-port": options.router.admin_host}
    given = {flag: port for flag, port in ports.items() if port > 0}
    for port in given.values():
        claim(port)
    return _problems(partial(check_free, hosts.get(flag, options.host), port, flag) for flag, port in given.items())


def _check_cores(options: LocalOptions, on_gpu: bool, progress: Callable[[str], None]) -> None:
    """Raises SetupError for more processes than these cores can start, unless it was insisted on; says so where they will be slow."""
    processes = options.num_workers * options.worker.tensor_parallel_size
    wanted = -(-processes // (FAKES_PER_CORE if options.worker.runner == "fake" else _ON_GPU_PER_CORE if on_gpu else 1))
    said = f"{processes} processes of workers want {wanted} cores, and this machine has {num_cores()}"
    if wanted > _MOST_OVERCOMMITTED * num_cores() and not options.overcommit:
        raise SetupError(f"{said}: lower --prefill, --decode or --tensor-parallel-size, or give --overcommit to start them all the same")
    if wanted > num_cores():
        progress(f"{said}: they share them, and all are slower")


def _check_store(options: LocalOptions, directory: Path = Path("/dev/shm")) -> None:
    """Raises SetupError for an object store that cannot be."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rooms = {"this machine": memory, str(directory): shutil.disk_usage(directory).free if directory.is_dir() else memory}
    for where, room in rooms.items():
        if options.ray_store_bytes > room:
            raise SetupError(
                f"--ray-store-bytes {options.ray_store_bytes} ({gib(options.ray_store_bytes)}) is more than {where} has, {gib(room)}; "
                "give less, or leave it out"
            )


def _check_memory(options: LocalOptions, weights: int, kv_bytes: int) -> None:
    """All workers take theirs at the same time, so each would find that there is enough. Raises SetupError."""
    num = options.num_workers
    own_ray = options.uses_ray and not options.ray_address
    kv_flag = "--num-blocks" if options.worker.num_blocks else "--kv-cache-memory-bytes"
    check_memory(
        {
            f"weights of {num} workers": num * weights,
            "their KV caches": num * kv_bytes,
            "their --prefix-cache-space": num * int(options.worker.prefix_cache_space * (1 << 30)),
            "Ray's object store": options.store_bytes if own_ray else 0,
        },
        f"lower {kv_flag}, --prefill or --decode"
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
    worker = options.worker
    fake, gpus_each = worker.runner == "fake", min(worker.tensor_parallel_size, num_gpus)
    dtype = dtype_on_cpu(model_dir, worker.dtype, worker.quantization, worker.architecture)
    weights = 0 if fake or gpus_each else weight_bytes(model_dir, dtype, worker.quantization)
    room = room_for(
        memory_of(weights, fake=fake, on_gpu=bool(gpus_each), kv_cache_bytes=worker.kv_cache_memory_bytes),
        memory_bytes=free_memory().num_bytes,
        cores=num_cores() * (FAKES_PER_CORE if fake else 1),
        gpus=num_gpus // gpus_each if gpus_each else None,
    )
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


def _check_model(options: LocalOptions, model_dir: Path, on_gpu: bool) -> Iterable[str]:
    """Returns what of the settings this model cannot have. Raises SetupError for files that are no model."""
    for name in ("config.json", "tokenizer.json"):
        if not (model_dir / name).is_file():
            raise SetupError(f"{model_dir} has no {name}; give a model directory, ORG/NAME of the hub or a known name")
    worker, config = options.worker, model_dir / "config.json"
    raw = read_config(model_dir, worker.architecture)
    if worker.runner != "fake":
        take_architecture(Fields(config, raw))

    def length() -> None:
        if worker.max_model_len and worker.max_model_len > (longest := context_of(raw, config)):
            raise SetupError(f"--max-model-len {worker.max_model_len} is more than the {longest} of {config}; lower it")

    if worker.runner == "fake":
        return _problems([length])
    kv_bytes = worker.kv_cache_memory_bytes or (0 if on_gpu else CPU_KV_BYTES)
    dtype = worker.dtype if on_gpu else dtype_on_cpu(model_dir, worker.dtype, worker.quantization, worker.architecture)
    checks: list[_Check] = [length, lambda: check_formats(model_dir, worker)]
    try:
        model = read_model(
            model_dir,
            dtype=dtype,
            kv_cache_dtype=worker.kv_cache_dtype,
            quantization=worker.quantization,
            architecture=worker.architecture,
        )
    except SetupError:
        # Of a kind that only who loads it knows.
        pass
    else:
        num_heads, num_kv_heads = model.num_heads, model.num_kv_heads
        cut = model.cut_beside_heads(whole_experts=worker.enable_expert_parallel)
        checks.append(lambda: check_parts(worker.tensor_parallel_size, num_heads=num_heads, num_kv_heads=num_kv_heads, **cut))
        block_bytes = model.kv_token_bytes * worker.block_size
        num_blocks = worker.num_blocks or kv_bytes // block_bytes
        if worker.num_blocks or kv_bytes:
            checks.append(lambda: check_pool(num_blocks, worker.block_size, worker.max_model_len))
        kv_bytes = num_blocks * block_bytes
    if not on_gpu:
        weights = weight_bytes(model_dir, dtype, worker.quantization)
        checks.append(lambda: _check_memory(options, weights, kv_bytes))
    return _problems(checks)


def _fetch_draft(options: LocalOptions, environ: Mapping[str, str], progress: Callable[[str], None]) -> None:
    """Fetches the draft model, if one is asked for, once for all workers and before their start is timed. Raises SetupError."""
    worker = options.worker
    if not worker.speculative_config or worker.runner == "fake":
        return
    speculative = SpeculativeConfig.parse(worker.speculative_config)
    if speculative.method != DRAFT_MODEL:
        return
    try:
        resolve(speculative.model, weights=not worker.dummy_weights, cache_dir=default_cache_dir(environ), progress=progress)
    except SetupError as error:
        raise SetupError(f"--speculative-config, model {speculative.model}: {error.message}") from error


def _make_run_dir() -> Path:
    """Private, and short enough for the sockets in it."""
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if len(os.fsencode(parent)) + len("/ts-12345678") <= _MAX_RUN_DIR_BYTES and os.access(parent, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="ts-", dir=parent))
    raise SetupError("there is no short temporary directory to write to; set TMPDIR to one like /tmp")
