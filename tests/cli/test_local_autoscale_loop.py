"""Tests of the loop that keeps the workers of `twostep up --autoscale`, and that it asks a real external scaler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from twostep.autoscaler.external_scaler import DecisionBoard, ExternalScaler
from twostep.autoscaler.server import SERVICE
from twostep.cluster.connection import connect
from twostep.cluster.records import LayoutRecord, WorkerRecord, worker_key
from twostep.cluster.scaling import DECISION_KEY, ScalingRecord
from twostep.cluster.signed import DECISIONS, RECORDS, Signer
from twostep.keys.secret import DeploymentSecret
from twostep.local.autoscale import Bounds, LocalAutoscale, Scale, ScalerClient, WantedWorkers
from twostep.local.redis_server import answers, server_argv, server_binary, server_url
from twostep.local.supervisor import Component, Process, Supervisor
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


class Processes:
    """In the supervisor's place: who is kept running, and who is ready. One that is told to go has gone once it is in `gone`."""

    def __init__(self, *names: str) -> None:
        self.running = dict.fromkeys(names, True)
        self.leaving: dict[str, asyncio.Event] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.running)

    def is_ready(self, name: str) -> bool:
        return self.running.get(name, False)

    def add(self, component: Component) -> None:
        self.running[component.name] = False

    async def retire(self, name: str) -> None:
        await self.leaving.setdefault(name, asyncio.Event()).wait()
        del self.running[name]


class Loop:
    """A local autoscale that is looked on by hand; `says` is what the autoscaler wants."""

    def __init__(self, *, total: int = 4) -> None:
        self.processes, self.said, self.now = Processes("prefill-0", "decode-0"), list[str](), 0.0
        self.says: WantedWorkers | None = None
        self.roles: dict[str, str] = {}
        self.places: dict[str, int] = {}
        bounds = Bounds(least=1, most=3)
        self.autoscale = LocalAutoscale(
            Scale(prefill=bounds, decode=bounds, total=total),
            cast(Supervisor, self.processes),
            [("prefill-0", "prefill"), ("decode-0", "decode")],
            make=self._make,
            ask=self._ask,
            roles=self._roles,
            say=self.said.append,
            clock=lambda: self.now,
        )

    async def look(self, *, ready: bool = True) -> set[str]:
        """Returns who runs or starts then; all of them are ready by the next look."""
        await self.autoscale.step()
        await asyncio.sleep(0)
        self.processes.running = dict.fromkeys(self.processes.running, ready)
        return set(self.processes.names)

    async def wants(self, prefill: int, decode: int, *victims: str) -> set[str]:
        self.says = WantedWorkers(replicas={"prefill": prefill, "decode": decode}, victims=victims, reason="because")
        return await self.look()

    async def gone(self, *names: str) -> set[str]:
        for name in names:
            self.processes.leaving[name].set()
        await asyncio.sleep(0)
        return await self.look()

    def _make(self, worker_id: str, role: str, place: int) -> Component:
        self.places[worker_id] = place
        return cast(Component, SimpleNamespace(name=worker_id))

    async def _roles(self, worker_ids: Sequence[str]) -> dict[str, str]:
        return {name: role for name, role in self.roles.items() if name in worker_ids}

    async def _ask(self) -> WantedWorkers | None:
        return self.says


async def test_workers_come_and_go_and_places_are_given_again() -> None:
    loop = Loop()
    assert await loop.look() == {"prefill-0", "decode-0"}, "nobody has said anything"
    four = {"prefill-0", "decode-0", "decode-1", "decode-2"}
    assert await loop.wants(1, 3) == four
    assert loop.places == {"decode-1": 2, "decode-2": 3}
    loop.says = None
    assert await loop.look() == four, "no answer, no change"
    assert await loop.wants(3, 1, "decode-0") == four, "no place is free yet"
    assert loop.processes.leaving.keys() == {"decode-0", "decode-2"}, "who should go first, and the youngest"
    await loop.look()
    assert loop.said.count("decode-0: draining, it is not needed any more") == 1
    assert await loop.gone("decode-0") == {"prefill-0", "prefill-1", "decode-1", "decode-2"}
    assert await loop.gone("decode-2") == {"prefill-0", "prefill-1", "prefill-2", "decode-1"}
    assert (loop.places["prefill-1"], loop.places["prefill-2"]) == (1, 3)
    assert loop.said[0] == "autoscaler: 1 prefill, 3 decode workers wanted: because"


async def test_who_changes_its_role_is_told_as_who_comes_and_goes_is() -> None:
    """And what is wanted is told by the roles, not by what the workers were started as."""
    loop = Loop()
    await loop.wants(1, 2)
    loop.says = WantedWorkers(replicas={"prefill": 1, "decode": 2}, workers={"prefill": 2, "decode": 1}, reason="long prompts")
    loop.roles = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill", "of-another-system": "decode"}
    await loop.look()
    loop.roles["decode-1"] = "decode"
    await loop.look()
    assert await loop.look() == {"prefill-0", "decode-0", "decode-1"}
    assert loop.said == [
        "autoscaler: 1 prefill, 2 decode workers wanted: because",
        "decode-1: a prefill worker now",
        "autoscaler: 2 prefill, 1 decode workers wanted: long prompts",
        "decode-1: a decode worker now",
    ], "each is told once"


async def test_a_worker_that_cannot_be_started_is_tried_again_after_a_pause_that_grows() -> None:
    loop = Loop()
    loop.says = WantedWorkers(replicas={"prefill": 1, "decode": 2})
    for _ in range(190):
        await loop.look(ready=False)
        # It has ended before it was ready.
        loop.processes.running.pop("decode-1", None)
        loop.now += 5.0
    pauses = [line.rpartition("for ")[2] for line in loop.said if "no decode worker is started" in line]
    assert pauses == ["10 s", "20 s", "40 s", "80 s", "160 s", "300 s", "300 s"], "in a thousand seconds"


_SECRET = DeploymentSecret(b"a secret of this test")


def record(**changes: object) -> ScalingRecord:
    counts = {"prefill": 2, "decode": 11}
    values = {"token": 1, "number": 1, "leader": "a", "at_s": time.time(), "interval_s": 1.0, "replicas": counts, "wanted": counts}
    return ScalingRecord(**{**values, "pods": {"prefill": 2, "decode": 10}, "victims": ("decode-3",), "reason": "because", **changes})  # type: ignore[arg-type]


async def test_the_external_scaler_is_asked_as_keda_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine is no silent autoscaler here.
    monkeypatch.setattr("twostep.local.autoscale._TIMEOUT_S", 60.0)
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
