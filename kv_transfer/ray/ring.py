"""The shared-memory ring between a worker and its KV agent: an mmapped file, and contiguous slots of it.

    worker ──read_blocks──▶ [ slot ][ slot ]      [ slot ] ──ray.put──▶ object store      (publish)
    worker ◀─write_blocks──────────────────────────────────────────── object store      (fetch, where the worker has mapped it too)
    worker ◀─write_blocks── [ slot ][ slot ]      [ slot ] ◀──ray.get── object store      (fetch, where it has not)

On a GPU's machine the worker pins its mappings, so that the device copies straight to and from them.

The file has a name only while the agent starts: once both have mapped it, it is unlinked, and the memory is gone with the processes.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kv_transfer.ray.store_file import identity_of
from twostep.errors import SetupError

# Makes memory fast to copy to and from a device; what it returns undoes that (see twostep.engine.batch.Runner.pin_host).
Pin = Callable[[npt.NDArray[np.uint8]], Callable[[], None]]

_CPU_BYTES = 64 << 20
_GPU_BYTES = 256 << 20


def default_ring_dir(run_dir: Path) -> Path:
    """Returns /dev/shm where there is one, else `run_dir`."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else run_dir


def default_ring_bytes(directory: Path, *, on_gpu: bool) -> int:
    """Returns room for what is on its way at once: 64 MiB, where a device copies to and from it 256 MiB. Less where the directory is small,
    so that several workers find room in it."""
    wanted = _GPU_BYTES if on_gpu else _CPU_BYTES
    if not on_gpu:
        return wanted
    return max(_CPU_BYTES, min(wanted, shutil.disk_usage(directory).free // 8))


class SharedMemory:
    """An mmapped file as uint8 [num_bytes]. The mapping lives as long as a view of it."""

    def __init__(self, path: Path, descriptor: int, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)

    @classmethod
    def create(cls, directory: Path, num_bytes: int) -> SharedMemory:
        """Makes a new file of mode 0600, all of its memory taken at once: a full /dev/shm is an error here and not a SIGBUS later.

        Raises SetupError.
        """
        path = directory / f"twostep-{secrets.token_hex(8)}.ring"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)
                return cls(path, descriptor, num_bytes)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SetupError(
                f"no ring of {num_bytes} bytes in {directory}: {error.strerror}; make room there or make the ring smaller"
            ) from error

    @classmethod
    def open(cls, path: Path, *, num_bytes: int = 0, identity: str = "") -> SharedMemory:
        """Maps what another process created, or its first bytes. Raises OSError, also if it is not the file of that identity."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if (identity and identity_of(found) != identity) or found.st_size < num_bytes:
                raise OSError(errno.ESTALE, "another file is there now", str(path))
            return cls(path, descriptor, num_bytes or found.st_size)
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Takes away its name; the mappings stay."""
        self.path.unlink(missing_ok=True)
