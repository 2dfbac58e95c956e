"""`twostep up --otlp-endpoint`: all processes trace, and to one place."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_local_aggregated import commands, flag, told


@pytest.mark.parametrize("word", ["--otlp-endpoint", "--otlp-traces-endpoint"])
def test_all_processes_are_told(word: str, tiny_llama_dir: Path) -> None:
    started = commands(told("up", "--model", str(tiny_llama_dir), "--port", "0", word, "http://collector:4317"))
    traced = {name for name, argv in started.items() if flag(argv, "--otlp-endpoint") == "http://collector:4317"}
    assert traced == {"router", "prefill-0", "decode-0"}


def test_untold_they_go_by_their_environment(tiny_llama_dir: Path) -> None:
    started = commands(told("up", "--model", str(tiny_llama_dir), "--port", "0"))
    assert all("--otlp-endpoint" not in argv for argv in started.values())
