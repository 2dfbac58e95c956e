"""A prompt through a router with real servers on both sides of it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from router_fakes import MAX_MODEL_LEN, Cluster, Reply, Script, until

from router.serving.answers import choice_seed
from twostep.errors import ContextExceeded, error_from_grpc
from twostep.rpc.api_level import unknown_fields
from twostep.rpc.v1 import inference_pb2 as pb


async def test_an_answer_arrives_whole_and_in_order(cluster: Cluster) -> None:
    async with cluster.paired() as (prefill, decode):
        prefill.cached_tokens = 3
        reply = await cluster.ask(max_tokens=90)
        await cluster.all_free()
    assert reply.token_ids == cluster.expected(90)
    assert reply.text == cluster.text_of(cluster.expected(90))
    assert prefill.cancelled == []
    assert decode.cancels == []
    end = reply.end
    assert end is not None
    num_prompt = len(cluster.tokenizer.encode("the capital of France").ids)
    assert end.usage == pb.Usage(prompt_tokens=num_prompt, completion_tokens=90, cached_tokens=3)
    assert (end.finish_reason, end.stop_reason, end.attempts) == (pb.FINISH_REASON_LENGTH, "", 1)
    assert end.transfer == pb.Transfer(
        transport="local", bytes=4096, chunks=1, blocks_moved=3, blocks_reused=1, prefill_worker="p0", decode_worker="d0"
    )
    phases = end.phases
    assert (phases.queue_s, phases.prefill_s, phases.publish_s, phases.fetch_s) == (0.001, 0.002, 0.003, 0.004)
    # The fake worker makes its phases up: they may be longer than it took.
    assert 0 <= phases.route_s < phases.ttft_s < phases.total_s
    assert 0 <= phases.first_decode_s <= phases.total_s
    assert 0 < phases.decode_s < phases.total_s


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"max_tokens": 9, "stop_token_ids": "first"}])
async def test_a_first_token_that_ends_the_answer_frees_both_sides(cluster: Cluster, sampling: dict[str, Any]) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    prefill.never_done = True  # so that it is the router that ends the call
    stopped = "stop_token_ids" in sampling
    if stopped:
        sampling = sampling | {"stop_token_ids": cluster.answer[:1]}
    async with cluster.serving():
        reply = await cluster.ask(**sampling)
        await cluster.all_free()
        await until(lambda: bool(prefill.cancelled and decode.cancels), "both sides are cancelled")
    assert reply.token_ids == cluster.expected(1)
    assert reply.end is not None
    if stopped:
        assert (reply.text, reply.end.finish_reason) == ("", pb.FINISH_REASON_STOP)
        assert reply.end.stop_reason == str(cluster.answer[0])
    else:
        assert (reply.text, reply.end.finish_reason) == (cluster.text_of(cluster.expected(1)), pb.FINISH_REASON_LENGTH)


async def test_tokens_that_wait_share_a_piece(cluster: Cluster) -> None:
    async with cluster.paired() as (_, decode):
        decode.script.tokens_per_step = 50
        reply = await cluster.ask(max_tokens=400)
    assert reply.token_ids == cluster.expected(400)
    assert len(reply.pieces) < 50


async def test_many_at_once_keep_apart(cluster: Cluster) -> None:
    for name in ("0", "1"):
        await cluster.prefill("p" + name)
        decode = await cluster.decode("d" + name)
        decode.script.tokens_per_step = 5
    async with cluster.serving(max_inflight=20):
        replies = await asyncio.gather(*(cluster.ask(max_tokens=5 + i) for i in range(40)))
        await cluster.all_free()
    for i, reply in enumerate(replies):
        assert reply.token_ids == cluster.expected(5 + i)
        assert reply.text == cluster.text_of(cluster.expected(5 + i))
    served = [len(worker.requests) for worker in cluster.workers]
    assert all(n >= 10 for n in served), f"load is spread: {served}"


def _token_ids(ids: list[int]) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))


async def test_what_no_worker_can_hold_is_refused_at_once(cluster: Cluster) -> None:
    await cluster.prefill()
    decode = await cluster.decode()

    decode.record = dataclasses.replace(decode.record, num_blocks=10)
    await cluster.beat()
    async with cluster.serving():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.ask(_token_ids([5] * 300))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "160" in (caught.value.details() or "")


async def test_with_compression_everything_is_said_as_without(cluster: Cluster) -> None:
    prefill, _ = await cluster.prefill(), await cluster.decode()
    prompt = "the capital of France " * 200
    async with cluster.serving(grpc_compression="gzip"):
        reply = await cluster.ask(cluster.request(prompt, max_tokens=12, logprobs=5))
    assert reply.token_ids == cluster.expected(12)
    assert list(prefill.requests[0].token_ids) == cluster.tokenizer.encode(prompt).ids


BAD: list[tuple[pb.GenerateRequest, str]] = [
    (pb.GenerateRequest(), "text, token_ids or chat"),
    (_token_ids([]), "token_ids is empty"),
    (_token_ids([5] * (MAX_MODEL_LEN + 9)), str(MAX_MODEL_LEN + 9)),
    (_token_ids([1 << 20] * (MAX_MODEL_LEN + 9)), f"the prompt has {MAX_MODEL_LEN + 9}"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=float("nan"))), "temperature"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(repetition_penalty=1e-38)), "repetition_penalty"),
    (pb.GenerateRequest(text="x", request_id="a b"), "request_id"),
    (pb.GenerateRequest(text="x", request_id="a" * 129), "request_id"),
    (pb.GenerateRequest(text="x", tenant="x" * 129), "tenant"),
    (pb.GenerateRequest(text="x", tenant="a\nb"), "tenant"),
    (pb.GenerateRequest(text="x", request_class=77), "request_class is 77"),  # type: ignore[arg-type]
    (pb.GenerateRequest(text="x", tpot_ms=float("inf")), "tpot_ms"),
    (pb.GenerateRequest(text="x", gap_ms=-1.0), "gap_ms"),
]


async def test_what_only_messages_can_say_wrong_is_refused_by_the_name_of_the_field(cluster: Cluster) -> None:
    """See test_fronts.py for what either front can be sent."""
    async with cluster.paired() as (prefill, _):
        beyond = cluster.tokenizer.get_vocab_size()
        for request, word in [*BAD, (_token_ids([5, beyond]), f"token_ids[1] is {beyond}")]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.ask(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, word
            assert word in (caught.value.details() or "")
        for tokenize, code in ((pb.TokenizeRequest(), "INVALID_ARGUMENT"), (pb.TokenizeRequest(text="x", model="other"), "NOT_FOUND")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.stub.Tokenize(tokenize, timeout=30)
            assert caught.value.code().name == code
    assert not prefill.requests


async def test_a_prompt_that_is_too_long_says_so_in_numbers(cluster: Cluster) -> None:
    async with cluster.paired():
        for request, numbers in (
            (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * MAX_MODEL_LEN)), (MAX_MODEL_LEN, None, MAX_MODEL_LEN)),
            (
                pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 3), sampling=pb.SamplingParams(max_tokens=MAX_MODEL_LEN)),
                (3, MAX_MODEL_LEN, MAX_MODEL_LEN),
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.ask(request)
            error = error_from_grpc(caught.value.code().name, caught.value.details() or "", caught.value.trailing_metadata())
            assert isinstance(error, ContextExceeded)
            assert (error.prompt_tokens, error.max_tokens, error.max_model_len) == numbers


@dataclass
class Several:
    """Collects several answers as a client has them, by their indices."""

    replies: defaultdict[int, Reply] = field(default_factory=lambda: defaultdict(Reply))
    metadata: dict[str, str | bytes] = field(default_factory=dict)


async def several(cluster: Cluster, request: pb.GenerateRequest) -> Several:
    found = Several()
    for begun in request.begun_answers:
        found.replies[begun.index].token_ids += begun.token_ids
    call = cluster.stub.Generate(request, timeout=60)
    found.metadata = dict(await call.initial_metadata())
    async for response in call:
        found.replies[response.index].add(response)
    assert all(reply.end is not None for reply in found.replies.values())
    return found


async def test_several_answers_to_one_request(cluster: Cluster) -> None:
    async with cluster.paired():
        request = cluster.request(max_tokens=12, seed=5)
        request.n, request.request_id = 4, "four"
        found = await several(cluster, request)
        assert {index: reply.token_ids for index, reply in found.replies.items()} == dict.fromkeys(range(4), cluster.expected(12))
        sent = cluster.prefills[0].requests
        assert sorted(each.sampling.seed for each in sent) == sorted(choice_seed(5, index) for index in range(4))
        assert (found.metadata["x-twostep-seed"], found.metadata["x-request-id"]) == ("5", "four")
        assert unknown_fields(request, found.metadata.items()) == []
        # After a break: those that the client still waits for, from where it is.
        request.begun_answers.add(index=3, token_ids=cluster.expected(7))
        request.begun_answers.add(index=1)
        del sent[:]
        rest = await several(cluster, request)
        assert {index: reply.token_ids for index, reply in rest.replies.items()} == dict.fromkeys((1, 3), cluster.expected(12))
        assert found.replies[3].text.endswith(rest.replies[3].text)
        assert len(rest.replies[3].text) < len(found.replies[3].text) == len(rest.replies[1].text)
        assert {each.sampling.seed for each in sent} == {choice_seed(5, 1), choice_seed(5, 3)}
        await cluster.all_free()


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 129},
        {"n": 2, "resume_token_ids": [1]},
        {"n": 2, "begun_answers": [pb.BegunAnswer(index=2)]},
        {"n": 2, "begun_answers": [pb.BegunAnswer(index=1), pb.BegunAnswer(index=1)]},
        {"n": 2, "request_id": "no\nname"},
    ],
)
async def test_several_answers_that_make_no_sense(cluster: Cluster, fields: dict[str, Any]) -> None:
    async with cluster.paired():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.ask(pb.GenerateRequest(text="x", **fields))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert any(name in (caught.value.details() or "") for name in fields)
        assert not cluster.prefills[0].requests


async def test_the_first_of_several_answers_that_fails_ends_all(cluster: Cluster) -> None:
    async with cluster.paired():
        cluster.decodes[0].script = Script(fail_at=4, fail_code="DATA_LOSS", fail_retryable=False)
        request = cluster.request(max_tokens=12)
        request.n = 3
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await several(cluster, request)
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS
        await cluster.all_free()
