"""Tests of what dispatch asks placement for, and of a request's wait for its turn: without workers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

import pytest
from router_fakes import SECRET

from router.placing.placement import NoPlacement, PlacementRequest, Shortage, Snapshot
from router.request.cleanup import Cleanup
from router.request.job import RequestJob
from router.request.memory_budget import MemoryBudget
from router.request.output import Output
from router.request.report import RequestReport
from router.request.targets import Targets
from router.serving.dispatch import Dispatcher
from router.waiting.fair_queue import QueueEntry
from router.waiting.queues import WorkerQueue
from router.workers.pool import WorkerPool
from router.workers.prefix_index import PrefixIndex
from twostep.errors import ContextExceeded, Incompatible, TwostepError, Unavailable
from twostep.metrics.router import RouterMetrics
from twostep.request_class import RequestClass
from twostep.rpc.call_signing import CallSigner
from twostep.sampling_params import SamplingParams


def job(**options: Any) -> RequestJob:
    now = time.monotonic()
    values: dict[str, Any] = {"request_id": "r", "prompt": [7] * 100, "sampling": SamplingParams(max_tokens=20), "deadline": now + 60.0}
    return RequestJob(**(values | options))


class NoHints:
    async def cached_tokens(self, *_: object) -> Mapping[Any, Any]:
        return {}


async def asked_for(one: RequestJob, shortage: Shortage, **config: Any) -> tuple[list[PlacementRequest], TwostepError]:
    """Every question to placement, which has no workers for it, and how the request ends."""
    asked: list[PlacementRequest] = []

    def decide(_: Snapshot, demand: PlacementRequest) -> NoPlacement:
        asked.append(demand)
        return NoPlacement(shortage=shortage, reason="no worker takes it")

    pool = WorkerPool(router_id="r", signer=CallSigner(SECRET, "r"), cleanup=Cleanup())
    queue, index = WorkerQueue(retry_s=0.001), cast(PrefixIndex, NoHints())
    dispatcher = Dispatcher(pool, index, Cleanup(), queue, decide, **config)
    output = Output(max_buffered=8, on_cut=lambda: None, holding=MemoryBudget().hold("a"), resumed=one.resumed)
    await dispatcher.serve(one, QueueEntry.of(one), output, RequestReport(started=one.arrived, metrics=cast(RouterMetrics, None), job=one))
    with pytest.raises(TwostepError) as ended:
        await output.take()
    assert queue.num_queued == 0
    return asked, ended.value


async def test_placement_is_asked_for_what_is_left_to_do_and_of_the_time() -> None:
    waited = {
        "arrived": time.monotonic() - 2.0,
        "targets": Targets(ttft_s=5.0, tpot_s=0.05, gap_s=0.2),
        "request_class": RequestClass.BATCH,
    }
    (demand, *_), error = await asked_for(job(**waited), Shortage.TOO_LARGE)
    assert isinstance(error, ContextExceeded)
    assert (demand.num_tokens, demand.max_new_tokens, demand.request_class) == (100, 20, RequestClass.BATCH)
    assert (demand.tpot_ms, demand.gap_ms) == (50.0, 200.0)
    assert demand.ttft_ms == pytest.approx(3000.0, abs=500.0)
    (late, *_), _ = await asked_for(job(**waited | {"arrived": time.monotonic() - 60.0}), Shortage.TOO_LARGE)
    assert late.ttft_ms == 0.0
    (resumed, *_), _ = await asked_for(job(**waited, resumed=[1, 2, 3]), Shortage.TOO_LARGE)
    assert (resumed.num_tokens, resumed.max_new_tokens, resumed.ttft_ms) == (103, 17, None), "its first token is promised no more"
    assert (demand.num_prompt_tokens, resumed.num_prompt_tokens) == (100, 100)


@pytest.mark.parametrize(
    ("shortage", "error", "waits"),
    [
        (Shortage.TOO_LARGE, ContextExceeded, False),
        (Shortage.INCOMPATIBLE, Incompatible, False),
        (Shortage.MISSING, Unavailable, True),
        (Shortage.NO_TRANSPORT, Unavailable, True),
    ],
)
async def test_what_may_pass_is_waited_for_within_the_grace(shortage: Shortage, error: type[TwostepError], waits: bool) -> None:
    asked, ended = await asked_for(job(), shortage, no_worker_grace_s=0.02)
    assert isinstance(ended, error)
    assert (len(asked) > 2) == waits


def test_a_requests_place_in_a_queue() -> None:
    plain = QueueEntry.of(job(arrived=100.0, expected_tokens=9, tenant="a"), ageing_s=30.0)
    assert (plain.num_prompt_tokens, plain.num_tokens, plain.due, plain.lapses, plain.tenant) == (100, 109, 130.0, None, "a")
    promised = {"arrived": 100.0, "targets": Targets(ttft_s=5.0)}
    assert (QueueEntry.of(job(**promised)).due, QueueEntry.of(job(**promised)).lapses) == (105.0, 105.0)
    for waits in ({"request_class": RequestClass.BATCH}, {"resumed": [1]}):
        assert (QueueEntry.of(job(**promised, **waits)).due, QueueEntry.of(job(**promised, **waits)).lapses) == (105.0, None)
