"""The KV pool that one-sided transports read: whole, in one GPU's memory, in 64-bit words. Imports torch."""

from __future__ import annotations

from kv_transfer.sum64 import WORD_BYTES
from twostep.engine.batch import KvShape, Runner
from twostep.errors import SetupError
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.kv_cache import KvCache


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
