"""Shared by all launches: the chip's properties, memory for parts of results, and kernels that start before the one ahead of them has ended
(programmatic dependent launch, Hopper and later).

    kernel A   ───────────────┐ memory visible
    kernel B        ├ weights ┊ wait     ├─── reads what A wrote ──┐

Each kernel of a chain calls `wait_for_previous` before it touches anything that an earlier kernel writes or reads, or writes anything
at all. A kernel's end then implies that of all before it. What no kernel writes (weights, tables) may be read before.
"""

from __future__ import annotations

import functools

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FIRST_CAPABILITY = (9, 0)
# Shared memory of a multiprocessor that no program can have.
_SHARED_RESERVED = 1024


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Returns whether kernels of this device can be launched so; to be given as `launch_pdl` and as the kernel's PDL."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


@functools.cache
def shared_bytes_of(device: torch.device) -> int:
    """Shared memory that one program may have. In the interpreter there is no such limit."""
    if device.type != "cuda":
        return 1 << 20
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor) - _SHARED_RESERVED


@functools.cache
def num_sms_of(device: torch.device) -> int:
    """Multiprocessors. The interpreter runs programs one by one: a few show all that many would."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class DecodeWorkspace:
    """Memory in which programs of one attention call hand each other parts, shared by all plans whose calls never overlap (one stream)."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self.parts = torch.empty(0, dtype=torch.float32, device=device)
        self.scales = torch.empty(0, dtype=torch.float32, device=device)
        # All zero between calls: the program that merges a sequence sets its counter back.
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, *, num_parts: int, head_dim: int, num_counters: int) -> None:
        """Makes room. Plans made before keep the memory they have, so graphs captured with them stay good; least is held where the
        largest batch is planned first."""
        if self.scales.numel() < num_parts * 2:
            self.scales = torch.empty(num_parts * 2, dtype=torch.float32, device=self._device)
        if self.parts.numel() < num_parts * head_dim:
            self.parts = torch.empty(num_parts * head_dim, dtype=torch.float32, device=self._device)
        if self.counters.numel() < num_counters:
            self.counters = torch.zeros(num_counters, dtype=torch.int32, device=self._device)


@triton.jit
def start_next():
    """Lets the next kernel's programs begin where there is room for them, once all programs of this one have come here."""
    gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Waits for the end of the kernel ahead; what it wrote can be read then."""
    gdc_wait()


@triton.jit
def follow():
    """Both: for kernels that have nothing to do before."""
    start_next()
    wait_for_previous()
