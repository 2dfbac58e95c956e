"""The KV pool that one-sided transports read: whole, in one GPU's memory, in 64-bit words; and its checksums. Imports torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kv_transfer.checksums import WORD_BYTES
from twostep.engine.batch import KvShape, Runner
from twostep.errors import SetupError
from twostep.model.kernels.triton_pull import PullShape, add_slot_sums, sum_blocks
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.kv_sums import KvSums


def gpu_pool_of(runner: Runner, transport: str) -> KvCache:
    """Raises SetupError where the worker has no such pool."""
    if not isinstance(runner, ModelRunner) or not runner.kv_cache.tensor.is_cuda:
        raise SetupError(
            f"{transport} reads one KV pool in one GPU's memory, and this worker has none (a CPU, a fake runner, or several ranks with a "
            f"part each); leave {transport} out of --kv-transfer"
        )
    check_words(runner.kv_cache.shape, transport)
    return runner.kv_cache


def check_words(shape: KvShape, transport: str) -> None:
    """Raises SetupError where a layer of a block has a part of a word."""
    if shape.layer_bytes % WORD_BYTES:
        raise SetupError(
            f"{transport} moves whole 64-bit words, and a layer of a KV block has {shape.layer_bytes} bytes; "
            f"use another --block-size, or leave {transport} out of --kv-transfer"
        )


# Triton's interpreter, which stands in where there is no GPU, runs one kernel at a time.
_interpreter = threading.Lock()

# For one GPU's own memory, which is ten times as fast as a link: more programs, for a shorter time.
WITHIN_GPU = PullShape(num_programs=128)


@contextmanager
def launching(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Gives a context within which kernels are launched on this stream, whose device is the thread's current one. None: the interpreter
    runs them."""
    with _interpreter if stream is None else torch.cuda.stream(stream):
        yield


def add_block_sums(
    pool: torch.Tensor,
    kept: KvSums | None,
    block_ids: Sequence[int],
    ids: torch.Tensor,
    sums: torch.Tensor,
    part: slice,
    *,
    block_bytes: int,
    shape: PullShape,
) -> None:
    """Adds up sum64 of bytes `part`, whole layers, of blocks `ids` int32 [n], on the host `block_ids`, into `sums` int64 [n], zeros before:
    out of what steps have kept of all of them, else out of the bytes. On the current stream."""
    if kept is not None and kept.kept(block_ids):
        layer_bytes = kept.layer_words * WORD_BYTES
        first, stop = part.start // layer_bytes, part.stop // layer_bytes
        add_slot_sums(kept.tensor, ids, sums, first_layer=first, num_layers=stop - first)
    else:
        size = part.stop - part.start
        sum_blocks(pool.data_ptr(), ids, sums, block_bytes=block_bytes, first_byte=part.start, num_bytes=size, shape=shape)
