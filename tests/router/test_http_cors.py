"""Pages of other origins in a browser: what they are told, and that nobody else's are."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import aiohttp
import pytest
from http_fakes import CHAT, chat, open_http, refused, served
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


def names(answer: aiohttp.ClientResponse, header: str) -> set[str]:
    """Returns the names in its headers of that name."""
    return {name.strip().lower() for value in answer.headers.getall(header, []) for name in value.split(",")}


@pytest.mark.parametrize("allowed", [(ORIGIN, "http://localhost:5173"), ("*",)])
async def test_a_preflight_needs_no_key(cluster: Cluster, allowed: tuple[str, ...]) -> None:
    async with cluster.serving(allowed_origins=allowed, api_keys="k" * 40), open_http(cluster) as http:
        async with http.options(CHAT, headers=PREFLIGHT) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == ("*" if allowed == ("*",) else ORIGIN)
            assert {"authorization", "content-type", "x-stainless-os"} <= names(answer, "Access-Control-Allow-Headers")
            assert {"get", "post", "delete"} <= names(answer, "Access-Control-Allow-Methods")
            assert "Access-Control-Allow-Credentials" not in answer.headers
            assert ("origin" in names(answer, "Vary")) == (allowed != ("*",))
        async with http.options(CHAT, headers={**PREFLIGHT, "Access-Control-Request-Headers": "x y;z"}) as answer:
            assert answer.headers["Access-Control-Allow-Headers"] == "Authorization, Content-Type"
        async with http.options(CHAT, headers={"Origin": ORIGIN}) as answer:
            assert answer.status != 204, "it is no preflight"


async def test_every_answer_tells_the_page(cluster: Cluster) -> None:
    asked: list[tuple[str, str, Any, int]] = [
        ("POST", CHAT, chat(max_tokens=2), 200),
        ("POST", CHAT, chat(max_tokens=2, stream=True), 200),
        ("POST", CHAT, {"messages": []}, 400),
        ("GET", "/nowhere", None, 404),
    ]
    async with served(cluster, allowed_origins=(ORIGIN,)) as http:
        for method, path, body, status in asked:
            for headers in ({"Origin": ORIGIN}, {"Origin": OTHER}, {}):
                async with http.request(method, path, json=body, headers=headers) as answer:
                    await answer.read()
                    assert answer.status == (403 if headers == {"Origin": OTHER} and method != "GET" else status), path
                    assert "origin" in names(answer, "Vary"), "a cache must not give it to others"
                    if headers == {"Origin": ORIGIN}:
                        assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
                        assert "x-request-id" in names(answer, "Access-Control-Expose-Headers")
                    else:
                        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


async def test_refusals_tell_it_too(cluster: Cluster) -> None:
    """Also those of keys and of a router that is full; the latter says when to come again."""

    async def check(http: aiohttp.ClientSession, status: int, shown: set[str]) -> None:
        async with http.post(CHAT, json=chat(), headers={"Origin": OTHER}) as answer:
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (status, "*")
            assert "origin" not in names(answer, "Vary")
            assert shown <= names(answer, "Access-Control-Expose-Headers")

    async with cluster.serving(allowed_origins=("*",), api_keys="k" * 40), open_http(cluster) as http:
        await check(http, 401, {"x-request-id"})
    prefill, _ = await cluster.prefill(), await cluster.decode()
    prefill.before_first.append(after(600))
    async with served(cluster, allowed_origins=("*",), max_inflight=1, max_waiting=0) as http:
        first = asyncio.create_task(http.post(CHAT, json=chat()))
        await until(lambda: bool(prefill.requests), "the first one is being served")
        await check(http, 429, {"retry-after", "x-request-id"})
        first.cancel()
        await asyncio.wait((first,))


async def test_nobody_by_default(cluster: Cluster) -> None:
    async with cluster.serving(), open_http(cluster) as http:
        async with http.options(CHAT, headers=PREFLIGHT) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (403, "origin_not_allowed")
            assert ORIGIN in error["message"]
            assert "--allowed-origins" in error["message"]
            assert not [name for name in answer.headers if name.lower().startswith("access-control")]
        assert (await refused(http, CHAT, chat(), 403, headers={"Origin": ORIGIN}))["code"] == "origin_not_allowed"


def test_the_flag() -> None:
    for text, expected in (
        ('["*"]', ("*",)),
        ('["https://a.example", "http://localhost:3000"]', ("https://a.example", "http://localhost:3000")),
        ("https://a.example, http://[::1]:3000", ("https://a.example", "http://[::1]:3000")),
        ("chrome-extension://abcdef", ("chrome-extension://abcdef",)),
        ("[]", ()),
    ):
        assert parse_config(["--model", "m", "--allowed-origins", text]).allowed_origins == expected
        assert options_of(parser().parse_args(["up", "--allowed-origins", text])).router.allowed_origins == expected
    for wrong in ("https://a.example/", "a.example", '["https://a.example"', "[1]", "null", "https://A.example"):
        with pytest.raises(argparse.ArgumentTypeError):
            allowed_origins(wrong)
