"""A step as a CUDA graph: what it takes to capture one, whatever it computes."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CapturedStep(ABC):
    """One graph, once it is captured. Subclasses keep what it reads and writes besides its own memory."""

    logits: torch.Tensor

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()

    @abstractmethod
    def step(self) -> torch.Tensor:
        """Computes logits [R, vocabulary]; all it takes is on the device already."""

    def warm_up(self, stream: torch.cuda.Stream, count: int) -> None:
        """Compiles kernels and makes the libraries' workspaces, which a capture must not. The same stream for all: its memory is theirs."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(count):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, pool: Any) -> None:
        # Only this thread is kept from calls that a capture forbids: those of libraries (NCCL's watchdog) may go on.
        with _nothing_collected(), torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            logits = self.step()
        self.logits = _lent(logits)


class _Memory:
    """Memory of the device as numba and others describe it: CUDA Array Interface, version 3."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3}


def _lent(logits: torch.Tensor) -> torch.Tensor:
    """Returns the same memory without keeping it from the graphs that are captured next: logits of all of them would be a gigabyte."""
    if not logits.is_cuda:
        return logits
    assert logits.is_contiguous()
    return torch.as_tensor(_Memory(logits), device=logits.device).view(logits.dtype).view(logits.shape)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """A garbage collection may free an older graph or its memory, which this thread must not do while it captures."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
