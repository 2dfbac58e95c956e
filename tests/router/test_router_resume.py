"""Answers that go on where an earlier stream broke, and those whose client declined that servers begin again."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
import grpc.aio
import pytest
from router_fakes import EOS_ID, Cluster, Reply, Script

from router.request.answer import resumed_tokens
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.sampling_params import SamplingParams


@pytest.mark.parametrize(("min_tokens", "ends"), [(0, True), (1, True), (2, False)])
def test_a_resumed_answer_is_over_only_where_it_could_have_ended(min_tokens: int, ends: bool) -> None:
    sampling = SamplingParams(max_tokens=9, min_tokens=min_tokens)
    *_, last = resumed_tokens([5, EOS_ID], sampling, eos_token_ids=frozenset({EOS_ID}), vocab_size=100)
    assert (last.finish_reason == pb.FINISH_REASON_STOP) == ends


async def go_on(cluster: Cluster, resumed: list[int], **sampling: Any) -> Reply:
    request = cluster.request(**sampling)
    request.resume_token_ids.extend(resumed)
    reply = Reply(token_ids=list(resumed))
    async for response in cluster.stub.Generate(request, timeout=30):
        reply.add(response)
    assert reply.end is not None
    return reply


@pytest.mark.parametrize("cut", [1, 9, 29])
async def test_a_resumed_answer_begins_after_what_the_client_has(cluster: Cluster, cut: int) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    resumed = cluster.expected(cut)
    async with cluster.serving():
        whole = await cluster.ask(max_tokens=30, seed=9, min_tokens=4, logprobs=2)
        reply = await go_on(cluster, resumed, max_tokens=30, seed=9, min_tokens=4, logprobs=2)
        await cluster.all_free()
    assert reply.token_ids == whole.token_ids == cluster.expected(30)
    assert whole.text.endswith(reply.text)
    assert reply.end is not None
    assert whole.end is not None
    assert (reply.end.usage, reply.end.finish_reason) == (whole.end.usage, whole.end.finish_reason)
    assert list(reply.logprobs) == list(whole.logprobs)[cut:]
    # To the workers it is what a request that lost a worker is: the prompt with the tokens behind it, and nothing else has changed.
    first, second = prefill.requests
    assert list(second.token_ids) == [*first.token_ids, *resumed]
    assert (second.num_prompt_tokens, second.sampling) == (first.num_prompt_tokens, first.sampling)
    assert list(decode.requests[1].token_ids) == list(second.token_ids)


@pytest.mark.parametrize(
    ("resumed", "sampling", "reason", "stop_reason"),
    [
        (5, {"max_tokens": 5}, pb.FINISH_REASON_LENGTH, ""),
        (-1, {"max_tokens": 50}, pb.FINISH_REASON_STOP, ""),
        (0, {"max_tokens": 50, "stop": ["city"]}, pb.FINISH_REASON_STOP, "city"),
    ],
    ids=["length", "end of sequence", "stop string"],
)
async def test_an_answer_that_lacked_only_its_end_gets_it_without_any_worker(
    cluster: Cluster, resumed: int, sampling: dict[str, Any], reason: int, stop_reason: str
) -> None:
    # 0: up to the token that completes the stop string.
    resumed = resumed or next(n for n in range(50) if "city" in cluster.text_of(cluster.expected(n)))
    ids = [*cluster.expected(3), EOS_ID] if resumed < 0 else cluster.expected(resumed)
    async with cluster.serving():
        reply = await go_on(cluster, ids, **sampling)
    assert reply.end is not None
    assert (reply.text, reply.pieces) == ("", [])
    assert (reply.end.finish_reason, reply.end.stop_reason) == (reason, stop_reason)
    assert reply.end.usage.completion_tokens == len(ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([1 << 20], "resume_token_ids[0] is 1048576"), ([5, EOS_ID, 5], "others follow"), ([5] * 9, "max_tokens, which counts them, is 8")],
)
async def test_what_cannot_be_the_beginning_of_an_answer_is_refused(cluster: Cluster, ids: list[int], message: str) -> None:
    async with cluster.serving():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await go_on(cluster, ids, max_tokens=8)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (caught.value.details() or "")


async def test_a_resumed_answer_survives_a_lost_worker_as_well(cluster: Cluster) -> None:
    async with cluster.paired() as (prefill, decode):
        decode.script = Script(fail_at=12)
        reply = await go_on(cluster, cluster.expected(6), max_tokens=20)
        await cluster.all_free()
    assert reply.token_ids == cluster.expected(20)
    assert [len(r.token_ids) - r.num_prompt_tokens for r in prefill.requests] == [6, 12]


# ---- no migration --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resumed", [0, 2])
async def test_without_migration_a_lost_worker_ends_the_stream_and_says_how_to_go_on(cluster: Cluster, resumed: int) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    decode.script = Script(fail_at=7)
    request = cluster.request(max_tokens=12)
    request.no_migration = True
    request.resume_token_ids.extend(cluster.expected(resumed))
    reply = Reply(token_ids=cluster.expected(resumed))
    async with cluster.serving():
        call = cluster.stub.Generate(request, timeout=30)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for response in call:
                reply.add(response)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        details = await call.details()
        assert f"{7 - resumed} tokens were sent" in details
        assert "resume_token_ids" in details
        assert "x-twostep-seed" in details
        # All that was decoded has arrived, and going on works as it says.
        assert reply.token_ids == cluster.expected(7)
        assert len(prefill.requests) == 1
        assert (await go_on(cluster, reply.token_ids, max_tokens=12)).token_ids == cluster.expected(12)
        await cluster.all_free()


async def test_without_migration_what_fails_before_the_first_token_is_begun_again_all_the_same(cluster: Cluster) -> None:
    prefills = [await cluster.prefill(f"p{i}") for i in range(2)]
    await cluster.decode()

    async def crash(_request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "it crashed")

    for prefill in prefills:
        prefill.before_first.append(crash)
    request = cluster.request(max_tokens=6)
    request.no_migration = True
    async with cluster.serving():
        reply = await cluster.ask(request)
        await cluster.all_free()
    assert reply.token_ids == cluster.expected(6)
    assert reply.end is not None
    assert reply.end.attempts == 3
