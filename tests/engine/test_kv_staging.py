"""Transfers share slots of pinned memory: bit for bit, never a slot that is still under way, never all waiting for each other."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from twostep.model.step import kv_staging
from twostep.model.step.kv_staging import PinnedStaging

ROW_BYTES = 64


class SlotDouble:
    """A slot whose copies take effect at once, and which knows whether anybody has waited for them."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._memory, self._gathered = torch.empty(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
        self._under_way = False
        self.stream = None

    def memory(self, num_rows: int, width: int) -> torch.Tensor:
        self._under_way = True
        return self._memory[: num_rows * width].view(num_rows, width)

    def gathered(self, num_rows: int, width: int) -> torch.Tensor:
        return self._gathered[: num_rows * width].view(num_rows, width)

    def host(self, num_rows: int, width: int) -> Any:
        assert not self._under_way, "the host touched a slot that the device may still read or write"
        return self._memory[: num_rows * width].view(num_rows, width).numpy()

    def wait(self) -> None:
        self._under_way = False


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> PinnedStaging:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(kv_staging, "_Slot", SlotDouble)
    monkeypatch.setattr(kv_staging, "_SLOT_BYTES", 3 * ROW_BYTES)
    monkeypatch.setattr(kv_staging, "_NUM_SLOTS", 2)
    return PinnedStaging(torch.zeros(400, ROW_BYTES, dtype=torch.uint8))


@pytest.mark.parametrize("columns", [None, slice(8, 48), slice(4, 60), slice(6, 12), slice(3, 20), slice(0, 1)])
def test_many_threads_read_back_what_they_wrote(staging: PinnedStaging, columns: slice | None) -> None:
    rng = random.Random(3)
    width = ROW_BYTES if columns is None else columns.stop - columns.start
    order = rng.sample(range(400), 400)

    def work(i: int) -> None:
        mine = order[50 * i : 50 * (i + 1)]
        mine.sort(key=lambda block: block // 7)  # some runs, some not
        for count in (50, 1, 3, 20, 7):
            data = np.random.default_rng(100 * i + count).integers(0, 256, (count, width), dtype=np.uint8)
            data.flags.writeable = count % 2 == 0
            staging.write(mine[:count], data, columns)
            back = np.zeros_like(data)
            staging.read(mine[:count], back, columns)
            np.testing.assert_array_equal(back, data)

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, i) for i in range(8)]:
            done.result(timeout=60)


@pytest.mark.parametrize("columns", [slice(8, 48), slice(4, 60), slice(6, 12), slice(3, 20)])
@pytest.mark.parametrize("pinned", [False, True])
def test_columns_alone_are_touched(staging: PinnedStaging, columns: slice, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: pinned)
    rng = np.random.default_rng(7)
    rows = rng.integers(0, 256, (400, ROW_BYTES), dtype=np.uint8)
    staging.write(range(400), rows)
    ids = rng.permutation(400)[:57].tolist()
    part = rng.integers(0, 256, (57, columns.stop - columns.start), dtype=np.uint8)
    staging.write(ids, part, columns)
    rows[ids, columns] = part
    whole = np.empty_like(rows)
    staging.read(range(400), whole)
    np.testing.assert_array_equal(whole, rows)
    other = slice(columns.start + 1, columns.stop)
    odd = np.empty((57, other.stop - other.start), np.uint8)
    staging.read(ids, odd, other)
    np.testing.assert_array_equal(odd, rows[ids, other])


def test_a_transfer_that_fails_gives_its_slots_back(staging: PinnedStaging) -> None:
    data = np.ones((9, ROW_BYTES), np.uint8)
    for _ in range(5):
        with pytest.raises((IndexError, RuntimeError)):
            staging.write([0, 1, 2, 3, 4, 5, 900, 901, 902], data)
        with pytest.raises((IndexError, RuntimeError)):
            staging.read([0, 1, 2, 900, 901, 902, 3, 4, 5], data.copy())
    staging.write(list(range(9)), data)
    back = np.zeros_like(data)
    staging.read(list(range(9)), back)
    np.testing.assert_array_equal(back, data)


def test_a_slot_is_the_same_memory_for_host_and_device_whatever_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    slot = kv_staging._Slot(128, torch.device("cpu"))
    for turn, shape in enumerate([(2, 8), (2, 8), (8, 16), (16, 8), (1, 128), (2, 8)]):
        slot.host(*shape)[...] = turn + np.arange(shape[0] * shape[1], dtype=np.uint8).reshape(shape)
        assert slot.memory(*shape).tolist() == slot.host(*shape).tolist()
        assert slot.memory(1, 16).flatten().tolist() == [turn + i for i in range(16)], "shapes share the slot from its start"
