"""What keeps the workers of `twostep up --autoscale`: over trivial processes, and asking a real external scaler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_local_supervisor import Journal, alive, component, until

from twostep.autoscaler.external_scaler import DecisionBoard, ExternalScaler
from twostep.autoscaler.server import SERVICE
from twostep.cluster.connection import connect
from twostep.cluster.records import LayoutRecord, WorkerRecord, worker_key
from twostep.cluster.scaling import DECISION_KEY, ScalingRecord
from twostep.cluster.signed import DECISIONS, RECORDS, Signer
from twostep.local.autoscale import LocalAutoscale
from twostep.local.process import Process
from twostep.local.redis_server import answers, server_argv, server_binary, server_url
from twostep.local.scaler import ScalerClient, WantedWorkers
from twostep.local.scaling import Bounds, Scale
from twostep.local.supervisor import Component, Supervisor
from twostep.rpc.keda import externalscaler_pb2_grpc
from twostep.rpc.server import GrpcServer, ServerConfig

SWITCHED = WorkerRecord(
    worker_id="decode-0",
    role="prefill",
    address="127.0.0.1:1",
    epoch=2,
    model="m",
    layout=LayoutRecord(model_fingerprint="f", num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="float32"),
    hash_unit=64,
    secret_check="x",
    num_blocks=10,
    max_num_seqs=4,
    max_model_len=64,
    pod_owner="decode",
)
SLOW_TO_GO = """
def slowly(*_):
    with open("asked", "a") as file:
        file.write("x")
    time.sleep(1)
    sys.exit(0)
signal.signal(signal.SIGTERM, slowly)
"""


class Loop:
    """A local autoscale over processes that only wait; `says` is what the autoscaler wants."""

    def __init__(self, tmp: Path, *, total: int = 4) -> None:
        self.tmp, self.journal, self.said = tmp, Journal(), list[str]()
        self.says: WantedWorkers | None = None
        self.roles: dict[str, str] = {}
        self.places: dict[str, int] = {}
        self.script = ""
        first = [("prefill-0", "prefill"), ("decode-0", "decode")]
        self.supervisor = Supervisor([component(tmp, name, stop_grace_s=60) for name, _ in first], run_dir=tmp, observer=self.journal)
        bounds = Bounds(least=1, most=3)
        self.autoscale = LocalAutoscale(
            Scale(prefill=bounds, decode=bounds, total=total),
            self.supervisor,
            first,
            make=self._make,
            ask=self._ask,
            roles=self._roles,
            say=self.said.append,
            look_every_s=0.02,
            first_pause_s=0.2,
        )

    def wants(self, prefill: int, decode: int, *victims: str) -> None:
        self.says = WantedWorkers(replicas={"prefill": prefill, "decode": decode}, victims=victims, reason="because")

    @property
    def ready(self) -> set[str]:
        return {name for name in self.supervisor.names if self.supervisor.is_ready(name)}

    def _make(self, worker_id: str, role: str, place: int) -> Component:
        self.places[worker_id] = place
        return component(self.tmp, worker_id, self.script, stop_grace_s=60)

    async def _roles(self, worker_ids: Sequence[str]) -> dict[str, str]:
        return {name: role for name, role in self.roles.items() if name in worker_ids}

    async def _ask(self) -> WantedWorkers | None:
        return self.says


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    return Loop(tmp_path)


async def test_workers_come_and_go_and_places_are_given_again(loop: Loop) -> None:
    await loop.supervisor.start()
    running = asyncio.create_task(loop.autoscale.run())
    await asyncio.sleep(0.1)
    assert loop.ready == {"prefill-0", "decode-0"}, "nobody has said anything"
    loop.wants(1, 3)
    await until(lambda: loop.ready == {"prefill-0", "decode-0", "decode-1", "decode-2"})
    assert loop.places == {"decode-1": 2, "decode-2": 3}
    # No answer, no change.
    loop.says = None
    await asyncio.sleep(0.1)
    assert len(loop.ready) == 4
    loop.wants(3, 1, "decode-0")
    await until(lambda: loop.ready == {"prefill-0", "prefill-1", "prefill-2", "decode-1"})
    assert sorted(loop.places[name] for name in ("prefill-1", "prefill-2")) == [1, 3], "those of decode-0 and of the youngest"
    assert loop.said[0] == "autoscaler: 1 prefill, 3 decode workers wanted: because"
    assert "decode-0: draining, it is not needed any more" in loop.said
    running.cancel()
    await asyncio.wait([running])
    await loop.supervisor.stop()


async def test_who_changes_its_role_is_told_as_who_comes_and_goes_is(loop: Loop) -> None:
    """And what is wanted is told by the roles, not by what the workers were started as."""
    await loop.supervisor.start()
    running = asyncio.create_task(loop.autoscale.run())
    loop.wants(1, 2)
    await until(lambda: "decode-1" in loop.ready)
    assert loop.said == ["autoscaler: 1 prefill, 2 decode workers wanted: because"]
    loop.says = WantedWorkers(replicas={"prefill": 1, "decode": 2}, workers={"prefill": 2, "decode": 1}, reason="long prompts")
    loop.roles = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill", "of-another-system": "decode"}
    await until(lambda: len(loop.said) >= 3)
    loop.roles["decode-1"] = "decode"
    await until(lambda: len(loop.said) >= 4)
    assert sorted(loop.said[1:3]) == ["autoscaler: 2 prefill, 1 decode workers wanted: long prompts", "decode-1: a prefill worker now"]
    assert loop.said[3:] == ["decode-1: a decode worker now"], "each is told once"
    assert loop.ready == {"prefill-0", "decode-0", "decode-1"}
    running.cancel()
    await asyncio.wait([running])
    await loop.supervisor.stop()


@pytest.mark.system
async def test_a_worker_that_cannot_be_started_is_tried_again_after_a_pause_that_grows(loop: Loop) -> None:
    await loop.supervisor.start()
    loop.script = "sys.exit(3)"
    running = asyncio.create_task(loop.autoscale.run())
    loop.wants(1, 2)
    await until(lambda: "autoscaler: no decode worker is started for 0.8 s" in loop.said)
    pauses = [line.rpartition("for ")[2] for line in loop.said if "no decode" in line]
    assert pauses[:3] == ["0.2 s", "0.4 s", "0.8 s"]
    assert loop.ready == {"prefill-0", "decode-0"}
    loop.script = ""
    await until(lambda: "decode-1" in loop.ready)
    running.cancel()
    await asyncio.wait([running])
    await loop.supervisor.stop()


@pytest.mark.system
async def test_an_end_in_the_midst_of_scaling_leaves_nothing_and_cuts_no_drain_short(loop: Loop) -> None:
    """One worker drains, one is being started and never gets ready."""
    await loop.supervisor.start()
    running = asyncio.create_task(loop.autoscale.run())
    loop.script = SLOW_TO_GO
    loop.wants(1, 2)
    await until(lambda: "decode-1" in loop.ready)
    loop.script = "time.sleep(1000)"
    loop.wants(2, 1, "decode-1")
    asked = loop.tmp / "asked"
    await until(lambda: asked.exists() and loop.supervisor.pid_of("prefill-1") is not None)
    pids = [loop.supervisor.pid_of(name) for name in loop.supervisor.names]
    running.cancel()
    await asyncio.wait([running])
    await loop.supervisor.stop()
    assert not [pid for pid in pids if pid is not None and alive(pid)]
    assert asked.read_text() == "x"
    assert not [event for event in loop.journal.events if event.startswith("killed")]


_SECRET = b"a secret of this test"


def record(**changes: object) -> ScalingRecord:
    counts = {"prefill": 2, "decode": 11}
    values = {"token": 1, "number": 1, "leader": "a", "at_s": time.time(), "interval_s": 1.0, "replicas": counts, "wanted": counts}
    return ScalingRecord(**{**values, "pods": {"prefill": 2, "decode": 10}, "victims": ("decode-3",), "reason": "because", **changes})  # type: ignore[arg-type]


async def test_the_external_scaler_is_asked_as_keda_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine is no silent autoscaler here.
    monkeypatch.setattr("twostep.local.scaler._TIMEOUT_S", 60.0)
    monkeypatch.setattr("twostep.cluster.connection._TIMEOUT_S", 60.0)
    board = DecisionBoard(stale_s=1000.0, max_listeners=1)
    server = GrpcServer(ServerConfig(health_port=-1))
    server.add(ExternalScaler(board, hpa_tolerance=0.0), externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server, SERVICE)
    port = await server.start()
    url = server_url(tmp_path)
    argv = server_argv(server_binary(), tmp_path)
    redis = await Process.start(argv, env={}, log=tmp_path / "redis.log", pid_file=tmp_path / "pid", cwd=tmp_path)
    client = ScalerClient(f"127.0.0.1:{port}", url, _SECRET)
    try:
        assert await client.wanted() is None
        assert client.trouble == "nothing has been decided yet; keep what there is"
        board.show(record(), 0.0)
        # Without Redis nobody knows who should go; how many there should be is known.
        assert await client.wanted() == WantedWorkers(replicas={"prefill": 2, "decode": 11})
        assert await client.roles(["decode-0"]) == {}
        while await answers(url):  # noqa: ASYNC110  it is another process
            await asyncio.sleep(0.02)
        store = connect(url)
        await store.set(DECISION_KEY, Signer(_SECRET, DECISIONS).sign_object(record(wanted={"prefill": 4, "decode": 9}).to_json()))
        assert await client.wanted() == WantedWorkers(
            replicas={"prefill": 2, "decode": 11}, workers={"prefill": 4, "decode": 9}, victims=("decode-3",), reason="because"
        )
        assert client.trouble == ""
        await store.set(worker_key("decode-0"), Signer(_SECRET, RECORDS).sign_object(SWITCHED.to_json()))
        assert await client.roles(["prefill-0", "decode-0"]) == {"decode-0": "prefill"}
        await store.set(worker_key("prefill-0"), "nonsense")
        assert await client.roles(["prefill-0", "decode-0"]) == {}
        await store.set(DECISION_KEY, "nonsense")
        assert await client.wanted() == WantedWorkers(replicas={"prefill": 2, "decode": 11})
        await store.aclose()
        await server.drain(0)
        assert await client.wanted() is None
        assert client.trouble
    finally:
        await client.close()
        await server.drain(0)
        await redis.stop(30)
