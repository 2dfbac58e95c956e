"""Asks NVML, the driver's library, once a second how busy this worker's GPUs are and how much of their memory is taken.

On a thread of its own: a driver in trouble answers late, or never, and then the figures are missing, and nothing else is. NVML reads what
the driver has counted already; no GPU is synchronized, and none gets work by it.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from twostep.cluster.records import GpuLoad

log = logging.getLogger(__name__)

_LIBRARY = "libnvidia-ml.so.1"
_EVERY_S = 1.0
# Older figures are not shown as those of now.
_STALE_S = 5.0
_NOT_SUPPORTED = 3


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


class Nvml:
    """Raises OSError where there is no driver, or where it refuses."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        self._call("nvmlInit_v2")

    def load(self, uuid: str) -> GpuLoad:
        """Reads one GPU, or a part of one (MIG), by its UUID as CUDA tells it."""
        device = self._device(uuid)
        memory, utilization = _Memory(), _Utilization()
        self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        try:
            self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(utilization))
        except OSError as error:
            if error.errno != _NOT_SUPPORTED:
                raise
            return GpuLoad(memory_used=memory.used, memory_total=memory.total)
        return GpuLoad(memory_used=memory.used, memory_total=memory.total, utilization=utilization.gpu / 100)

    def _device(self, uuid: str) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        try:
            self._call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(found))
        except OSError:
            self._call("nvmlDeviceGetHandleByUUID", f"MIG-{uuid}".encode(), ctypes.byref(found))
        return found

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status != 0:
            raise OSError(status, f"{name} fails with status {status}")


class GpuMeter:
    """start(), then `loads` at any time, from any thread."""

    def __init__(
        self,
        ids: Sequence[str],
        open_driver: Callable[[], Nvml] = Nvml,
        *,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ids`: UUIDs, one for each rank; none: nothing is asked."""
        self._ids, self._open_driver, self._every_s, self._clock = ids, open_driver, every_s, clock
        self._last: tuple[float, tuple[GpuLoad, ...]] = (0.0, ())
        self._closed = threading.Event()

    @property
    def loads(self) -> tuple[GpuLoad, ...]:
        """One for each id; empty: the driver has not told of late."""
        at, loads = self._last
        return loads if self._clock() - at < _STALE_S else ()

    def start(self) -> None:
        if self._ids:
            # A daemon: a driver that hangs must not keep the process from its end.
            threading.Thread(target=self._run, name="gpu-meter", daemon=True).start()

    def close(self) -> None:
        """Returns at once. Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        driver: Nvml | None = None
        complained = False
        while not self._closed.is_set():
            try:
                driver = driver or self._open_driver()
                self._last = self._clock(), tuple(driver.load(uuid) for uuid in self._ids)
                complained = False
            except (OSError, AttributeError) as error:
                driver = None
                log.log(logging.DEBUG if complained else logging.WARNING, "the driver does not tell how busy the GPU is: %s", error)
                complained = True
            self._closed.wait(self._every_s)
