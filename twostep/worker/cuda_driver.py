"""The GPU's driver, before anything is imported that computes with it."""

from __future__ import annotations

import ctypes
import os
import threading

_NVML, _CUDA = "libnvidia-ml.so.1", "libcuda.so.1"


def has_driver() -> bool:
    """Returns whether this machine shows a GPU's driver."""
    return _initialized(_NVML, "nvmlInit_v2")


def begin_driver() -> None:
    """Initializes CUDA in this process on a thread: the driver takes tenths of a second in which Python can import. Whoever needs it
    earlier waits for it there, and where it fails whoever computes finds out the same again."""
    # As torch does, which comes too late for it now: kernels are loaded as they are used. The default since CUDA 12.2.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    threading.Thread(target=_initialized, args=(_CUDA, "cuInit", 0), name="cuda-driver", daemon=True).start()


def _initialized(library: str, function: str, *arguments: int) -> bool:
    try:
        status: int = getattr(ctypes.CDLL(library), function)(*arguments)
    except (OSError, AttributeError):
        return False
    return status == 0
