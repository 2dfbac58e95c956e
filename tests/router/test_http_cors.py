"""Pages of other origins in a browser: what they are told, and that nobody else's are."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import aiohttp
import pytest
from http_fakes import CHAT, chat, open_http
from router_fakes import Cluster, after, until

from router.config import parse_config
from twostep.cli._flags import parser
from twostep.cli._up import options_of
from twostep.settings.readers import allowed_origins

ORIGIN, OTHER = "https://chat.example", "https://evil.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def names(header: str) -> set[str]:
    return {name.strip().lower() for name in header.split(",")}


def varies(answer: aiohttp.ClientResponse) -> set[str]:
    return {name for header in answer.headers.getall("Vary", []) for name in names(header)}


@pytest.mark.parametrize("allowed", [(ORIGIN, "http://localhost:5173"), ("*",)])
async def test_a_preflight_needs_no_key(cluster: Cluster, allowed: tuple[str, ...]) -> None:
    async with cluster.serving(allowed_origins=allowed, api_keys="k" * 40), open_http(cluster) as http:
        async with http.options(CHAT, headers=PREFLIGHT) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == ("*" if allowed == ("*",) else ORIGIN)
            assert {"authorization", "content-type", "x-stainless-os"} <= names(answer.headers["Access-Control-Allow-Headers"])
            assert {"GET", "POST", "DELETE"} <= {name.strip() for name in answer.headers["Access-Control-Allow-Methods"].split(",")}
            assert "Access-Control-Allow-Credentials" not in answer.headers
            assert ("origin" in varies(answer)) == (allowed != ("*",))
        async with http.options(CHAT, headers={**PREFLIGHT, "Access-Control-Request-Headers": "x y;z"}) as answer:
            assert answer.headers["Access-Control-Allow-Headers"] == "Authorization, Content-Type"
        async with http.options(CHAT, headers={"Origin": ORIGIN}) as answer:
            assert answer.status != 204, "it is no preflight"


async def test_every_answer_tells_the_page(cluster: Cluster) -> None:
    await cluster.prefill()
    await cluster.decode()
    async with cluster.serving(allowed_origins=(ORIGIN,), max_body_bytes=4096), open_http(cluster) as http:
        asked: list[tuple[str, str, Any, int]] = [
            ("POST", CHAT, chat(max_tokens=2), 200),
            ("POST", CHAT, chat(max_tokens=2, stream=True), 200),
            ("POST", CHAT, {"messages": []}, 400),
            ("POST", CHAT, chat(metadata={"a": "x" * 5000}), 413),
            ("GET", "/v1/models", None, 200),
            ("GET", "/nowhere", None, 404),
            ("PATCH", CHAT, {}, 405),
        ]
        for method, path, body, status in asked:
            async with http.request(method, path, json=body, headers={"Origin": ORIGIN}) as answer:
                await answer.read()
                assert answer.status == status, path
                assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
                assert "x-request-id" in names(answer.headers["Access-Control-Expose-Headers"])
                assert "origin" in varies(answer)
            for headers in ({"Origin": OTHER}, {}):
                async with http.request(method, path, json=body, headers=headers) as answer:
                    await answer.read()
                    foreign = bool(headers) and method != "GET"
                    assert answer.status == (403 if foreign else status), path
                    assert not [name for name in answer.headers if name.lower().startswith("access-control")]
                    assert "origin" in varies(answer), "a cache must not give it to others"


async def test_refusals_tell_it_too(cluster: Cluster) -> None:
    """Also those of keys and of a router that is full; the latter says when to come again."""

    async def refused(status: int, body: dict[str, Any], **options: Any) -> set[str]:
        async with (
            cluster.serving(allowed_origins=("*",), **options),
            open_http(cluster) as http,
            http.post(CHAT, json=body, headers={"Origin": OTHER}) as answer,
        ):
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (status, "*")
            assert "origin" not in varies(answer)
            return names(answer.headers["Access-Control-Expose-Headers"])

    assert "x-request-id" in await refused(401, chat(), api_keys="k" * 40)
    assert "x-request-id" in await refused(503, chat(max_tokens=2), no_worker_grace=0.05)
    prefill, _ = await cluster.prefill(), await cluster.decode()
    prefill.before_first.append(after(600))
    async with cluster.serving(allowed_origins=("*",), max_inflight=1, max_waiting=0), open_http(cluster) as http:
        first = asyncio.create_task(http.post(CHAT, json=chat()))
        await until(lambda: bool(prefill.requests), "the first one is being served")
        async with http.post(CHAT, json=chat(), headers={"Origin": OTHER}) as answer:
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (429, "*")
            assert {"retry-after", "x-request-id"} <= names(answer.headers["Access-Control-Expose-Headers"])
        first.cancel()
        await asyncio.wait((first,))


async def test_nobody_by_default(cluster: Cluster) -> None:
    async with cluster.serving(), open_http(cluster) as http:
        async with http.options(CHAT, headers=PREFLIGHT) as answer:
            assert answer.status == 405
            assert not [name for name in answer.headers if name.lower().startswith("access-control")]
        async with http.get("/v1/models", headers={"Origin": ORIGIN}) as answer:
            assert "Access-Control-Allow-Origin" not in answer.headers
            assert "Vary" not in answer.headers


def test_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (
        ('["*"]', ("*",)),
        ('["https://a.example", "http://localhost:3000"]', ("https://a.example", "http://localhost:3000")),
        ("https://a.example, http://[::1]:3000", ("https://a.example", "http://[::1]:3000")),
        ("chrome-extension://abcdef", ("chrome-extension://abcdef",)),
        ("[]", ()),
    ):
        assert allowed_origins(text) == expected
        assert parse_config(["--model", "m", "--allowed-origins", text]).allowed_origins == expected
        assert options_of(parser().parse_args(["up", "--allowed-origins", text])).router.allowed_origins == expected
    assert parse_config(["--model", "m"]).allowed_origins == ()
    monkeypatch.setenv("TWOSTEP_ALLOWED_ORIGINS", '["https://b.example"]')
    assert parse_config(["--model", "m"]).allowed_origins == ("https://b.example",)
    for wrong in ("https://a.example/", "a.example", '["https://a.example"', "[1]", "null", "https://A.example"):
        with pytest.raises(argparse.ArgumentTypeError):
            allowed_origins(wrong)
