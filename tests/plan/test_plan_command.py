"""`twostep plan` as its user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from twostep.cli import main
from twostep.lab.bench.shapes import LLAMA_8B

# Finds nothing but the base install's packages.
GUARD = """
import sys
allowed = set(sys.stdlib_module_names) | {"twostep", "grpc", "google", "typing_extensions"}
class Guard:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed and not name.startswith("_"):
            return None
        return self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Guard(finder) for finder in sys.meta_path]
from twostep.cli import main
main(sys.argv[1:])
"""
CURVES = {"prefill": {"fixed_s": 0.005, "per_row_s": 5e-5}, "decode": {"fixed_s": 0.005, "per_row_s": 5e-5}}
QUICK = ["--model", "llama-3.1-8b", "--gpu-memory", "80GB", "--workload", "prompts=1500..2500,outputs=20"]


def with_base_install(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-W", "error", "-c", GUARD, "plan", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def plan(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as status:
        main(["plan", *words])
    return status.value.code


def test_a_plan_as_text_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "curves.json").write_text(json.dumps(CURVES))
    words = ["--preset", str(tmp_path / "curves.json"), *QUICK, "--slo", "ttft=800,gap=40", "--rate", "12", "--gpu-hour-price", "3.6"]
    assert plan(*words, "--json") == 0
    raw = json.loads(capsys.readouterr().out)
    assert plan(*words) == 0
    text = capsys.readouterr().out
    pair = raw["disaggregated"]
    for needed in (
        f"{pair['num_prefill']} prefill + {pair['num_decode']} decode",
        "2 · layers · kv_heads · head_dim · bytes = 2 · 32 · 8 · 128 · 2 = 131,072 bytes",
        "goodput/s",
        "cost/request",
        f"recommended  {raw['recommended']}",
    ):
        assert needed in text
    assert raw["kv_bytes_per_token"] == 131072
    assert (raw["curves_of"], raw["state_bytes_per_sequence"]) == ("llama-3.1-8b", 0)
    assert pair["goodput_per_s"] >= 12
    assert pair["planned_rate"] == pytest.approx(12, rel=0.1)
    assert pair["share_kept"] >= 0.95
    assert pair["cost_per_hour"] == pytest.approx(3.6 * pair["gpus"])
    assert pair["cost_per_request"] == pytest.approx(3.6 * pair["gpus"] / 3600 / pair["planned_rate"])
    assert pair["cost_per_million_output_tokens"] == pytest.approx(1e6 * pair["cost_per_request"] / 20)
    role = pair["roles"]["decode"]
    assert 0 < role["peak_tokens"] <= role["pool_tokens"]
    assert role["peak_kv_bytes"] == 131072 * role["peak_tokens"]


PRESET = ["--preset", "h200-llama-3.1-8b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slo", "ttft=800", "--gpus", "2"], "give --preset (h200-llama-3.1-8b"),
        (["--slo", "ttft=800", "--gpus", "0", *PRESET], "a worker takes 1; give at least as many"),
        (["--slo", "ttft=8", "--gpus", "2", *PRESET], "alone, a request of"),
        (["--slo", "speed=8", "--gpus", "2", *PRESET], "target 'speed=8'"),
        (["--slo", ",", "--gpus", "2", *PRESET], "--slo has no target"),
        (["--slo", "ttft=800", "--rate", "-1", *PRESET], "give requests a second, above 0"),
        (["--slo", "ttft=800", "--rate", "1", "--preset", "abacus"], "known are h200-llama-3.1-8b"),
        (["--slo", "ttft=800", "--rate", "1", "--curve", "x"], "give it to --preset"),
        (["--slo", "ttft=800"], "--rate --gpus"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*QUICK, *words)
    assert message in capsys.readouterr().err


@pytest.mark.system
@pytest.mark.smoke
def test_the_base_install_is_enough() -> None:
    done = with_base_install(*QUICK, "--slo", "ttft=800", "--rate", "1", "--redis-url", "redis://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("twostep: --redis-url needs the package redis")
    told = with_base_install("--help")
    assert told.returncode == 0
    assert "2600+-30%,outputs" in "".join(told.stdout.split()), "the example can be run as it is printed"


def test_unknown_architectures_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"model_type": "bert", "architectures": ["BertModel"]}))
    words = [*PRESET, "--model", str(tmp_path), *QUICK[4:], "--slo", "ttft=900", "--rate", "1", "--gpu-memory", "1GB"]
    assert plan(*words)
    assert "BertModel" in (told := capsys.readouterr().err)
    assert "--architecture" in told
    assert plan(*words, "--architecture", "LlamaForCausalLM")
    assert "does not fit" in capsys.readouterr().err, "it is read as the architecture that it is said to be"
