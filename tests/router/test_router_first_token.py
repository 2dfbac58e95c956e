"""When the first token of a prompt whose KV moves goes to the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from router_fakes import Cluster, FakePrefill, Reply

from router.request.job import RequestJob
from router.request.targets import Targets
from twostep.rpc.v1 import inference_pb2, prefill_pb2
from twostep.sampling_params import SamplingParams


class ScoringPrefill(FakePrefill):
    """Says something more once the first token is sent: who has been told that has read the token."""

    async def Run(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        async for event in super().Run(request, context):
            yield event
            if event.HasField("first_token"):
                yield prefill_pb2.PrefillEvent(prompt_logprobs=inference_pb2.PromptLogprobs(position=1, logprobs=[-1.0]))


HOUR = 3_600_000.0


@pytest.mark.parametrize(
    ("targets", "waits"),
    [
        ({"gap_ms": HOUR}, True),
        ({"gap_ms": HOUR, "ttft_ms": HOUR}, True),
        ({"gap_ms": 1.0}, False),
        ({"ttft_ms": HOUR, "tpot_ms": HOUR}, False),
        ({}, False),
    ],
)
async def test_where_a_gap_was_promised_it_waits_for_its_kv(cluster: Cluster, targets: dict[str, float], waits: bool) -> None:
    worker = ScoringPrefill("p0", cluster.exchange, cluster.template)
    await worker.start()
    cluster.workers.append(worker)
    await cluster.decode()
    told = asyncio.Event()

    async def kv_comes(_request: Any, _context: Any) -> None:
        await told.wait()

    worker.after_first.append(kv_comes)
    request = cluster.request(max_tokens=9, prompt_logprobs=0)
    for name, value in targets.items():
        setattr(request, name, value)
    reply, before_kv, queued = Reply(), 0, [1]
    async with cluster.serving():
        async for response in cluster.stub.Generate(request, timeout=60.0):
            if not response.HasField("prompt_logprobs"):
                reply.add(response)
            if not told.is_set() and (reply.token_ids or waits):
                before_kv = len(reply.token_ids)
                queued = [link.queued_tokens for link in cluster.router.pool.prefill.values()]
                told.set()
        await cluster.all_free()
    assert before_kv == (0 if waits else 1)
    assert queued == [0], "its prompt is computed, whatever it waits for"
    assert reply.token_ids == cluster.expected(9)
    assert reply.end is not None
    assert reply.end.phases.ttft_s <= reply.end.phases.total_s


async def test_one_that_waits_goes_out_if_its_worker_is_lost(cluster: Cluster) -> None:
    """The decode worker may have all it needs: the client gets what there is, and the answer goes on."""
    async with cluster.paired() as (prefill, _decode):

        async def lost(_request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")

        prefill.after_first.append(lost)
        request = cluster.request(max_tokens=9)
        request.gap_ms = HOUR
        reply = await cluster.ask(request)
        await cluster.all_free()
    assert reply.token_ids == cluster.expected(9)


def test_it_waits_no_longer_than_either_target_allows() -> None:
    def waits_s(**targets: float) -> float:
        sampling = SamplingParams(max_tokens=2)
        job = RequestJob(request_id="r", prompt=[1], sampling=sampling, deadline=1e12, targets=Targets(**targets))
        return job.first_token_may_wait_s()

    assert waits_s() == waits_s(ttft_s=9.0, tpot_s=1.0) == 0.0
    assert waits_s(gap_s=0.025) == 0.025
    assert waits_s(gap_s=0.025, ttft_s=3000.0) == 0.025
    assert waits_s(gap_s=0.025, ttft_s=1e-9) == 0.0
    assert 0.0 < waits_s(gap_s=5000.0, ttft_s=3000.0) < 3000.0
