"""HTTP requests in the metrics: a label has the values of the route table, whatever clients ask for."""

from __future__ import annotations

import asyncio
import re
import time

import aiohttp
from router_fakes import Cluster, Script, until

COUNT = re.compile(r'twostep_http_requests_total\{handler="(.+)",method="(.+)",status="(.+)"\} (\d+)')
OPEN = re.compile(r'twostep_http_open_streams\{handler="(.+)"\} (\d+)')


async def scrape(http: aiohttp.ClientSession) -> tuple[dict[tuple[str, str, str], int], dict[str, int]]:
    async with http.get("/metrics") as answer:
        text = await answer.text()
    counts = {(m[1], m[2], m[3]): int(m[4]) for m in re.finditer(COUNT, text.replace(".0", ""))}
    return counts, {m[1]: int(m[2]) for m in re.finditer(OPEN, text.replace(".0", ""))}


async def test_requests_are_counted_by_route_and_class_of_status(cluster: Cluster) -> None:
    async with cluster.serving(), aiohttp.ClientSession(f"http://127.0.0.1:{cluster.router.http_port}") as http:
        for method, path in (
            ("GET", "/health"),
            ("GET", "/v1/models/one"),
            ("GET", "/v1/models/two"),
            ("GET", "/nowhere"),
            ("GET", "/else/where"),
            ("PROPFIND", "/health"),
            ("GET", "/ready"),
            ("POST", "/v1/chat/completions"),
        ):
            async with http.request(method, path) as answer:
                await answer.read()
        counts, streams = await scrape(http)
    assert counts == {
        ("/health", "GET", "2xx"): 1,
        ("/v1/models/{model}", "GET", "4xx"): 2,
        ("other", "GET", "4xx"): 2,
        ("other", "other", "4xx"): 1,
        ("/ready", "GET", "5xx"): 1,
        ("/v1/chat/completions", "POST", "4xx"): 1,
    }
    assert streams == {}


async def test_open_streams_are_a_gauge_and_a_client_that_goes_away_a_status(cluster: Cluster) -> None:
    await cluster.prefill()
    worker = await cluster.decode()
    worker.script = Script(step_s=600.0, once=False)
    body = {"model": "m", "prompt": "the capital of France", "stream": True, "max_tokens": 400, "ignore_eos": True}
    async with cluster.serving(), aiohttp.ClientSession(f"http://127.0.0.1:{cluster.router.http_port}") as http:
        async with http.post("/v1/completions", json=body) as first, http.post("/v1/completions", json=body) as second:
            assert (await first.content.readany())[:5] == (await second.content.readany())[:5] == b"data:"
            assert (await scrape(http))[1] == {"/v1/completions": 2}
            # Both are cut.
            first.close()
            second.close()

        def closed() -> bool:
            return not cluster.held()

        await until(closed, "the requests are over")
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            counts, streams = await scrape(http)
            if streams == {"/v1/completions": 0}:
                break
            await asyncio.sleep(0.02)
        assert streams == {"/v1/completions": 0}
        assert counts["/v1/completions", "POST", "cancelled"] == 2
        async with http.post("/v1/completions", json=body | {"max_tokens": 2}) as third:
            assert (await third.read()).endswith(b"[DONE]\n\n")
        counts, streams = await scrape(http)
    assert streams == {"/v1/completions": 0}
    assert counts["/v1/completions", "POST", "2xx"] == 1
