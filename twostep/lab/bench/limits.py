"""Measures what this device can do: read memory, multiply matrices."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from twostep.lab.bench.roofline import DeviceLimits

# Beyond every cache; on a GPU, large enough that starting the kernel does not count.
_READ_BYTES = {"cuda": 4 << 30, "cpu": 512 << 20}
_MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
_REPEATS = 7


def measure_limits(device: torch.device, dtype: torch.dtype) -> DeviceLimits:
    """The best of some repeats of a reduction over memory and of a square product of random matrices in `dtype`. On a GPU it needs
    about 5 GB, less where less is free."""
    with torch.inference_mode():
        return DeviceLimits(_read_rate(device), _matmul_rate(device, dtype))


def _read_rate(device: torch.device) -> float:
    num_bytes = _READ_BYTES[device.type]
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 2)
    words = torch.ones(max(1, num_bytes // 4), dtype=torch.int32, device=device)
    return words.numel() * 4 / _best_s(lambda: words.amax(), device)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = _MATMUL_SIZE[device.type]
    # Zeros would flatter: they draw less power, and clocks stay higher.
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / _best_s(lambda: a @ b, device)


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
