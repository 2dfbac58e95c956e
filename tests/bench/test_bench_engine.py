"""`twostep bench engine` on a tiny model: every phase is measured, and figures fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "twostep.cli", "bench", "engine", "--device", "cpu", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_figures_fit_together(tiny_llama_dir: Path) -> None:
    done = bench(
        *("--model", str(tiny_llama_dir), "--batch-size", "1", "3", "--prompt-tokens", "40", "--output-tokens", "9"),
        *("--max-num-batched-tokens", "32", "--json"),
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    limits = report["limits"]
    assert limits["bytes_per_s"] > 1e8
    assert limits["flops_per_s"] > 1e8
    assert [r["batch"] for r in report["results"]] == [1, 3]
    for result in report["results"]:
        prefill, decode = result["prefill"], result["decode"]
        assert prefill["tokens"] == 40 * result["batch"]
        assert prefill["tokens_per_s"] == pytest.approx(prefill["tokens"] / prefill["seconds"])
        assert 0 < result["ttft_p50_s"] <= result["ttft_p99_s"] <= prefill["seconds"]
        # Measured once all have their first token; the last one has all others before it.
        assert 8 <= decode["tokens"] <= 8 * result["batch"]
        assert 0 < result["tpot_p50_s"] <= result["tpot_p99_s"] <= decode["seconds"]
        for phase in (prefill, decode):
            assert phase["mfu"] > 0
            assert phase["mbu"] > 0
            assert phase["bound"] in ("compute", "bandwidth")
            assert phase["joules_per_token"] is None, "a CPU has no counter"


def test_a_batch_that_does_not_fit_says_what_to_change(tiny_llama_dir: Path) -> None:
    done = bench("--model", str(tiny_llama_dir), "--prompt-tokens", "1500", "--output-tokens", "900", "--batch-size", "1")
    assert done.returncode == 1
    assert "lower --prompt-tokens or --output-tokens" in done.stderr
    done = bench("--model", str(tiny_llama_dir), "--kv-cache-memory-bytes", "40000", "--prompt-tokens", "200", "--batch-size", "9")
    assert done.returncode == 1
    assert "smaller --batch-size" in done.stderr


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_a_device_that_is_not_there_is_named(device: str, tiny_llama_dir: Path) -> None:
    done = bench("--model", str(tiny_llama_dir), "--device", device)
    assert done.returncode == 1
    assert device in done.stderr
    assert "Traceback" not in done.stderr


def test_sizes_are_checked() -> None:
    done = bench("--output-tokens", "1")
    assert (done.returncode, "at 3" in done.stderr) == (1, True)
