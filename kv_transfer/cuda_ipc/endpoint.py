"""Says where a source's pool lies: its host, its process, its GPU, and the handles of its memory.

cuda_ipc:1:{boot id}:{PID namespace}:{pid}:{start time}:{incarnation}:{GPU}:{pool}:{offset}:{num_blocks}:{block_bytes}:{probe}:{offset}
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path

from kv_transfer.endpoint_text import endpoint_text, parse_endpoint

_VERSION = "1"
_MAX_LENGTH = 4096
_TYPES = (str, str, int, int, str, str, bytes, int, int, int, bytes, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process of this or another host, never mistaken for a later one: a pid may come again, a start time does not with it."""

    boot_id: str
    pid_namespace: str  # empty where it cannot be found out
    pid: int
    start_time: int  # in ticks since the host's boot

    @classmethod
    def own(cls) -> ProcessId:
        try:
            namespace = os.readlink("/proc/self/ns/pid").partition("[")[2].rstrip("]")
        except OSError:
            namespace = ""
        pid = os.getpid()
        return cls(boot_id=_boot_id(), pid_namespace=namespace, pid=pid, start_time=start_time_of(pid) or 0)

    def gone(self, own: ProcessId) -> bool | None:
        """Returns whether it has ended, as `own` sees it; None: it cannot see it."""
        if (self.boot_id, self.pid_namespace) != (own.boot_id, own.pid_namespace) or not self.pid_namespace:
            return None
        return start_time_of(self.pid) != self.start_time


@dataclass(frozen=True, slots=True)
class IpcEndpoint:
    """A source. `gpu`: its UUID; empty for a pool in host memory, which only the same process can read. `incarnation` is unique to one
    transport object. Fields are in the order of the text."""

    process: ProcessId
    incarnation: str
    gpu: str
    pool_handle: bytes
    pool_offset: int
    num_blocks: int
    block_bytes: int
    probe_handle: bytes
    probe_offset: int

    def __str__(self) -> str:
        process, *rest = astuple(self)
        return endpoint_text("cuda_ipc", _VERSION, (*process, *rest))

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> IpcEndpoint:
        """Raises Unavailable for text that no source of ours wrote."""
        boot_id, namespace, pid, start_time, *rest = parse_endpoint(text, "cuda_ipc", _VERSION, _TYPES, max_length=_MAX_LENGTH)
        return cls(ProcessId(boot_id=boot_id, pid_namespace=namespace, pid=pid, start_time=start_time), *rest)


def _boot_id() -> str:
    """Returns that of the host, not of the container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_time_of(pid: int) -> int | None:
    """Returns it in ticks since the host's boot; None if there is no such process, or only its remains."""
    try:
        # Behind the name, which may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
