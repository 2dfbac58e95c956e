"""Requests that a decode worker serves alone: the router's side of them."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc
import grpc.aio
import pytest
from router_fakes import Cluster, Reply, Script, refuse, until
from scraping import scrape

from twostep.rpc.v1 import inference_pb2

FULL = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "no free blocks")


async def failure(cluster: Cluster, timeout: float = 60.0, **sampling: Any) -> tuple[str, str]:
    """Status and message of a request that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.ask(timeout=timeout, **sampling)
    return caught.value.code().name, caught.value.details() or ""


def end_of(reply: Reply) -> inference_pb2.End:
    assert reply.end is not None
    return reply.end


async def test_without_prefill_workers_the_decode_worker_does_it_all(cluster: Cluster) -> None:
    decode = await cluster.decode(local=True, transports=())
    decode.num_cached_tokens = 3
    decode.script = Script(step_s=0.01, prefill_s=0.05)
    async with cluster.serving():
        reply = await cluster.ask(max_tokens=9, ignore_eos=True)
    assert reply.token_ids == cluster.expected(9)
    end = end_of(reply)
    assert end.attempts == 1
    assert (end.transfer.transport, end.transfer.prefill_worker, end.transfer.decode_worker) == ("none", "", "d0")
    assert (end.transfer.bytes, end.transfer.blocks_moved, end.phases.publish_s, end.phases.fetch_s) == (0, 0, 0, 0)
    assert (end.phases.queue_s, end.phases.prefill_s, end.usage.cached_tokens) == (0.001, 0.002, 3)
    assert end.phases.ttft_s >= 0.05
    assert 0 < end.phases.first_decode_s < end.phases.decode_s
    request = decode.requests[0]
    assert request.prefill_here
    assert decode.attaches == decode.cancels == []


@pytest.mark.parametrize("local", [True, False])
async def test_the_context_is_that_of_whoever_can_do_it_alone(cluster: Cluster, local: bool) -> None:
    template = cluster.template
    cluster.template = dataclasses.replace(template, max_model_len=40)
    await cluster.prefill()
    cluster.template = template
    await cluster.decode(local=local)
    async with cluster.serving():
        models = (await cluster.stub.ListModels(inference_pb2.ListModelsRequest(), timeout=30)).models
        context = template.max_model_len if local else 40
        assert [(m.name, m.max_model_len, m.prefill_workers, m.decode_workers) for m in models] == [("m", context, 1, 1)]
        if local:
            reply = await cluster.ask(max_tokens=60, ignore_eos=True)
            assert len(reply.token_ids) == 60


async def test_who_would_not_compute_the_prompt_may_still_take_its_kv(cluster: Cluster) -> None:
    """Its queue is full: the next choice is the pair of the prefill worker and the same decode worker."""
    prefill = await cluster.prefill()
    decode = await cluster.decode(local=True)
    decode.max_local = 0
    async with cluster.serving():
        reply = await cluster.ask(max_tokens=5, ignore_eos=True)
        await cluster.all_free()
    assert reply.token_ids == cluster.expected(5)
    assert end_of(reply).attempts == 1
    assert end_of(reply).transfer.prefill_worker == "p0"
    assert len(prefill.requests) == 1
    assert decode.requests[-1].prefill_here is False


async def test_a_worker_whose_flag_has_changed_is_not_asked_twice_in_a_round(cluster: Cluster) -> None:
    first, second = await cluster.decode("d0", local=True), await cluster.decode("d1", local=True)
    for decode in (first, second):
        decode.hooks.append(refuse(grpc.StatusCode.FAILED_PRECONDITION, "this decode worker computes no prompts"))
    async with cluster.serving():
        # One round asks both; the next, a moment later, finds that they do it again.
        reply = await cluster.ask(max_tokens=3, ignore_eos=True)
    assert reply.token_ids == cluster.expected(3)
    assert sorted([len(first.requests), len(second.requests)]) == [1, 2]


@pytest.mark.parametrize("lost", ["prefilling", "decoding"])
async def test_a_lost_decode_worker_is_replaced_by_another(cluster: Cluster, lost: str) -> None:
    workers = [await cluster.decode(f"d{i}", local=True) for i in range(2)]
    dead = asyncio.Event()
    for worker in workers:
        # The first token is that of the prompt.
        worker.script = Script(hold_at=0 if lost == "prefilling" else 5, go_on=dead)
    async with cluster.serving():
        call = asyncio.create_task(cluster.ask(max_tokens=12, ignore_eos=True))
        await until(lambda: scrape(cluster.router.metrics_port)("twostep_request_placements_total", path="local") == 1, "one has it")
        busy, idle = sorted(workers, key=lambda w: not w.held)
        attempt = (busy.requests[0].request_id, busy.requests[0].attempt)
        await until(lambda: lost == "prefilling" or cluster.exchange.arrived(attempt, 1), "and has begun")
        dead.set()
        await busy.die()
        reply = await call
        assert reply.token_ids == cluster.expected(12)
        assert end_of(reply).attempts == 2
        assert end_of(reply).transfer.decode_worker == idle.record.worker_id
        assert (idle.requests[0].num_prompt_tokens < len(idle.requests[0].token_ids)) == (lost == "decoding")
        await until(lambda: not idle.held, "it is free")


async def test_from_a_pair_to_a_decode_worker_alone(cluster: Cluster) -> None:
    """The prefill worker dies for good while its prompt's answer is under way on a decode worker that dies too."""
    prefill = await cluster.prefill()
    only_pair = await cluster.decode("d0")
    only_pair.script = Script(hold_at=10)
    async with cluster.serving():
        call = asyncio.create_task(cluster.ask(max_tokens=30, ignore_eos=True))
        await until(lambda: bool(only_pair.attaches), "it decodes there")
        alone = await cluster.decode("d1", local=True, transports=())
        await cluster.seen()
        await prefill.die()
        await only_pair.die()
        reply = await call
    assert reply.token_ids == cluster.expected(30)
    assert (end_of(reply).transfer.transport, end_of(reply).transfer.decode_worker) == ("none", "d1")
    assert alone.requests[0].prefill_here


async def test_from_a_decode_worker_alone_to_a_pair(cluster: Cluster) -> None:
    alone = await cluster.decode("d0", local=True, transports=())
    alone.script = Script(hold_at=10)
    async with cluster.serving():
        call = asyncio.create_task(cluster.ask(max_tokens=30, ignore_eos=True))
        await until(lambda: bool(alone.held), "it decodes there")
        await cluster.prefill()
        await cluster.decode("d1")
        await cluster.seen()
        await alone.die()
        reply = await call
    assert reply.token_ids == cluster.expected(30)
    assert end_of(reply).transfer.prefill_worker == "p0"
