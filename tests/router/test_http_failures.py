"""Refusals and failures over HTTP; clients that go away or do not read. What gRPC promises too is in test_fronts.py."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aiohttp
import grpc
import openai
import pytest
from http_fakes import CHAT, MESSAGES, RENDERED, TEXT, chat, events_of, open_client, open_http, refused, served, told, when
from jinja2 import Template
from openai import AsyncOpenAI
from router_fakes import MAX_MODEL_LEN, Cluster, FakeDecode, FakePrefill, Script, after, refuse, until

from router.http.body import parse_body
from router.http.errors import HttpError
from router.http.request_bodies import CompletionBody

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"logit_bias": {"100000": 10}}, "logit_bias"),
    (CHAT, {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias"),
    (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "x", "prompt_logprobs": 1, "stream": True, "n": 2}, "n"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"guided_regex": "a"}, "guided_regex"),
    (CHAT, {"n": 1000}, "n"),
    (CHAT, {"temperature": "0.5"}, "temperature"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}] * 5000}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0].type"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    (CHAT, {"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
    (CHAT, {"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "("}}}}, "response_format"),
    (TEXT, {"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    (CHAT, {"tool_choice": {"type": "f"}}, "tool_choice.type"),
    (CHAT, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    (CHAT, {"stop": [""]}, "stop[0]"),
    (CHAT, {"stop_token_ids": [100_000]}, "stop_token_ids[0]"),
    (CHAT, {"request_id": "white space"}, "request_id"),
    (TEXT, {"prompt": "x", "best_of": 3, "n": 2}, "best_of"),
    (TEXT, {"prompt": ["x"] * 2048, "n": 3}, "n"),
    (TEXT, {"prompt": "x", "use_beam_search": True}, "use_beam_search"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": [[1], [2, 1 << 20]]}, "prompt[1][1]"),
    (TEXT, {"prompt": ["x", ""]}, "prompt[1]"),
    (TEXT, {"prompt": ["x", ""], "add_special_tokens": False}, "prompt[1]"),
]
# Prompts that are none, the field that is named, and a word of the message.
NO_PROMPTS: list[tuple[Any, str, str]] = [
    ([7, 7, -1], "prompt[2]", "token id"),
    ([1 << 80], "prompt[0]", "token id"),
    ([1.5], "prompt[0]", "token id"),
    ([True], "prompt[0]", "token id"),
    ([[7], [7, 1 << 40]], "prompt[1][1]", "token id"),
    ([7, "x"], "prompt[1]", "not of several"),
    (["x", 7], "prompt[1]", "not of several"),
    ([[7], "x"], "prompt[1]", "not of several"),
    ([[[7]]], "prompt[0][0]", "not of several"),
    ([[]], "prompt[0]", "at least one"),
    ([], "prompt", "empty"),
    ([None], "prompt[0]", "give a text"),
    (5, "prompt", "give a text"),
    (["x"] * 2049, "prompt", "at most 2048"),
]


async def test_what_cannot_be_done_is_refused_by_name(http: aiohttp.ClientSession) -> None:
    for path, fields, param in REFUSED:
        error = await refused(http, path, chat(**fields) if path == CHAT else fields)
        assert (error["type"], error["param"]) == ("invalid_request_error", param), (fields, error)
    for path, body in (("/v1/models/other", None), (CHAT, chat(model="other")), ("/tokenize", {"prompt": "x", "model": "other"})):
        error = await refused(http, path, body, 404)
        assert (error["type"], error["param"], error["code"]) == ("not_found_error", "model", "model_not_found")
    for header, value in (
        ("x-twostep-class", "urgent"),
        ("x-twostep-timeout-ms", "soon"),
        ("x-twostep-keep-alive-s", "0"),
        *(("x-twostep-seed", seed) for seed in ("x", "1.5", str(1 << 63), "-", "9" * 5000)),
    ):
        assert (await refused(http, CHAT, chat(stream=True), headers={header: value}))["param"] == header
    for raw, kind, status in ((b"{", "application/json", 400), (b"[]", "application/json", 400), (b"{}", "text/plain", 415)):
        async with http.post(CHAT, data=raw, headers={"content-type": kind}) as answer:
            assert answer.status == status, raw
            assert (await answer.json())["error"]["message"]
    # Fields that are known and harmless are not refused.
    fields = {"logit_bias": {}, "functions": None, "modalities": ["text"], "store": True, "metadata": {"a": "b"}, "max_tokens": 1}
    await told(http, CHAT, chat(**fields))


@pytest.mark.parametrize(("prompt", "param", "says"), NO_PROMPTS, ids=lambda value: repr(value)[:20])
def test_what_is_no_prompt_is_refused_for_what_it_is(prompt: Any, param: str, says: str) -> None:
    with pytest.raises(HttpError) as caught:
        parse_body(CompletionBody, json.dumps({"prompt": prompt}).encode())
    assert (caught.value.status, caught.value.param) == (400, param)
    assert says in caught.value.message


async def test_prompts_that_can_never_fit_are_refused_before_they_are_read(http: aiohttp.ClientSession) -> None:
    assert (await refused(http, TEXT, {"prompt": [5] * 300_000}))["code"] == "context_length_exceeded"
    async with http.post(TEXT, data=io.BytesIO(b" " * (17 << 20)), headers={"content-type": "application/json"}) as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (413, "invalid_request_error")


async def test_of_several_prompts_it_is_said_which_one_is_too_long(http: aiohttp.ClientSession) -> None:
    for long, other in (([5] * MAX_MODEL_LEN, [5]), ([5] * (MAX_MODEL_LEN - 9), [5]), ("word " * 3 * MAX_MODEL_LEN, "x")):
        error = await refused(http, TEXT, {"prompt": [other, long], "n": 2, "max_tokens": 16})
        assert (error["param"], error["code"]) == ("prompt[1]", "context_length_exceeded")
        assert error["message"].startswith("prompt[1]: This model's maximum context length")
        assert (await refused(http, TEXT, {"prompt": long, "max_tokens": 16}))["param"] is None
    assert (await refused(http, TEXT, {"prompt": ["x", "x"], "min_tokens": 20}))["param"] == "min_tokens"


async def test_near_the_end_of_the_context_only_limits_that_were_sent_are_refused(
    prefill: FakePrefill, http: aiohttp.ClientSession
) -> None:
    """Completions have 16 tokens where max_tokens is not given, or as many as there is room for."""
    prompt = [5] * (MAX_MODEL_LEN - 9)
    for given, most in ((prompt, 9), (prompt[9:], 16)):
        await told(http, TEXT, {"prompt": given})
        assert prefill.requests[-1].sampling.max_tokens == most
    for path, body, says in (
        (TEXT, {"prompt": prompt, "max_tokens": 16}, ("max_tokens is 16", "at most 9")),
        (CHAT, chat(max_completion_tokens=MAX_MODEL_LEN), ("max_completion_tokens is 2048",)),
        (CHAT, chat(max_tokens=MAX_MODEL_LEN), ("max_tokens is 2048",)),
        (TEXT, {"prompt": "x", "min_tokens": 20}, ("min_tokens is 20", "16 tokens at most")),
    ):
        message = (await refused(http, path, body))["message"]
        assert all(part in message for part in says), message
    await told(http, TEXT, {"prompt": prompt, "max_tokens": 9})


async def test_a_timeout_ends_the_request(cluster: Cluster, prefill: FakePrefill, http: aiohttp.ClientSession) -> None:
    for body, headers in ((chat(timeout=0.2), {}), (chat(stream=True), {"x-twostep-timeout-ms": "200"})):
        prefill.before_first.append(after(600))
        await refused(http, CHAT, body, 504, headers=headers)
    await cluster.all_free()


@pytest.mark.parametrize("where", ["prompt", "answer"])
async def test_a_request_without_a_next_token_is_repeated_by_nobody(cluster: Cluster, where: str) -> None:
    """Neither by the router on other workers nor by the SDK, whole or streamed; what came before it has been sent."""
    prefills, decodes = [await cluster.prefill(f"p{i}") for i in range(2)], [await cluster.decode(f"d{i}") for i in range(2)]
    for prefill, decode in zip(prefills, decodes, strict=True):
        if where == "prompt":
            prefill.before_first.extend([refuse(grpc.StatusCode.OUT_OF_RANGE, "not finite")] * 3)
        decode.script.fail_at, decode.script.fail_retryable, decode.script.fail_code, decode.script.once = 6, False, "OUT_OF_RANGE", False
    async with served(cluster) as http, open_client(cluster) as client:
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=30)
        assert caught.value.code == "non_finite_logits"
        async with http.post(CHAT, json=chat(stream=True, max_tokens=30)) as answer:
            assert answer.status == (422 if where == "prompt" else 200)
            events = [await answer.json()] if where == "prompt" else events_of(await answer.read())
        assert events[-1]["error"]["code"] == "non_finite_logits"
        assert (len(events) > 2) == (where == "answer")
        with pytest.raises(grpc.aio.AioRpcError) as status:
            await cluster.ask(max_tokens=30)
        assert status.value.code() is grpc.StatusCode.OUT_OF_RANGE
        assert sum(len(prefill.requests) for prefill in prefills) == 3, "once for each"
        await cluster.all_free()


async def test_one_choice_that_fails_ends_all(
    cluster: Cluster, prefill: FakePrefill, decode: FakeDecode, http: aiohttp.ClientSession
) -> None:
    decode.script.step_s = 0.01
    prefill.hooks.append(refuse(grpc.StatusCode.INVALID_ARGUMENT, "not this one"))
    await refused(http, CHAT, chat(n=4, max_tokens=1000))
    await cluster.all_free()


@pytest.mark.parametrize("fields", [{}, {"n": 3, "stream": True}], ids=str)
async def test_a_client_that_goes_away_frees_both_sides_within_a_step(cluster: Cluster, fields: dict[str, Any]) -> None:
    prefill, decode, num = await cluster.prefill(), await cluster.decode(), fields.get("n", 1)

    async def disconnect(when: Callable[[], bool]) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
        writer.write(raw_request(chat(max_tokens=1500, **fields)))
        await until(when, "the request is under way")
        writer.close()
        await writer.wait_closed()

    # The next token would be sampled long after this test: whatever is free before was free within one step.
    decode.script.step_s = 600.0
    async with cluster.serving():
        await disconnect(lambda: len(decode.attaches) == num)
        await until(lambda: not cluster.held() and len(decode.cancels) == num, "nothing is held")
        # While prompts are being computed too.
        prefill.before_first.extend([after(600)] * 3)
        await disconnect(lambda: len(prefill.held) == num)
        await cluster.all_free()
        assert len(prefill.cancelled) >= num


def raw_request(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def test_a_client_that_does_not_read_is_cut_and_its_neighbour_is_not_held_up(cluster: Cluster) -> None:
    _, decode = await cluster.prefill(), await cluster.decode()
    decode.script.tokens_per_step, decode.script.step_s, decode.script.once = 50, 0.001, False
    async with served(cluster, max_buffered_tokens=100) as http:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", cluster.router.http_port))
        # Much for each token, so that what lies between fills soon.
        await loop.sock_sendall(sock, raw_request(chat(stream=True, max_tokens=1900, logprobs=True, top_logprobs=20, n=8)))
        await until(lambda: bool(decode.attaches), "it is under way")
        assert (await told(http, CHAT, chat(max_tokens=300)))["usage"]["completion_tokens"] == 300
        await until(lambda: len(decode.cancels) > 0 and not cluster.held(), "the one that does not read is cut")
        received = b""
        with suppress(ConnectionResetError):
            while piece := await asyncio.wait_for(loop.sock_recv(sock, 1 << 20), 60):
                received += piece
        sock.close()
        assert b"[DONE]" not in received


@pytest.mark.system
async def test_silence_is_filled_with_comments(
    prefill: FakePrefill, http: aiohttp.ClientSession, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    prefill.before_first.append(when(gate))
    async with http.post(CHAT, json=chat(stream=True, max_tokens=3), headers={"x-twostep-keep-alive-s": "1"}) as answer:
        assert (await answer.content.readuntil(b"\n\n")).startswith(b": ")
        gate.set()
        assert events_of(await answer.read())[-1] == "[DONE]"
    monkeypatch.setattr("router.http.sse.KEEP_ALIVE_S", 0.3)
    prefill.after_first.append(after(1.5))
    chunks = [c async for c in await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3, stream=True)]
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_ids_of_requests(prefill: FakePrefill, http: aiohttp.ClientSession) -> None:
    for fields, name in (({}, "mine.1"), ({"stream": True}, "mine.1"), ({"request_id": "body-1"}, "body-1")):
        async with http.post(CHAT, json=chat(max_tokens=1, **fields), headers={"x-request-id": "mine.1"}) as answer:
            assert f'"chatcmpl-{name}"' in await answer.text()
            assert answer.headers["x-request-id"] == name
        assert prefill.requests[-1].request_id.startswith(f"{name}~")


async def test_endpoints_that_are_not_served_say_so(cluster: Cluster) -> None:
    async with cluster.serving(), open_http(cluster) as http:
        for path in ("/v1/moderations", "/v1/fine_tuning/jobs"):
            assert (await refused(http, path, None, 404))["code"] == "unsupported_endpoint"


async def test_tokens_and_back(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    ids, size = cluster.tokenizer.encode("the größte").ids, cluster.tokenizer.get_vocab_size()
    found = await told(http, "/tokenize", {"prompt": "the größte", "return_token_strs": True})
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 2048)
    assert len(found["token_strs"]) == len(ids)
    assert (await told(http, "/tokenize", {"prompt": ""}))["tokens"] == []
    info = await told(http, "/tokenizer_info")
    assert Template(info["chat_template"]).render(messages=MESSAGES, add_generation_prompt=True) == RENDERED
    assert (info["eos_token"], info["bos_token"], info["model_max_length"]) == ("<|im_end|>", None, 2048)
    for tokens, text in ((ids, "the größte"), ([], "")):
        assert await told(http, "/detokenize", {"model": "m", "tokens": tokens}) == {"prompt": text}
    await told(http, "/detokenize", {"tokens": [size - 1]})
    for wrong, param in (([-1], "tokens[0]"), ([5, size], "tokens[1]"), ([5] * 140_000, "tokens")):
        assert (await refused(http, "/detokenize", {"tokens": wrong}))["param"] == param


async def test_a_router_that_goes_says_so_in_its_streams(cluster: Cluster) -> None:
    _, decode = await cluster.prefill(), await cluster.decode()
    decode.script.step_s = 600.0
    async with served(cluster) as http, http.post(CHAT, json=chat(stream=True, max_tokens=30)) as answer:
        await answer.content.readuntil(b"\n\n")
        whole = asyncio.create_task(http.post(CHAT, json=chat(max_tokens=30)))
        await until(lambda: len(decode.attaches) == 2, "both are under way")
        await cluster.router.drain(0.1)
        assert "repeat" in events_of(await answer.read())[-1]["error"]["message"]
        assert (await whole).status == 503
    await cluster.all_free()


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/batches"])
async def test_a_router_that_drains_says_so_until_its_last_answer(cluster: Cluster, path: str) -> None:
    _, decode = await cluster.prefill(), await cluster.decode()
    go_on = asyncio.Event()
    decode.script = Script(hold_at=5, go_on=go_on)
    async with served(cluster) as http:
        await told(http, "/ready")
        streamed = asyncio.create_task(cluster.ask(max_tokens=16))
        await until(lambda: bool(decode.held), "an answer is under way, over gRPC")
        draining = asyncio.create_task(cluster.router.drain(60.0))
        await until(lambda: not cluster.router.board.status().ready, "the router drains")
        for _ in range(2):
            async with http.get("/health") as health, http.get("/ready") as ready:
                assert (health.status, ready.status) == (503, 503)
                assert health.headers["connection"] == ready.headers["connection"] == "close"
            assert "another" in (await refused(http, path, chat(), 503))["message"]
        go_on.set()
        assert (await streamed).token_ids == cluster.expected(16)
        await draining
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get("/health")
    await cluster.all_free()


@pytest.mark.system
async def test_what_a_worker_held_is_remembered_until_there_is_one_again(cluster: Cluster) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode(num_blocks=20)
    async with served(cluster, default_max_tokens=0, no_worker_grace=60.0) as http:
        await told(http, CHAT, chat(stop=["Paris"]))
        await decode.die()
        await until(lambda: not [r for r in cluster.router.pool.records() if r.role == "decode"], "its record has expired")
        waiting = asyncio.create_task(told(http, CHAT, chat(stop=["Paris"])))
        await until(lambda: cluster.router.admission.num_inflight == 1, "it waits for a worker")
        await cluster.revive(decode)
        await waiting
    asked = [request.sampling.max_tokens for request in prefill.requests]
    assert asked[-1] == asked[0] < 320


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n", "no HTTP request"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization Bearer sk-secret\r\n\r\n", "no HTTP request"),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"y" * 10_000 + b"\r\n\r\n", "8 KiB"),
    ],
)
async def test_what_is_no_http_is_refused_like_everything_else(cluster: Cluster, head: bytes, says: str) -> None:
    async with cluster.serving():
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
        writer.write(head)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    answered, _, body = answer.partition(b"\r\n\r\n")
    assert answered.split(b"\r\n")[0].split()[1] == b"400"
    assert b"content-type: application/json" in answered.lower()
    assert b"aiohttp" not in answered.lower()
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)
    assert says in error["message"]
    assert "sk-secret" not in error["message"]


@pytest.mark.parametrize("field", [{"logit_bias": {"5": 10}}, {"prompt_logprobs": 1}])
async def test_workers_that_would_ignore_a_parameter_do_not_get_it(cluster: Cluster, field: dict[str, Any]) -> None:
    """A version of before neither says nor knows it; a newer worker beside it is the one that is asked."""
    newer = cluster.template
    cluster.template = dataclasses.replace(newer, sampling=())
    old = [await cluster.prefill("p-old"), await cluster.decode("d-old")]
    async with served(cluster) as http:
        await told(http, TEXT, {"prompt": "the capital", "max_tokens": 2})
        await refused(http, TEXT, {"prompt": "the capital", "max_tokens": 2, **field}, 409)
        cluster.template = newer
        prefill, decode = await cluster.prefill("p-new"), await cluster.decode("d-new")
        await until(lambda: len(cluster.router.pool.records()) == 4, "it knows the workers")
        await told(http, TEXT, {"prompt": "the capital", "max_tokens": 2, **field})
        assert [len(worker.requests) for worker in old] == [1, 1]
        assert prefill.requests[-1].sampling.logit_bias == ({5: 10.0} if "logit_bias" in field else {})
        assert prefill.requests[-1].sampling.HasField("prompt_logprobs") == ("prompt_logprobs" in field)
        assert decode.requests[-1].sampling.logit_bias == prefill.requests[-1].sampling.logit_bias
        assert not decode.requests[-1].sampling.HasField("prompt_logprobs"), "it computes no prompt"
