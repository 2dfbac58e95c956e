"""`twostep bench engine` on a tiny model: every phase is measured, and figures fit together."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from twostep.cli import main
from twostep.errors import SetupError
from twostep.lab.bench.roofline import DeviceLimits

# Ends with a traceback if PyTorch was loaded.
WITHOUT_TORCH = """
import sys
from twostep.cli import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules
"""


def bench(*words: str, start: tuple[str, ...] = ("-m", "twostep.cli")) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", *start, "bench", "engine", "--device", "cpu", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.system
def test_figures_fit_together(tiny_llama_dir: Path) -> None:
    done = bench(
        *("--model", str(tiny_llama_dir), "--batch-size", "1", "3", "--input-tokens", "40", "--output-tokens", "9"),
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--input-tokens 1500 --output-tokens 900 --batch-size 1", "lower --input-tokens or --output-tokens"),
        ("--kv-cache-memory-bytes 400000 --input-tokens 200 --batch-size 1 99", "a batch of 99 needs"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_measured(
    words: str, said: str, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("something was measured before")

    monkeypatch.setattr("twostep.lab.bench.roofline.measure_limits", never)
    monkeypatch.setattr("twostep.lab.bench.engine.run_scenario", never)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "engine", "--device", "cpu", "--model", str(tiny_llama_dir), *words.split()])
    assert ended.value.code == 1
    assert said in capsys.readouterr().err


def test_a_known_architecture_by_another_name(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_llama_dir, tmp_path / "own")
    config = tmp_path / "own" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["OwnForCausalLM"], "model_type": "own"}))
    measured: list[str] = []

    def scenario(runner: Any, shape: Any, *_: object) -> None:
        measured.append(shape.config.architecture)
        raise SetupError("that is enough")

    monkeypatch.setattr("twostep.lab.bench.roofline.measure_limits", lambda *_: DeviceLimits(bytes_per_s=1e9, flops_per_s=1e9))
    monkeypatch.setattr("twostep.lab.bench.engine.run_scenario", scenario)
    words = ["bench", "engine", "--device", "cpu", "--model", str(tmp_path / "own"), "--input-tokens", "9"]
    for given, said in (([], "OwnForCausalLM"), (["--architecture", "LlamaForCausalLM"], "that is enough")):
        with pytest.raises(SystemExit) as ended:
            main([*words, *given])
        assert ended.value.code == 1
        assert said in capsys.readouterr().err
    assert measured == ["llama"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--device cuda:99", "--device cuda:99: "),
        ("--device gpu", "--device: 'gpu' is not understood"),
        ("--output-tokens 1", "--output-tokens: '1'"),
        ("--batching static", "it was removed"),
    ],
)
def test_what_cannot_be_is_said_before_pytorch_is_loaded(words: str, said: str) -> None:
    done = bench(*words.split(), start=("-c", WITHOUT_TORCH))
    assert done.returncode
    assert said in done.stderr
    assert "Traceback" not in done.stderr
