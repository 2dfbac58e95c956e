"""Tests of Run beside Reserve: where a decode worker is likely to take a request, its prompt is not held up by the question."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc
import pytest
from bare_deployment import until
from router_fakes import Cluster, refuse

from twostep.cluster.records import WorkerLoad

FULL = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "no free blocks")


async def test_a_prompt_is_not_held_up_by_its_reservation(cluster: Cluster) -> None:
    """And no token is sent before that is there."""
    async with cluster.paired() as (prefill, decode):
        seen = asyncio.Event()
        first = asyncio.Event()

        async def hold(_request: Any, _context: Any) -> None:
            await until(lambda: bool(prefill.held), "Run has begun")
            seen.set()
            await first.wait()

        decode.num_cached_tokens = 16
        decode.hooks.append(hold)
        call = cluster.stub.Generate(cluster.request(max_tokens=3), timeout=60.0)
        await seen.wait()
        reading = asyncio.ensure_future(call.read())
        assert decode.attaches == []
        assert not reading.done()
        first.set()
        assert (await reading).piece.position == 0
        call.cancel()
        await cluster.all_free()


@pytest.mark.parametrize("refused", ["reserve", "run"])
async def test_a_refusal_gives_back_what_the_other_worker_has_begun(cluster: Cluster, refused: str) -> None:
    """And a decode worker that was full is asked first from then on."""
    prefills = [await cluster.prefill(f"p{i}") for i in range(2)]
    decode = await cluster.decode()
    runs_at_reserve: list[int] = []

    def runs() -> int:
        return sum(len(p.requests) for p in prefills)

    async def on_reserve(request: Any, context: Any) -> None:
        runs_at_reserve.append(runs())
        if refused == "reserve" and len(runs_at_reserve) == 1:
            await until(lambda: any(p.held for p in prefills), "Run has begun")
            await FULL(request, context)

    async def on_run(request: Any, context: Any) -> None:
        if refused == "run" and runs() == 1:
            await until(lambda: bool(runs_at_reserve), "Reserve has begun")
            await FULL(request, context)

    decode.hooks.extend([on_reserve] * 2)
    for prefill in prefills:
        prefill.hooks.extend([on_run] * 2)
    async with cluster.serving():
        reply = await cluster.ask(max_tokens=4)
        await cluster.all_free()
    assert reply.token_ids == cluster.expected(4)
    assert reply.end is not None
    assert reply.end.attempts == 1
    assert (runs(), len(runs_at_reserve)) == (2, 2)
    if refused == "reserve":
        assert runs_at_reserve[1] == 1, "Reserve first"
    assert sum(len(p.cancelled) for p in prefills) == (refused == "reserve")
    assert len(decode.cancels) == (refused == "run")


@pytest.mark.parametrize("why", ["old prefill", "old decode", "no blocks", "no place"])
async def test_a_reservation_that_may_fail_or_that_an_older_worker_needs_goes_first(cluster: Cluster, why: str) -> None:
    prefill = await cluster.prefill()
    prefill.record = dataclasses.replace(prefill.record, cached_at_watch=why != "old prefill")
    load = WorkerLoad(num_free_blocks=3 if why == "no blocks" else 1024, num_running=256 if why == "no place" else 0)
    decode = await cluster.decode(cached_at_watch=why != "old decode", load=load)
    decode.num_cached_tokens = 16

    async def none_yet(_request: Any, _context: Any) -> None:
        assert prefill.requests == []

    decode.hooks.append(none_yet)
    async with cluster.serving():
        reply = await cluster.ask(cluster.request("the capital of France " * 10, max_tokens=3))
    assert reply.token_ids == cluster.expected(3)
    assert [request.num_decode_cached_tokens for request in prefill.requests] == [16]
