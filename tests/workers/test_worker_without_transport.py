"""Workers whose KV transports are away when they start: they start, say why they are not ready, and are ready once one is back."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from worker_harness import WAIT_S, Pair, life_of, prompt_of, routed, started, until

from kv_transfer.local.transport import LocalHub, LocalTransport
from kv_transfer.transports import Transports
from twostep.rpc.channel import open_channel
from twostep.worker.edge import EdgeParts

pytestmark = pytest.mark.usefixtures("patient_paths")
PROMPT = prompt_of(30)


class Ray:
    """Stands for one: what is up or away for all."""

    away = True


class RayDouble(LocalTransport):
    ray: Ray

    @property
    def ready(self) -> bool:
        return super().ready and not self.ray.away

    @property
    def why_not_ready(self) -> str:
        return "Ray does not answer"


@asynccontextmanager
async def world(redis_url: str, **decode_options: object) -> AsyncIterator[tuple[Pair, Ray]]:
    hub, ray = LocalHub(), Ray()

    def make(parts: EdgeParts) -> Transports:
        transport = RayDouble(hub=hub, **life_of(parts))
        transport.ray = ray
        return Transports([transport])

    quick = {"transport_timeout": 0.1}
    async with started(redis_url, make_transports=make, prefill_options=quick, decode_options=quick | decode_options) as pair:
        yield pair, ray


async def serving(address: str) -> bool:
    async with open_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=WAIT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def until_ready(pair: Pair, *, prefill: bool) -> None:
    await until(lambda: (pair.prefill_worker.record().not_ready_reason == "") is prefill)
    assert await serving(pair.prefill_worker.address) is prefill


async def test_they_start_and_join_later_by_themselves(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "twostep.worker")
    async with world(redis_url) as (pair, ray), routed(pair) as router:
        epochs = pair.prefill_worker.epoch, pair.decode_worker.epoch
        assert not await serving(pair.prefill_worker.address)
        record = pair.prefill_worker.record()
        assert record.ready, "the process is; nobody is placed on it without a transport"
        assert (record.transports, record.draining) == ((), False)
        assert record.not_ready_reason == "no KV transport works (--kv-transfer auto): local: Ray does not answer"
        # A decode worker computes prompts of its own meanwhile.
        assert await serving(pair.decode_worker.address)
        assert pair.decode_worker.record().not_ready_reason == ""
        (await router.generate_here("here", PROMPT, 3)).check(PROMPT, 3)
        ray.away = False
        await until_ready(pair, prefill=True)
        answer = await router.generate("moved", PROMPT, 3)
        answer.check(PROMPT, 3)
        assert answer.committed is not None
        ray.away = True
        await until_ready(pair, prefill=False)
        ray.away = False
        await until_ready(pair, prefill=True)
        assert (pair.prefill_worker.epoch, pair.decode_worker.epoch) == epochs
        assert sum("is not ready" in record.message for record in caplog.records) == 2, "each time once"
        assert sum("KV travels by local" in record.message for record in caplog.records) == 2


async def test_a_decode_worker_that_computes_no_prompts_is_not_ready_either(redis_url: str) -> None:
    async with world(redis_url, local_prefill=False) as (pair, ray):
        assert not await serving(pair.decode_worker.address)
        assert "Ray does not answer" in pair.decode_worker.record().not_ready_reason
        ray.away = False
        await until(lambda: pair.decode_worker.record().not_ready_reason == "")
        assert await serving(pair.decode_worker.address)
