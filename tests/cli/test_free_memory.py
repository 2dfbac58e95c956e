"""Memory is looked at before it is taken: bounds of the machine and of containers, and what a worker and a whole system ask for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from local_plans import planned, told

from twostep.errors import SetupError
from twostep.process.free_memory import Free, check_memory, free_memory, resident_bytes
from twostep.worker.config import WorkerConfig
from twostep.worker.model import load_model

GIB = 1 << 30


def machine(root: Path, *, available_kib: int, groups: str = "") -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(groups)


def bound(directory: Path, *, most: object, used: int, inactive: int, version: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")  # fmt: skip
    (directory / names[0]).write_text(f"{most}\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 1\n{names[2]} {inactive}\n")


def free(root: Path) -> Free:
    return free_memory(proc=root / "proc", cgroup=root / "cgroup")


def test_what_a_process_has_is_told_while_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/statm").write_text("900 300 20 1 0 100 0\n")
    assert resident_bytes(7, proc=tmp_path) == 300 * os.sysconf("SC_PAGE_SIZE")
    assert resident_bytes(8, proc=tmp_path) == 0


def test_without_a_container_it_is_what_the_machine_has(tmp_path: Path) -> None:
    machine(tmp_path, available_kib=8000)
    assert free(tmp_path).num_bytes == 8000 << 10


@pytest.mark.parametrize(
    ("version", "directory", "groups"),
    [
        (2, "cgroup", "0::/\n"),
        (2, "cgroup/kube/pod1", "0::/kube/pod1\n"),
        (2, "cgroup/kube", "0::/kube/pod1\n"),
        (1, "cgroup/memory", "4:cpu:/\n3:memory:/\n"),
        (1, "cgroup/memory/docker/abc", "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n"),
        (1, "cgroup/memory/docker", "3:memory:/docker/abc\n"),
    ],
)
def test_every_bound_of_a_container_counts(tmp_path: Path, version: int, directory: str, groups: str) -> None:
    machine(tmp_path, available_kib=8000, groups=groups)
    bound(tmp_path / directory, most=4_000_000, used=3_500_000, inactive=100_000, version=version)
    assert free(tmp_path).num_bytes == 600_000
    bound(tmp_path / directory, most="max" if version == 2 else 2**63 - 4096, used=3_500_000, inactive=0, version=version)
    assert free(tmp_path).num_bytes == 8000 << 10


def test_a_path_that_leads_out_of_the_groups_is_not_followed(tmp_path: Path) -> None:
    machine(tmp_path, available_kib=8000, groups="0::/../../elsewhere\n")
    bound(tmp_path / "elsewhere", most=1, used=0, inactive=0, version=2)
    assert free(tmp_path).num_bytes == 8000 << 10


def test_what_does_not_fit_is_said_by_name() -> None:
    check_memory({"weights": GIB, "KV cache": GIB}, "lower something", free=Free(2 * GIB, "this machine"))
    with pytest.raises(SetupError, match=r"weights 1\.00 GiB, KV cache 2\.00 GiB.*this machine has 2\.00 GiB.*lower something"):
        check_memory({"weights": GIB, "KV cache": 2 * GIB}, "lower something", free=Free(2 * GIB, "this machine"))


@pytest.mark.parametrize("flags", [{"kv_cache_memory_bytes": 900_000_000_000}, {"num_blocks": 1 << 30}])
def test_a_worker_on_a_cpu_refuses_a_cache_that_memory_does_not_hold(tiny_llama_dir: Path, flags: dict[str, int]) -> None:
    config = WorkerConfig(role="decode", model=str(tiny_llama_dir), device="cpu", **flags)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=r"--kv-cache-memory-bytes|--num-blocks"):
        load_model(config)


def test_a_whole_system_is_refused_where_its_workers_together_are_too_large(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.process.free_memory.free_memory", lambda: Free(8 * GIB, "this machine"))
    alone = told("up", "--model", str(tiny_llama_dir), "--device", "cpu", "--port", "0", "--kv-cache-memory-bytes", str(5 * GIB))
    with pytest.raises(SetupError, match="--kv-cache-memory-bytes"):
        planned(alone)


def test_a_system_whose_rings_do_not_fit_shared_memory_is_refused(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr("twostep.local.plan.shutil.disk_usage", lambda _: usage(64 << 20, 0, 64 << 20))
    common = ("up", "--model", str(tiny_llama_dir), "--device", "cpu", "--port", "0")
    with pytest.raises(SetupError, match=r"--shm-size"):
        planned(told(*common))
    planned(told(*common, "--kv-ring-bytes", str(8 << 20)))
    planned(told(*common, "--aggregated"))
