"""Tests of the words for a process' end, and for what to do about it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from twostep.process.ending import how_it_ended, oom_kills


@pytest.mark.parametrize("status", [1, 2, 255, 128])
def test_an_exit_status_is_one(status: int) -> None:
    assert how_it_ended(status) == f"exited with status {status}"


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (signal.SIGKILL, "memory"),
        (signal.SIGBUS, "/dev/shm"),
        (signal.SIGILL, "CPU"),
        (signal.SIGSEGV, "native library"),
        (signal.SIGTERM, "SIGTERM"),
    ],
)
def test_a_signal_is_named_with_what_it_most_likely_means(number: signal.Signals, hint: str) -> None:
    for status in (-number, 128 + number):
        said = how_it_ended(status)
        assert number.name in said
        assert hint in said


def test_the_kernels_own_count_tells_its_kills_from_others(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3
    by_kernel = how_it_ended(-9, oom_kills_before=2, proc=tmp_path)
    by_somebody = how_it_ended(-9, oom_kills_before=3, proc=tmp_path)
    assert "--kv-cache-memory-bytes" in by_kernel
    assert "--kv-cache-memory-bytes" not in by_somebody
    assert "killed it on purpose" in by_somebody
    (tmp_path / "vmstat").write_text("pgfault 7\n")
    assert oom_kills(tmp_path) is None
    assert "most likely" in how_it_ended(-9, oom_kills_before=None, proc=tmp_path)


def test_nobody_may_know() -> None:
    assert how_it_ended(None)
