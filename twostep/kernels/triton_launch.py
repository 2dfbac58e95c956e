"""Kernels that start before the one ahead of them has ended (programmatic dependent launch, Hopper and later).

    kernel A   ───────────────┐ memory visible
    kernel B        ├ weights ┊ follow() ├─── reads what A wrote ──┐

Each kernel of a chain calls `follow` before it touches anything that an earlier kernel writes or reads, or writes anything at all.
A kernel's end then implies that of all before it. What no kernel writes (weights, tables) may be read before.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FIRST_CAPABILITY = (9, 0)


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels of this device can be launched so; to be given as `launch_pdl` and as the kernel's PDL."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


@triton.jit
def follow():
    """Lets the next kernel begin, and waits for the end of the one ahead."""
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def prefetch(address, num_bytes):
    """Asks for `num_bytes` (a multiple of 16) at each address (int64 tensor, 16-byte aligned) to be brought to the second-level cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
