"""`twostep bench serve` as its user has it."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_server import serving_in_thread
from timed_servers import Schedule, TimedInference

from twostep.cli import main
from twostep.cli._bench_serve import progress_line
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.bench.serve.runner import Extent, RunProgress
from twostep.lab.bench.serve.summary import Windows, summarize

# Finds nothing but the base install.
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


def with_base_install(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-W", "error::ResourceWarning", "-c", GUARD, "bench", "serve", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def bench(*words: str) -> int | str | None:
    """Runs it in this process. Returns its exit status."""
    with pytest.raises(SystemExit) as status:
        main(["bench", "serve", *words])
    return status.value.code


@contextmanager
def server(**options: Any) -> Iterator[tuple[str, TimedInference]]:
    servicer = TimedInference(Schedule((0.02, 0.001)), **options)
    with serving_in_thread(servicer) as address:
        yield address, servicer


FAST = ("--workload", "fixed", "--input-tokens", "40", "--output-tokens", "5", "--rate", "400")


@pytest.mark.system
@pytest.mark.smoke
def test_a_run_with_the_base_install_alone() -> None:
    with server() as (address, servicer):
        done = with_base_install("--target", address, *FAST, "--num-requests", "20", "--goodput", "ttft:60000", "gap:60000")
    assert done.returncode == 0, done.stderr
    assert "20 of 20 (100.0%) kept TTFT ≤ 60000 ms, gap ≤ 60000 ms" in done.stdout
    for name in ("TTFT", "TPOT", "ITL", "longest gap", "E2E", "prefill", "of a core"):
        assert name in done.stdout
    assert [len(r.token_ids.ids) for r in servicer.requests] == [40] * 20


@pytest.mark.system
@pytest.mark.parametrize(
    ("words", "said"), [(("--plots", "/tmp/nowhere"), "[bench]"), (("--target", "127.0.0.1:9"), "no router answers at 127.0.0.1:9")]
)
def test_what_the_base_install_lacks_is_said(words: tuple[str, ...], said: str) -> None:
    done = with_base_install(*FAST, *words)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_rates_json_saved_requests_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "requests.jsonl"
    with server() as (address, servicer):
        words = (
            "--target",
            address,
            *FAST,
            "--rate",
            "300,600",
            "--num-requests",
            "15",
            "--goodput",
            "ttft:60000",
            "gap:60000",
            "--gpus",
            "1+1",
        )
        files = ("--json", "--output", str(tmp_path / "out.json"), "--save-requests", str(saved), "--plots", str(tmp_path / "plots"))
        page = tmp_path / "page.html"
        assert bench(*words, *files, "--page", str(page), "--send-targets", "--request-class", "batch") == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "out.json").read_text())
    assert [p["rate"] for p in report["points"]] == [300, 600]
    assert report["knee"]["rate"] == 600
    assert report["settings"]["served_model"] == "timed"
    assert report["points"][0]["goodput"]["num_gpus"] == 2
    assert (tmp_path / "plots" / "load.png").read_bytes().startswith(b"\x89PNG")
    assert len({r.cache_salt for r in servicer.requests}) == 2, "rates find nothing of each other in a cache"
    assert {(r.ttft_ms, r.gap_ms, r.HasField("tpot_ms")) for r in servicer.requests} == {(60000, 60000, False)}
    assert "prefill: 250 ms" in page.read_text()
    assert [list(p["gaps_by_cause"]) for p in report["points"]] == [["untold"], ["untold"]], "this server tells of no gaps"
    with pytest.raises(SystemExit) as done:
        main(["bench", "page", str(saved), str(saved), "--output", str(page)])
    assert not done.value.code
    assert page.read_text().count("600 requests/s") > 2
    # The saved records give the same figures again.
    rows = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [row["rate"] for row in rows] == [300] * 15 + [600] * 15
    again = [RequestRecord.from_json(row) for row in rows if row["rate"] == 600]
    summary = summarize(again, Windows.of_requests(again, open_loop=True), targets=LatencyTargets(ttft_ms=60000))
    assert summary.ttft_s.p99 == pytest.approx(report["points"][1]["ttft_s"]["p99"], abs=1e-5)
    assert summary.goodput is not None
    assert summary.goodput.num_met == report["points"][1]["goodput"]["num_met"] == 15


def test_saved_requests_are_strict_json_at_an_infinite_rate_too(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with server() as (address, _):
        words = ("--rate", "inf", "--num-requests", "3", "--save-requests", str(path), "--json", "--plots", str(tmp_path))
        assert bench("--target", address, *FAST, *words) == 0

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    assert [json.loads(line, parse_constant=refuse)["rate"] for line in path.read_text().splitlines()] == [None] * 3
    assert (tmp_path / "load.png").is_file()


def test_a_sweep_ends_where_requests_come_as_a_burst(capsys: pytest.CaptureFixture[str]) -> None:
    """A server with room for all of them at once keeps any target then, at whatever rate they are said to come."""
    with server() as (address, _):
        words = ("--sweep", "--rate", "50", "--num-requests", "20", "--goodput", "ttft:60000", "--json")
        assert bench("--target", address, *FAST, *words) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    last = report["points"][-1]
    assert 20 / last["rate"] < last["e2e_s"]["p50"], "the sweep goes on as long as there is a rate"
    assert report["knee"] is None or report["knee"]["rate"] < last["rate"]
    assert "--num-requests" in told.err


def test_users_and_conversations(capsys: pytest.CaptureFixture[str]) -> None:
    with server() as (address, servicer):
        words = ("--workload", "multi-turn", "--turns", "2:3", "--input-tokens", "10", "--output-tokens", "4", "--think-time", "0.001")
        assert bench("--target", address, *words, "--concurrency", "3", "--num-requests", "6") == 0
    assert "3 users: " in capsys.readouterr().out
    assert len(servicer.requests) >= 12


def test_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    rows = [{"timestamp": i * 20, "input_length": 600 + i, "output_length": 3, "hash_ids": [0, i + 1]} for i in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    with server() as (address, servicer):
        assert bench("--target", address, "--workload", "mooncake", "--dataset-path", str(path), "--trace-speed", "2") == 0
    printed = capsys.readouterr().out
    assert "8 requests measured, 8 completed" in printed
    # The window is as long as the trace, and not a minute: one each 10 ms.
    assert "offered      100.00 requests/s" in printed
    assert sorted(len(r.token_ids.ids) for r in servicer.requests) == list(range(600, 608))
    assert len({tuple(r.token_ids.ids[:512]) for r in servicer.requests}) == 1


def test_chats_that_quote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--workload", "quoting", "--input-tokens", "30", "--spread", "0", "--concurrency", "2", "--num-requests", "4")
    path = tmp_path / "text"
    path.write_text("Nobody came to the fair. The bread was eaten by the geese.")
    with server() as (address, servicer):
        assert bench("--target", address, *words) == 0
        assert bench("--target", address, *words, "--dataset-path", str(path)) == 0
        path.write_text("Two sentences. No more.")
        assert bench("--target", address, *words, "--dataset-path", str(path)) == 1
    told = capsys.readouterr()
    assert told.out.count("1.00 tokens each") == 2
    assert "passages have up to 30 tokens" in told.err
    asked = [bytes(r.token_ids.ids).decode() for r in servicer.requests]
    assert all(chat.startswith("<user>Re") for chat in asked)
    assert any(chat.endswith("Nobody came to the fair. The b<assistant>Nobody c") for chat in asked[4:])
    assert {r.sampling.max_tokens for r in servicer.requests} == {22}, "a passage of 30 tokens, of which 8 are there"


def test_nothing_answered_is_a_failure_with_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    with server(refuse_every=1) as (address, _):
        assert bench("--target", address, *FAST, "--num-requests", "3") == 1
    printed = capsys.readouterr().out
    assert "refused      3: no worker has room" in printed
    assert "warning: no request completed" in printed
    assert "nan" not in printed


@pytest.mark.parametrize("way", ["flag", "variable", "both", "neither"])
def test_the_key_is_that_of_the_flag_or_of_the_variable(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TWOSTEP_API_KEY", {"flag": "", "variable": "sk-told", "both": "not this one", "neither": ""}[way])
    words = ("--api-key", "sk-told") if way in ("flag", "both") else ()
    with server(key="sk-told") as (address, _):
        monkeypatch.setenv("TWOSTEP_TARGET", address)
        assert bench(*words, *FAST, "--num-requests", "2", "--json") == (1 if way == "neither" else 0)
    told = capsys.readouterr()
    assert "sk-told" not in told.out
    if way == "neither":
        assert address in told.err, "it is not said to be away"
        assert "TWOSTEP_API_KEY" in told.err


def test_a_key_that_goes_unencrypted_is_told_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--target", "0.0.0.0:1", *FAST, "--num-requests", "2", "--api-key", "k") == 1
    assert "twostep: the API key goes to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--sweep", "--sweep needs targets"),
        ("--sweep --goodput ttft:1 --num-requests 5", "20 or more"),
        ("--sweep --rate 1,2 --goodput ttft:1", "--sweep"),
        ("--sweep --concurrency 2 --goodput ttft:1", "--concurrency"),
        ("--rate 1,x", "--rate"),
        ("--rate 1,0", "above 0"),
        ("--rate nan", "the rate is nan"),
        ("--rate 0", "the rate is 0"),
        ("--rate inf", "--num-requests"),
        ("--concurrency 2 --rate 2", "leave out --rate"),
        ("--concurrency 0", "--concurrency 0"),
        ("--duration 1 --num-requests 1", "give one of the two"),
        ("--duration nan", "--duration nan"),
        ("--warmup inf", "--warmup inf"),
        ("--timeout -1", "--timeout -1"),
        ("--goodput speed:1", "target 'speed:1'"),
        ("--send-targets", "--goodput"),
        ("--attainment 2", "--attainment 2"),
        ("--workload mooncake", "--dataset-path"),
        ("--workload azure --dataset-path x", "mooncake"),
        ("--workload mixed", "it was removed"),
        ("--workload quoting --dataset-path /nowhere/text", "cannot be read"),
        ("--workload quoting --max-model-len 512", "--input-tokens"),
        ("--dataset-path x", "--workload"),
        ("--trace-speed 2", "--trace-speed"),
        ("--workload multi-turn --turns 1:181", "180 turns"),
        ("--workload multi-turn --turns x", "--turns 'x'"),
        ("--prefix-tokens 0", "--prefix-tokens 0"),
        ("--gpus 0", "--gpus 0"),
        ("--gpu-hour-price 2", "twostep plan"),
        ("--input-tokens 0", "--input-tokens 0: give a number above 0"),
        ("--spread 150", "spread"),
        ("--output /nowhere/at/all.json", "not a folder"),
        ("--extra-body {}", "vllm bench serve"),
        ("--target http://127.0.0.1:9", "vllm bench serve"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_connected_to(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with server() as (address, servicer):
        assert bench("--target", address, *words.split())
    assert said in capsys.readouterr().err
    assert not servicer.calls
    assert not servicer.requests


def test_a_wait_for_the_last_answers_is_no_load() -> None:
    progress = RunProgress(num_sent=9, num_ended=5, elapsed_s=75.0, none_to_come=True)
    said = progress_line("2 users", Extent(duration_s=15.0), progress)
    assert said == "2 users: 15/15 s, 9 sent, waiting for 60 s for the last 4 answers"
    said = progress_line("2 users", Extent(num_requests=9), progress)
    assert said == "2 users: 5/9, 9 sent, waiting for the last 4 answers"


@pytest.mark.system
def test_a_terminal_has_a_progress_bar() -> None:
    ours, theirs = pty.openpty()
    try:
        with server() as (address, _):
            command = [sys.executable, "-P", "-m", "twostep.cli", "bench", "serve", "--target", address, *FAST, "--duration", "1"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process, ThreadPoolExecutor(1) as pool:
                done = pool.submit(process.communicate, timeout=120)
                # Read as it is drawn: a terminal that nobody looks at is soon full, and the program that draws there stands still.
                shown = ""
                while not done.done() or select.select([ours], [], [], 0)[0]:
                    if select.select([ours], [], [], 0.05)[0]:
                        shown += os.read(ours, 1 << 16).decode(errors="replace")
                printed, _ = done.result()
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0
    assert "under way" in shown or "for the last" in shown
    assert "/1 s" in shown
    assert b"under way," not in printed, "results are on standard output, progress is not"


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarking.md"])
def test_the_first_load_of_the_documents_is_one_that_waits_for_its_answers(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / page).read_text()
    lines = [line for line in text.splitlines() if line.startswith("twostep bench serve ")]
    words = shlex.split(lines[0], comments=True)[3:]
    assert "--concurrency" in words
    with server() as (address, servicer):
        assert bench("--target", address, *words) == 0
    assert "12 requests measured, 12 completed" in capsys.readouterr().out
    assert max(len(r.token_ids.ids) for r in servicer.requests) < 200, "a CPU has to compute these"
