"""Decisions that are written down can be made again, and show what a change of placement changes."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_simulation import GPU, LAYOUT, worker_record
from router_fakes import Cluster, until

from router.placing import log as placement_log
from router.placing import replay
from router.placing.log import LoggedPlacement, PlacementEncoder, PlacementLog, choice_of
from router.placing.placement import Candidate, MeanLoad, NoPlacement, Placement, PlacementRequest, Snapshot, place
from router.placing.replay import differs, main, read_decisions
from twostep.cluster.records import WorkerLoad, WorkerRecord
from twostep.errors import InvalidRequest, SetupError
from twostep.request_class import RequestClass


def record(name: str, **options: Any) -> WorkerRecord:
    return worker_record(name, **({"transports": ("ray", "cuda_ipc"), "curve": GPU} | options))


candidates = st.builds(
    dict,
    cached_tokens=st.integers(0, 1200),
    host_cached_tokens=st.integers(0, 100),
    queued_tokens=st.integers(0, 9000),
    batch_tokens=st.integers(0, 4000),
    recent_tokens=st.floats(0, 1e5),
    num_attempts=st.integers(0, 70),
    excluded=st.booleans(),
    mean=st.none() | st.builds(MeanLoad, queued_tokens=st.floats(0, 1e4), own_queued_tokens=st.floats(0, 1e4), num_seqs=st.floats(0, 70)),
)
options = st.builds(
    dict,
    ready=st.booleans(),
    local_prefill=st.booleans(),
    curve=st.sampled_from([None, GPU]),
    transports=st.sampled_from([(), ("ray",), ("cuda_ipc", "ray")]),
    layout=st.sampled_from([LAYOUT, dataclasses.replace(LAYOUT, block_size=32), dataclasses.replace(LAYOUT, num_layers=3)]),
)
demands = st.builds(
    PlacementRequest,
    request_id=st.text(min_size=1, max_size=9),
    num_tokens=st.integers(1, 9000),
    max_new_tokens=st.integers(1, 500),
    request_class=st.sampled_from(RequestClass),
    ttft_ms=st.none() | st.floats(1, 1e4),
    tpot_ms=st.none() | st.floats(0.1, 1e3),
)


def sides(parts: list[tuple[dict[str, Any], dict[str, Any]]], letter: str) -> list[Candidate]:
    return [Candidate(record=record(f"{letter}{i}", **own), **known) for i, (known, own) in enumerate(parts)]


@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.lists(st.tuples(candidates, options), max_size=4), st.lists(st.tuples(candidates, options), max_size=4), demands))
)
def test_whatever_was_decided_is_decided_again(cases: list[tuple[Any, Any, PlacementRequest]]) -> None:
    encoder, lines = PlacementEncoder(), []
    made = []
    for prefill, decode, demand in cases:
        snapshot = Snapshot(prefill=sides(prefill, "p"), decode=sides(decode, "d"))
        made.append((snapshot, demand))
        lines += encoder.lines(LoggedPlacement(1.5, snapshot, demand, place(snapshot, demand)))
    logged = list(read_decisions(lines))
    assert [(each.snapshot, each.demand) for each in logged] == made
    assert [differs(each) for each in logged] == [None] * len(made)


def _log_of(path: Path, num_decisions: int = 40, **options: Any) -> list[Placement | NoPlacement]:
    log = PlacementLog(path, **options)
    workers = [[Candidate(record=record(f"{letter}{i}")) for i in range(3)] for letter in "pd"]
    results = []
    for number in range(num_decisions):
        # One worker's heartbeat comes every ten requests.
        workers[0][0] = workers[0][0] if number % 10 else Candidate(record=record("p0", load=WorkerLoad(num_free_blocks=number)))
        snapshot = Snapshot(prefill=list(workers[0]), decode=list(workers[1]))
        results.append(log.place(snapshot, PlacementRequest(request_id=f"r{number}", num_tokens=2600, max_new_tokens=128)))
    log.close(60.0)
    assert log.num_left_out == 0
    return results


def test_records_are_written_once_and_the_tool_finds_nothing_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "placement.jsonl"
    results = _log_of(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum("worker" in line for line in lines) == 6 + 3
    assert [line["choice"] for line in lines if "demand" in line] == [choice_of(result) for result in results]
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == "40 decisions, 0 differ\n"


def test_what_would_be_decided_otherwise_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "placement.jsonl"
    _log_of(path, 4)

    def changed(snapshot: Snapshot, demand: PlacementRequest) -> Placement | NoPlacement:
        if demand.request_id != "r2":
            return place(snapshot, demand)
        return Placement(
            prefill=None, decode=record("d9"), cost=1.0, reason="", predicted_ttft_s=0.5, predicted_tpot_s=0.01, meets_targets=False
        )

    monkeypatch.setattr(replay, "place", changed)
    assert main([str(path)]) == 1
    first, summary = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}:9 request r2 of 2600 tokens: prefill p")
    assert first.endswith("-> alone on d9 (500.0 ms, 10.00 ms a token, targets missed)")
    assert summary == "4 decisions, 1 differs"


def test_files_that_are_none_are_refused_with_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "missing")]) == 2
    path = tmp_path / "placement.jsonl"
    _log_of(path, 2)
    whole = path.read_text()
    path.write_text(whole + "what is this\n")
    assert main([str(path)]) == 2
    assert f"line {len(whole.splitlines()) + 1} is none of a placement log" in capsys.readouterr().err
    with pytest.raises(InvalidRequest, match="line 1"):
        list(read_decisions(['{"at": 1, "demand": {}, "prefill": [[7]], "decode": [], "choice": {}}\n']))
    # A router that was killed in the middle of a line.
    path.write_text(whole + whole.splitlines()[-1][:50])
    assert main([str(path)]) == 0


def test_a_full_file_is_kept_once_and_each_can_be_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "placement.jsonl"
    _log_of(path, 200, max_bytes=20_000)
    older = path.with_name("placement.jsonl.1")
    assert sorted(tmp_path.iterdir()) == [path, older]
    assert 0 < path.stat().st_size <= 30_000
    assert 20_000 <= older.stat().st_size <= 30_000
    for file in (path, older):
        assert main([str(file)]) == 0
    last = [json.loads(line) for line in path.read_text().splitlines()][-1]
    assert last["demand"]["request_id"] == "r199"


def test_a_slow_disk_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()

    def slow(self: PlacementLog, lines: list[str]) -> None:
        stuck.wait(120.0)

    monkeypatch.setattr(PlacementLog, "_write", slow)
    monkeypatch.setattr(placement_log, "_MAX_QUEUED", 8)
    log = PlacementLog(tmp_path / "placement.jsonl")
    snapshot, demand = Snapshot(prefill=[], decode=[]), PlacementRequest(request_id="r", num_tokens=1, max_new_tokens=1)
    for _ in range(50):
        assert isinstance(log.place(snapshot, demand), NoPlacement)
    assert log.num_left_out >= 50 - 8 - 1
    stuck.set()
    log.close(60.0)


def test_a_file_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--placement-log"):
        PlacementLog(tmp_path / "nowhere" / "placement.jsonl")


async def test_a_router_writes_down_what_it_decides(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "placement.jsonl"
    async with cluster.paired(placement_log=path):
        for _ in range(3):
            reply = await cluster.ask(max_tokens=4, ignore_eos=True)
            assert reply.token_ids == cluster.expected(4)
    await until(lambda: not any(thread.name == "placement-log" for thread in threading.enumerate()), "its thread has ended")
    choices = [json.loads(line)["choice"] for line in path.read_text().splitlines() if '"demand"' in line]
    # Once before it waits for its turn, to see whether its targets can be met, or once in all.
    assert len(choices) >= 3
    assert {(choice["prefill"], choice["decode"]) for choice in choices} == {("p0", "d0")}
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == f"{len(choices)} decisions, 0 differ\n"
