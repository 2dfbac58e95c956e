"""The nixl transport's memory on a GPU: checksums where blocks lie, and what a read brought into the pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kv_transfer.checksums import block_sums
from kv_transfer.nixl.memory import Landing, NixlMemory
from twostep.engine.batch import KvShape
from twostep.errors import DataLoss
from twostep.model.kernels.triton_pull import slot_sums
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.kv_sums import KvSums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def land(memory: NixlMemory, offset: int, ids: list[int], part: slice) -> np.ndarray:
    """As the agent does it; the sums."""
    landing = Landing(memory, offset, ids, part)
    landing.prepare()
    landing.begin()
    while not landing.done():
        pass
    return landing.sums


@pytest.mark.parametrize(
    ("block_bytes", "first", "stop"), [(8, 0, 8), (40, 0, 40), (4096, 0, 4096), (40_008, 0, 40_008), (96, 32, 64), (80, 72, 80)]
)
def test_sums_and_landing(block_bytes: int, first: int, stop: int) -> None:
    part = slice(first, stop)
    rng = np.random.default_rng(block_bytes)
    host = rng.integers(0, 256, (9, block_bytes), np.uint8)
    memory = NixlMemory(torch.from_numpy(host.copy()).to(DEVICE), arena_bytes=1 << 20, probe_bytes=1000)
    memory.enter_thread()
    source, target = [7, 2, 3, 8], [0, 5, 4, 1]
    rows = host[source, part]
    expected = block_sums(rows, part.start)
    np.testing.assert_array_equal(memory.block_sums(source, part), expected)
    offset = 4096
    arrived = torch.from_numpy(rows.reshape(-1).copy()).to(DEVICE)
    memory._arena[offset : offset + len(arrived)] = arrived
    np.testing.assert_array_equal(land(memory, offset, target, part), expected)
    host[target, part] = rows
    np.testing.assert_array_equal(memory._pool.cpu().numpy(), host)
    memory._arena[offset + len(arrived) - 1] ^= 64
    found = land(memory, offset, target, part)
    assert found[3] != expected[3]
    np.testing.assert_array_equal(found[:3], expected[:3])


def test_probes_are_checked() -> None:
    memory = NixlMemory(torch.zeros(8, 256, dtype=torch.uint8).to(DEVICE), arena_bytes=8192, probe_bytes=500)
    memory.enter_thread()
    memory._arena[100:600] = memory._pattern
    memory.check_probe(100, 500)
    memory._arena[300] ^= 1
    with pytest.raises(DataLoss, match="probe"):
        memory.check_probe(100, 500)
    assert (memory.pool.num_bytes, memory.arena.num_bytes, memory.probe.num_bytes) == (2048, 8192, 500)


def test_kept_sums_are_used_and_stay_true() -> None:
    shape = KvShape(num_blocks=5, block_size=3, num_layers=4, num_kv_heads=2, head_dim=16, dtype="bfloat16")
    cache = KvCache(shape, DEVICE)
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    cache.sums = KvSums(cache.tensor, cache.shape, 4, 16, slot_sums)
    pool = cache.tensor.view(5, -1).view(torch.uint8)
    memory = NixlMemory(pool, arena_bytes=1 << 20, probe_bytes=100, sums=cache.sums)
    memory.enter_thread()
    for part in (slice(0, shape.block_bytes), slice(shape.layer_bytes, 3 * shape.layer_bytes)):
        rows = pool[[3, 0]][:, part].cpu().numpy()
        expected = block_sums(rows, part.start)
        np.testing.assert_array_equal(memory.block_sums([3, 0], part), expected)
        memory._arena[: rows.size] = torch.from_numpy(rows.reshape(-1).copy()).to(DEVICE)
        np.testing.assert_array_equal(land(memory, 0, [1, 2], part), expected)
        arrived = pool[[1, 2]][:, part].cpu().numpy()
        np.testing.assert_array_equal(memory.block_sums([1, 2], part), block_sums(arrived, part.start))
