"""API keys as clients meet them, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from http_fakes import CHAT, TEXT, chat, open_http, raw_events, refused, served, told
from router_fakes import ANSWER_TEXT, SECRET, Cluster, Script, until
from scraping import scrape

from router.access.own_key import own_key_of
from router.workers.prefix_index import PrefixIndex
from twostep.errors import RETRY_AFTER, SetupError
from twostep.keys.api_key_file import put_in_file, remove_from_file
from twostep.keys.api_keys import Limits, admin_key, make_key, system_key
from twostep.prefix import derive_key, prefix_hashes
from twostep.request_class import RequestClass
from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import inference_pb2, status_pb2, status_pb2_grpc

LONG_PROMPT = "the capital of France is Paris, the end of the answer and so on " * 24


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The file of a router's keys."""
    path = tmp_path / "api-keys"
    path.touch()
    return path


def add(keys: Path, **options: Any) -> str:
    """Adds a key and returns what its holder is told."""
    shown, key = make_key(**options)
    put_in_file(keys, key)
    return shown


def bearer(told: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {told}"}


def grpc_bearer(told: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {told}"),)


async def test_everything_but_probes_and_the_page_wants_a_key(cluster: Cluster, keys: Path) -> None:
    shown = add(keys)
    async with served(cluster, api_keys_file=keys) as http:
        for path in ("/health", "/ready", "/version", "/openapi.json", "/ui/"):
            async with http.get(path) as answer:
                assert answer.status == 200, path
        for method, path in (
            *(("POST", path) for path in (CHAT, TEXT, "/v1/embeddings", "/tokenize", "/detokenize")),
            *(("GET", path) for path in ("/v1/models", "/metrics", "/ui/api/status", "/nowhere")),
        ):
            for headers in ({}, bearer(shown + "x"), {"Authorization": shown}):
                async with http.request(method, path, headers=headers, json=chat(max_tokens=2)) as answer:
                    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), path
                    error = (await answer.json())["error"]
                    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                    assert "twostep keys create" in error["message"]
        # However a path is written.
        for path in (
            "/ui/%61pi/status",
            "/ui/api//status",
            "/ui/../v1/models",
            "/ui/%2e%2e/v1/models",
            "//v1/models",
            "/ui/..%2fv1%2fmodels",
        ):
            answered = await raw_answer(cluster, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            assert answered.split(b" ")[1] in (b"401", b"404"), path
        for path in ("/v1/models", "/metrics", "/ui/api/status"):
            async with http.get(path, headers=bearer(shown)) as answer:
                assert answer.status == 200, path
                assert answer.headers["Server"] == "twostep", "and not of which versions it is made"


@pytest.mark.parametrize("in_file", [True, False])
async def test_one_key_may_be_all_there_is(cluster: Cluster, tmp_path: Path, in_file: bool) -> None:
    """As vLLM's --api-key. Browsers still find the page; operators cannot change the key here."""
    (tmp_path / "key").write_text("the-only-key\n")
    given: dict[str, Any] = {"api_key_file": tmp_path / "key"} if in_file else {"api_key": "the-only-key"}
    async with served(cluster, admin_port=0, **given) as http:
        for headers, status in (({}, 401), (bearer("another"), 401), (bearer("the-only-key"), 200)):
            async with http.post(CHAT, json=chat(max_tokens=2), headers=headers) as answer:
                assert answer.status == status
        async with http.get("/", headers={"Accept": "text/html"}) as answer:
            assert (answer.status, answer.url.path) == (200, "/ui/")
        admin = f"http://127.0.0.1:{cluster.router.admin_port}/admin/keys"
        async with http.post(admin, json={"name": "another"}, headers=bearer(admin_key(SECRET))) as answer:
            assert answer.status == 400


@pytest.mark.parametrize("text", ["", "\n", "k" * 1000])
def test_a_file_without_a_key_opens_nothing(cluster: Cluster, tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    for path in (tmp_path / "key", tmp_path / "none"):
        with pytest.raises(SetupError, match=str(path)):
            own_key_of(path, "")
    assert own_key_of(None, "") is None


async def test_grpc_wants_a_key_too(cluster: Cluster, keys: Path) -> None:
    shown = add(keys)
    async with served(cluster, api_keys_file=keys), open_channel(f"127.0.0.1:{cluster.router.grpc_port}") as channel:
        status: status_pb2_grpc.StatusAsyncStub = status_pb2_grpc.StatusStub(channel)

        async def generate(metadata: Any) -> None:
            call = cluster.stub.Generate(cluster.request(max_tokens=2), metadata=metadata, timeout=60)
            assert [response async for response in call]

        calls = {
            "Generate": generate,
            "Tokenize": lambda m: cluster.stub.Tokenize(inference_pb2.TokenizeRequest(text="a"), metadata=m, timeout=60),
            "ListModels": lambda m: cluster.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=m, timeout=60),
            "GetStatus": lambda m: status.GetStatus(status_pb2.StatusRequest(), metadata=m, timeout=60),
        }
        for name, call in calls.items():
            for metadata in ((), grpc_bearer(shown + "x"), (("authorization", shown),)):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(metadata)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
                assert "twostep keys create" in (refused.value.details() or "")
            for right in (shown, system_key(SECRET)):
                await call(grpc_bearer(right))
        reflection = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflection(iter([b""]), timeout=60).read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        probe = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await probe(b"", timeout=60), "probes show no key"
        await cluster.all_free()


async def test_requests_of_a_minute_are_bounded_over_both_fronts(cluster: Cluster, keys: Path) -> None:
    shown = add(keys, limits=Limits(requests_per_minute=2))
    async with served(cluster, api_keys_file=keys) as http:
        async with http.post(CHAT, json=chat(max_tokens=2, n=3), headers=bearer(shown)) as answer:
            assert answer.status == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == "1", "n answers are one request"
        async for _ in cluster.stub.Generate(cluster.request(max_tokens=1), metadata=grpc_bearer(shown)):
            pass
        async with http.post(CHAT, json=chat(max_tokens=2), headers=bearer(shown)) as answer:
            assert answer.status == 429
            assert 10 <= int(answer.headers["Retry-After"]) <= 30
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"
            assert "requests_per_minute of 2" in (await answer.json())["error"]["message"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in cluster.stub.Generate(cluster.request(max_tokens=1), metadata=grpc_bearer(shown)):
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 5_000 <= int(dict(caught.value.trailing_metadata() or ())[RETRY_AFTER]) <= 30_000
        await told(http, "/v1/models", headers=bearer(shown))  # a look is no request


async def test_tokens_are_taken_before_any_worker_is_asked(cluster: Cluster, keys: Path) -> None:
    shown = add(keys, limits=Limits(tokens_per_minute=60, tokens_per_day=100))
    other = add(keys, limits=Limits(tokens_per_minute=60))
    async with served(cluster, api_keys_file=keys) as http:
        (prefill, decode) = cluster.workers
        both = await told(http, TEXT, {"prompt": [5] * 20, "max_tokens": 30, "n": 2}, headers=bearer(shown))
        assert both["usage"]["total_tokens"] == 80
        asked = len(prefill.requests), len(decode.requests)
        # 20 less than nothing: what is owed is paid first.
        async with http.post(TEXT, json={"prompt": [5] * 15, "max_tokens": 1}, headers=bearer(shown)) as answer:
            assert answer.status == 429
            assert 10 <= int(answer.headers["Retry-After"]) <= 35
            assert answer.headers["x-ratelimit-remaining-tokens"] == "0"
            assert answer.headers["x-ratelimit-remaining-tokens-day"] == "20"
        assert scrape(cluster.router.metrics_port)("twostep_requests_refused_total", reason="quota") == 1
        # This will never do.
        await refused(http, TEXT, {"prompt": [5] * 61, "max_tokens": 1}, headers=bearer(other))
        assert (len(prefill.requests), len(decode.requests)) == asked
        # A stream tells what is left.
        async with http.post(TEXT, json={"prompt": [5] * 20, "max_tokens": 5, "stream": True}, headers=bearer(other)) as answer:
            assert 40 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < 60
            assert (await raw_events(answer))[-1] == "[DONE]"


async def test_embeddings_cost_their_inputs_and_one_request(cluster: Cluster, keys: Path) -> None:
    shown = add(keys, limits=Limits(tokens_per_minute=60, requests_per_minute=3))
    async with served(cluster, api_keys_file=keys) as http:
        inputs = {"model": "m", "input": [[5] * 10, [6] * 15]}
        async with http.post("/v1/embeddings", json=inputs, headers=bearer(shown)) as answer:
            assert answer.status == 200
            assert 35 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < 60
            assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        await told(http, "/v1/embeddings", inputs | {"input": [[5] * 60]}, 429, headers=bearer(shown))
        await told(http, "/v1/embeddings", inputs | {"input": [[5] * 61]}, 400, headers=bearer(shown))
        assert len(cluster.prefills[0].requests) == 2


async def test_a_request_that_finds_no_worker_costs_nothing(cluster: Cluster, keys: Path) -> None:
    shown = add(keys, limits=Limits(tokens_per_minute=1000))
    async with cluster.serving(api_keys_file=keys, no_worker_grace=0.05), open_http(cluster) as http:
        await refused(http, TEXT, {"prompt": [5] * 200}, 503, headers=bearer(shown))
        (account,) = cluster.router.access.accounts()
        assert account.usage()["tokens_this_minute"] == 0


async def test_calls_at_once_are_bounded_and_end_with_their_clients(cluster: Cluster, keys: Path) -> None:
    shown = add(keys, limits=Limits(max_concurrent=1))
    async with served(cluster, api_keys_file=keys) as http:
        cluster.workers[1].script.step_s = 600.0  # type: ignore[attr-defined]
        (account,) = cluster.router.access.accounts()
        async with http.post(CHAT, json=chat(max_tokens=500, ignore_eos=True, stream=True), headers=bearer(shown)) as answer:
            await answer.content.readline()
            error = await refused(http, CHAT, chat(max_tokens=1), 429, headers=bearer(shown))
            assert "max_concurrent" in error["message"]
            answer.close()
        await until(lambda: account.num_calls == 0, "the call has ended")
        await cluster.all_free()
        await told(http, CHAT, chat(max_tokens=1), headers=bearer(shown))


async def whole(call: Any) -> list[inference_pb2.GenerateResponse]:
    return [response async for response in call]


async def test_answers_end_with_their_key(cluster: Cluster, keys: Path) -> None:
    """Disabled or revoked, over both fronts; its neighbours' go on."""
    made = {name: make_key(name=name) for name in ("disabled", "revoked", "neighbour")}
    for _, key in made.values():
        put_in_file(keys, key)
    await cluster.prefill()
    decode = await cluster.decode()
    async with served(cluster, api_keys_file=keys) as http, asyncio.timeout(60):
        decode.script = Script(hold_at=3, once=False)
        streams, calls = {}, {}
        for name, (shown, _) in made.items():
            streams[name] = await http.post(CHAT, json=chat(max_tokens=10, stream=True), headers=bearer(shown))
            assert streams[name].status == 200
            calls[name] = cluster.stub.Generate(cluster.request(max_tokens=10), metadata=grpc_bearer(shown))
            await calls[name].initial_metadata()
        put_in_file(keys, replace(made["disabled"][1], disabled=True))
        remove_from_file(keys, made["revoked"][1].id)
        for name in ("disabled", "revoked"):
            with pytest.raises(grpc.aio.AioRpcError, match=name) as caught:
                await whole(calls[name])
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            told = (await streams[name].read()).decode()
            assert name in told.splitlines()[-2], "the last event says why"
            assert "[DONE]" not in told
        decode.script.go_on.set()
        assert "[DONE]" in (await streams["neighbour"].read()).decode()
        assert (await whole(calls["neighbour"]))[-1].HasField("end")
    await cluster.all_free()


async def test_a_key_may_be_for_batch_only(cluster: Cluster, keys: Path) -> None:
    shown = add(keys, most_urgent=RequestClass.BATCH)
    async with served(cluster, api_keys_file=keys) as http:
        await told(http, CHAT, chat(max_tokens=1), headers=bearer(shown))
        assert cluster.workers[0].requests[-1].request_class == inference_pb2.REQUEST_CLASS_BATCH
        error = await refused(http, CHAT, chat(max_tokens=1), 403, headers={**bearer(shown), "x-twostep-class": "interactive"})
        assert error["type"] == "permission_error"


# ---- tenants -----------------------------------------------------------------------------------------------------------------


def hashes_of(cluster: Cluster, tenant: str) -> list[bytes]:
    layout = cluster.layout
    key = derive_key(
        SECRET,
        tenant=tenant,
        salt="",
        model_fingerprint=layout.model_fingerprint,
        dtype=layout.dtype,
        quantization=layout.quantization,
    )
    ids = cluster.tokenizer.encode(LONG_PROMPT).ids
    return list(prefix_hashes(key, ids[:-1], 64))


async def test_tenants_never_share_cached_prefixes(cluster: Cluster, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker announces a prefix of one tenant: only that tenant's requests are told of it, whatever the others say of themselves."""
    alice, bob = add(keys, tenant="alice"), add(keys, tenant="bob")
    gateway, own = add(keys, tenant="gateway", speaks_for_tenants=True), add(keys)
    hints: list[int] = []
    look_up = PrefixIndex.cached_tokens

    async def spied(*asked: Any) -> Any:
        found = await look_up(*asked)
        hints.append(max((cached.num_tokens for cached in found.values()), default=0))
        return found

    monkeypatch.setattr(PrefixIndex, "cached_tokens", spied)
    async with served(cluster, api_keys_file=keys) as http:
        prefill, decode = cluster.workers
        await cluster.announce(prefill, hashes_of(cluster, "alice"))
        key_id = next(a.key.id for a in cluster.router.access.accounts() if not a.key.tenant)
        for shown, headers, tenant in (
            (alice, {}, "alice"),
            (bob, {}, "bob"),
            (bob, {"x-twostep-tenant": "alice"}, "bob"),
            (gateway, {"x-twostep-tenant": "alice"}, "alice"),
            (gateway, {}, "gateway"),
            (own, {}, key_id),
        ):
            await told(http, TEXT, {"prompt": LONG_PROMPT, "max_tokens": 1}, headers={**bearer(shown), **headers})
            # As whose request, and whether a worker was known to hold some of its prompt.
            assert (prefill.requests[-1].tenant, hints[-1] > 0) == (tenant, tenant == "alice")
        # gRPC: neither the field of the message nor the metadata.
        request = cluster.request(LONG_PROMPT, max_tokens=1)
        request.tenant = "alice"
        async for _ in cluster.stub.Generate(request, metadata=(*grpc_bearer(bob), ("x-twostep-tenant", "alice"))):
            pass
        assert (prefill.requests[-1].tenant, hints[-1]) == ("bob", 0)
        assert {r.tenant for r in decode.requests} == {"alice", "bob", "gateway", key_id}


# ---- what must not be seen ----------------------------------------------------------------------------------------------------


async def test_nothing_secret_is_logged(cluster: Cluster, keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shown, wrong, prompt = add(keys), "ts-wrong-but-somebodys-key", "the capital of my secret plans"
    async with served(cluster, api_keys_file=keys) as http:
        for headers in (bearer(shown), bearer(wrong), {"Authorization": f"Basic {wrong}"}):
            for body in (chat(max_tokens=3), {"messages": [{"role": "user", "content": prompt}], "temperature": "hot"}):
                async with http.post(CHAT, json=body, headers=headers) as answer:
                    await answer.read()
            async with http.post(TEXT, json={"prompt": prompt, "max_tokens": 8, "stream": True}, headers=headers) as answer:
                await answer.read()
            for metadata in (grpc_bearer(shown), grpc_bearer(wrong)):
                try:
                    async for _ in cluster.stub.Generate(cluster.request(prompt, max_tokens=3), metadata=metadata):
                        pass
                except grpc.aio.AioRpcError:
                    pass
        # Requests that cannot even be read.
        for raw in (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {shown}\x01\r\n\r\n{prompt}",
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {shown}{'x' * 20_000}\r\n\r\n",
            f"{prompt} {shown}\r\n\r\n",
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {shown}\r\nContent-Length: {shown}\r\n\r\n",
        ):
            answer = await raw_answer(cluster, raw.encode())
            assert b" 400 " in answer
            assert b"Traceback" not in answer
    for text in (caplog.text, *(record.getMessage() for record in caplog.records)):
        for secret in (shown, wrong, prompt, "my secret plans", ANSWER_TEXT.strip()[:20], "Bearer"):
            assert secret not in text


async def raw_answer(cluster: Cluster, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
    writer.write(data)
    try:
        async with asyncio.timeout(60):
            return await reader.read(65536)
    finally:
        writer.close()


async def test_what_nobody_expected_is_told_as_a_reference(
    cluster: Cluster, keys: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = add(keys)
    async with served(cluster, api_keys_file=keys) as http:

        async def fails(*_: Any, **__: Any) -> None:
            raise RuntimeError("a detail of the inside")

        monkeypatch.setattr(cluster.router.inference.prompts, "prompt", fails)
        async with http.post(CHAT, json=chat(max_tokens=1), headers=bearer(shown)) as answer:
            text = await answer.text()
            assert answer.status == 500
        message = json.loads(text)["error"]["message"]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in cluster.stub.Generate(cluster.request(max_tokens=1), metadata=grpc_bearer(shown)):
                pass
        for answered in (text, refused.value.details() or ""):
            assert "internal error" in answered
            for detail in ("detail", "RuntimeError", "Traceback", ".py"):
                assert detail not in answered
        assert refused.value.code() is grpc.StatusCode.INTERNAL
        assert message.split()[2].rstrip(";") in caplog.text, "the log has the reference"
