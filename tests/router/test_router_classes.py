"""Classes, tenants, deadlines and targets through a whole router: who is served first, and who is refused before a worker is asked."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc
import grpc.aio
import pytest
from router_fakes import Cluster, FakeDecode, FakePrefill, FakeWorker, Script, after, until
from scraping import Scrape, scrape

from router.waiting.fair_queue import QueueEntry
from router.waiting.queues import WorkerQueue
from twostep.cluster.records import WorkerLoad
from twostep.errors import ResourceExhausted
from twostep.rpc.channel import error_from_rpc
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.step_curve import StepCurve

INTERACTIVE, STANDARD, BATCH = pb.REQUEST_CLASS_INTERACTIVE, pb.REQUEST_CLASS_STANDARD, pb.REQUEST_CLASS_BATCH
# A step takes ten milliseconds and a prompt's token one: this prompt of some ten tokens is there in about 20 ms.
CURVE = StepCurve(fixed_s=0.01, per_row_s=0.001)


def told_by(cluster: Cluster) -> Scrape:
    return scrape(cluster.router.metrics_port)


def asking(cluster: Cluster, tenant: str = "", request_class: pb.RequestClass.ValueType = STANDARD, **sampling: Any) -> pb.GenerateRequest:
    request = cluster.request(**({"max_tokens": 2} | sampling))
    request.tenant, request.request_class = tenant, request_class
    return request


async def described(cluster: Cluster, *workers: FakeWorker, **fields: Any) -> None:
    for worker in workers:
        worker.record = dataclasses.replace(worker.record, **fields)
    await cluster.beat()


async def refused(cluster: Cluster, request: pb.GenerateRequest, **options: Any) -> ResourceExhausted:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.ask(request, **options)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, caught.value.details()
    error = error_from_rpc(caught.value)
    assert isinstance(error, ResourceExhausted)
    return error


async def both(cluster: Cluster) -> tuple[FakePrefill, FakeDecode]:
    return await cluster.prefill(), await cluster.decode()


# ---- what is passed on -----------------------------------------------------------------------------------------------------


async def test_workers_are_told_class_and_tenant_and_a_fronts_word_counts(cluster: Cluster) -> None:
    prefill, decode = await both(cluster)
    async with cluster.serving():
        await cluster.ask(asking(cluster, "alice", BATCH))
        assert [r.request_class for r in (*prefill.requests, *decode.requests)] == [BATCH, BATCH]
        assert [r.tenant for r in (*prefill.requests, *decode.requests)] == ["alice", "alice"]
        await cluster.ask(asking(cluster))
        assert decode.requests[-1].request_class == STANDARD
        request = asking(cluster, "alice")
        async for _ in cluster.stub.Generate(request, timeout=60, metadata=(("x-twostep-tenant", "bob"),)):
            pass
        assert decode.requests[-1].tenant == "bob"
        request = cluster.request(max_tokens=2)
        assert request.request_class == pb.REQUEST_CLASS_UNSPECIFIED
        await cluster.ask(request)
        assert decode.requests[-1].request_class == STANDARD


# ---- who goes first --------------------------------------------------------------------------------------------------------


async def in_turn(cluster: Cluster, decode: FakeDecode, requests: list[pb.GenerateRequest], queued: Any) -> list[pb.GenerateRequest]:
    """The order in which requests are begun that all wait behind one: that in which the worker took them."""
    decode.script = Script(hold_at=5)
    go_on = decode.script.go_on
    first = asyncio.create_task(cluster.ask(cluster.request(max_tokens=12)))
    await until(lambda: bool(decode.attaches), "the first is served")
    tasks = []
    for i, request in enumerate(requests):
        request.request_id = f"r{i}"
        tasks.append(asyncio.create_task(cluster.ask(request)))
        await until(lambda i=i: queued() == i + 1, "it waits")  # type: ignore[misc]
    go_on.set()
    await asyncio.gather(first, *tasks)
    return [requests[int(request_id.partition("~")[0][1:])] for request_id, _ in decode.attaches[1:]]


@pytest.mark.parametrize("where", ["admission", "room"])
async def test_classes_and_tenants_take_turns_wherever_they_wait(cluster: Cluster, where: str) -> None:
    """Behind the router's own bound, and behind full workers."""
    _, decode = await both(cluster)
    decode.max_held = 1 if where == "room" else 1 << 30
    requests = [
        asking(cluster, "a", BATCH),
        *(asking(cluster, "greedy") for _ in range(4)),
        asking(cluster, "modest"),
        asking(cluster, "modest"),
        asking(cluster, "greedy", INTERACTIVE),
    ]
    async with cluster.serving(max_inflight=1 if where == "admission" else 512):
        router = cluster.router
        begun = await in_turn(
            cluster, decode, requests, lambda: router.admission.num_waiting if where == "admission" else router.worker_queue.num_queued
        )
    names = [(pb.RequestClass.Name(r.request_class)[14:].lower(), r.tenant) for r in begun]
    assert names[0] == ("interactive", "greedy")
    assert names[-1] == ("batch", "a")
    middle = [tenant for _, tenant in names[1:-1]]
    # One for one, though greedy's four came first.
    assert sorted(middle[:4]) == ["greedy", "greedy", "modest", "modest"], middle
    assert middle[4:] == ["greedy", "greedy"]


async def test_weights_are_shares(cluster: Cluster) -> None:
    _, decode = await both(cluster)
    requests = [asking(cluster, tenant) for tenant in ("small",) * 6 + ("big",) * 6]
    async with cluster.serving(max_inflight=1, tenant_weights={"big": 3.0}):
        begun = await in_turn(cluster, decode, requests, lambda: cluster.router.admission.num_waiting)
    assert sum(r.tenant == "big" for r in begun[:8]) == 6, [r.tenant for r in begun]


async def test_prompts_wait_here_rather_than_on_a_worker_and_batch_ones_first(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is sent no more than keeps it busy: what is there is out of the reach of classes and shares."""
    prefill, _ = await both(cluster)
    prompt_tokens = len(cluster.tokenizer.encode("the capital of France").ids)
    await described(cluster, prefill, step_tokens=prompt_tokens)
    release = asyncio.Event()
    tries: list[QueueEntry] = []
    again = WorkerQueue.again

    async def held(_request: Any, _context: Any) -> None:
        await release.wait()

    async def counted(queue: WorkerQueue, entry: QueueEntry, *, refused: bool) -> None:
        tries.append(entry)
        await again(queue, entry, refused=refused)

    async def tried_again() -> None:
        before = len(tries)
        await until(lambda: len(tries) >= before + 3, "those who wait try again")

    monkeypatch.setattr(WorkerQueue, "again", counted)

    prefill.before_first.extend([held] * 4)
    # Workers that have enough to do are not taken for absent ones.
    async with cluster.serving(staged_steps=4, no_worker_grace=0.0):
        batch = [asyncio.create_task(cluster.ask(asking(cluster, request_class=BATCH))) for _ in range(5)]
        await until(lambda: (len(prefill.requests), cluster.router.worker_queue.num_queued) == (2, 3), "two steps of it are there")
        await tried_again()
        assert len(prefill.requests) == 2
        others = [asyncio.create_task(cluster.ask(asking(cluster))) for _ in range(4)]
        await until(lambda: (len(prefill.requests), cluster.router.worker_queue.num_queued) == (4, 5), "four steps in all")
        await tried_again()
        assert [r.request_class for r in prefill.requests] == [BATCH, BATCH, STANDARD, STANDARD]
        release.set()
        await asyncio.gather(*batch, *others)
        assert [r.request_class for r in prefill.requests[4:6]] == [STANDARD, STANDARD]
        assert len(prefill.requests) == 9


async def test_a_prompt_that_is_computed_makes_room_for_the_next_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.server.WorkerQueue", lambda *args, **options: WorkerQueue(*args, **options, retry_s=1000.0))
    prefill, decode = await both(cluster)
    # Answers go on while prompts are computed: it is the first token that makes room, not the end.
    decode.script = Script(step_s=0.5, once=False)
    await described(cluster, prefill, step_tokens=1)
    prefill.before_first.extend([after(0.1)] * 6)
    async with cluster.serving(staged_steps=1):
        tasks = [asyncio.create_task(cluster.ask(asking(cluster, max_tokens=1000), timeout=60)) for _ in range(6)]
        await until(lambda: len(prefill.requests) == 6, "each was let in behind the one before")
        assert len(decode.held) == 6
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_that_goes_on_elsewhere_is_charged_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.prefill()
    first, second = await cluster.decode("d0"), await cluster.decode("d1")
    lost = asyncio.Event()
    for worker in (first, second):
        worker.script = Script(hold_at=5, go_on=lost)
    charged: list[int] = []
    took = WorkerQueue.took

    def counted(queue: WorkerQueue, entry: QueueEntry) -> None:
        charged.append(entry.num_tokens)
        took(queue, entry)

    monkeypatch.setattr(WorkerQueue, "took", counted)
    async with cluster.serving():
        asked = asyncio.create_task(cluster.ask(asking(cluster, max_tokens=20)))
        await until(lambda: bool(first.attaches or second.attaches), "one of them decodes")
        lost.set()
        await (first if first.held else second).die()
        assert len((await asked).token_ids) == 20
    assert len(charged) == 2
    assert charged[0] > 0
    assert charged[1] == 0


# ---- deadlines and targets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["admission", "room"])
async def test_who_runs_out_of_time_in_the_queue_costs_no_worker_anything(cluster: Cluster, where: str) -> None:
    prefill, decode = await both(cluster)
    decode.script = Script(hold_at=5)
    go_on = decode.script.go_on
    async with cluster.serving(max_inflight=1 if where == "admission" else 512):
        first = asyncio.create_task(cluster.ask(cluster.request(max_tokens=30)))
        await until(lambda: bool(prefill.requests), "the first is served")
        decode.max_held = 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.ask(asking(cluster), timeout=0.3)
        # Or the server's side of gRPC was the first to see that the time is up.
        assert caught.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
        await until(lambda: cluster.router.admission.num_waiting == cluster.router.worker_queue.num_queued == 0, "it waits no more")
        # Nothing said that the decode worker was full: Run may have begun beside the reservation that was refused. It is cancelled.
        assert len(prefill.requests) <= (1 if where == "admission" else 2)
        await until(lambda: len(prefill.held) <= 1, "only the first is held")
        go_on.set()
        await first


def with_targets(request: pb.GenerateRequest, **targets: float) -> pb.GenerateRequest:
    for name, value in targets.items():
        setattr(request, name, value)
    return request


async def test_what_cannot_meet_its_targets_is_refused_before_any_worker_is_asked(cluster: Cluster) -> None:
    prefill, decode = await both(cluster)
    # Ten seconds of prompts are queued, says the worker.
    busy = WorkerLoad(num_free_blocks=1024, num_waiting=5, num_queued_tokens=10_000)
    await described(cluster, prefill, curve=CURVE, load=busy)
    await described(cluster, decode, curve=CURVE)
    async with cluster.serving():
        error = await refused(cluster, with_targets(asking(cluster), ttft_ms=2000))
        assert "ttft_ms is 2000" in error.message
        assert not error.hopeless
        assert error.retry_after_s is not None
        assert 4.0 <= error.retry_after_s <= 30.0, "about as long as it is too much"
        assert not prefill.requests
        assert not decode.requests
        told = told_by(cluster)
        assert told("twostep_requests_refused_total", reason="target_ttft", request_class="standard") == 1
        assert told("twostep_requests_total", status="RESOURCE_EXHAUSTED", request_class="standard") == 1
        # A promise that can be kept, none at all, and one of a kind that waits, are served.
        await cluster.ask(with_targets(asking(cluster), ttft_ms=60_000))
        await cluster.ask(asking(cluster))
        await cluster.ask(with_targets(asking(cluster, request_class=BATCH), ttft_ms=2000))
        assert len(prefill.requests) == 3


async def test_a_token_that_would_take_too_long_is_a_reason_of_its_own(cluster: Cluster) -> None:
    prefill, decode = await both(cluster)
    crowd = WorkerLoad(num_free_blocks=1024, num_running=100, num_context_tokens=50_000)
    await described(cluster, prefill, curve=CURVE)
    await described(cluster, decode, curve=dataclasses.replace(CURVE, per_sequence_s=0.001), load=crowd)
    async with cluster.serving():
        error = await refused(cluster, with_targets(asking(cluster, max_tokens=100), tpot_ms=30))
        assert "tpot_ms is 30" in error.message
        assert error.retry_after_s is not None
        assert not decode.requests
        assert told_by(cluster)("twostep_requests_refused_total", reason="target_tpot") == 1
        await cluster.ask(with_targets(asking(cluster), tpot_ms=10_000))
        error = await refused(cluster, with_targets(asking(cluster, max_tokens=100), gap_ms=30))
        assert "gap_ms is 30" in error.message
        assert told_by(cluster)("twostep_requests_refused_total", reason="target_gap") == 1
        # Each counts as a miss of what it was refused for, whatever else was named.
        await refused(cluster, with_targets(asking(cluster, max_tokens=100), gap_ms=30, ttft_ms=600_000))
        told = told_by(cluster)
        assert told("twostep_request_slo_missed_total", reason="target_tpot") == 1
        assert told("twostep_request_slo_missed_total", reason="target_gap") == 2
        assert told("twostep_request_slo_missed_total", reason="target_ttft") is None


async def test_a_target_that_idle_workers_would_miss_gets_no_false_hope(cluster: Cluster) -> None:
    prefill, decode = await both(cluster)
    await described(cluster, prefill, decode, curve=CURVE)
    async with cluster.serving():
        error = await refused(cluster, with_targets(asking(cluster), ttft_ms=1))
        assert "idle workers would not keep it either" in error.message
        assert error.retry_after_s is None
        assert error.hopeless
        assert not decode.requests


async def test_workers_that_have_not_measured_themselves_get_the_benefit_of_the_doubt(cluster: Cluster) -> None:
    prefill, _ = await both(cluster)
    await described(cluster, prefill, load=WorkerLoad(num_free_blocks=1024, num_queued_tokens=10_000_000))
    async with cluster.serving():
        await cluster.ask(with_targets(asking(cluster), ttft_ms=100))


# ---- what was promised, and kept -------------------------------------------------------------------------------------------


async def test_attainment_is_counted_by_class(cluster: Cluster) -> None:
    prefill, decode = await both(cluster)
    async with cluster.serving():
        assert told_by(cluster)("twostep_request_slo_total") is None
        await cluster.ask(asking(cluster))
        await cluster.ask(with_targets(asking(cluster, request_class=INTERACTIVE), ttft_ms=600_000, tpot_ms=600_000))
        # Four tokens that take a fifth of a second from the first one on.
        decode.script = Script(hold_at=4)
        hold = decode.script.go_on
        request = with_targets(asking(cluster, request_class=INTERACTIVE, max_tokens=5), ttft_ms=600_000, tpot_ms=20, gap_ms=150)
        async for _ in cluster.stub.Generate(request, timeout=60):
            asyncio.get_running_loop().call_later(0.2, hold.set)
        prefill.before_first.append(after(0.2))
        await cluster.ask(with_targets(asking(cluster, request_class=INTERACTIVE), ttft_ms=100))
        await cluster.ask(with_targets(asking(cluster, request_class=BATCH), tpot_ms=600_000))
        told = told_by(cluster)
        assert told("twostep_request_slo_total", request_class="interactive") == 3
        assert told("twostep_request_slo_attained_total", request_class="interactive") == 1
        assert told("twostep_request_slo_missed_total", request_class="interactive", reason="target_tpot") == 1
        assert told("twostep_request_slo_missed_total", request_class="interactive", reason="target_gap") == 1
        assert told("twostep_request_slo_missed_total", request_class="interactive", reason="target_ttft") == 1
        assert told("twostep_request_slo_attained_total", request_class="batch") == 1
        assert told("twostep_request_slo_total", request_class="standard") is None
        assert told("twostep_request_queue_time_seconds_count", request_class="interactive") == 3
        assert told("twostep_requests_total", status="OK", request_class="interactive") == 3
