"""HTTPS, and whose certificate is asked for."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest
from router_fakes import Cluster

from router.config import RouterConfig
from router.http.server import ssl_context
from twostep.errors import SetupError
from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import inference_pb2, inference_pb2_grpc
from twostep.settings.tls import TlsFiles


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
