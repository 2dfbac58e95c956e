"""`twostep status`: the live table at a terminal, once, as JSON, and what it says when there is nothing to show."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import commands
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import ScriptedInference, serving_in_thread, some_cluster
from terminal_session import Session

from twostep.cli._status_table import RouterReply, amount, duration, instant, percent, render
from twostep.cli._terminal import width_of
from twostep.client._status import cluster_status
from twostep.rpc.v1 import status_pb2 as pb

COMMAND = [sys.executable, "-P", "-W", "error", "-m", "twostep.cli", "status"]


@pytest.fixture
def server() -> Iterator[tuple[ScriptedInference, str]]:
    servicer = ScriptedInference()
    with serving_in_thread(servicer) as target:
        yield servicer, target


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return commands.run("status", *words)


def plain(text: str, *_: str) -> str:
    return text


# ---- at a terminal ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", ["q", "\x03"])
def test_the_live_table(server: tuple[ScriptedInference, str], leave: str) -> None:
    servicer, target = server
    with Session([*COMMAND, "--target", target, "--interval", "0.1"], env={"NO_COLOR": ""}) as terminal:
        terminal.expect("q or Ctrl-C leaves")
        assert terminal.cursor_hidden
        lines = terminal.table()
        assert lines[0] == "scripted  router-0  0.1.0  up 1 h 6 min  ready"
        assert any(line.split() == ["decode-0", "ready", "12/64", "0", "████··", "60", "%", "640", "0.5", "0", "2"] for line in lines)
        servicer.cluster.workers[1].num_running = 33
        terminal.expect("33/64")
        servicer.away = True
        terminal.expect("this router drains; ask another")
        servicer.away = False
        terminal.expect("33/64")
        terminal.resize(50, 12)
        terminal.expect("more lines: make")
        assert all(width_of(line) <= 50 for line in terminal.table())
        terminal.type(leave)
        assert terminal.wait() == 0
        assert not terminal.cursor_hidden
        assert "33/64" in terminal.text(), "what was there last stays"
        assert "\x1b[32m" in terminal.raw


def test_a_router_that_is_gone_is_shown_beside_the_others(server: tuple[ScriptedInference, str]) -> None:
    _, target = server
    done = run("--target", f"127.0.0.1:9,{target}")
    assert done.returncode == 0
    assert "127.0.0.1:9: no server answers" in done.stdout
    assert "prefill-0" in done.stdout


def test_once_and_as_json(server: tuple[ScriptedInference, str]) -> None:
    servicer, target = server
    done = run("--interval", "0", "--target", target)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert all(width_of(line) <= 80 for line in done.stdout.splitlines())
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("decode-")] == [
        ["decode-0", "ready"],
        ["decode-1", "draining"],
    ]
    (router,) = json.loads(run("--json", "--target", target).stdout)["routers"]
    assert (router["target"], router["model"], router["load"]["ttft_s"]["p50"]) == (target, "scripted", 0.12)
    assert router["workers"][0]["transports"] == ["cuda_ipc", "ray"]
    assert router["scaling"] is None
    servicer.cluster.scaling.CopyFrom(some_decision(switches=[pb.RoleSwitch(worker_id="decode-0", role="prefill")]))
    (router,) = json.loads(run("--json", "--target", target).stdout)["routers"]
    assert router["scaling"] == {
        "leader": "autoscaler-0",
        "age_s": 8.4,
        "stale": False,
        "roles": [
            {"role": "prefill", "pods": 2, "wanted_pods": 2, "wanted_workers": 2, "serving_workers": 1},
            {"role": "decode", "pods": 3, "wanted_pods": 3, "wanted_workers": 3, "serving_workers": 3},
        ],
        "switches": [{"worker_id": "decode-0", "role": "prefill"}],
        "reason": "2.43 requests/s need 1 + 2; 4 with reserve",
        "limit": "",
        "problem": "",
    }
    with Session([*COMMAND, "--interval", "0", "--target", target], env={"NO_COLOR": "1"}) as terminal:
        assert terminal.wait() == 0
        assert "\x1b" not in terminal.raw
        assert "prefill-0" in terminal.text()


def test_nobody_there_and_bad_flags(server: tuple[ScriptedInference, str]) -> None:
    done = run("--target", "127.0.0.1:9")
    assert done.returncode == 1
    assert "no server answers at 127.0.0.1:9; start one with `twostep up`" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--interval 0.01" in run("--interval", "0.01", "--target", server[1]).stderr
    assert "16 at most" in run("--target", ",".join(f"127.0.0.1:{port}" for port in range(1, 20))).stderr


def test_a_key_is_asked_for_and_shown(server: tuple[ScriptedInference, str]) -> None:
    servicer, target = server
    servicer.key = "sk-1"
    done = run("--interval", "0", "--target", target)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"twostep: {target}: no API key was given; send one; here: TWOSTEP_API_KEY, or --api-key\n"
    assert run("--interval", "0", "--target", target, "--api-key", "sk-1").returncode == 0


# ---- the table -------------------------------------------------------------------------------------------------------------


def test_no_workers_yet_and_workers_of_one_role() -> None:
    cluster = some_cluster()
    del cluster.workers[:]
    cluster.ready = False
    lines = render([RouterReply("a:1", status=cluster_status(cluster))], 80, plain)
    assert lines[0].endswith("not ready")
    assert "No worker has registered" in lines[-1]
    cluster = some_cluster()
    del cluster.workers[0]
    shown = "\n".join(render([RouterReply("a:1", status=cluster_status(cluster))], 80, plain))
    assert "prefill: no workers; decode workers compute prompts themselves\n\ndecode: 1 of 2 ready" in shown
    cluster.workers[0].local_prefill = False
    assert "prefill: no workers, and nothing is served" in "\n".join(
        render([RouterReply("a:1", status=cluster_status(cluster))], 80, plain)
    )


def test_what_is_kept_and_moved_of_all_and_by_each_worker() -> None:
    cluster = some_cluster()
    status = cluster_status(cluster)
    shown = render([RouterReply("a:1", status=status)], 132, plain)
    assert "placed   4.5/s: 11 % kept, 89 % moved" in shown
    assert "work     prompts 1.50 s, answers 1.20 s, P:D 1.25   targets kept 98.5 %" in shown
    titles = next(line for line in shown if line.startswith("worker")).split()
    cells = next(line for line in shown if line.startswith("decode-0")).replace(" %", "%").replace("████·· ", "").split()
    found = dict(zip([title for title in titles if title != "used"], cells, strict=False))
    assert [found[name] for name in ("kept/s", "out/s", "in/s", "tokens/s")] == ["0.5", "0", "2", "640"]
    assert "decode: 1 of 2 ready" in shown
    for worker in cluster.workers:
        worker.both_roles = True
    cluster.load.local_on_prefill_per_s = 0.4
    shown = render([RouterReply("a:1", status=cluster_status(cluster))], 80, plain)
    assert "decode: 1 of 2 ready, taking any work" in shown
    assert "placed   4.5/s: 11 % kept (9 % on prefill workers), 89 % moved" in shown


def test_workers_that_get_no_request_are_named_with_why() -> None:
    cluster = some_cluster()
    cluster.workers[0].not_ready_reason = "no KV transport works (--kv-transfer ray): ray: Ray does not answer at h:1"
    cluster.refused.add(worker_id="decode-9", role="decode", version="0.3.0", reason="it runs version 0.3.0; upgrade \x1b[31mthe router")
    cluster.refused.add(worker_id="odd", reason="not a worker record of this version")
    lines = render([RouterReply("a:1", status=cluster_status(cluster))], 70, plain)
    shown = " ".join("".join(lines).split())
    assert "prefill: 0 of 1 ready" in lines
    assert any(line.split()[:3] == ["prefill-0", "no", "use"] for line in lines)
    assert "prefill-0: no KV transport works (--kv-transfer ray): ray: Ray does not answer at h:1" in shown
    assert "refused: decode-9 (decode, 0.3.0): it runs version 0.3.0; upgrade" in shown
    assert "refused: odd: not a worker record of this version" in lines
    assert all(width_of(line) <= 70 for line in lines)
    assert "\x1b" not in shown
    names = {worker.worker_id: worker.version for worker in cluster_status(cluster).refused}
    assert names == {"decode-9": "0.3.0", "odd": ""}


def some_decision(**fields: Any) -> pb.Scaling:
    values: dict[str, Any] = {
        "leader": "autoscaler-0",
        "age_s": 8.4,
        "roles": [
            pb.RoleScaling(role="prefill", pods=2, wanted_pods=2, wanted_workers=2, serving_workers=1),
            pb.RoleScaling(role="decode", pods=3, wanted_pods=3, wanted_workers=3, serving_workers=3),
        ],
        "reason": "2.43 requests/s need 1 + 2; 4 with reserve",
    }
    return pb.Scaling(**(values | fields))


def decided(*decisions: pb.Scaling, width: int = 80, paint: Any = plain) -> list[str]:
    """The lines about the autoscaler, of routers that know these."""
    looks = []
    for number, scaling in enumerate(decisions):
        cluster = some_cluster()
        cluster.scaling.CopyFrom(scaling)
        looks.append(RouterReply(f"{number}:1", status=cluster_status(cluster)))
    lines = render(looks, width, paint)
    at = next(number for number, line in enumerate(lines) if "autoscaler: " in line)
    assert lines[at - 1] == ""
    return lines[at : lines.index("", at)]


def test_what_the_autoscaler_wants_and_why() -> None:
    assert "autoscaler" not in "\n".join(render([RouterReply("a:1", status=cluster_status(some_cluster()))], 80, plain))
    assert decided(some_decision()) == [
        "autoscaler: prefill 1 of 2, decode 3 of 3 workers; 8 s ago, by autoscaler-0",
        "2.43 requests/s need 1 + 2; 4 with reserve",
    ]
    more = some_decision(limit="max_cost", age_s=0, switches=[pb.RoleSwitch(worker_id=f"decode-{i}", role="prefill") for i in range(6)])
    more.roles[0].pods, more.roles[0].wanted_workers, more.roles[1].wanted_workers = 1, 4, 1
    assert decided(more, width=200) == [
        "autoscaler: prefill 1 of 4 (1 → 2 started as such), decode 3 of 1 (3 started as such) workers; 0 s ago, by autoscaler-0",
        "2.43 requests/s need 1 + 2; 4 with reserve; held back by max_cost; "
        "decode-0 becomes prefill, decode-1 becomes prefill, decode-2 becomes prefill, decode-3 becomes prefill; and 2 more",
    ]
    # As the name is drawn, in a terminal of 80 columns.
    drawn = some_decision(leader="autoscaler-50b7b0123456")
    drawn.roles[0].wanted_pods = drawn.roles[0].pods = 1
    assert decided(drawn)[:2] == [
        "autoscaler: prefill 1 of 2 (1 started as such), decode 3 of 3 workers",
        "8 s ago, by autoscaler-50b7b0123456",
    ]
    assert decided(some_decision(reason="")) == decided(some_decision())[:1]
    later = some_decision(age_s=300.0, stale=True, problem="no access")
    assert decided(later, some_decision(), pb.Scaling(problem="no access")) == decided(some_decision()), "the youngest of them"


def test_an_autoscaler_that_decides_no_more_stands_out() -> None:
    stale = decided(some_decision(age_s=720.0, stale=True, limit="surge"), paint=lambda text, *styles: f"{text}|{''.join(styles)}")
    assert [line.partition("|")[2] for line in stale] == ["yellow", "yellow", "dim"]
    assert [line.partition("|")[0] for line in stale] == [
        "autoscaler: nobody has decided for 12 min; see that it runs, and its log",
        "wanted last, by autoscaler-0: prefill 1 of 2, decode 3 of 3 workers",
        "2.43 requests/s need 1 + 2; 4 with reserve; held back by surge",
    ]
    problem = "not a decision of an autoscaler: KeyError('pods'); upgrade whoever reads or wrote it"
    assert decided(some_decision(problem=problem), width=200)[2:] == [f"autoscaler: its decision cannot be read: {problem}"]
    assert decided(pb.Scaling(problem=problem), width=200) == [f"autoscaler: its decision cannot be read: {problem}"]


def test_alerts_and_gpus_are_shown() -> None:
    cluster = some_cluster()
    cluster.alerts.add(name="TwostepNoTransport", severity="critical", text="prefill-0: ray is away", age_s=150)
    for utilization in (0.2, 0.87):
        cluster.workers[0].gpus.add(utilization=utilization, memory_used=60 * 10**9, memory_total=141 * 10**9)
    cluster.workers[1].gpus.add(memory_total=10**9)
    lines = render([RouterReply("a:1", status=cluster_status(cluster))], 120, plain)
    assert "critical: TwostepNoTransport: prefill-0: ray is away, for 2 min" in lines
    assert {cell for line in lines for cell in ("87 %, 120/282G", "–, 0/1G") if cell in line} == {"87 %, 120/282G", "–, 0/1G"}


TEXTS = st.text("ab 日\n\x1b", max_size=60)
NUMBERS = st.floats(0, 1e12, allow_nan=False)


@st.composite
def clusters(draw: Any) -> pb.ClusterStatus:
    cluster = some_cluster()
    cluster.model, cluster.router_id = draw(TEXTS), draw(TEXTS)
    for worker in cluster.workers:
        worker.worker_id = draw(st.text("ab日-", min_size=1, max_size=50))
        worker.num_running = draw(st.integers(0, 1 << 31))
        worker.num_blocks = draw(st.integers(0, 1000))
        worker.num_free_blocks = min(worker.num_blocks, draw(st.integers(0, 1000)))
        worker.tokens_per_s, worker.fetched_bytes_per_s = draw(NUMBERS), draw(NUMBERS)
        worker.ready, worker.draining = draw(st.booleans()), draw(st.booleans())
    load = cluster.load
    load.requests_per_s, load.failures_per_s, load.ttft_s.p99 = draw(NUMBERS), draw(NUMBERS), draw(NUMBERS)
    texts = {name: draw(TEXTS) for name in ("leader", "reason", "limit", "problem")}
    switches = [pb.RoleSwitch(worker_id=draw(TEXTS), role=draw(TEXTS))]
    cluster.scaling.CopyFrom(some_decision(age_s=draw(NUMBERS), stale=draw(st.booleans()), switches=switches, **texts))
    return cluster


@settings(max_examples=40)
@given(clusters(), st.integers(40, 200), st.text("ab 日\n\x1b", max_size=300))
def test_no_line_is_wider_than_the_terminal(cluster: pb.ClusterStatus, width: int, error: str) -> None:
    lines = render([RouterReply("a:1", status=cluster_status(cluster)), RouterReply("b:1", error=error)], width, plain)
    assert max(map(width_of, lines)) <= width
    assert not any(char in line for line in lines for char in "\x1b\n\r")


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (
            [instant(s) for s in (0, 0.0012, 0.0099, 0.012, 0.999, 1.5, 75.2)],
            ["–", "1.2 ms", "9.9 ms", "12 ms", "999 ms", "1.50 s", "75 s"],
        ),
        (
            [amount(n) for n in (0, 0.02, 0.25, 1.25, 4.0, 9.96, 640, 1500, 2.5e6, 3e9)],
            ["0", "0.02", "0.2", "1.2", "4", "10.0", "640", "1.5k", "2.5M", "3.0G"],
        ),
        ([percent(1, 4), percent(0, 0)], ["25 %", "–"]),
        ([duration(s) for s in (5, 65, 4000, 200_000)], ["5 s", "1 min", "1 h 6 min", "2 d 7 h"]),
    ],
)
def test_figures_are_short(shown: list[str], wanted: list[str]) -> None:
    assert shown == wanted
