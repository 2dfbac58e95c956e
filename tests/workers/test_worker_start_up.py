"""Progress while a process starts, and where the time went."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.errors import SetupError
from twostep.model.runner.device import choose_device
from twostep.process.startup import StartUp
from twostep.worker.config import parse_config
from twostep.worker.model import load_model


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


NAMES = st.sampled_from(["weights", "kernels", "graphs"])


@given(st.lists(st.tuples(NAMES, st.integers(0, 40))), st.integers(0, 40), st.booleans())
def test_every_second_is_in_exactly_one_phase(events: list[tuple[str, int]], before: int, on_terminal: bool) -> None:
    clock = Clock()
    terminal = io.StringIO() if on_terminal else None
    start = StartUp(since=clock.now, clock=clock, line=lambda text: None, terminal=terminal)
    clock.now += before
    spent = {"import": before}
    for name, seconds in events:
        start.phase(name)
        start.advance(1, 2)
        clock.now += seconds
        spent[name] = spent.get(name, 0) + seconds
    said = start.finish()
    assert said.startswith(f"ready in {before + sum(s for _, s in events)}.0 s")
    assert {name: float(s) for name, s in re.findall(r"(\w+) ([\d.]+)(?:,|$)", said.partition(":")[2])} == {
        name: float(s) for name, s in spent.items() if s
    }
    if terminal is not None and events:
        assert terminal.getvalue().endswith("\r\x1b[K"), "the bar is gone at the end"


def test_a_log_gets_a_line_now_and_then_and_a_terminal_a_bar() -> None:
    lines: list[str] = []
    clock, terminal = Clock(), io.StringIO()
    for target in (None, terminal):
        start = StartUp(since=clock.now, clock=clock, line=lines.append, terminal=target)
        start.phase("weights")
        for done in range(0, 100):
            clock.now += 0.2
            start.advance(done * 10**8, 10**10, "B")
        assert start.finish() == "ready in 20.0 s: weights 20.0 (9.9 GB, 0.5 GB/s)"
    assert lines == [f"weights: {gb} of 10.0 GB" for gb in ("2.4", "4.9", "7.4", "9.9")]
    assert "[############............] 5.0 of 10.0 GB" in terminal.getvalue()


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_device("auto")[0] == choose_device("auto:3")[0] == "cpu"
    assert choose_device("cuda:1") == ("cuda:1", "as asked for")
    with pytest.raises(SetupError, match="auto:N"):
        choose_device("auto-1")


def test_auto_is_a_gpu_where_its_kernels_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "a card")
    assert [choose_device(name)[0] for name in ("auto", "auto:1", "auto:2")] == ["cuda:0", "cuda:1", "cuda:0"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    device, why = choose_device("auto")
    assert device == "cpu"
    assert "triton" in why


def test_a_model_on_a_cpu_reports_its_phases(tiny_llama_dir: Path) -> None:
    phases: list[str] = []
    amounts: list[tuple[int, int]] = []

    class Journal:
        def phase(self, name: str) -> None:
            phases.append(name)

        def advance(self, done: int, total: int, unit: str = "") -> None:
            amounts.append((done, total))

    model = load_model(parse_config("decode", ["--model", str(tiny_llama_dir), "--kv-cache-memory-bytes", str(1 << 20)]), Journal())
    assert phases == ["device", "weights", "pool", "curve"]
    assert model.runner.kv_shape.num_blocks * model.runner.kv_shape.block_bytes <= 1 << 20
