"""Weights read to their places: every part of every tensor, in any dtype, with the host holding only the readers' slots."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from twostep.errors import SetupError
from twostep.model.families.modules import Place
from twostep.model.loading import weight_files
from twostep.model.loading.weight_files import read_weights, stored_tensors

FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def placed_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """A tensor for a file, the empty part of a larger buffer that is to hold a part of it, and where that part begins."""
    shape = draw(st.lists(st.integers(1, 13), min_size=1, max_size=2))
    stored = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(draw(FLOATS))
    start = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1 if axis else 0, size - begin)) for axis, (size, begin) in enumerate(zip(shape, start, strict=True))]
    buffer = torch.full((sizes[0] + 3, *sizes[1:]), torch.nan, dtype=draw(FLOATS))
    return stored, buffer[2 : 2 + sizes[0]], tuple(start)


@given(cases=st.lists(placed_tensors(), min_size=1, max_size=5), num_readers=st.integers(1, 4), slot_bytes=st.integers(1, 64))
def test_any_part_of_any_tensor(cases: list[tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]], num_readers: int, slot_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "_SLOT_BYTES", slot_bytes)
        save_file({f"t{i}.weight": stored for i, (stored, _, _) in enumerate(cases)}, Path(name, "model.safetensors"))
        by_name = {tensor.name: tensor for tensor in stored_tensors(Path(name))}
        work = [(by_name[f"t{i}.weight"], Place(into, tuple(stored.shape), start)) for i, (stored, into, start) in enumerate(cases)]
        seen: list[tuple[int, int]] = []
        read_weights(work, lambda done, total: seen.append((done, total)), num_readers=num_readers)
    for stored, into, start in cases:
        part = stored[tuple(slice(begin, begin + size) for begin, size in zip(start, into.shape, strict=True))]
        assert torch.equal(into, part.to(into.dtype))
        base = into._base
        assert base is not None
        assert base[:2].isnan().all()
        assert base[2 + len(into) :].isnan().all()
    assert seen == sorted(seen)
    assert all(total == seen[-1][0] for _, total in seen)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_holds_the_weights_once(tmp_path: Path, dtype: torch.dtype) -> None:
    """As they are in the file, and converted."""
    save_file({f"t{i}.weight": torch.full((1 << 20,), float(i)) for i in range(48)}, tmp_path / "model.safetensors")
    work = [
        (tensor, Place.whole(torch.zeros(1 << 20, dtype=dtype).add_(7))) for tensor in stored_tensors(tmp_path)
    ]  # zeros are not there yet
    before, highest = anonymous_bytes(), 0

    def look(done: int, total: int) -> None:
        nonlocal highest
        highest = max(highest, anonymous_bytes())

    read_weights(work, look, num_readers=2)
    slots = 2 * weight_files._SLOTS * weight_files._SLOT_BYTES
    assert slots < 48 << 20
    assert highest - before < slots + (16 << 20), "192 MiB of weights were held twice"
    assert all(bool((place.tensor == float(tensor.name[1:-7])).all()) for tensor, place in work)


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({f"t{i}.weight": torch.zeros(1000) for i in range(20)}, file)
    tensors = stored_tensors(tmp_path)
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 40_000)
    threads = threading.active_count()
    with pytest.raises(SetupError, match=r"model\.safetensors"):
        read_weights([(tensor, Place.whole(torch.empty(tensor.shape))) for tensor in tensors])
    assert threading.active_count() == threads
    file.unlink()
    with pytest.raises(SetupError, match=r"model\.safetensors"):
        read_weights([(tensor, Place.whole(torch.empty(tensor.shape))) for tensor in tensors])


def test_a_failing_callback_ends_the_reading(tmp_path: Path) -> None:
    save_file({f"t{i}.weight": torch.zeros(10) for i in range(20)}, tmp_path / "model.safetensors")
    calls = []

    def fail(done: int, total: int) -> None:
        calls.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_weights([(tensor, Place.whole(torch.empty(tensor.shape))) for tensor in stored_tensors(tmp_path)], fail, num_readers=1)
    assert calls == [40]


def test_nothing_to_read() -> None:
    read_weights([])
