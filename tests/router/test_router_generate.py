"""A prompt through a router with real servers on both sides of it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc
import grpc.aio
import pytest
from router_fakes import ANSWER_TEXT, EOS_ID, MAX_MODEL_LEN, Cluster, until

from twostep.rpc.v1 import inference_pb2 as pb


async def test_an_answer_arrives_whole_and_in_order(cluster: Cluster) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    prefill.cached_tokens = 3
    async with cluster.serving():
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
    assert 0 < phases.route_s < phases.ttft_s < phases.total_s
    assert 0 <= phases.first_decode_s <= phases.total_s
    assert 0 < phases.decode_s < phases.total_s


async def test_the_request_id_is_the_clients_or_a_new_one(cluster: Cluster) -> None:
    prefill = await cluster.prefill()
    await cluster.decode()
    async with cluster.serving():
        for given in ("my-request.1", ""):
            request = cluster.request(max_tokens=2)
            request.request_id = given
            call = cluster.stub.Generate(request, timeout=30)
            metadata = dict(await call.initial_metadata())
            async for _ in call:
                pass
            name = prefill.requests[-1].request_id
            if given:
                assert metadata["x-request-id"] == given
                assert name.startswith(f"{given}~")
            else:
                assert metadata["x-request-id"] == name
                assert len(name) >= 16


async def test_a_request_id_may_be_used_twice_at_once_and_again_later(cluster: Cluster) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    decode.script.step_s = 0.01
    async with cluster.serving():

        async def ask() -> list[int]:
            request = cluster.request(max_tokens=8)
            request.request_id = "r" * 128
            return (await cluster.ask(request)).token_ids

        answers = [*await asyncio.gather(ask(), ask()), await ask()]
        assert answers == [cluster.expected(8)] * 3
        assert decode.cancels == []
        assert len({request.request_id for request in prefill.requests}) == 3
        await cluster.all_free()


async def test_workers_get_the_prompt_and_every_sampling_value_but_stop(cluster: Cluster) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    decode.num_cached_tokens = 2
    async with cluster.serving():
        await cluster.ask(stop=["never"], stop_token_ids=[7], top_k=3)
        await cluster.ask(cluster.request(seed=5, temperature=0.0, max_tokens=3))
    first, second = prefill.requests
    sampling = first.sampling
    assert list(first.token_ids) == cluster.tokenizer.encode("the capital of France").ids
    assert first.num_prompt_tokens == len(first.token_ids)
    assert first.num_decode_cached_tokens == 2
    # From the request, the model's generation config, the router's flags.
    assert (sampling.top_k, list(sampling.stop_token_ids), sampling.temperature, sampling.max_tokens) == (3, [7], 0.5, 16)
    assert sampling.top_p == pytest.approx(0.9)
    assert list(sampling.stop) == []
    assert sampling.HasField("seed")
    assert (second.sampling.seed, second.sampling.temperature, second.sampling.max_tokens) == (5, 0.0, 3)
    assert list(decode.requests[0].token_ids) == list(first.token_ids)
    assert decode.requests[0].sampling == sampling


async def test_token_ids_and_chat_are_prompts_too_and_tokenize_tells_the_same(cluster: Cluster) -> None:
    prefill = await cluster.prefill()
    await cluster.decode()
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    async with cluster.serving():
        await cluster.ask(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7])))
        await cluster.ask(pb.GenerateRequest(chat=chat))
        tokens = await cluster.stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=30)
        text = await cluster.stub.Tokenize(pb.TokenizeRequest(text="x " * 5000, model="m"), timeout=30)
    assert list(prefill.requests[0].token_ids) == [5, 6, 7]
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(prefill.requests[1].token_ids) == list(tokens.token_ids) == cluster.tokenizer.encode(rendered).ids
    assert tokens.max_model_len == MAX_MODEL_LEN
    assert list(text.token_ids) == cluster.tokenizer.encode("x " * 5000).ids


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


async def test_a_stop_string_over_several_tokens_cuts_the_text_and_frees_both_sides(cluster: Cluster) -> None:
    _, decode = await cluster.prefill(), await cluster.decode()
    decode.script.step_s = 0.002
    stop = "größte city"
    async with cluster.serving():
        reply = await cluster.ask(stop=[stop, "never seen"], max_tokens=500)
        await cluster.all_free()
        await until(lambda: len(decode.cancels) == 1, "decode is told")
    assert reply.text == ANSWER_TEXT[: ANSWER_TEXT.index(stop)]
    assert reply.end is not None
    assert (reply.end.finish_reason, reply.end.stop_reason) == (pb.FINISH_REASON_STOP, stop)
    # Just the tokens up to the one that completed the string, and all of them counted.
    ids = cluster.expected(500)
    num = next(n for n in range(500) if stop in cluster.text_of(ids[:n]))
    assert reply.token_ids == ids[:num]
    assert reply.end.usage.completion_tokens == num


async def test_text_held_back_for_a_stop_string_is_sent_at_the_end(cluster: Cluster) -> None:
    await cluster.prefill()
    await cluster.decode()
    async with cluster.serving():
        reply = await cluster.ask(stop=[ANSWER_TEXT + "?"], max_tokens=12)
    assert reply.text == cluster.text_of(cluster.expected(12))


async def test_an_end_of_sequence_token_is_counted_but_no_text(cluster: Cluster) -> None:
    await cluster.prefill()
    await cluster.decode()
    cluster.exchange.answer = [*cluster.answer[:5], EOS_ID]
    async with cluster.serving():
        reply = await cluster.ask(max_tokens=100)
    assert reply.token_ids == [*cluster.answer[:5], EOS_ID]
    assert reply.text == cluster.text_of(cluster.answer[:5])
    assert reply.end is not None
    assert (reply.end.finish_reason, reply.end.stop_reason, reply.end.usage.completion_tokens) == (pb.FINISH_REASON_STOP, "", 6)


async def test_logprobs_come_with_every_token_or_not_at_all(cluster: Cluster) -> None:
    await cluster.prefill()
    await cluster.decode()
    async with cluster.serving():
        reply = await cluster.ask(max_tokens=4, logprobs=2)
        without = await cluster.ask(max_tokens=4)
    assert [p.logprob for p in reply.logprobs] == [-0.5, -1.5, -2.5, -3.5]
    assert [t.token_id for t in reply.logprobs[0].top] == [0, 1]
    assert without.logprobs == []


async def test_tokens_that_wait_share_a_piece(cluster: Cluster) -> None:
    _, decode = await cluster.prefill(), await cluster.decode()
    decode.script.tokens_per_step = 50
    async with cluster.serving():
        reply = await cluster.ask(max_tokens=400)
    assert reply.token_ids == cluster.expected(400)
    assert len(reply.pieces) < 50


async def test_the_trace_context_goes_on_to_the_workers(cluster: Cluster) -> None:
    prefill = await cluster.prefill()
    await cluster.decode()
    seen: list[Any] = []

    async def hook(_request: Any, context: Any) -> None:
        seen.append(dict(context.invocation_metadata()))

    prefill.hooks.append(hook)
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with cluster.serving():
        call = cluster.stub.Generate(cluster.request(max_tokens=2), timeout=60, metadata=(("traceparent", trace),))
        async for _ in call:
            pass
    assert seen[0]["traceparent"] == trace


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


async def test_models_are_listed_with_the_workers_that_can_serve(cluster: Cluster) -> None:
    await cluster.prefill()
    await cluster.decode("d0")
    await cluster.decode("d1")
    async with cluster.serving():
        models = (await cluster.stub.ListModels(pb.ListModelsRequest(), timeout=30)).models
    assert [(m.name, m.max_model_len, m.prefill_workers, m.decode_workers) for m in models] == [("m", MAX_MODEL_LEN, 1, 2)]


def _token_ids(ids: list[int]) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))


def _sampled(**options: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(**options))


BAD: list[tuple[pb.GenerateRequest, str, list[str]]] = [
    (pb.GenerateRequest(), "INVALID_ARGUMENT", ["prompt", "text, token_ids or chat"]),
    (pb.GenerateRequest(text=""), "INVALID_ARGUMENT", ["text is empty"]),
    (_token_ids([]), "INVALID_ARGUMENT", ["token_ids is empty"]),
    (_token_ids([1, 2, 1 << 20]), "INVALID_ARGUMENT", ["token_ids[2]", "1048576", "vocabulary"]),
    (pb.GenerateRequest(chat=pb.Chat()), "INVALID_ARGUMENT", ["messages is empty"]),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(content="x")])), "INVALID_ARGUMENT", ["messages[0].role"]),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="tool")])), "INVALID_ARGUMENT", ["no tools here"]),
    (_token_ids([5] * (MAX_MODEL_LEN + 9)), "INVALID_ARGUMENT", [str(MAX_MODEL_LEN + 9), str(MAX_MODEL_LEN), "shorten"]),
    (_token_ids([1 << 20] * (MAX_MODEL_LEN + 9)), "INVALID_ARGUMENT", [f"{MAX_MODEL_LEN + 9} tokens"]),
    (_token_ids([5] * MAX_MODEL_LEN), "INVALID_ARGUMENT", [f"{MAX_MODEL_LEN} tokens"]),
    (_sampled(max_tokens=MAX_MODEL_LEN), "INVALID_ARGUMENT", ["max_tokens", str(MAX_MODEL_LEN)]),
    (pb.GenerateRequest(text="x", model="other"), "NOT_FOUND", ["'other'", "'m'"]),
    (_sampled(max_tokens=0), "INVALID_ARGUMENT", ["max_tokens"]),
    (_sampled(max_tokens=-3), "INVALID_ARGUMENT", ["max_tokens"]),
    (_sampled(temperature=-1.0), "INVALID_ARGUMENT", ["temperature"]),
    (_sampled(temperature=float("nan")), "INVALID_ARGUMENT", ["temperature"]),
    (_sampled(top_p=0.0), "INVALID_ARGUMENT", ["top_p"]),
    (_sampled(top_k=-5), "INVALID_ARGUMENT", ["top_k"]),
    (_sampled(min_p=2.0), "INVALID_ARGUMENT", ["min_p"]),
    (_sampled(repetition_penalty=0.0), "INVALID_ARGUMENT", ["repetition_penalty"]),
    (_sampled(repetition_penalty=1e-38), "INVALID_ARGUMENT", ["repetition_penalty", "0.01"]),
    (_sampled(frequency_penalty=3.0), "INVALID_ARGUMENT", ["frequency_penalty"]),
    (_sampled(logprobs=21), "INVALID_ARGUMENT", ["logprobs"]),
    (_sampled(stop=[""]), "INVALID_ARGUMENT", ["stop"]),
    (_sampled(stop=["x"] * 17), "INVALID_ARGUMENT", ["stop"]),
    (_sampled(stop_token_ids=[-1]), "INVALID_ARGUMENT", ["stop_token_ids[0]"]),
    (_sampled(min_tokens=30, max_tokens=20), "INVALID_ARGUMENT", ["min_tokens"]),
    (pb.GenerateRequest(text="x", request_id="a b"), "INVALID_ARGUMENT", ["request_id"]),
    (pb.GenerateRequest(text="x", request_id="a" * 129), "INVALID_ARGUMENT", ["request_id"]),
    (pb.GenerateRequest(text="x", cache_salt="a" * 257), "INVALID_ARGUMENT", ["cache_salt"]),
]


async def test_bad_requests_are_refused_by_the_name_of_the_field(cluster: Cluster) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    async with cluster.serving():
        for request, code, words in BAD:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.ask(request)
            details = caught.value.details() or ""
            assert caught.value.code().name == code, (words, details)
            assert all(word in details for word in words), (words, details)
        with pytest.raises(grpc.aio.AioRpcError, match="text or chat"):
            await cluster.stub.Tokenize(pb.TokenizeRequest(), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError, match="not served here"):
            await cluster.stub.Tokenize(pb.TokenizeRequest(text="x", model="other"), timeout=30)
        # And it goes on serving.
        assert (await cluster.ask(max_tokens=3)).token_ids == cluster.expected(3)
    assert len(prefill.requests) == len(decode.requests) == 1


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
