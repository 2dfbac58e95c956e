"""Harness of the autoscaler's service: a real Redis, workers and routers that are nothing but what they write there, and a client that asks
over gRPC as KEDA does."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import redis.asyncio
from bare_deployment import RedisServer as RedisServer
from bare_deployment import until as eventually
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from twostep.autoscaler.config import AutoscalerConfig
from twostep.autoscaler.controller import Policy
from twostep.autoscaler.policy import decide
from twostep.autoscaler.server import Autoscaler
from twostep.cluster.demand import WINDOW_S, DemandTotals, demand_key, signed_totals, window_of
from twostep.cluster.records import WORKERS_KEY, LayoutRecord, WorkerRecord, worker_key
from twostep.cluster.scaling import ScalingRecord
from twostep.cluster.signed import DECISIONS, DEMAND, RECORDS, Signer
from twostep.keys.secret import DeploymentSecret, secret_check
from twostep.rpc.channel import open_channel
from twostep.rpc.keda import externalscaler_pb2, externalscaler_pb2_grpc
from twostep.settings.tls import PLAINTEXT, TlsFiles
from twostep.step_curve import StepCurve

SECRET = DeploymentSecret(b"a secret of the tests, long enough")
WAIT_S = 60.0
# Signs decisions.
SIGNER = Signer(SECRET, DECISIONS)
LAYOUT = LayoutRecord(model_fingerprint="m", dtype="float32", block_size=16, num_layers=1, num_kv_heads=1, head_dim=4)
# Curve of a worker that does 20,000 prompt tokens a second and a decode step in 10 ms and a bit.
CURVE = StepCurve(fixed_s=0.01, per_row_s=5e-5, per_sequence_s=1e-4, per_context_s=1e-8)


def worker(worker_id: str, role: str, **options: Any) -> WorkerRecord:
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "role": role,
        "address": "127.0.0.1:1",
        "epoch": 1_000_000,
        "model": "m",
        "layout": LAYOUT,
        "hash_unit": 64,
        "secret_check": secret_check(SECRET),
        "num_blocks": 4096,
        "max_num_seqs": 64,
        "max_model_len": 4096,
        "transports": ("ray",),
        "curve": CURVE,
        "pod_name": f"pod-{worker_id}",
        "pod_owner": role,
    }
    return WorkerRecord(**(values | options))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldLoad:
    """The load that one router tells of: requests and refusals a second, and their tokens."""

    requests: int
    prompt_tokens: int = 1000
    cached_tokens: int = 0
    output_tokens: int = 100
    refused: int = 0
    queued: int = 0
    ttft_met: float = 1.0
    tpot_met: float = 1.0

    def totals(self) -> DemandTotals:
        many = self.requests * WINDOW_S
        return DemandTotals(
            requests=many,
            prompt_tokens=many * self.prompt_tokens,
            refused=self.refused * WINDOW_S,
            started=many,
            started_prompt_tokens=many * self.prompt_tokens,
            cached_tokens=many * self.cached_tokens,
            uncached_squares=many * (self.prompt_tokens - self.cached_tokens) ** 2,
            ended=many,
            output_tokens=many * self.output_tokens,
            ttft_total=many,
            ttft_met=round(many * self.ttft_met),
            tpot_total=many,
            tpot_met=round(many * self.tpot_met),
            queued=self.queued,
        )


class Writer:
    """Plays workers and routers: writes what they would say at an instant of the test's clock. Records do not expire."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.redis = client
        self._written: set[str] = set()

    async def workers(self, *records: WorkerRecord) -> None:
        """These are there, and no others."""
        names = {record.worker_id for record in records}
        async with self.redis.pipeline(transaction=True) as pipe:
            for gone in self._written - names:
                pipe.delete(worker_key(gone))
                pipe.srem(WORKERS_KEY, gone)
            for record in records:
                pipe.set(worker_key(record.worker_id), Signer(SECRET, RECORDS).sign_object(record.to_json()))
                pipe.sadd(WORKERS_KEY, record.worker_id)
            await pipe.execute()
        self._written = names

    async def load(self, now_s: float, load: ToldLoad, *, routers: int = 1, seconds: float = 60.0) -> None:
        """Writes this load of each router over the last `seconds`."""
        last = window_of(now_s)
        async with self.redis.pipeline(transaction=True) as pipe:
            for window in range(last - math.ceil(seconds / WINDOW_S), last + 1):
                names = [f"router-{number}" for number in range(routers)]
                fields: Mapping[Any, Any] = {name: signed_totals(Signer(SECRET, DEMAND), window, name, load.totals()) for name in names}
                pipe.hset(demand_key(window), mapping=fields)
                pipe.expire(demand_key(window), 600)
            await pipe.execute()

    async def forget_load(self) -> None:
        keys = [key async for key in self.redis.scan_iter("twostep:v1:demand:*")]
        if keys:
            await self.redis.delete(*keys)


@dataclass
class Clock:
    """A clock as a test has it: seconds since 1970, unless it begins elsewhere."""

    now_s: float = field(default_factory=lambda: float(int(time.time())))

    def __call__(self) -> float:
        return self.now_s


class Keda:
    """Asks as KEDA does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)

    @staticmethod
    def ref(role: str | None) -> externalscaler_pb2.ScaledObjectRef:
        metadata = {"scalerAddress": "autoscaler:50081"} | ({} if role is None else {"role": role})
        return externalscaler_pb2.ScaledObjectRef(name=f"twostep-{role}", namespace="n", scalerMetadata=metadata)

    async def value(self, role: str) -> float:
        """Returns the metric that KEDA would hand to the HorizontalPodAutoscaler."""
        request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=self.ref(role), metricName=f"twostep-{role}-replicas")
        answer = await self.stub.GetMetrics(request, timeout=WAIT_S)
        (metric,) = answer.metricValues
        return metric.metricValueFloat if metric.metricValueFloat > 0 else float(metric.metricValue)

    async def active(self, role: str) -> bool:
        answer: externalscaler_pb2.IsActiveResponse = await self.stub.IsActive(self.ref(role), timeout=WAIT_S)
        return answer.result

    async def refusal(self, role: str = "prefill") -> grpc.StatusCode:
        """The status, or OK."""
        try:
            await self.value(role)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@asynccontextmanager
async def keda(port: int, tls: TlsFiles = PLAINTEXT) -> AsyncIterator[Keda]:
    async with open_channel(f"127.0.0.1:{port}", tls=tls) as channel:
        yield Keda(channel)


def decision(token: int, number: int = 1, leader: str = "a", at_s: float = 1.0, **options: Any) -> ScalingRecord:
    counts = {"prefill": 2, "decode": 3}
    values = {"interval_s": 1.0, "replicas": counts, "pods": counts, "wanted": counts} | options
    return ScalingRecord(token=token, number=number, leader=leader, at_s=at_s, **values)


def count_of(metric: Any, *labels: str) -> float:
    """Returns the value of a counter of the process under test."""
    value: float = metric.labels(*labels).collect()[0].samples[0].value
    return value


@dataclass
class Scene:
    """A Redis, its writer, a clock, and autoscalers that decide when the test says so: at their start, and at next()."""

    redis: RedisServer
    writer: Writer
    directory: Path
    clock: Clock = field(default_factory=Clock)

    def config(self, **options: Any) -> AutoscalerConfig:
        """Decisions count and leases last until a test says otherwise, however long its process is held up."""
        secret = self.directory / "secret"
        secret.write_bytes(SECRET.own)
        made = AutoscalerConfig(
            redis_url=self.redis.url, secret_file=secret, host="127.0.0.1", grpc_port=0, metrics_port=-1, health_port=-1, kubernetes_api=""
        )
        return replace(made, **{"leader_lease": 3600.0, "stale_after": 10_000, "interval": 60.0} | options)

    async def load(self, load: ToldLoad | None = None, **options: Any) -> None:
        await self.writer.load(self.clock.now_s, load or ToldLoad(requests=1), **options)

    async def pair(self) -> None:
        """A worker of each role, and little load."""
        await self.writer.workers(worker("p", "prefill"), worker("d", "decode"))
        await self.load()

    @asynccontextmanager
    async def running(
        self, *, policy: Policy = decide, monotonic: Callable[[], float] = time.monotonic, look_again_s: float = 0.001, **options: Any
    ) -> AsyncIterator[Autoscaler]:
        made = Autoscaler(self.config(**options), clock=self.clock, monotonic=monotonic, look_again_s=look_again_s, policy=policy)
        await made.start()
        try:
            yield made
        finally:
            await made.drain(0.0)

    @asynccontextmanager
    async def deciding(self, **options: Any) -> AsyncIterator[Autoscaler]:
        """One that has made its first decision."""
        async with self.running(**options) as autoscaler:
            await eventually(lambda: autoscaler.board.record is not None, "a decision")
            yield autoscaler

    async def next(self, autoscaler: Autoscaler, load: ToldLoad | None = None, *, after_s: float = 60.0) -> ScalingRecord:
        """The decision after so many seconds of that load."""
        self.clock.now_s += after_s
        await self.load(load)
        autoscaler.controller.wake()
        await eventually(lambda: autoscaler.board.answer().at_s == self.clock.now_s, "another decision")
        return autoscaler.board.answer()


def patient(url: str) -> redis.asyncio.Redis:
    """One that waits for a Redis server that is held up: the product's own gives up after a second, and tries again at its own pace."""
    return redis.asyncio.Redis.from_url(url, socket_timeout=WAIT_S, socket_connect_timeout=WAIT_S, retry=Retry(NoBackoff(), 0))


@asynccontextmanager
async def client(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    made = patient(url)
    try:
        yield made
    finally:
        await made.aclose()
