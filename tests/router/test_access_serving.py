"""API keys as clients meet them, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from http_fakes import CHAT, TEXT, chat, open_http, raw_events
from router_fakes import ANSWER_TEXT, SECRET, Cluster, until

from twostep.errors import RETRY_AFTER
from twostep.keys.api_key_file import put_in_file
from twostep.keys.api_keys import Limits, make_key, system_key
from twostep.prefix import derive_key, prefix_hashes
from twostep.request_class import RequestClass
from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import inference_pb2, status_pb2, status_pb2_grpc

LONG_PROMPT = "the capital of France is Paris, the end of the answer and so on " * 24


class Keys:
    """The file of a router's keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def add(self, **options: Any) -> str:
        told, key = make_key(**options)
        put_in_file(self.path, key)
        return told


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "api-keys")


@asynccontextmanager
async def serving(cluster: Cluster, keys: Keys, **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    await cluster.prefill()
    await cluster.decode()
    async with cluster.serving(api_keys_file=keys.path, **options), open_http(cluster) as http:
        yield http


def bearer(told: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {told}"}


def grpc_bearer(told: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {told}"),)


async def test_everything_but_probes_and_the_page_wants_a_key(cluster: Cluster, keys: Keys) -> None:
    told = keys.add()
    async with serving(cluster, keys) as http:
        for path in ("/health", "/ready", "/version", "/openapi.json", "/ui/"):
            async with http.get(path) as answer:
                assert answer.status == 200, path
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", CHAT),
            ("POST", TEXT),
            ("POST", "/v1/embeddings"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/metrics"),
            ("GET", "/ui/api/status"),
            ("GET", "/nowhere"),
        ):
            for headers in ({}, bearer(told + "x"), {"Authorization": told}):
                async with http.request(method, path, headers=headers, json=chat(max_tokens=2)) as answer:
                    assert answer.status == 401, path
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
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
        assert not cluster.held()
        for path in ("/v1/models", "/metrics", "/ui/api/status"):
            async with http.get(path, headers=bearer(told)) as answer:
                assert answer.status == 200, path
                assert answer.headers["Server"] == "twostep", "and not of which versions it is made"


async def test_grpc_wants_a_key_too(cluster: Cluster, keys: Keys) -> None:
    told = keys.add()
    async with serving(cluster, keys), open_channel(f"127.0.0.1:{cluster.router.port}") as channel:
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
            for metadata in ((), grpc_bearer(told + "x"), (("authorization", told),)):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(metadata)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
                assert "twostep keys create" in (refused.value.details() or "")
            for right in (told, system_key(SECRET)):
                await call(grpc_bearer(right))
        reflection = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflection(iter([b""]), timeout=60).read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        probe = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await probe(b"", timeout=60), "probes show no key"
        await cluster.all_free()


async def test_requests_of_a_minute_are_bounded_over_both_fronts(cluster: Cluster, keys: Keys) -> None:
    told = keys.add(limits=Limits(requests_per_minute=2))
    async with serving(cluster, keys) as http:
        async with http.post(CHAT, json=chat(max_tokens=2, n=3), headers=bearer(told)) as answer:
            assert answer.status == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == "1", "n answers are one request"
        async for _ in cluster.stub.Generate(cluster.request(max_tokens=1), metadata=grpc_bearer(told)):
            pass
        async with http.post(CHAT, json=chat(max_tokens=2), headers=bearer(told)) as answer:
            assert answer.status == 429
            assert 10 <= int(answer.headers["Retry-After"]) <= 30
            error = (await answer.json())["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert "requests_per_minute of 2" in error["message"]
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in cluster.stub.Generate(cluster.request(max_tokens=1), metadata=grpc_bearer(told)):
                pass
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        behind = dict(refused.value.trailing_metadata() or ())
        assert 5_000 <= int(behind[RETRY_AFTER]) <= 30_000
        async with http.get("/v1/models", headers=bearer(told)) as answer:
            assert answer.status == 200, "a look is no request"


async def test_tokens_are_taken_before_any_worker_is_asked(cluster: Cluster, keys: Keys) -> None:
    told = keys.add(limits=Limits(tokens_per_minute=60, tokens_per_day=100))
    async with serving(cluster, keys) as http:
        (prefill, decode) = cluster.workers
        async with http.post(TEXT, json={"prompt": [5] * 20, "max_tokens": 30, "n": 2}, headers=bearer(told)) as answer:
            assert (await answer.json())["usage"]["total_tokens"] == 80
        asked = len(prefill.requests), len(decode.requests)
        # 20 less than nothing: what is owed is paid first.
        async with http.post(TEXT, json={"prompt": [5] * 15, "max_tokens": 1}, headers=bearer(told)) as answer:
            assert answer.status == 429
            assert 10 <= int(answer.headers["Retry-After"]) <= 35
            assert answer.headers["x-ratelimit-remaining-tokens"] == "0"
            assert answer.headers["x-ratelimit-remaining-tokens-day"] == "20"
        assert (len(prefill.requests), len(decode.requests)) == asked
        assert cluster.router.inference._metrics.refused.labels("quota", "standard")._value.get() == 1
        other = keys.add(limits=Limits(tokens_per_minute=60))
        await cluster.router.access.refresh()
        async with http.post(TEXT, json={"prompt": [5] * 61, "max_tokens": 1}, headers=bearer(other)) as answer:
            assert answer.status == 400, "this will never do"
        assert (len(prefill.requests), len(decode.requests)) == asked


async def test_a_stream_tells_what_is_left(cluster: Cluster, keys: Keys) -> None:
    told = keys.add(limits=Limits(tokens_per_minute=60))
    async with serving(cluster, keys) as http:
        body = {"prompt": [5] * 20, "max_tokens": 5, "stream": True}
        async with http.post(TEXT, json=body, headers=bearer(told)) as answer:
            assert 40 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < 60
            assert (await raw_events(answer))[-1] == "[DONE]"


async def test_a_request_that_finds_no_worker_costs_nothing(cluster: Cluster, keys: Keys) -> None:
    told = keys.add(limits=Limits(tokens_per_minute=1000))
    async with cluster.serving(api_keys_file=keys.path, no_worker_grace=0.05), open_http(cluster) as http:
        async with http.post(TEXT, json={"prompt": [5] * 200}, headers=bearer(told)) as answer:
            assert answer.status == 503
        (account,) = cluster.router.access.accounts()
        assert account.usage()["tokens_this_minute"] == 0


async def test_calls_at_once_are_bounded_and_end_with_their_clients(cluster: Cluster, keys: Keys) -> None:
    told = keys.add(limits=Limits(max_concurrent=1))
    async with serving(cluster, keys) as http:
        cluster.workers[1].script.step_s = 600.0  # type: ignore[attr-defined]
        (account,) = cluster.router.access.accounts()
        async with http.post(CHAT, json=chat(max_tokens=500, ignore_eos=True, stream=True), headers=bearer(told)) as answer:
            await answer.content.readline()
            async with http.post(CHAT, json=chat(max_tokens=1), headers=bearer(told)) as refused:
                assert refused.status == 429
                assert "max_concurrent" in (await refused.json())["error"]["message"]
            answer.close()
        await until(lambda: account.num_calls == 0, "the call has ended")
        await cluster.all_free()
        async with http.post(CHAT, json=chat(max_tokens=1), headers=bearer(told)) as again:
            assert again.status == 200


async def test_a_key_may_be_for_batch_only(cluster: Cluster, keys: Keys) -> None:
    told = keys.add(most_urgent=RequestClass.BATCH)
    async with serving(cluster, keys) as http:
        async with http.post(CHAT, json=chat(max_tokens=1), headers=bearer(told)) as answer:
            assert answer.status == 200
        assert cluster.workers[0].requests[-1].request_class == inference_pb2.REQUEST_CLASS_BATCH
        headers = {**bearer(told), "x-twostep-class": "interactive"}
        async with http.post(CHAT, json=chat(max_tokens=1), headers=headers) as answer:
            assert answer.status == 403
            assert (await answer.json())["error"]["type"] == "permission_error"


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


async def test_tenants_never_share_cached_prefixes(cluster: Cluster, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker announces a prefix of one tenant: only that tenant's requests are told of it, whatever the others say of themselves."""
    alice, bob, gateway = (
        keys.add(tenant="alice"),
        keys.add(tenant="bob"),
        keys.add(tenant="gateway", speaks_for_tenants=True),
    )
    own = keys.add()
    async with serving(cluster, keys) as http:
        prefill = cluster.workers[0]
        await cluster.announce(prefill, hashes_of(cluster, "alice"))

        prefixes, hints = cluster.router.inference._dispatcher._prefixes, []
        look_up = prefixes.cached_tokens

        async def spied(*asked: Any) -> Any:
            found = await look_up(*asked)
            hints.append(max((cached.num_tokens for cached in found.values()), default=0))
            return found

        monkeypatch.setattr(prefixes, "cached_tokens", spied)

        async def served(told: str, **headers: str) -> tuple[str, bool]:
            """As whose request, and whether a worker was known to hold some of its prompt."""
            body = {"prompt": LONG_PROMPT, "max_tokens": 1}
            async with http.post(TEXT, json=body, headers={**bearer(told), **headers}) as answer:
                assert answer.status == 200
            return prefill.requests[-1].tenant, hints[-1] > 0

        for told, headers, tenant in (
            (alice, {}, "alice"),
            (bob, {}, "bob"),
            (bob, {"x-twostep-tenant": "alice"}, "bob"),
            (gateway, {"x-twostep-tenant": "alice"}, "alice"),
            (gateway, {}, "gateway"),
        ):
            assert await served(told, **headers) == (tenant, tenant == "alice")
        key_id = next(a.key.id for a in cluster.router.access.accounts() if not a.key.tenant)
        assert await served(own) == (key_id, False)
        # gRPC: neither the field of the message nor the metadata.
        request = cluster.request(LONG_PROMPT, max_tokens=1)
        request.tenant = "alice"
        async for _ in cluster.stub.Generate(request, metadata=(*grpc_bearer(bob), ("x-twostep-tenant", "alice"))):
            pass
        assert (prefill.requests[-1].tenant, hints[-1]) == ("bob", 0)
        decode = cluster.workers[1]
        assert {r.tenant for r in decode.requests} == {"alice", "bob", "gateway", key_id}


# ---- what must not be seen ----------------------------------------------------------------------------------------------------


async def test_nothing_secret_is_logged(cluster: Cluster, keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told, wrong, prompt = keys.add(), "ts-wrong-but-somebodys-key", "the capital of my secret plans"
    async with serving(cluster, keys) as http:
        for headers in (bearer(told), bearer(wrong), {"Authorization": f"Basic {wrong}"}):
            for body in (chat(max_tokens=3), {"messages": [{"role": "user", "content": prompt}], "temperature": "hot"}):
                async with http.post(CHAT, json=body, headers=headers) as answer:
                    await answer.read()
            async with http.post(TEXT, json={"prompt": prompt, "max_tokens": 8, "stream": True}, headers=headers) as answer:
                await answer.read()
            for metadata in (grpc_bearer(told), grpc_bearer(wrong)):
                try:
                    async for _ in cluster.stub.Generate(cluster.request(prompt, max_tokens=3), metadata=metadata):
                        pass
                except grpc.aio.AioRpcError:
                    pass
        # What cannot even be read.
        for raw in (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {told}\x01\r\n\r\n{prompt}",
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {told}{'x' * 20_000}\r\n\r\n",
            f"{prompt} {told}\r\n\r\n",
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {told}\r\nContent-Length: {told}\r\n\r\n",
        ):
            answer = await raw_answer(cluster, raw.encode())
            assert b" 400 " in answer
            assert b"Traceback" not in answer
    for text in (caplog.text, *(record.getMessage() for record in caplog.records)):
        for secret in (told, wrong, prompt, "my secret plans", ANSWER_TEXT.strip()[:20], "Bearer"):
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
    cluster: Cluster, keys: Keys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = keys.add()
    async with serving(cluster, keys) as http:

        async def fails(*_: Any, **__: Any) -> None:
            raise RuntimeError("a detail of the inside")

        monkeypatch.setattr(cluster.router.inference.prompts, "prompt", fails)
        async with http.post(CHAT, json=chat(max_tokens=1), headers=bearer(told)) as answer:
            text = await answer.text()
            assert answer.status == 500
        message = json.loads(text)["error"]["message"]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in cluster.stub.Generate(cluster.request(max_tokens=1), metadata=grpc_bearer(told)):
                pass
        for told_to_client in (text, refused.value.details() or ""):
            assert "internal error" in told_to_client
            for detail in ("detail", "RuntimeError", "Traceback", ".py"):
                assert detail not in told_to_client
        assert refused.value.code() is grpc.StatusCode.INTERNAL
        assert message.split()[2].rstrip(";") in caplog.text, "the log has the reference"
