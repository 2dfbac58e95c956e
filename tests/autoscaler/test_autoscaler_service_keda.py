"""A KEDA-like client drives the autoscaler through a trace: its pods go where the HorizontalPodAutoscaler's formula takes them, and every
decision is the one that the pure policy makes of the same observations."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hpa_formula import desired
from service_harness import WAIT_S, Scene, ToldLoad, eventually, keda, worker

from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import ROLES
from twostep.autoscaler.policy import decide
from twostep.rpc.channel import open_channel
from twostep.rpc.keda import externalscaler_pb2
from twostep.settings.autoscaler import PoolSettings

STEP_S = 120.0
# Light, heavy on prompts, heavy on answers, light again: an hour of it.
TRACE = (
    *[ToldLoad(requests=1)] * 4,
    *[ToldLoad(requests=20, prompt_tokens=2000)] * 8,
    *[ToldLoad(requests=20, prompt_tokens=500, output_tokens=600, cached_tokens=100, ttft_met=0.9, queued=3, refused=1)] * 8,
    *[ToldLoad(requests=2)] * 12,
)


async def test_decisions_over_a_trace_are_those_of_the_pure_policy(scene: Scene) -> None:
    """A pod is there an interval after it was asked for."""
    memory, most = Memory(), 0
    pods, there = ({"prefill": 1, "decode": 1} for _ in range(2))
    await scene.pair()
    async with scene.deciding(interval=STEP_S, cool_down=480.0) as autoscaler, keda(autoscaler.port) as asked:
        for number, load in enumerate((ToldLoad(requests=1), *TRACE)):
            if number:
                await scene.writer.workers(*(worker(f"{role}-{i:02d}", role) for role in ROLES for i in range(there[role])))
                await scene.next(autoscaler, load, after_s=STEP_S)
            record, seen = autoscaler.board.answer(), autoscaler.controller.observation
            assert seen is not None
            step = decide(autoscaler.config.policy(), memory, seen)
            memory = step.memory
            assert record.replicas == step.decision.replicas
            assert record.wanted == {"prefill": step.decision.prefill, "decode": step.decision.decode}
            assert (record.victims, record.reason) == (step.decision.victims, step.decision.reason)
            assert record.memory == memory.to_json()
            there = dict(pods)
            for role in ROLES:
                pods[role] = desired(await asked.value(role), pods[role])
                there[role] = min(there[role], pods[role])
                assert await asked.active(role)
            assert pods == record.asked, "the HPA's formula comes to what was asked for"
            assert all(record.asked[role] >= record.replicas[role] for role in ROLES)
            most = max(most, sum(pods.values()))
    assert most > 4, "the load asked for more"
    assert sum(pods.values()) < most, "and for less again"


async def test_pods_that_are_to_come_count_as_asked_for(scene: Scene) -> None:
    await scene.pair()
    async with scene.deciding(prefill=PoolSettings(min_workers=4)) as autoscaler:
        assert autoscaler.board.answer().replicas["prefill"] == 4
        for passed, expected in ((100.0, 4), (200.0, 1)):
            await scene.next(autoscaler, after_s=passed)
            assert autoscaler.controller.observation is not None
            assert autoscaler.controller.observation.pods["prefill"] == expected, "not for ever"


@pytest.mark.parametrize(("role", "said"), [(None, "role is missing"), ("router", "role is 'router'"), ("", "role is missing")])
async def test_metadata_without_a_role_is_refused_clearly(scene: Scene, role: str | None, said: str) -> None:
    async with scene.running() as autoscaler, keda(autoscaler.port) as asked:
        ref = asked.ref(role)

        async def streamed() -> None:
            async for _ in asked.stub.StreamIsActive(ref, timeout=WAIT_S):
                pass

        for request in (
            asked.stub.IsActive(ref, timeout=WAIT_S),
            asked.stub.GetMetricSpec(ref, timeout=WAIT_S),
            asked.stub.GetMetrics(externalscaler_pb2.GetMetricsRequest(scaledObjectRef=ref), timeout=WAIT_S),
            streamed(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await request
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in (refused.value.details() or "")


async def test_the_metric_has_a_name_a_target_of_one_and_no_other(scene: Scene) -> None:
    await scene.pair()
    async with scene.deciding() as autoscaler, keda(autoscaler.port) as asked:
        (spec,) = (await asked.stub.GetMetricSpec(asked.ref("decode"), timeout=WAIT_S)).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("twostep-decode-replicas", 1, 1.0)

        async def told(name: str) -> externalscaler_pb2.MetricValue:
            request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=asked.ref("decode"), metricName=name)
            (metric,) = (await asked.stub.GetMetrics(request, timeout=WAIT_S)).metricValues
            return metric

        # As KEDA asks with its own number in front, as older versions do, and without a name.
        for name in ("twostep-decode-replicas", "s0-twostep-decode-replicas", ""):
            metric = await told(name)
            assert metric.metricName == "twostep-decode-replicas"
            assert metric.metricValue >= metric.metricValueFloat >= 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await told("twostep-prefill-replicas")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_tells_of_sleep_and_waking_and_has_a_bound(scene: Scene) -> None:
    zero = PoolSettings(min_workers=0)
    await scene.pair()
    told: list[bool] = []
    options = {"max_streams": 1, "scale_to_zero_after": 120.0, "cool_down": 60.0, "prefill": zero, "decode": zero}
    async with scene.deciding(interval=STEP_S, **options) as autoscaler, keda(autoscaler.port) as asked:

        async def listen() -> None:
            async for answer in asked.stub.StreamIsActive(asked.ref("prefill")):
                told.append(answer.result)

        listening = asyncio.create_task(listen())
        await eventually(lambda: told == [True], "the first word")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in asked.stub.StreamIsActive(asked.ref("decode"), timeout=WAIT_S):
                pass
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await scene.next(autoscaler, ToldLoad(requests=2), after_s=STEP_S)
        assert await asked.active("prefill"), "which is not said again"
        for load, expected in ((ToldLoad(requests=0), [True, False]), (ToldLoad(requests=3), [True, False, True])):
            for _ in range(20):
                if (await scene.next(autoscaler, load, after_s=STEP_S)).replicas["prefill"] == int(expected[-1]):
                    break
            await eventually(lambda expected=expected: told == expected, "the next word")
            assert await asked.active("prefill") is expected[-1]
        listening.cancel()
        await asyncio.wait([listening])


async def test_the_process_answers_is_alive_is_scraped_and_drains(scene: Scene) -> None:
    secret = scene.config().secret_file
    flags = ["--redis-url", scene.redis.url, "--secret-file", str(secret), "--host", "127.0.0.1", "--grpc-port", "0"]
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
    async with keda(ports[0]) as asked, asyncio.timeout(WAIT_S):
        value = 0.0
        while value == 0.0:
            scene.clock = type(scene.clock)()
            await scene.pair()
            # Until there is a decision it is UNAVAILABLE.
            with contextlib.suppress(grpc.aio.AioRpcError):
                value = await asked.value("prefill")
        assert value == 3.0
        async with open_channel(f"127.0.0.1:{ports[1]}") as channel:
            for service in ("liveness", "readiness"):
                request, answer = health_pb2.HealthCheckRequest(service=service), health_pb2.HealthCheckResponse()
                while answer.status != health_pb2.HealthCheckResponse.SERVING:
                    answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_S)
    process.terminate()
    async with asyncio.timeout(WAIT_S):
        await draining
        assert await process.wait() == 0
