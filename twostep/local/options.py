"""What a local system consists of."""

from __future__ import annotations

import os
from dataclasses import dataclass

from twostep.errors import SetupError

DEFAULT_MODEL = "smollm2-135m-instruct"
_LEAST_STORE_BYTES = 512 << 20
_MAX_WORKERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Everything `twostep up` can be told. `None` and empty leave it to the process concerned."""

    model: str = DEFAULT_MODEL
    served_model_name: str = ""
    num_prefill: int = 1
    num_decode: int = 1
    host: str = "127.0.0.1"
    port: int = 50051
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
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    cpu_threads: int | None = None
    object_store_bytes: int = 0
    start_timeout_s: float = 180.0
    drain_timeout_s: float = 30.0
    verbose: bool = False

    def __post_init__(self) -> None:
        """Raises SetupError for what cannot be a system."""
        if self.num_prefill < 1 or self.num_decode < 1:
            raise SetupError("a system needs at least one prefill and one decode worker; give --prefill and --decode of 1 or more")
        if self.num_prefill + self.num_decode > _MAX_WORKERS:
            raise SetupError(f"{self.num_prefill} + {self.num_decode} workers are too many for one machine; give at most {_MAX_WORKERS}")
        if self.tensor_parallel_size < 1:
            raise SetupError(f"--tensor-parallel-size {self.tensor_parallel_size} is no number of GPUs; give 1 or more")
        if not 0 <= self.port <= 65534:
            raise SetupError(f"--port {self.port} is not a port; give one from 1 to 65534, or 0 for any free one")

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

    @property
    def budget_bytes(self) -> int:
        """What each prefill worker may keep published: their shares leave room for what is being copied."""
        return self.store_bytes * 7 // 10 // self.num_prefill

    @property
    def threads_per_worker(self) -> int:
        """This machine's cores shared out to the workers, at least one each."""
        if self.cpu_threads is not None:
            return self.cpu_threads
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // (self.num_prefill + self.num_decode))
