"""Tests of the promises of both fronts, gRPC and HTTP: each case is written once and asked through either."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from router_fakes import ANSWER_TEXT, EOS_ID, MAX_MODEL_LEN, Cluster, Script, refuse, until
from scraping import scrape

from twostep.errors import (
    STATUS,
    DataLoss,
    DeadlineExceeded,
    Incompatible,
    InvalidRequest,
    NotFound,
    ResourceExhausted,
    TwostepError,
    Unavailable,
)
from twostep.rpc.v1 import inference_pb2 as pb

PROMPT = "the capital of France"
_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass
class Answer:
    """The answer that a client has. `error`: a TwostepError's class, by the status that it was told with."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    stop_reason: str = ""
    usage: tuple[int, int, int] = (0, 0, 0)  # prompt, completion, cached
    headers: dict[str, str] = field(default_factory=dict)
    error: type[TwostepError] | None = None
    message: str = ""
    retry_after: bool = False


class GrpcFront:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def ask(self, *, headers: dict[str, str] | None = None, on_piece: Callable[[], None] = lambda: None, **fields: Any) -> Answer:
        answer = Answer()
        own = {
            name: fields.pop(name) for name in ("model", "ttft_ms", "tpot_ms", "gap_ms", "cache_salt", "resume_token_ids") if name in fields
        }
        messages, prompt = fields.pop("messages", None), fields.pop("prompt", PROMPT)
        try:
            request = pb.GenerateRequest(sampling=pb.SamplingParams(**fields), **own)
        except (ValueError, TypeError) as error:  # protobuf's own check
            return Answer(error=InvalidRequest, message=str(error))
        if messages is not None:
            request.chat.messages.extend(pb.ChatMessage(**message) for message in messages)
        elif isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        call = self._cluster.stub.Generate(request, timeout=60, metadata=tuple((headers or {}).items()))
        try:
            answer.headers = {key: str(value) for key, value in await call.initial_metadata()}
            async for response in call:
                if response.HasField("end"):
                    end = response.end
                    answer.finish, answer.stop_reason = _FINISH[end.finish_reason], end.stop_reason
                    answer.usage = (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens)
                    break
                answer.text += response.piece.text
                answer.token_ids += response.piece.token_ids
                answer.logprobs += [each.logprob for each in response.piece.logprobs]
                on_piece()
        except grpc.aio.AioRpcError as error:
            answer.error = next(kind for kind, status in STATUS.items() if status.grpc == error.code().name)
            answer.message = error.details() or ""
            answer.retry_after = any(key == "x-twostep-retry-after-ms" or "retry" in key for key, _ in error.trailing_metadata() or ())
        finally:
            call.cancel()
        return answer

    async def tokenize(self, **fields: Any) -> list[int]:
        request = pb.TokenizeRequest(text=fields.get("prompt", ""))
        if "messages" in fields:
            request = pb.TokenizeRequest(chat=pb.Chat(messages=[pb.ChatMessage(**message) for message in fields["messages"]]))
        return list((await self._cluster.stub.Tokenize(request, timeout=30)).token_ids)

    async def models(self) -> list[tuple[str, int]]:
        models = (await self._cluster.stub.ListModels(pb.ListModelsRequest(), timeout=30)).models
        return [(model.name, model.max_model_len) for model in models]


class HttpFront:
    """Streams, so that every way to end an answer is seen; a failure after the first event is the last event."""

    def __init__(self, cluster: Cluster) -> None:
        self._url = f"http://127.0.0.1:{cluster.router.http_port}"

    async def ask(self, *, headers: dict[str, str] | None = None, on_piece: Callable[[], None] = lambda: None, **fields: Any) -> Answer:
        answer = Answer()
        body: dict[str, Any] = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}, **fields}
        body |= {} if "messages" in body else {"prompt": body.get("prompt", PROMPT)}
        body["max_tokens"] = body.get("max_tokens", 16)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        async with aiohttp.ClientSession(self._url) as http, http.post(path, json=body, headers=headers) as reply:
            answer.headers = {key.lower(): value for key, value in reply.headers.items()}
            if reply.status != 200:
                return self._failed(answer, (await reply.json())["error"], reply.status)
            async for line in reply.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    return self._failed(answer, event["error"], reply.status)
                if usage := event.get("usage"):
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                    answer.usage = (usage["prompt_tokens"], usage["completion_tokens"], cached)
                for choice in event["choices"]:
                    answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                    answer.token_ids += choice.get("token_ids") or []
                    answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
                    answer.finish = choice["finish_reason"] or answer.finish
                    answer.stop_reason = str(choice.get("stop_reason") or answer.stop_reason)
                    on_piece()
        return answer

    def _failed(self, answer: Answer, error: dict[str, Any], status: int) -> Answer:
        answer.error = next((kind for kind, known in STATUS.items() if known.http == status), None)
        answer.message = error["message"]
        answer.retry_after = "retry-after" in answer.headers
        return answer

    async def tokenize(self, **fields: Any) -> list[int]:
        async with aiohttp.ClientSession(self._url) as http, http.post("/tokenize", json=fields) as reply:
            ids: list[int] = (await reply.json())["tokens"]
            return ids

    async def models(self) -> list[tuple[str, int]]:
        async with aiohttp.ClientSession(self._url) as http, http.get("/v1/models") as reply:
            return [(model["id"], model["max_model_len"]) for model in (await reply.json())["data"]]


Front = GrpcFront | HttpFront


@pytest.fixture(params=[GrpcFront, HttpFront], ids=["grpc", "http"])
def front_of(request: pytest.FixtureRequest) -> Callable[[Cluster], Front]:
    made: Callable[[Cluster], Front] = request.param
    return made


@pytest.fixture
async def front(cluster: Cluster, front_of: Callable[[Cluster], Front]) -> AsyncIterator[Front]:
    """The front of a router before a pair of workers, p0 and d0."""
    async with cluster.paired():
        yield front_of(cluster)


async def test_an_answer_its_usage_and_what_its_client_may_repeat_it_with(cluster: Cluster, front: Front) -> None:
    cluster.prefills[0].cached_tokens = 3
    for prompt in (PROMPT, cluster.tokenizer.encode(PROMPT).ids):
        answer = await front.ask(prompt=prompt, max_tokens=90)
        assert (answer.token_ids, answer.text) == (cluster.expected(90), cluster.text_of(cluster.expected(90)))
        assert answer.usage == (len(cluster.tokenizer.encode(PROMPT).ids), 90, 3)
        assert (answer.finish, answer.stop_reason) == ("length", "")
        assert int(answer.headers["x-twostep-seed"]) == cluster.prefills[0].requests[-1].sampling.seed
        assert cluster.prefills[0].requests[-1].request_id.startswith(answer.headers["x-request-id"])
    await cluster.all_free()


async def test_every_way_to_end_an_answer(cluster: Cluster, front: Front) -> None:
    stop, answered = "größte city", ANSWER_TEXT
    ids = cluster.expected(500)
    num = next(n for n in range(500) if stop in cluster.text_of(ids[:n]))
    for fields, text, token_ids, finish, reason in (
        ({"stop": [stop, "never"], "max_tokens": 500}, answered[: answered.index(stop)], ids[:num], "stop", stop),
        ({"stop": [answered + "?"], "max_tokens": 12}, cluster.text_of(ids[:12]), ids[:12], "length", ""),
        ({"stop_token_ids": ids[:1], "max_tokens": 9}, "", ids[:1], "stop", str(ids[0])),
        ({"max_tokens": 1}, cluster.text_of(ids[:1]), ids[:1], "length", ""),
    ):
        answer = await front.ask(**fields)
        assert (answer.text, answer.token_ids) == (text, token_ids), fields
        assert (answer.finish, answer.stop_reason, answer.usage[1]) == (finish, reason, len(token_ids)), fields
    cluster.exchange.answer = [*cluster.answer[:5], EOS_ID]
    answer = await front.ask(max_tokens=100)
    assert (answer.text, answer.finish, answer.stop_reason) == (cluster.text_of(cluster.answer[:5]), "stop", "")
    assert answer.usage[1] == 6, "the token that ends it is counted, and is no text"
    await cluster.all_free()


async def test_log_probabilities_come_with_every_token_or_not_at_all(front: Front) -> None:
    assert (await front.ask(max_tokens=4, logprobs=2)).logprobs == [-0.5, -1.5, -2.5, -3.5]
    assert (await front.ask(max_tokens=4)).logprobs == []


async def test_workers_get_sampling_values_class_tenant_and_trace(cluster: Cluster, front: Front) -> None:
    seen: list[dict[str, Any]] = []

    async def look(_request: Any, context: Any) -> None:
        seen.append(dict(context.invocation_metadata()))

    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    prefill.hooks.append(look)
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = {"traceparent": trace, "x-twostep-tenant": "alice"}
    await front.ask(headers=headers, stop=["never"], stop_token_ids=[7], top_k=3, seed=5, max_tokens=3)
    assert seen[0]["traceparent"] == trace
    sampling = prefill.requests[0].sampling
    # From the request, and where it says nothing from the model's generation config.
    assert (sampling.top_k, list(sampling.stop_token_ids), sampling.seed, sampling.max_tokens) == (3, [7], 5, 3)
    assert (sampling.temperature, sampling.top_p) == (0.5, pytest.approx(0.9))
    assert list(sampling.stop) == [], "stop strings are the router's"
    assert decode.requests[0].sampling == sampling
    assert prefill.requests[0].tenant == decode.requests[0].tenant == "alice"


async def test_chats_are_rendered_and_counted_alike(cluster: Cluster, front: Front) -> None:
    messages = [{"role": "user", "content": "hi"}]
    await front.ask(messages=messages, max_tokens=2)
    rendered = cluster.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n").ids
    assert list(cluster.prefills[0].requests[0].token_ids) == await front.tokenize(messages=messages) == rendered
    assert await front.tokenize(prompt="x " * 5000) == cluster.tokenizer.encode("x " * 5000).ids
    assert await front.models() == [("m", MAX_MODEL_LEN)]


BAD: list[tuple[dict[str, Any], type[TwostepError]]] = [
    ({"prompt": ""}, InvalidRequest),
    ({"prompt": [1, 2, 1 << 20]}, InvalidRequest),
    ({"messages": []}, InvalidRequest),
    ({"messages": [{"content": "x"}]}, InvalidRequest),
    ({"messages": [{"role": "tool", "content": ""}]}, InvalidRequest),
    ({"prompt": [5] * MAX_MODEL_LEN}, InvalidRequest),
    ({"max_tokens": MAX_MODEL_LEN}, InvalidRequest),
    ({"model": "other"}, NotFound),
    *(
        ({name: value}, InvalidRequest)
        for name, value in (
            ("max_tokens", -1),
            ("temperature", -1.0),
            ("top_p", 0.0),
            ("top_k", -5),
            ("min_p", 2.0),
            ("repetition_penalty", 0.0),
            ("frequency_penalty", 3.0),
            ("logprobs", 21),
            ("prompt_logprobs", 21),
            ("logit_bias", {5: 101.0}),
            ("logit_bias", dict.fromkeys(range(1025), 1.0)),
            ("stop", [""]),
            ("stop", ["x"] * 17),
            ("stop_token_ids", [-1]),
            ("min_tokens", 30),
            ("cache_salt", "a" * 257),
            ("ttft_ms", 0.0),
            ("tpot_ms", -3.0),
            ("gap_ms", 0.0),
        )
    ),
]


async def test_what_makes_no_sense_is_refused_with_the_name_of_the_field(cluster: Cluster, front: Front) -> None:
    for fields, error in BAD:
        answer = await front.ask(**fields)
        assert answer.error is error, (fields, answer)
        (name,) = fields
        assert name in ("prompt", "messages", "model") or name in answer.message, answer.message
    assert not cluster.prefills[0].requests
    assert (await front.ask(max_tokens=3)).token_ids == cluster.expected(3), "and it goes on serving"


async def test_too_many_are_refused_and_told_when_to_come_again(cluster: Cluster, front_of: Callable[[Cluster], Front]) -> None:
    await cluster.prefill()
    decode = await cluster.decode()
    go_on = asyncio.Event()
    decode.script = Script(hold_at=5, go_on=go_on)
    async with cluster.serving(max_inflight=1, max_waiting=1):
        front = front_of(cluster)
        first = asyncio.create_task(front.ask(max_tokens=16))
        await until(lambda: bool(decode.held), "the first is served")
        second = asyncio.create_task(front.ask(max_tokens=2))
        await until(lambda: cluster.router.admission.num_waiting == 1, "the second waits")
        third = await front.ask()
        assert (third.error, third.retry_after) == (ResourceExhausted, True)
        go_on.set()
        assert ((await first).token_ids, (await second).token_ids) == (cluster.expected(16), cluster.expected(2))


async def test_failures_have_their_status(cluster: Cluster, front_of: Callable[[Cluster], Front]) -> None:
    decode = await cluster.decode()
    async with cluster.serving(no_worker_grace=0.01, request_timeout=1.5):
        front = front_of(cluster)
        assert (await front.ask()).error is Unavailable, "there is no prefill worker"
        prefill = await cluster.prefill()
        await cluster.seen()
        decode.hooks.append(refuse(grpc.StatusCode.INVALID_ARGUMENT, "it can never fit"))
        assert (await front.ask()).error is InvalidRequest, "one that a worker calls wrong is not tried elsewhere"
        assert len(decode.requests) == 1
        decode.script = Script(fail_at=4, fail_code="DATA_LOSS", fail_retryable=False)
        broken = await front.ask(max_tokens=8)
        assert broken.token_ids == cluster.expected(4), "what came before the failure is there"
        # An event of a stream has no status of its own.
        assert (broken.error, "scripted" in broken.message) == (DataLoss if isinstance(front, GrpcFront) else None, True)
        decode.max_held = 0
        assert (await front.ask()).error is DeadlineExceeded, "there was no room until its time was up"
        told = scrape(cluster.router.metrics_port)
        assert told("twostep_requests_refused_total", reason="deadline", request_class="standard") == 1
        decode.max_held = 1 << 30
        prefill.record = dataclasses.replace(prefill.record, layout=dataclasses.replace(prefill.record.layout, num_layers=9))
        await cluster.seen()
        assert (await front.ask()).error is Incompatible
        await cluster.all_free()


async def test_an_answer_goes_on_where_it_was_when_its_decode_worker_dies(cluster: Cluster, front_of: Callable[[Cluster], Front]) -> None:
    prefill = await cluster.prefill()
    workers = [await cluster.decode(f"d{i}") for i in range(2)]
    lost = asyncio.Event()
    for worker in workers:
        worker.script = Script(hold_at=20, go_on=lost)
    async with cluster.serving():
        asked = asyncio.create_task(front_of(cluster).ask(max_tokens=60))
        await until(lambda: any(worker.attaches for worker in workers), "one of them decodes")
        lost.set()
        await next(worker for worker in workers if worker.held).die()
        answer = await asked
        told = scrape(cluster.router.metrics_port)
        assert told("twostep_request_attempts_total") == 2
        assert told("twostep_request_migrations_total") == told("twostep_requests_total", status="OK") == 1
        assert told("twostep_time_to_first_token_seconds_count") == told("twostep_second_token_seconds_count") == 1
    assert (answer.token_ids, answer.text) == (cluster.expected(60), cluster.text_of(cluster.expected(60)))
    resumed = prefill.requests[1]
    assert list(resumed.token_ids)[resumed.num_prompt_tokens :] == cluster.expected(len(resumed.token_ids) - resumed.num_prompt_tokens)


async def test_a_client_that_goes_away_frees_both_sides(cluster: Cluster, front: Front) -> None:
    decode = cluster.decodes[0]
    decode.script = Script(hold_at=10)
    begun = asyncio.Event()
    asked = asyncio.create_task(front.ask(max_tokens=1000, on_piece=begun.set))
    await begun.wait()
    asked.cancel()
    with suppress(asyncio.CancelledError):
        await asked
    await cluster.all_free()
    await until(lambda: len(decode.cancels) == 1 and not cluster.router.admission.num_inflight, "it is told, and the place is free")
