"""What the HTTP front says of the router itself; how it counts requests; HTTPS, and whose certificate is asked for."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from pathlib import Path

import aiohttp
import pytest
from router_fakes import Cluster, Script, until

from router.config import RouterConfig
from router.http.server import ssl_context
from twostep.errors import SetupError
from twostep.metrics.process import package_version
from twostep.rpc.channel import TlsFiles, open_channel
from twostep.rpc.v1 import inference_pb2, inference_pb2_grpc


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


@pytest.mark.parametrize("with_ca", [False, True])
async def test_certificates(cluster: Cluster, self_signed: tuple[Path, Path], with_ca: bool) -> None:
    cert, key = self_signed
    stranger = ssl.create_default_context(cafile=cert)
    known = ssl.create_default_context(cafile=cert)
    await asyncio.to_thread(known.load_cert_chain, cert, key)
    async with cluster.serving(tls=TlsFiles(cert=cert, key=key, ca=cert if with_ca else None)), aiohttp.ClientSession() as http:
        url = f"https://127.0.0.1:{cluster.router.http_port}/v1/models"
        async with http.get(url, ssl=known) as answer:
            assert (await answer.json())["data"][0]["id"] == "m"
        if with_ca:
            with pytest.raises(aiohttp.ClientError):
                await http.get(url, ssl=stranger)
        else:
            async with http.get(url, ssl=stranger) as answer:
                assert answer.status == 200


async def test_clients_without_certificates_where_workers_need_them(cluster: Cluster, self_signed: tuple[Path, Path]) -> None:
    cert, key = self_signed
    stranger = ssl.create_default_context(cafile=cert)
    tls = TlsFiles(cert=cert, key=key, ca=cert)
    async with cluster.serving(tls=tls, tls_client_auth="none"), aiohttp.ClientSession() as http:
        async with http.get(f"https://127.0.0.1:{cluster.router.http_port}/v1/models", ssl=stranger) as answer:
            assert answer.status == 200
        async with open_channel(f"127.0.0.1:{cluster.router.port}", tls=TlsFiles(ca=cert)) as channel:
            models = await inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=30)
            assert models.models[0].name == "m"


def test_an_authority_alone_serves_nothing(self_signed: tuple[Path, Path]) -> None:
    for told in ("require", "none"):
        config = RouterConfig(model=Path(), tls=TlsFiles(ca=self_signed[0]), tls_client_auth=told)
        assert config.front_tls.ca == self_signed[0], "and so the server refuses to start"


def test_files_that_are_no_certificates(tmp_path: Path, self_signed: tuple[Path, Path]) -> None:
    cert, key = self_signed
    bad = tmp_path / "bad.pem"
    bad.write_text("this is no certificate")
    for files in (TlsFiles(cert=bad, key=key), TlsFiles(cert=cert, key=key, ca=bad)):
        with pytest.raises(SetupError, match="--tls"):
            ssl_context(files)
