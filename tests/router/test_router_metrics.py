"""Tests of a router's /metrics after requests of every outcome."""

from __future__ import annotations

import dataclasses

import grpc.aio
import pytest
from router_fakes import Cluster, Reply, Script, until
from scraping import Scrape, scrape

from twostep.rpc.v1 import inference_pb2
from twostep.step_curve import StepCurve

NAMES = ("route", "queue", "prefill", "publish", "fetch", "first_decode", "decode")


def told_by(cluster: Cluster) -> Scrape:
    return scrape(cluster.router.metrics_port)


async def test_latencies_tokens_and_outcome_of_a_request(cluster: Cluster) -> None:
    async with cluster.paired():
        before = told_by(cluster)
        assert before("twostep_requests_total") is None
        assert before("twostep_time_to_first_token_seconds_count") == 0
        replies = [await cluster.ask(max_tokens=n) for n in (1, 2, 12)]
        assert [len(reply.token_ids) for reply in replies] == [1, 2, 12]
        told = told_by(cluster)
        assert told("twostep_requests_total") == 3
        assert told("twostep_requests_total", status="OK", finish_reason="length") == 3
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
            assert told(f"twostep_{name}_count") == 3
        for phase in NAMES:
            assert told("twostep_request_phase_seconds_count", phase=phase) == 3
        # The first gap of two of them, and all gaps: 0 + 1 + 11.
        assert told("twostep_second_token_seconds_count") == 2
        assert told("twostep_inter_token_latency_seconds_count") == 12
        assert told("twostep_generation_tokens_total") == 15
        assert told("twostep_request_generation_tokens_sum") == 15
        prompt = sum(reply.end.usage.prompt_tokens for reply in replies if reply.end is not None)
        assert told("twostep_prompt_tokens_total") == told("twostep_request_prompt_tokens_sum") == prompt > 0
        assert told("twostep_request_attempts_total") == 3
        assert told("twostep_request_migrations_total") == 0
        total = sum(reply.end.phases.ttft_s for reply in replies if reply.end is not None)
        assert told("twostep_time_to_first_token_seconds_sum") == pytest.approx(total)
        assert told("twostep_num_requests_running", role="router") == 0
        assert told("twostep_num_requests_waiting", role="router") == 0
        assert told("twostep_router_streams") == 1
        assert told("twostep_router_workers", worker_role="prefill") == told("twostep_router_workers", worker_role="decode") == 1


@pytest.mark.parametrize("measured", [False, True])
async def test_where_requests_went_and_whether_it_came_as_predicted(cluster: Cluster, measured: bool) -> None:
    """Of workers that have not measured themselves nothing was predicted."""
    cluster.template = dataclasses.replace(cluster.template, curve=StepCurve(fixed_s=0.01, per_row_s=1e-4) if measured else None)
    async with cluster.paired():
        replies = [await cluster.ask(max_tokens=n) for n in (1, 12)]
        told = told_by(cluster)
        assert told("twostep_request_placements_total", path="handed_over", worker_role="prefill", reason="only_way") == 2
        assert told("twostep_request_placements_total") == 2
        for kind, count in (("ttft", 2), ("tpot", 1)):
            assert told("twostep_request_prediction_ratio_count", kind=kind, path="handed_over") == (count if measured else None)
        if measured:
            # 10 ms and some at least were predicted, for each.
            total = sum(reply.end.phases.ttft_s for reply in replies if reply.end is not None)
            ratios = told("twostep_request_prediction_ratio_sum", kind="ttft", path="handed_over")
            assert ratios is not None
            assert 0 < ratios < total / 0.01


async def test_outcomes_that_are_not_ok(cluster: Cluster) -> None:
    async with cluster.paired() as (_, decode):
        decode.script = Script(hold_at=5, once=False)
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.ask(inference_pb2.GenerateRequest(text="hello", model="another"))
        request = cluster.request(max_tokens=1000)
        request.ttft_ms = 600_000
        call = cluster.stub.Generate(request, timeout=60)
        reply = Reply()
        async for response in call:
            reply.add(response)
            if len(reply.token_ids) >= 3:
                break
        told = told_by(cluster)
        assert told("twostep_num_requests_running", role="router") == 1
        call.cancel()
        await until(
            lambda: told_by(cluster)("twostep_requests_total", status="CANCELLED", finish_reason="") == 1, "the cancelled one is counted"
        )
        told = told_by(cluster)
        assert told("twostep_requests_total", status="NOT_FOUND", finish_reason="") == 1
        assert told("twostep_requests_total") == 2
        assert told("twostep_request_slo_total") is None, "who leaves was not waited for"
        assert told("twostep_num_requests_running", role="router") == 0
        assert told("twostep_time_to_first_token_seconds_count") == 1
        assert told("twostep_e2e_request_latency_seconds_count") == 0
        tokens = told("twostep_generation_tokens_total")
        assert tokens is not None
        assert tokens >= 3
