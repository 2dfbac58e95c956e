"""Tells how far a running step is: a word in the host's memory, which the step writes as its layers pass.

    device   │ layer 0 │ layer 1 │ … │ layer L-1 │ logits, sample │
    word     n·2¹⁰     +1        +2              +L                    n: the step's number, which it reads on the device

A replayed graph cannot record an event that tells one replay from the next; a number can. Writing costs nothing: what writes a layer's keys
says in passing that the layers before are done (`rotate_and_write`), and only the last layer takes a launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

_LAYERS = 1 << 10
# A layer of a large prompt takes a millisecond.
_POLL_S = 0.0002


class StepProgress:
    """The word of one device's steps, which belong to one thread and stream."""

    def __init__(self, device: torch.device) -> None:
        self.word = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._seen = self.word.numpy()
        self.number = 0

    def begin(self) -> None:
        """Numbers the step that is launched next."""
        self.number += 1

    def mark(self, num_layers: int, ended: Callable[[], bool]) -> ProgressMark:
        """Returns the mark after so many layers of the step just numbered. `ended`: whether the step is done; raises what it failed
        with."""
        return ProgressMark(num_layers, lambda: int(self._seen[0]), self.number * _LAYERS + num_layers, ended)


class ProgressMark:
    """A LayerMark."""

    def __init__(self, num_layers: int, word: Callable[[], int], target: int, ended: Callable[[], bool]) -> None:
        self.num_layers = num_layers
        self._word = word
        self._target = target
        self._ended = ended

    def wait(self) -> None:
        while self._word() < self._target and not self._ended():
            time.sleep(_POLL_S)


def note_layers(word: torch.Tensor, number: torch.Tensor, num_layers: int) -> None:
    """Says, in order of the current stream, that so many layers are done. word int64 [1]; number int32 [1], on the device."""
    _note_kernel[(1,)](word, number, num_layers, num_warps=1)


@triton.jit(do_not_specialize=["num_layers"])
def _note_kernel(word_ptr, number_ptr, num_layers):
    store_progress(word_ptr, number_ptr, num_layers)


@triton.jit
def store_progress(word_ptr, number_ptr, num_layers):
    tl.store(word_ptr, tl.load(number_ptr).to(tl.int64) * 1024 + num_layers)
