"""A KEDA-like client drives the autoscaler through a trace: its pods go where the HorizontalPodAutoscaler's formula takes them, and every
decision is the one that the pure policy makes of the same observations."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hpa_formula import desired
from service_harness import CURVE, WAIT_S, Clock, Keda, Load, RedisServer, Writer, client, config, eventually, keda, running, worker

from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import ROLES, Observation, Role, Traffic, WorkerView
from twostep.autoscaler.policy import decide
from twostep.cluster.records import WorkerRecord
from twostep.rpc.channel import open_channel
from twostep.rpc.keda import externalscaler_pb2
from twostep.settings.autoscaler import PoolSettings

STEP_S = 120.0


@dataclass
class Cluster:
    """Deployments as a HorizontalPodAutoscaler moves them: a pod is there an interval after it was asked for."""

    pods: dict[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    there: dict[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})

    async def scale(self, asked: Keda) -> None:
        self.there = dict(self.pods)
        for role in ROLES:
            self.pods[role] = desired(await asked.value(role), self.pods[role])
            self.there[role] = min(self.there[role], self.pods[role])

    def records(self) -> list[WorkerRecord]:
        return [worker(f"{role}-{number:02d}", role) for role in ROLES for number in range(self.there[role])]


def observed(now_s: float, load: Load, routers: int, records: Sequence[WorkerRecord], pods: Mapping[Role, int]) -> Observation:
    """What the policy is to see of what was written."""
    return Observation(
        now_s=now_s,
        traffic=Traffic(
            requests_per_s=float(load.requests * routers),
            prompt_tokens=float(load.prompt_tokens),
            cached_tokens=load.prompt_tokens * (load.cached_tokens / load.prompt_tokens),
            output_tokens=float(load.output_tokens),
            refused_per_s=float(load.refused * routers),
            queued_requests=load.queued * routers,
            ttft_met=load.ttft_met,
            tpot_met=load.tpot_met,
            prompt_scv=0.0,
        ),
        workers=tuple(
            WorkerView(
                worker_id=record.worker_id,
                role="prefill" if record.role == "prefill" else "decode",
                owner="prefill" if record.role == "prefill" else "decode",
                pod_name=record.pod_name,
                can_switch=True,
                curve=CURVE,
                max_num_seqs=64,
                num_blocks=4096,
                started_s=started_s,
            )
            for record, started_s in sorted(
                ((r, STARTED.setdefault(r.worker_id, now_s)) for r in records), key=lambda each: each[0].worker_id
            )
        ),
        pods=pods,
    )


STARTED: dict[str, float] = {}

# Light, heavy on prompts, heavy on answers, light again: an hour of it.
TRACE = (
    *[Load(requests=1)] * 4,
    *[Load(requests=20, prompt_tokens=2000)] * 8,
    *[Load(requests=20, prompt_tokens=500, output_tokens=600, cached_tokens=100, ttft_met=0.9, queued=3, refused=1)] * 8,
    *[Load(requests=2)] * 12,
)


async def test_decisions_over_a_trace_are_those_of_the_pure_policy(redis_server: RedisServer, writer: Writer, tmp_path: Path) -> None:
    clock, cluster, memory = Clock(), Cluster(), Memory()
    STARTED.clear()
    settings = config(redis_server.url, tmp_path, interval=STEP_S, leader_lease=3600.0, cool_down=480.0)
    await writer.workers(*cluster.records())
    await writer.load(clock.now_s, TRACE[0], routers=2)
    policy, most = settings.policy(), 0
    # They were there before anybody looked: since their epochs.
    STARTED.update({"prefill-00": 1.0, "decode-00": 1.0})
    async with running(settings, clock) as autoscaler, keda(autoscaler.port) as asked:
        for number, load in enumerate(TRACE):
            at_s = clock.now_s
            if number:  # the first decision is made at the start
                await writer.workers(*cluster.records())
                await writer.load(at_s, load, routers=2, seconds=30.0)
                autoscaler.controller.wake()
            await eventually(lambda at_s=at_s: (record := autoscaler.board.record) is not None and record.at_s == at_s, "a decision")
            seen = autoscaler.controller.observation
            assert seen is not None
            assert seen == observed(at_s, load, 2, cluster.records(), seen.pods)
            step = decide(policy, memory, seen)
            memory = step.memory
            record = autoscaler.board.answer()
            assert record.replicas == step.decision.replicas
            assert record.wanted == {"prefill": step.decision.prefill, "decode": step.decision.decode}
            assert (record.victims, record.reason) == (step.decision.victims, step.decision.reason)
            assert record.memory == memory.to_json()
            await cluster.scale(asked)
            assert cluster.pods == record.asked, "the HPA's formula comes to what was asked for"
            assert all(record.asked[role] >= record.replicas[role] for role in ROLES)
            assert all([await asked.active(role) for role in ROLES])
            most = max(most, sum(cluster.pods.values()))
            clock.now_s += STEP_S
    assert most > 4, "the load asked for more"
    assert sum(cluster.pods.values()) < most, "and for less again"


async def test_pods_that_are_to_come_count_as_asked_for(redis_server: RedisServer, writer: Writer, tmp_path: Path) -> None:
    clock = Clock()
    settings = config(redis_server.url, tmp_path, interval=STEP_S, leader_lease=3600.0, prefill=PoolSettings(min_workers=4))
    await writer.workers(worker("p", "prefill"), worker("d", "decode"))
    await writer.load(clock.now_s, Load(requests=1))
    async with running(settings, clock) as autoscaler:
        await eventually(lambda: autoscaler.board.record is not None, "a decision")
        assert autoscaler.board.answer().replicas["prefill"] == 4
        for passed, expected in ((100.0, 4), (200.0, 1)):
            clock.now_s += passed
            await writer.load(clock.now_s, Load(requests=1))
            autoscaler.controller.wake()
            await eventually(lambda: autoscaler.board.answer().at_s == clock.now_s, "another decision")
            seen = autoscaler.controller.observation
            assert seen is not None
            assert seen.pods["prefill"] == expected, "not for ever"


@pytest.mark.parametrize(
    ("role", "said"),
    [(None, "role is missing"), ("router", "role is 'router'"), ("", "role is missing")],
)
async def test_metadata_without_a_role_is_refused_clearly(
    redis_server: RedisServer, tmp_path: Path, role: str | None, said: str
) -> None:  # fmt: skip
    async with running(config(redis_server.url, tmp_path)) as autoscaler, keda(autoscaler.port) as asked:
        ref = asked.ref(role)
        requests = (
            asked.stub.IsActive(ref, timeout=WAIT_S),
            asked.stub.GetMetricSpec(ref, timeout=WAIT_S),
            asked.stub.GetMetrics(externalscaler_pb2.GetMetricsRequest(scaledObjectRef=ref), timeout=WAIT_S),
        )
        for request in requests:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await request
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in (refused.value.details() or "")
            assert "give prefill or decode" in (refused.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in asked.stub.StreamIsActive(ref, timeout=WAIT_S):
                pass
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_metric_has_a_name_a_target_of_one_and_no_other(redis_server: RedisServer, writer: Writer, tmp_path: Path) -> None:
    await writer.workers(worker("p", "prefill"), worker("d", "decode"))
    clock = Clock()
    await writer.load(clock.now_s, Load(requests=1))
    async with running(config(redis_server.url, tmp_path), clock) as autoscaler, keda(autoscaler.port) as asked:
        (spec,) = (await asked.stub.GetMetricSpec(asked.ref("decode"), timeout=WAIT_S)).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("twostep-decode-replicas", 1, 1.0)
        await eventually(lambda: autoscaler.board.record is not None, "a decision")
        # As KEDA asks with its own number in front, as older versions do, and without a name.
        for name in ("twostep-decode-replicas", "s0-twostep-decode-replicas", ""):
            request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=asked.ref("decode"), metricName=name)
            (metric,) = (await asked.stub.GetMetrics(request, timeout=WAIT_S)).metricValues
            assert metric.metricName == "twostep-decode-replicas"
            assert metric.metricValue >= metric.metricValueFloat >= 1
        request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=asked.ref("decode"), metricName="twostep-prefill-replicas")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asked.stub.GetMetrics(request, timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_tells_of_sleep_and_waking_and_has_a_bound(redis_server: RedisServer, writer: Writer, tmp_path: Path) -> None:
    clock = Clock()
    settings = config(
        redis_server.url,
        tmp_path,
        interval=STEP_S,
        leader_lease=3600.0,
        max_streams=1,
        scale_to_zero_after=120.0,
        cool_down=60.0,
        prefill=PoolSettings(min_workers=0),
        decode=PoolSettings(min_workers=0),
    )
    await writer.workers(worker("p", "prefill"), worker("d", "decode"))
    await writer.load(clock.now_s, Load(requests=2))
    told: list[bool] = []
    async with running(settings, clock) as autoscaler, keda(autoscaler.port) as asked:

        async def listen() -> None:
            async for answer in asked.stub.StreamIsActive(asked.ref("prefill")):
                told.append(answer.result)

        listening = asyncio.create_task(listen())
        await eventually(lambda: told == [True], "the first word")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in asked.stub.StreamIsActive(asked.ref("decode"), timeout=WAIT_S):
                pass
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for load, expected in ((Load(requests=0), [True, False]), (Load(requests=3), [True, False, True])):
            for _ in range(20):
                clock.now_s += STEP_S
                await writer.load(clock.now_s, load)
                autoscaler.controller.wake()
                await eventually(lambda: autoscaler.board.answer().at_s == clock.now_s, "a decision")
                if autoscaler.board.answer().replicas["prefill"] == int(expected[-1]):
                    break
            await eventually(lambda expected=expected: told == expected, "the next word")
            assert await asked.active("prefill") is expected[-1]
        listening.cancel()
        await asyncio.wait([listening])


async def test_the_process_answers_is_alive_is_scraped_and_drains(redis_server: RedisServer, writer: Writer, tmp_path: Path) -> None:
    secret = config(redis_server.url, tmp_path).secret_file
    flags = ["--redis-url", redis_server.url, "--secret-file", str(secret), "--host", "127.0.0.1", "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "twostep.autoscaler", *flags, "--interval", "0.2", "--stale-after", "1000"),
        *("--log-level", "debug"),
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": "", "TWOSTEP_PREFILL_MIN_WORKERS": "3"},
    )
    assert process.stderr is not None
    ports: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while len(ports) < 2:
            line = (await process.stderr.readline()).decode()
            assert line, "it ended"
            if "listening on" in line:
                ports.append(int(line.rsplit(":", 1)[1]))
    draining = asyncio.create_task(process.stderr.read())
    async with client(redis_server.url) as connection, keda(ports[0]) as asked:
        told = Writer(connection)
        await told.workers(worker("p", "prefill"), worker("d", "decode"))
        value = 0.0
        async with asyncio.timeout(WAIT_S):
            while value == 0.0:
                await told.load(Clock().now_s, Load(requests=1))
                # Until there is a decision it is UNAVAILABLE.
                with contextlib.suppress(grpc.aio.AioRpcError):
                    value = await asked.value("prefill")
        assert value == 3.0
        async with open_channel(f"127.0.0.1:{ports[1]}") as channel:
            for service in ("liveness", "readiness"):
                request, answer = health_pb2.HealthCheckRequest(service=service), health_pb2.HealthCheckResponse()
                async with asyncio.timeout(WAIT_S):
                    while answer.status != health_pb2.HealthCheckResponse.SERVING:
                        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_S)
    process.terminate()
    async with asyncio.timeout(WAIT_S):
        await draining
        assert await process.wait() == 0
