"""What the HTTP front says of the router itself."""

from __future__ import annotations

import aiohttp
from router_fakes import Cluster

from twostep.metrics.process import package_version


async def test_health_version_models_and_metrics(cluster: Cluster) -> None:
    await cluster.prefill()
    await cluster.decode()
    async with cluster.serving(), aiohttp.ClientSession(f"http://127.0.0.1:{cluster.router.http_port}") as http:
        for path, wanted in (("/health", {"status": "ok"}), ("/version", {"version": package_version()})):
            async with http.get(path) as answer:
                assert (answer.status, await answer.json()) == (200, wanted)
        async with http.get("/v1/models") as answer:
            (model,) = (await answer.json())["data"]
        assert (model["id"], model["object"]) == ("m", "model")
        async with http.get("/v1/models/m") as answer:
            assert await answer.json() == model
        async with http.get("/metrics") as answer:
            assert 'twostep_process_info{role="router"' in await answer.text()


async def test_failures_look_like_openais(cluster: Cluster) -> None:
    async with cluster.serving(), aiohttp.ClientSession(f"http://127.0.0.1:{cluster.router.http_port}") as http:
        for path, method, status, kind in (
            ("/v1/models/other", "GET", 404, "not_found_error"),
            ("/nowhere", "GET", 404, "not_found_error"),
            ("/v1/models", "PATCH", 405, "invalid_request_error"),
            ("/ready", "GET", 503, "server_error"),
        ):
            async with http.request(method, path, headers={"x-request-id": "mine"}) as answer:
                assert answer.status == status, path
                assert answer.headers["x-request-id"] == "mine"
                error = (await answer.json())["error"]
                assert error["type"] == kind
                assert error["message"]
                assert set(error) == {"message", "type", "param", "code"}
