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

import grpc
import pytest
from scripted_server import serving_in_thread
from timed_servers import Schedule, TimedInference

from twostep.cli import main
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.bench.serve.summary import Windows, summarize
from twostep.rpc.v1 import inference_pb2 as pb

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


def bench(*words: str, base_install: bool = False) -> subprocess.CompletedProcess[str]:
    start = ["-c", GUARD] if base_install else ["-m", "twostep.cli"]
    command = [sys.executable, "-P", "-W", "error::ResourceWarning", *start, "bench", "serve", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@contextmanager
def server(**options: Any) -> Iterator[tuple[str, TimedInference]]:
    servicer = TimedInference(Schedule((0.02, 0.001)), **options)
    with serving_in_thread(servicer) as address:
        yield address, servicer


FAST = ("--workload", "fixed", "--input-tokens", "40", "--output-tokens", "5", "--rate", "40")


@pytest.mark.system
@pytest.mark.smoke
def test_a_run_with_the_base_install_alone() -> None:
    with server() as (address, servicer):
        done = bench("--target", address, *FAST, "--num-requests", "20", "--goodput", "ttft:60000", "gap:60000", base_install=True)
    assert done.returncode == 0, done.stderr
    assert "20 of 20 (100.0%) kept TTFT ≤ 60000 ms, gap ≤ 60000 ms" in done.stdout
    for name in ("TTFT", "TPOT", "ITL", "longest gap", "E2E", "prefill", "of a core"):
        assert name in done.stdout
    assert len(servicer.requests) == 20
    assert all(len(r.token_ids.ids) == 40 for r in servicer.requests)


@pytest.mark.system
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--plots", "/tmp/nowhere"), "twostep[bench]"),
        (("--target", "http://127.0.0.1:9"), "twostep[bench]"),
        (("--target", "127.0.0.1:9"), "no router answers at 127.0.0.1:9"),
    ],
)
def test_what_the_base_install_lacks_is_said(words: tuple[str, ...], said: str) -> None:
    done = bench(*FAST, *words, base_install=True)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.system
def test_rates_json_saved_requests_and_plots(tmp_path: Path) -> None:
    with server() as (address, servicer):
        done = bench(
            *("--target", address, *FAST, "--rate", "30,60", "--num-requests", "15", "--goodput", "ttft:60000", "--gpus", "1+1"),
            *("--json", "--output", str(tmp_path / "out.json"), "--save-requests", str(tmp_path / "requests.jsonl")),
            *("--plots", str(tmp_path / "plots"), "--send-targets", "--request-class", "batch"),
            *("--gpu-hour-price", "3.6"),
        )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "out.json").read_text())
    assert [p["rate"] for p in report["points"]] == [30, 60]
    assert report["knee"]["rate"] == 60
    assert report["settings"]["served_model"] == "timed"
    assert report["points"][0]["cost"]["per_request"] > 0
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"latency.png", "goodput.png", "cdf.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "plots").iterdir())
    assert len({r.cache_salt for r in servicer.requests}) == 2, "rates find nothing of each other in a cache"
    assert {r.ttft_ms for r in servicer.requests} == {60000}
    # What was saved gives the same figures again.
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    again = [RequestRecord.from_json(row) for row in rows if row["rate"] == 60]
    summary = summarize(again, Windows.of_requests(again, open_loop=True), targets=LatencyTargets(ttft_ms=60000))
    assert summary.ttft_s.p99 == pytest.approx(report["points"][1]["ttft_s"]["p99"], abs=1e-5)
    assert summary.goodput is not None
    assert summary.goodput.num_met == report["points"][1]["goodput"]["num_met"] == 15


@pytest.mark.system
def test_saved_requests_are_strict_json_at_an_infinite_rate_too(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with server() as (address, _):
        words = ("--rate", "inf", "--num-requests", "3", "--save-requests", str(path), "--json")
        done = bench("--target", address, *FAST, *words)
    assert done.returncode == 0, done.stderr

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    saved = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [request["rate"] for request in saved] == [None] * 3


@pytest.mark.system
def test_a_sweep_ends_at_its_bound(tmp_path: Path) -> None:
    with server() as (address, _):
        done = bench("--target", address, *FAST, "--sweep", "--num-requests", "6", "--goodput", "ttft:60000")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("requests measured") == 16


@pytest.mark.system
def test_users_and_conversations() -> None:
    with server() as (address, servicer):
        done = bench(
            *("--target", address, "--workload", "multi-turn", "--turns", "2:3", "--input-tokens", "10", "--output-tokens", "4"),
            *("--concurrency", "3", "--num-requests", "6", "--think-time", "0.001"),
        )
    assert done.returncode == 0, done.stderr
    assert "3 users: " in done.stdout
    assert len(servicer.requests) >= 12


@pytest.mark.system
@pytest.mark.parametrize("kind", ["mooncake", "azure"])
def test_traces(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace"
    if kind == "mooncake":
        rows = [{"timestamp": i * 20, "input_length": 600 + i, "output_length": 3, "hash_ids": [0, i + 1]} for i in range(8)]
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"2023-11-16 18:17:0{i}.0000000,60{i},3\n" for i in range(8)))
    with server() as (address, servicer):
        speed = "2" if kind == "mooncake" else "100"
        done = bench("--target", address, "--workload", kind, "--dataset-path", str(path), "--trace-speed", speed)
    assert done.returncode == 0, done.stderr
    assert "8 requests measured, 8 completed" in done.stdout
    # The window is as long as the trace, and not a minute: one each 10 ms.
    assert "offered      100.00 requests/s" in done.stdout
    assert sorted(len(r.token_ids.ids) for r in servicer.requests) == list(range(600, 608))
    heads = {tuple(r.token_ids.ids[:512]) for r in servicer.requests}
    assert len(heads) == (1 if kind == "mooncake" else 8)


@pytest.mark.system
def test_nothing_answered_is_a_failure_with_its_reasons() -> None:
    with server(refuse_every=1) as (address, _):
        done = bench("--target", address, *FAST, "--num-requests", "3")
    assert done.returncode == 1
    assert "refused      3: no worker has room" in done.stdout
    assert "warning: no request completed" in done.stdout
    assert "nan" not in done.stdout


class Keyed(TimedInference):
    """Notes which keys it was shown; UNAUTHENTICATED without one, as a router with keys."""

    def __init__(self) -> None:
        super().__init__(Schedule((0.02, 0.001)))
        self.shown: set[str] = set()

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        self.shown.add(dict(context.invocation_metadata()).get("authorization", ""))
        if "" in self.shown:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no API key was given")
        return await super().ListModels(request, context)


@pytest.mark.parametrize("way", ["flag", "variable", "both"])
def test_the_key_is_that_of_the_flag_or_of_the_variable(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TWOSTEP_API_KEY", {"flag": "", "variable": "sk-told", "both": "not this one"}[way])
    words: tuple[str, ...] = () if way == "variable" else ("--api-key", "sk-told")
    servicer = Keyed()
    with serving_in_thread(servicer) as address:
        if way == "variable":
            monkeypatch.setenv("TWOSTEP_TARGET", address)
        else:
            words = ("--target", address, *words)
        with pytest.raises(SystemExit) as status:
            main(["bench", "serve", *words, *FAST, "--num-requests", "2", "--json"])
    assert status.value.code == 0
    assert servicer.shown == {"Bearer sk-told"}
    assert "sk-told" not in capsys.readouterr().out


def test_a_router_that_asks_for_a_key_is_not_said_to_be_away(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TWOSTEP_API_KEY", raising=False)
    with serving_in_thread(Keyed()) as address, pytest.raises(SystemExit) as status:
        main(["bench", "serve", "--target", address, *FAST, "--num-requests", "2"])
    assert status.value.code == 1
    assert capsys.readouterr().err == (
        f"twostep: the router at {address} answered: no API key was given; here: TWOSTEP_API_KEY, or --api-key\n"
    )


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_a_key_that_goes_unencrypted_is_told_on_standard_error(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        main(["bench", "serve", "--target", f"{scheme}0.0.0.0:1", *FAST, "--num-requests", "2", "--api-key", "k"])
    assert status.value.code == 1
    assert "twostep: the API key goes to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sweep",), "--sweep needs targets"),
        (("--sweep", "--rate", "1,2", "--goodput", "ttft:1"), "--sweep"),
        (("--rate", "1,x"), "--rate"),
        (("--rate", "1,0"), "above 0"),
        (("--concurrency", "2", "--rate", "2"), "leave out --rate"),
        (("--duration", "1", "--num-requests", "1"), "give one of the two"),
        (("--goodput", "speed:1"), "target 'speed:1'"),
        (("--send-targets",), "--goodput"),
        (("--workload", "mooncake"), "--dataset-path"),
        (("--dataset-path", "x"), "--workload"),
        (("--workload", "multi-turn", "--turns", "1:181"), "180 turns"),
        (("--gpu-hour-price", "2"), "--gpus"),
        (("--spread", "150"), "spread"),
        (("--output", "/nowhere/at/all.json"), "not a folder"),
        (("--extra-body", '{"a": 1}'), "over HTTP"),
        (("--extra-body", "[]", "--target", "http://127.0.0.1:9"), "--extra-body"),
        (("--tenant", "a", "--target", "http://127.0.0.1:9"), "Twostep's own"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_with_what_to_change(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server() as (address, servicer):
        target = () if "--target" in words else ("--target", address)
        with pytest.raises(SystemExit) as status:
            main(["bench", "serve", *target, *words])
    assert status.value.code == 1
    assert said in capsys.readouterr().err
    assert not servicer.requests


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--input-tokens", "0"), "--input-tokens 0: give a number above 0"),
        (("--trace-speed", "0", "--workload", "azure", "--dataset-path", "x"), "--trace-speed 0"),
        (("--duration", "nan"), "--duration nan"),
        (("--warmup", "inf"), "--warmup inf"),
        (("--timeout", "-1"), "--timeout -1"),
        (("--gpu-hour-price", "-2", "--gpus", "0+1"), "--gpu-hour-price"),
        (("--gpus", "0"), "--gpus 0"),
        (("--rate", "nan"), "the rate is nan"),
        (("--rate", "0"), "the rate is 0"),
        (("--workload", "azure"), "--dataset-path"),
        (("--workload", "multi-turn", "--turns", "x"), "--turns 'x'"),
    ],
)
def test_wrong_numbers_are_refused_before_anything_is_connected_to(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        main(["bench", "serve", "--target", "127.0.0.1:1", *words])
    assert status.value.code == 1
    assert said in capsys.readouterr().err


@pytest.mark.system
def test_a_terminal_has_a_progress_bar() -> None:
    ours, theirs = pty.openpty()
    try:
        with server() as (address, _):
            command = [sys.executable, "-P", "-m", "twostep.cli", "bench", "serve", "--target", address, *FAST, "--duration", "1"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process, ThreadPoolExecutor(1) as pool:
                done = pool.submit(process.communicate, timeout=120)
                # Read as it is drawn: a terminal that nobody looks at is soon full, and whoever draws there stands still.
                shown = ""
                while not done.done() or select.select([ours], [], [], 0)[0]:
                    if select.select([ours], [], [], 0.05)[0]:
                        shown += os.read(ours, 1 << 16).decode(errors="replace")
                printed, _ = done.result()
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0
    assert "under way" in shown or "waiting for the last" in shown
    assert "/1 s" in shown
    assert b"under way," not in printed, "results are on standard output, progress is not"


@pytest.mark.system
def test_help_is_instant_and_has_examples() -> None:
    done = bench("--help")
    assert done.returncode == 0
    assert "twostep bench serve --rate 4 --goodput ttft:500 tpot:10 gap:25" in done.stdout
    assert "--send-targets" in done.stdout
    assert "[TWOSTEP_API_KEY]" in done.stdout


@pytest.mark.system
@pytest.mark.parametrize("page", ["README.md", "docs/benchmarking.md"])
def test_the_first_load_of_the_documents_is_one_that_waits_for_its_answers(page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text()
    lines = [line for line in text.splitlines() if line.startswith("twostep bench serve ")]
    words = shlex.split(lines[0], comments=True)[3:]
    assert "--concurrency" in words
    with server() as (address, servicer):
        done = bench("--target", address, *words)
    assert done.returncode == 0, done.stderr
    assert "12 requests measured, 12 completed" in done.stdout
    assert max(len(r.token_ids.ids) for r in servicer.requests) < 200, "a CPU has to compute these"
