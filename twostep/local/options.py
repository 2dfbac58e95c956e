"""What a local system consists of."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from twostep.errors import SetupError
from twostep.local.capacity import num_cores
from twostep.text.reasoning import reasoning_format
from twostep.text.tool_calls import tool_call_format

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_HTTP_PORT = 8000
_LEAST_STORE_BYTES = 512 << 20
_MAX_WORKERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Everything `twostep up` can be told. `None` and empty leave it to the process concerned. `aggregated`: no prefill workers, and so no
    hand-overs and no Ray; every decode worker computes its prompts itself. `local_prefill`: decode workers may do so beside prefill
    workers too. `autoscale`: `num_prefill` and `num_decode` are those of the start; a `max_` of None is what the machine has room for."""

    model: str = DEFAULT_MODEL
    served_model_name: str = ""
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    num_prefill: int = 1
    num_decode: int = 1
    aggregated: bool = False
    autoscale: bool = False
    min_prefill: int = 1
    max_prefill: int | None = None
    min_decode: int = 1
    max_decode: int | None = None
    local_prefill: bool = True
    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int | None = None
    api_keys_file: Path | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    # Of files and batches; none: they go with the system.
    batch_dir: Path | None = None
    redis_url: str = ""
    ray_address: str = ""
    kv_transfer: str = ""
    kv_wire: str = ""
    runner: str = "model"
    dtype: str = ""
    kv_cache_dtype: str = ""
    device: str = ""
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    cpu_threads: int | None = None
    object_store_bytes: int = 0
    start_timeout_s: float = 180.0
    drain_timeout_s: float = 30.0
    # Where traces go; empty: where OpenTelemetry's own variables say, if they do.
    otlp_endpoint: str = ""
    verbose: bool = False

    def __post_init__(self) -> None:
        """Raises SetupError for what cannot be a system."""
        if self.aggregated:
            self._check_aggregated()
        elif self.num_prefill < 1 or self.num_decode < 1:
            raise SetupError(
                "a system needs at least one prefill and one decode worker; give --prefill and --decode of 1 or more, or --aggregated"
            )
        elif self.kv_transfer == "none":
            raise SetupError("--kv-transfer none leaves prefill workers nothing to do; give --aggregated for a system without them")
        if self.num_prefill + self.num_decode > _MAX_WORKERS:
            raise SetupError(f"{self.num_prefill} + {self.num_decode} workers are too many for one machine; give at most {_MAX_WORKERS}")
        if self.autoscale:
            self._check_autoscale()
        # Refused here rather than by a router whose log nobody reads.
        reasoning_format(self.reasoning_parser, None)
        tool_call_format(self.tool_call_parser, None)
        if self.tensor_parallel_size < 1:
            raise SetupError(f"--tensor-parallel-size {self.tensor_parallel_size} is no number of GPUs; give 1 or more")
        if not 0 <= self.port <= 65534:
            raise SetupError(f"--port {self.port} is not a port; give one from 1 to 65534, or 0 for any free one")
        if self.api_keys_file is not None and not self.api_keys_file.is_file():
            raise SetupError(
                f"--api-keys-file {self.api_keys_file} is no file; make the first key with `twostep keys create --api-keys-file FILE`"
            )
        if not 0 <= self.wanted_http_port <= 65535:
            raise SetupError(f"--http-port {self.http_port} is not a port; give one from 1 to 65535, or 0 for any free one")

    @property
    def wanted_http_port(self) -> int:
        """0: any free one."""
        return self.http_port if self.http_port is not None else DEFAULT_HTTP_PORT if self.port else 0

    def _check_aggregated(self) -> None:
        if self.num_prefill:
            raise SetupError(f"--aggregated and --prefill {self.num_prefill} contradict each other; leave one of them out")
        if self.num_decode < 1:
            raise SetupError("an aggregated system needs at least one worker; give --decode of 1 or more")
        if not self.local_prefill:
            raise SetupError(
                "--aggregated and --no-local-prefill contradict each other: nobody would compute prompts; leave one of them out"
            )
        if self.kv_transfer not in ("", "auto", "none") or self.ray_address:
            raise SetupError("with --aggregated no KV is handed over; leave --kv-transfer and --ray-address out")

    def _check_autoscale(self) -> None:
        if self.aggregated:
            raise SetupError(
                "--autoscale holds the ratio of prefill to decode workers; with --aggregated there are none of the first: leave one out"
            )
        for role, least, first, most in (
            ("prefill", self.min_prefill, self.num_prefill, self.max_prefill),
            ("decode", self.min_decode, self.num_decode, self.max_decode),
        ):
            if not 1 <= least <= first:
                raise SetupError(f"--min-{role} {least} and --{role} {first}: give 1 at least, and start with no fewer than that")
            if most is not None and not first <= most <= _MAX_WORKERS:
                raise SetupError(f"--{role} {first} and --max-{role} {most}: start with no more than that, and give {_MAX_WORKERS} at most")

    @property
    def uses_ray(self) -> bool:
        """Whether a Ray is needed, of its own or of --ray-address."""
        return not self.aggregated

    @property
    def store_bytes(self) -> int:
        """Size of the object store that KV caches travel through; it takes memory only as it is used."""
        if self.object_store_bytes:
            return self.object_store_bytes
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        wanted = max(_LEAST_STORE_BYTES, memory // 8)
        try:
            shared = os.statvfs("/dev/shm")
        except OSError:
            return wanted
        return max(_LEAST_STORE_BYTES, min(wanted, shared.f_bavail * shared.f_frsize // 2))

    def budget_bytes(self, num_workers: int) -> int:
        """What each of so many workers may keep published while it has the prefill role, which all but one may come to have: their shares
        leave room for what is being copied."""
        return self.store_bytes * 7 // 10 // max(1, num_workers - 1)

    def threads_of_each(self, num_workers: int) -> int:
        """This machine's cores shared out to so many workers, at least one each."""
        return self.cpu_threads if self.cpu_threads is not None else max(1, num_cores() // num_workers)

    @property
    def num_workers(self) -> int:
        """At the start."""
        return self.num_prefill + self.num_decode
