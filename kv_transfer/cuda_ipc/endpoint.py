"""Where a source's pool lies, as text for a manifest: its host, its process, its GPU, and the handles of its memory. No secrets but these:
whoever has a handle, on the same host, has the memory.

    cuda_ipc:1:{boot id}:{PID namespace}:{pid}:{start time}:{life}:{GPU}:{pool}:{offset}:{num_blocks}:{block_bytes}:{probe}:{offset}
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from twostep.errors import Unavailable

_VERSION = "1"
_NUM_PARTS = 14
_MAX_LENGTH = 4096
# Addresses have 64 bits, and so have numbers of the kernel's.
_MAX_NUMBER = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process of this or another host, never mistaken for a later one: a pid may come again, a start time does not with it."""

    boot_id: str
    pid_namespace: str  # empty where it cannot be told
    pid: int
    start_time: int  # in ticks since the host's boot

    @classmethod
    def own(cls) -> ProcessId:
        try:
            namespace = os.readlink("/proc/self/ns/pid").partition("[")[2].rstrip("]")
        except OSError:
            namespace = ""
        pid = os.getpid()
        return cls(boot_id=_boot_id(), pid_namespace=namespace, pid=pid, start_time=_start_time(pid) or 0)

    def gone(self, own: ProcessId) -> bool | None:
        """Whether it has ended, as `own` sees it; None: it cannot see it."""
        if (self.boot_id, self.pid_namespace) != (own.boot_id, own.pid_namespace) or not self.pid_namespace:
            return None
        return _start_time(self.pid) != self.start_time


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcEndpoint:
    """A source. `gpu`: its UUID; empty for a pool in host memory, which only the same process can read. `life` is unique to one
    transport object."""

    process: ProcessId
    life: str
    gpu: str
    pool_handle: bytes
    pool_offset: int
    num_blocks: int
    block_bytes: int
    probe_handle: bytes
    probe_offset: int

    def __str__(self) -> str:
        process = self.process
        return ":".join(
            map(
                str,
                (
                    "cuda_ipc", _VERSION, process.boot_id, process.pid_namespace, process.pid, process.start_time, self.life, self.gpu,
                    _text(self.pool_handle), self.pool_offset, self.num_blocks, self.block_bytes, _text(self.probe_handle),
                    self.probe_offset,
                ),
            )
        )  # fmt: skip

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> IpcEndpoint:
        """Raises Unavailable: whoever wrote it is no source for us."""
        parts = text.split(":")
        if len(text) > _MAX_LENGTH or len(parts) != _NUM_PARTS or parts[:2] != ["cuda_ipc", _VERSION]:
            raise Unavailable(f"{text[:40]!r} is no cuda_ipc endpoint of version {_VERSION}; run the same version on both workers")
        try:
            pid, start_time, pool_offset, num_blocks, block_bytes, probe_offset = (int(parts[i]) for i in (4, 5, 9, 10, 11, 13))
            pool_handle, probe_handle = (base64.b64decode(parts[i], altchars=b"-_", validate=True) for i in (8, 12))
        except (ValueError, binascii.Error):
            raise Unavailable(f"the cuda_ipc endpoint {text[:40]!r} is damaged; prefill again") from None
        numbers = pid, start_time, pool_offset, num_blocks, block_bytes, probe_offset
        if not 0 <= min(numbers) <= max(numbers) < _MAX_NUMBER:
            raise Unavailable(f"the cuda_ipc endpoint {text[:40]!r} is damaged; prefill again")
        return cls(
            process=ProcessId(boot_id=parts[2], pid_namespace=parts[3], pid=pid, start_time=start_time),
            life=parts[6],
            gpu=parts[7],
            pool_handle=pool_handle,
            pool_offset=pool_offset,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            probe_handle=probe_handle,
            probe_offset=probe_offset,
        )


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


def _boot_id() -> str:
    """Of the host, not of the container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_time(pid: int) -> int | None:
    """In ticks since the host's boot; None if there is no such process, or only its remains."""
    try:
        # Behind the name, which may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
