"""TLS of the server every process uses: both sides show certificates; the health port stays plaintext."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twostep.errors import SetupError
from twostep.rpc.channel import open_channel
from twostep.rpc.server import GrpcServer, ServerConfig
from twostep.settings.tls import PLAINTEXT, TlsFiles

CHECK = health_pb2.HealthCheckRequest(service="liveness")


@pytest.fixture
def certificate(self_signed: tuple[Path, Path]) -> TlsFiles:
    cert, key = self_signed
    return TlsFiles(cert=cert, key=key, ca=cert)


async def test_both_sides_show_certificates(certificate: TlsFiles) -> None:
    server = GrpcServer(ServerConfig(tls=certificate))
    port = await server.start()
    async with open_channel(f"127.0.0.1:{port}", tls=certificate) as channel:
        assert (await health_pb2_grpc.HealthStub(channel).Check(CHECK, timeout=30)).status == health_pb2.HealthCheckResponse.SERVING
    for refused in (TlsFiles(ca=certificate.ca), PLAINTEXT):
        async with open_channel(f"127.0.0.1:{port}", tls=refused) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(CHECK, timeout=30)
    async with open_channel(f"127.0.0.1:{server.health_port}") as plain:
        assert (await health_pb2_grpc.HealthStub(plain).Check(CHECK, timeout=30)).status == health_pb2.HealthCheckResponse.SERVING
    await server.drain(0)


async def test_a_peer_is_known_by_its_name_at_whatever_address(certificate: TlsFiles) -> None:
    server = GrpcServer(ServerConfig(tls=certificate))
    port = await server.start()
    # The certificate knows 127.0.0.1 too: only the name that is asked for may count.
    async with open_channel(f"127.0.0.1:{port}", tls=replace(certificate, peer_name="localhost")) as channel:
        assert (await health_pb2_grpc.HealthStub(channel).Check(CHECK, timeout=30)).status == health_pb2.HealthCheckResponse.SERVING
    async with open_channel(f"127.0.0.1:{port}", tls=replace(certificate, peer_name="stranger")) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await health_pb2_grpc.HealthStub(channel).Check(CHECK, timeout=30)
    await server.drain(0)


async def test_files_that_are_no_certificates_are_setup_errors(tmp_path: Path, certificate: TlsFiles) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("this is no certificate")
    server = GrpcServer(ServerConfig(tls=TlsFiles(cert=bad, key=certificate.key)))
    with pytest.raises(SetupError, match="--tls-cert"):
        await server.start()
    await server.drain(0)
