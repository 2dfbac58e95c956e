"""Changes of roles that the autoscaler asks for: of a worker's own service, with a pass, one at a time, never of the last one of a role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from service_harness import SECRET, Scene, ToldLoad, count_of, eventually, worker

from twostep.autoscaler.model import Role, Switch
from twostep.autoscaler.server import Autoscaler
from twostep.autoscaler.switches import Outcome, Switcher, last_of_role
from twostep.cluster.records import WorkerRecord
from twostep.errors import Incompatible, Unavailable
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.server import GrpcServer, ServerConfig
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostep.rpc.worker_role import RolePass
from twostep.settings.autoscaler import PoolSettings

ANSWERS = ToldLoad(requests=9, prompt_tokens=200, output_tokens=800)


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Checks the pass as a worker does, waits until it may, and says what it was told to."""

    def __init__(self, record: WorkerRecord) -> None:
        self.record = record
        self.may = asyncio.Event()
        self.may.set()
        self.fails_with: Exception | None = None
        self.asked: list[str] = []
        self.drains: list[float] = []
        self.num_running = 0
        self.most_at_once = 0

    async def Stats(self, request: worker_pb2.WorkerStatsRequest, context: Any) -> worker_pb2.WorkerStats:
        record = self.record
        return worker_pb2.WorkerStats(worker_id=record.worker_id, role=record.role, epoch=record.epoch, ready=True)

    async def SwitchRole(self, request: worker_pb2.SwitchRoleRequest, context: Any) -> worker_pb2.SwitchRoleResponse:
        RolePass.from_proto(request).verify(SECRET, worker_id=self.record.worker_id, epoch=self.record.epoch)
        self.asked.append(request.role)
        self.drains.append(request.drain_timeout_s)
        self.num_running += 1
        self.most_at_once = max(self.most_at_once, self.num_running)
        try:
            await self.may.wait()
        finally:
            self.num_running -= 1
        if self.fails_with is not None:
            raise self.fails_with
        self.record = replace(self.record, role=request.role, epoch=self.record.epoch + 1)
        return worker_pb2.SwitchRoleResponse(role=request.role, epoch=self.record.epoch, drain_s=0.5, switch_s=0.01)


@asynccontextmanager
async def serving(*records: WorkerRecord) -> AsyncIterator[list[FakeWorker]]:
    servers, workers = [], []
    for record in records:
        server = GrpcServer(ServerConfig(health_port=-1))
        fake = FakeWorker(record)
        server.add(fake, worker_pb2_grpc.add_WorkerServicer_to_server, "twostep.v1.Worker")
        await server.start()
        fake.record = replace(record, address=f"127.0.0.1:{server.port}")
        servers.append(server)
        workers.append(fake)
    try:
        yield workers
    finally:
        for fake in workers:
            fake.may.set()
        await asyncio.gather(*(server.drain(1.0) for server in servers))


class Results(list[tuple[str, Role, Outcome]]):
    def __call__(self, record: WorkerRecord, to: Role, outcome: Outcome) -> None:
        self.append((record.worker_id, to, outcome))


async def test_workers_change_their_role_one_after_the_other() -> None:
    results, leads = Results(), True
    switcher = Switcher(SECRET, drain_s=7.0, on_result=results, may=lambda: leads)
    async with serving(*(worker(f"p{number}", "prefill") for number in range(4))) as fakes:
        there = [fake.record for fake in fakes]
        fakes[0].may.clear()
        wanted = [Switch(worker_id=f"p{number}", to="decode") for number in range(2)]
        switcher.start(wanted, there)
        await eventually(lambda: fakes[0].asked == ["decode"], "the first call")
        switcher.start(wanted, there)
        assert switcher.busy
        assert fakes[1].asked == []
        fakes[0].may.set()
        await eventually(lambda: len(results) == 2, "both ends")
        assert results == [("p0", "decode", "ok"), ("p1", "decode", "ok")]
        assert [fake.asked for fake in fakes] == [["decode"], ["decode"], [], []], "none of them twice"
        assert fakes[1].drains == [7.0]
        await eventually(lambda: not switcher.busy, "rest")
        switcher.start([Switch(worker_id="p2", to="decode"), Switch(worker_id="p3", to="decode")], [fake.record for fake in fakes])
        await eventually(lambda: len(results) == 4, "two more")
        assert results[2:] == [("p2", "decode", "ok"), ("p3", "decode", "left_out")], "the last of its role, by then"
        leads = False
        await eventually(lambda: not switcher.busy, "rest")
        switcher.start([Switch(worker_id="p0", to="prefill")], [fake.record for fake in fakes])
        await eventually(lambda: not switcher.busy, "rest")
        assert fakes[0].asked == ["decode"], "who leads no more asks for nothing"
    await switcher.close()


async def test_the_last_of_a_role_keeps_it() -> None:
    results = Results()
    switcher = Switcher(SECRET, drain_s=1.0, on_result=results)
    async with serving(worker("p0", "prefill"), worker("d0", "decode"), worker("d1", "decode", ready=False)) as fakes:
        there = [fake.record for fake in fakes]
        assert last_of_role(there[0], there)
        assert last_of_role(there[1], there), "one that is not ready does not count"
        assert last_of_role(there[0], [*there, worker("p1", "prefill", not_ready_reason="no KV transport works")])
        assert not last_of_role(there[0], [*there, worker("p1", "prefill")])
        switcher.start([Switch(worker_id="p0", to="decode"), Switch(worker_id="d0", to="prefill")], there)
        await eventually(lambda: len(results) == 2, "both")
        assert results == [("p0", "decode", "left_out"), ("d0", "prefill", "left_out")]
        assert all(fake.asked == [] for fake in fakes)


async def test_failures_are_told_apart_and_a_worker_of_another_name_is_left_alone() -> None:
    results = Results()
    async with serving(worker("p0", "prefill"), worker("p1", "prefill")) as fakes:
        there = [fake.record for fake in fakes]
        cases: list[tuple[Exception | None, bytes, Outcome]] = [
            (Incompatible("it hands nothing over"), SECRET, "refused"),
            (Unavailable("it stops"), SECRET, "failed"),
            (None, DeploymentSecret(b"another deployment's secret"), "failed"),
        ]
        for error, secret, outcome in cases:
            fakes[0].fails_with = error
            switcher = Switcher(secret, drain_s=1.0, on_result=results)
            switcher.start([Switch(worker_id="p0", to="decode")], there)
            await eventually(lambda: len(results) > 0, "an end")
            assert results.pop() == ("p0", "decode", outcome)
        fakes[0].fails_with = None
        asked = len(fakes[0].asked)
        moved = [replace(there[0], worker_id="p9"), there[1]]
        switcher = Switcher(SECRET, drain_s=1.0, on_result=results)
        switcher.start([Switch(worker_id="p9", to="decode")], moved)
        await eventually(lambda: results == [("p9", "decode", "failed")], "an end")
        assert len(fakes[0].asked) == asked


async def test_a_switch_that_is_not_wanted_any_more_is_not_asked_for() -> None:
    """An address at which nobody answers counts as a failure."""
    results = Results()
    switcher = Switcher(SECRET, drain_s=1.0, on_result=results)
    there = [worker(f"p{number}", "prefill", address="127.0.0.1:9") for number in range(4)]
    switches = [Switch(worker_id=f"p{number}", to="decode") for number in range(3)]
    switcher.start(switches, there, {f"p{number}": "decode" for number in range(3)})
    switcher.start([], there, {"p0": "decode", "p2": "decode"})
    await eventually(lambda: not switcher.busy, "rest")
    assert results == [("p0", "decode", "failed"), ("p2", "decode", "failed")]
    await switcher.close()


@asynccontextmanager
async def shifting(scene: Scene, *, fails_with: Exception | None = None) -> AsyncIterator[tuple[Autoscaler, list[FakeWorker]]]:
    """Four pods of a kind and one of the other, a load that turns to answers, and pods that take their time: until the first worker was
    asked to take the other role, and has answered."""
    pools = PoolSettings(max_workers=4, cold_start=600.0)
    async with serving(*(worker(f"p{number}", "prefill") for number in range(4)), worker("d0", "decode")) as fakes:
        for fake in fakes:
            fake.fails_with = fails_with
        await scene.writer.workers(*(fake.record for fake in fakes))
        await scene.load(ANSWERS)
        async with scene.deciding(cool_down=60.0, spare=0, prefill=pools, decode=pools, worker_drain=3.0) as autoscaler:
            record = autoscaler.board.answer()
            while not record.switches:
                record = await scene.next(autoscaler, ANSWERS)
            # A worker has its new role before the answer is back: only then is it counted.
            ended = [autoscaler.metrics.switches, "refused" if fails_with else "ok"]
            await eventually(lambda: count_of(*ended) == len(record.switches), "the end of the switches")
            await scene.writer.workers(*(fake.record for fake in fakes))
            yield autoscaler, fakes


async def test_a_leader_shifts_a_worker_to_the_role_that_is_short(scene: Scene) -> None:
    """And it counts for the Deployment that owns its pod."""
    async with shifting(scene) as (autoscaler, fakes):
        shifted = {fake.record.worker_id for fake in fakes if fake.record.role == "decode" and fake.record.pod_owner == "prefill"}
        assert shifted == set(autoscaler.board.answer().switches)
        record, seen = await scene.next(autoscaler, ANSWERS), autoscaler.controller.observation
        assert seen is not None
        assert {view.worker_id for view in seen.workers if view.role == "decode" and view.owner == "prefill"} == shifted
        assert record.pods["prefill"] == 4, "pods count for who owns them"
        assert sum(record.replicas.values()) == sum(record.wanted.values())
        assert record.wanted["decode"] > record.replicas["decode"]


async def test_a_worker_that_refused_is_not_asked_again_in_that_life(scene: Scene) -> None:
    async with shifting(scene, fails_with=Incompatible("it hands nothing over")) as (autoscaler, fakes):
        refused = set(autoscaler.board.answer().switches)
        await scene.next(autoscaler, ANSWERS)
        seen = autoscaler.controller.observation
        assert seen is not None
        assert {view.worker_id for view in seen.workers if not view.can_switch} == refused
        for fake in fakes:
            fake.record = replace(fake.record, epoch=fake.record.epoch + 1)
        await scene.writer.workers(*(fake.record for fake in fakes))
        await scene.next(autoscaler, ANSWERS)
        assert autoscaler.controller.observation is not None
        assert all(view.can_switch for view in autoscaler.controller.observation.workers)
