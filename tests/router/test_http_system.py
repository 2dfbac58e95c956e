"""Tests of what the HTTP front says of the router itself, its counts of requests, HTTPS, and whose certificate is asked for."""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import nullcontext
from pathlib import Path

import aiohttp
import pytest
from http_fakes import open_http, refused, served, told
from router_fakes import Cluster, Script, until

from router.config import RouterConfig
from router.http.server import ssl_context
from twostep.errors import SetupError
from twostep.metrics.process import package_version
from twostep.rpc.channel import TlsFiles, open_channel
from twostep.rpc.v1 import inference_pb2, inference_pb2_grpc


async def test_health_version_models_and_metrics(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    assert await told(http, "/health") == {"status": "ok"}
    assert await told(http, "/version") == {"version": package_version()}
    (model,) = (await told(http, "/v1/models"))["data"]
    assert (model["id"], model["object"]) == ("m", "model")
    assert await told(http, "/v1/models/m") == model
    async with http.get("/metrics") as answer:
        assert 'twostep_process_info{role="router"' in await answer.text()


async def test_failures_look_like_openais_and_are_counted_by_route(cluster: Cluster) -> None:
    async with cluster.serving(), open_http(cluster) as http:
        for method, path, status, kind in (
            ("GET", "/v1/models/other", 404, "not_found_error"),
            ("GET", "/v1/models/another", 404, "not_found_error"),
            ("GET", "/nowhere", 404, "not_found_error"),
            ("PROPFIND", "/health", 405, "invalid_request_error"),
            ("GET", "/ready", 503, "server_error"),
            ("POST", "/v1/chat/completions", 415, "invalid_request_error"),
        ):
            assert (await refused(http, path, None, status, method=method))["type"] == kind
        await told(http, "/health")
        counts, streams = await scrape(http)
    assert counts == {
        ("/health", "GET", "2xx"): 1,
        ("/v1/models/{model}", "GET", "4xx"): 2,
        ("other", "GET", "4xx"): 1,
        ("other", "other", "4xx"): 1,
        ("/ready", "GET", "5xx"): 1,
        ("/v1/chat/completions", "POST", "4xx"): 1,
    }
    assert streams == {}


COUNT = re.compile(r'twostep_http_requests_total\{handler="(.+)",method="(.+)",status="(.+)"\} (\d+)')
OPEN = re.compile(r'twostep_http_open_streams\{handler="(.+)"\} (\d+)')


async def scrape(http: aiohttp.ClientSession) -> tuple[dict[tuple[str, str, str], int], dict[str, int]]:
    async with http.get("/metrics") as answer:
        text = (await answer.text()).replace(".0", "")
    return {(m[1], m[2], m[3]): int(m[4]) for m in re.finditer(COUNT, text)}, {m[1]: int(m[2]) for m in re.finditer(OPEN, text)}


async def test_open_streams_are_a_gauge_and_a_client_that_goes_away_a_status(cluster: Cluster) -> None:
    await cluster.prefill()
    worker = await cluster.decode()
    worker.script = Script(step_s=600.0, once=False)
    body = {"model": "m", "prompt": "the capital of France", "stream": True, "max_tokens": 400, "ignore_eos": True}
    async with served(cluster) as http:
        async with http.post("/v1/completions", json=body) as first, http.post("/v1/completions", json=body) as second:
            assert (await first.content.readany())[:5] == (await second.content.readany())[:5] == b"data:"
            assert (await scrape(http))[1] == {"/v1/completions": 2}
            # Both are cut.
            first.close()
            second.close()
        await until(lambda: not cluster.held(), "the requests are over")
        async with asyncio.timeout(60):
            while (counted := await scrape(http))[1] != {"/v1/completions": 0}:
                pass
        assert counted[0]["/v1/completions", "POST", "cancelled"] == 2


@pytest.mark.parametrize(("with_ca", "client_auth"), [(False, "require"), (True, "require"), (True, "none")])
async def test_certificates(cluster: Cluster, self_signed: tuple[Path, Path], with_ca: bool, client_auth: str) -> None:
    """Clients show one where there is an authority, unless that is for workers alone."""
    cert, key = self_signed
    stranger = ssl.create_default_context(cafile=cert)
    known = ssl.create_default_context(cafile=cert)
    await asyncio.to_thread(known.load_cert_chain, cert, key)
    tls = TlsFiles(cert=cert, key=key, ca=cert if with_ca else None)
    async with cluster.serving(tls=tls, tls_client_auth=client_auth), aiohttp.ClientSession() as http:
        url = f"https://127.0.0.1:{cluster.router.http_port}/v1/models"
        assert (await told(http, url, ssl=known))["data"][0]["id"] == "m"
        needed = with_ca and client_auth == "require"
        with pytest.raises(aiohttp.ClientError) if needed else nullcontext():
            await told(http, url, ssl=stranger)
        if client_auth == "none":
            async with open_channel(f"127.0.0.1:{cluster.router.grpc_port}", tls=TlsFiles(ca=cert)) as channel:
                models = await inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=30)
                assert models.models[0].name == "m"


def test_files_that_are_no_certificates(tmp_path: Path, self_signed: tuple[Path, Path]) -> None:
    cert, key = self_signed
    bad = tmp_path / "bad.pem"
    bad.write_text("this is no certificate")
    for files in (TlsFiles(cert=bad, key=key), TlsFiles(cert=cert, key=key, ca=bad)):
        with pytest.raises(SetupError, match="--tls"):
            ssl_context(files)
    for told_to in ("require", "none"):
        config = RouterConfig(model=Path(), tls=TlsFiles(ca=cert), tls_client_auth=told_to)
        assert config.front_tls.ca == cert, "an authority alone: the server refuses to start"
