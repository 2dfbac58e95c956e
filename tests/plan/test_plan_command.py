"""`twostep plan` as its user runs it, with nothing but the base install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

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
"""
ONCE = "main(sys.argv[1:])"
# One simulation, told in both ways.
AS_TEXT_AND_AS_JSON = """
import twostep.cli._plan as command
plan_for_rate, plans = command.plan_for_rate, []
def planned(*asked):
    if not plans:
        plans.append(plan_for_rate(*asked))
    return plans[0]
command.plan_for_rate = planned
for more in ([], ["--json"]):
    try:
        main([*sys.argv[1:], *more])
    except SystemExit as ended:
        assert not ended.code
    print("----")
"""
CURVES = {"prefill": {"fixed_s": 0.005, "per_row_s": 5e-5}, "decode": {"fixed_s": 0.005, "per_row_s": 5e-5}}
QUICK = ["--model", "llama-3.1-8b", "--gpu-memory", "80GB", "--workload", "prompts=1500..2500,outputs=20"]


def plan(*words: str, what: str = ONCE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-W", "error", "-c", GUARD + what, "plan", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def curves(tmp_path: Path) -> str:
    path = tmp_path / "curves.json"
    path.write_text(json.dumps(CURVES))
    return str(path)


def test_a_plan_as_text_and_as_json(curves: str) -> None:
    words = ["--curve", curves, *QUICK, "--slo", "ttft=800,gap=40", "--rate", "12", "--gpu-hour-price", "3.6"]
    done = plan(*words, what=AS_TEXT_AND_AS_JSON)
    assert done.returncode == 0, done.stderr
    text, as_json, _ = done.stdout.split("----\n")
    raw = json.loads(as_json)
    pair = raw["disaggregated"]
    for needed in (
        f"{pair['num_prefill']} prefill + {pair['num_decode']} decode",
        "2 · layers · kv_heads · head_dim · bytes = 2 · 32 · 8 · 128 · 2 = 131,072 bytes",
        "by Little's law",
        "goodput/s",
        "cost/request",
        f"recommended  {raw['recommended']}",
    ):
        assert needed in text
    assert raw["kv_bytes_per_token"] == 131072
    assert pair["goodput_per_s"] >= 12
    assert pair["share_kept"] >= 0.95
    assert pair["cost_per_hour"] == pytest.approx(3.6 * pair["gpus"])
    assert pair["cost_per_request"] == pytest.approx(3.6 * pair["gpus"] / 3600 / pair["planned_rate"])
    role = pair["roles"]["decode"]
    # Reserved while the prompt is computed, then decoding: Little's law and the simulation's peak speak of the same thing.
    assert 0.3 * role["tokens_in_flight_by_littles_law"] < role["peak_tokens"] < 8 * role["tokens_in_flight_by_littles_law"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slo", "ttft=800", "--gpus", "2"], "give --preset (h200-llama-3.1-8b"),
        (["--slo", "ttft=800", "--gpus", "0", "--preset", "h200-llama-3.1-8b"], "a worker takes 1; give at least as many"),
        (["--slo", "ttft=8", "--gpus", "2", "--preset", "h200-llama-3.1-8b"], "alone, a request of"),
        (["--slo", "speed=8", "--gpus", "2", "--preset", "h200-llama-3.1-8b"], "'speed=8' is no part of the targets"),
        (["--slo", "ttft=800", "--rate", "-1", "--preset", "h200-llama-3.1-8b"], "give requests a second, above 0"),
        (["--slo", "ttft=800", "--rate", "1", "--preset", "abacus"], "known are h200-llama-3.1-8b"),
        (["--slo", "ttft=800", "--rate", "1", "--redis-url", "redis://127.0.0.1:9"], "needs redis"),
    ],
)
def test_errors_are_one_line(words: list[str], message: str) -> None:
    done = plan(*QUICK, *words)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.smoke
def test_rate_or_gpus() -> None:
    assert plan("--workload", "prompts=5,outputs=5", "--slo", "ttft=5").returncode == 2
    told = plan("--help")
    assert told.returncode == 0
    assert "2600+-30%,outputs" in "".join(told.stdout.split()), "the example can be run as it is printed"
