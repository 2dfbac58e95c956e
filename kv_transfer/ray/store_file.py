"""The file that a node's object store lies in, for those who are not Ray's: a worker maps it and reads chunks where they lie.

raylet   makes it, takes its name away and keeps it open
actor    is the raylet's child, has it mapped, and knows by an object's address where in the file it is
worker   opens it as /proc/RAYLET/fd/N, which takes the same user and process namespace (docs/ray.md)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFile:
    """A file that this process has mapped from its beginning, at `address`; whoever opens `path` finds a file of that identity, or another
    one."""

    path: Path
    identity: str
    address: int
    num_bytes: int

    def offset_of(self, data: npt.NDArray[np.uint8], within: int) -> int | None:
        """Returns where in the file contiguous memory of this process begins; None if it does not lie in the first `within` bytes."""
        offset = data.__array_interface__["data"][0] - self.address
        return offset if 0 <= offset <= offset + data.nbytes <= min(within, self.num_bytes) else None

    def take_memory(self, num_bytes: int) -> None:
        """Takes the memory of the first bytes now, for this process's account. Raises OSError, and has then taken nothing."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        finally:
            os.close(descriptor)


def find_store(data: npt.NDArray[np.uint8], openers: Sequence[int]) -> StoreFile | None:
    """Returns the file behind mapped memory of this process, which one of the processes `openers` has open; None if none shows it."""
    address: int = data.__array_interface__["data"][0]
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, offset, device, inode, *_ = line.split()
            start, stop = (int(end, 16) for end in span.split("-"))
            if start <= address < stop and int(inode):
                begin = start - int(offset, 16)
                major, minor = (int(part, 16) for part in device.split(":"))
                identity = _identity(os.makedev(major, minor), int(inode))
                path = _open_elsewhere(openers, identity)
                return None if path is None else StoreFile(path=path, identity=identity, address=begin, num_bytes=stop - begin)
    return None


def identity_of(found: os.stat_result) -> str:
    """Returns what is the same for two who have one file open, whatever they call it, and for no two files of one machine: containers
    have file systems of their own in shared memory, whose inodes have the same numbers."""
    return _identity(found.st_dev, found.st_ino)


def _identity(device: int, inode: int) -> str:
    return f"{device}:{inode}"


def _open_elsewhere(openers: Sequence[int], identity: str) -> Path | None:
    for process in openers:
        with suppress(OSError):
            for path in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    if identity_of(path.stat()) == identity:
                        return path
    return None
