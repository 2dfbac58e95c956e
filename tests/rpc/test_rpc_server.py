"""The server every process uses: error table, undecodable messages, health, ports, drain."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from served import SOON_S, Prefill, Worker
from served import serving as served_by

from twostep.errors import STATUS, SetupError, TwostepError
from twostep.rpc.channel import error_from_rpc, open_channel
from twostep.rpc.health import READINESS
from twostep.rpc.server import GrpcServer, ServerConfig
from twostep.rpc.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostep.settings.tls import TlsFiles


@asynccontextmanager
async def serving(alive: Any = lambda: True) -> AsyncIterator[tuple[GrpcServer, Worker, Prefill, grpc.aio.Channel]]:
    async with served_by(alive=alive, max_message_bytes=1 << 20) as served, open_channel(served.address) as channel:
        yield served.server, served.worker, served.prefill, channel


@pytest.mark.parametrize("cls", list(STATUS))
async def test_every_error_of_the_tree_arrives_with_its_status_and_message(cls: type[TwostepError]) -> None:
    async with serving() as (_, stats, _, channel):
        stats.error = cls("do this")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).Stats(worker_pb2.WorkerStatsRequest())
        assert (caught.value.code().name, caught.value.details()) == (STATUS[cls].grpc, "do this")
        back = error_from_rpc(caught.value)
        assert STATUS[type(back)].grpc == STATUS[cls].grpc
        assert back.message == "do this"


async def test_an_unexpected_error_is_internal_with_a_reference_found_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (_, stats, _, channel):
        stats.error = KeyError("secret detail")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).Stats(worker_pb2.WorkerStatsRequest())
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        details = caught.value.details() or ""
        assert "secret detail" not in details
        assert details.split()[2].rstrip(";") in caplog.text


@pytest.mark.parametrize(("method", "stream"), [("/twostep.v1.Prefill/Run", True), ("/twostep.v1.Worker/Stats", False)])
async def test_undecodable_messages_are_invalid_arguments(method: str, stream: bool) -> None:
    # Field 1 of PrefillRequest is a string: 0xff 0xfe is no UTF-8. For Stats: a truncated varint.
    data = b"\x0a\x02\xff\xfe" if stream else b"\x08"
    async with serving() as (_, _, _, channel):
        call: Any = channel.unary_stream(method)(data).read() if stream else channel.unary_unary(method)(data)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "UTF-8" in (caught.value.details() or "")


async def test_oversized_messages_are_refused_and_the_server_goes_on() -> None:
    async with serving() as (server, _, _, channel):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=[("grpc.max_send_message_length", -1)]) as big:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await big.unary_unary("/twostep.v1.Worker/Stats")(b"\x0a" * (2 << 20))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await worker_pb2_grpc.WorkerStub(channel).Stats(worker_pb2.WorkerStatsRequest())).worker_id == "w"


async def test_streams_deliver_then_fail_with_status() -> None:
    async with serving() as (_, _, prefill, channel):
        call = prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.PrefillRequest())
        assert [(await call.read()).done.chunks for _ in range(3)] == [1, 1, 1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert prefill.closed.is_set()


@pytest.mark.parametrize("kind", ["hang", "flood"])
async def test_a_cancelled_stream_runs_the_handlers_finally_at_once(kind: str) -> None:
    """Returns whether the handler waits for something of its own or for a client that does not read."""
    async with serving() as (_, _, prefill, channel):
        call = prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.PrefillRequest(request_id=kind))
        await call.read()
        if kind == "hang":
            await asyncio.wait_for(prefill.hanging.wait(), SOON_S)
        else:
            await at_rest(prefill)
        call.cancel()
        await asyncio.wait_for(prefill.closed.wait(), SOON_S)


async def at_rest(prefill: Prefill) -> None:
    """Until it waits for its client to read what was sent."""
    async with asyncio.timeout(SOON_S):
        before = 0
        while not before or prefill.num_sent != before:
            before = prefill.num_sent
            await asyncio.sleep(0.1)


async def test_health_separates_liveness_from_readiness_on_both_ports() -> None:
    alive = True
    async with serving(lambda: alive) as (server, _, _, channel), open_channel(f"127.0.0.1:{server.health_port}") as health_only:

        async def ask(service: str, on: grpc.aio.Channel) -> int:
            return (await health_pb2_grpc.HealthStub(on).Check(health_pb2.HealthCheckRequest(service=service))).status

        serving_, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for on in (channel, health_only):
            assert [await ask(s, on) for s in ("liveness", READINESS, "")] == [serving_, not_serving, not_serving]
        server.health.set(READINESS, True)
        for on in (channel, health_only):
            assert [await ask(s, on) for s in ("liveness", READINESS, "")] == [serving_] * 3
        alive = False
        assert [await ask(s, health_only) for s in ("liveness", READINESS, "")] == [not_serving, serving_, not_serving]
        with pytest.raises(grpc.aio.AioRpcError, match="no service 'other'"):
            await ask("other", channel)
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await worker_pb2_grpc.WorkerStub(health_only).Stats(worker_pb2.WorkerStatsRequest())


async def test_health_watch_reports_changes() -> None:
    async with serving() as (server, _, _, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        server.health.set(READINESS, True)
        assert (await asyncio.wait_for(watch.read(), SOON_S)).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


async def test_reflection_lists_the_services() -> None:
    async with serving() as (_, _, _, channel):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = {s.name for s in (await call.read()).list_services_response.service}
        assert {"twostep.v1.Worker", "twostep.v1.Prefill", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("flag", ["--grpc-port", "--health-port"])
async def test_a_port_in_use_names_the_port_and_the_flag(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = ServerConfig(port=port) if flag == "--grpc-port" else ServerConfig(health_port=port)
        server = GrpcServer(config)
        with pytest.raises(SetupError, match=rf"{port}.*{flag}"):
            await server.start()
        await server.drain(0)


async def test_drain_lets_running_calls_end_and_refuses_new_ones() -> None:
    async with serving() as (server, stats, _, channel):
        stub = worker_pb2_grpc.WorkerStub(channel)
        gate = stats.gate = asyncio.Event()
        running = asyncio.ensure_future(stub.Stats(worker_pb2.WorkerStatsRequest()))
        await asyncio.wait_for(stats.held.wait(), SOON_S)
        drain = asyncio.create_task(server.drain(1000))

        async def asked_until_refused() -> None:
            while True:
                try:
                    await stub.Stats(worker_pb2.WorkerStatsRequest())
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.CANCELLED:
                        raise

        # Calls that come before the drain has begun are answered, and at that very moment gRPC itself ends them.
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await asyncio.wait_for(asked_until_refused(), SOON_S)
        assert not running.done()
        gate.set()
        assert (await running).worker_id == "w"
        await asyncio.wait_for(drain, SOON_S)


async def test_what_a_drain_cuts_short_is_unavailable_and_not_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own end of a call looks to the caller as if the caller had ended it."""
    # However long they take to say so.
    monkeypatch.setattr("twostep.rpc.server._LAST_WORD_S", 1000.0)
    async with serving() as (server, stats, prefill, channel):
        stats.gate = asyncio.Event()
        unary = asyncio.ensure_future(worker_pb2_grpc.WorkerStub(channel).Stats(worker_pb2.WorkerStatsRequest()))
        stub = prefill_pb2_grpc.PrefillStub(channel)
        streams = [stub.Run(prefill_pb2.PrefillRequest(request_id="hang")) for _ in range(20)]
        for stream in streams:
            for _ in range(3):
                await stream.read()
        await asyncio.wait_for(stats.held.wait(), SOON_S)
        await asyncio.wait_for(server.drain(0.05), SOON_S)
        for call in (unary, *(stream.read() for stream in streams)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "this server is stopping; repeat the request on another"
        assert prefill.closed.is_set()


async def test_tls_files_that_are_missing_or_half_given_are_setup_errors(tmp_path: Any) -> None:
    with pytest.raises(SetupError, match="--tls-cert"):
        GrpcServer(ServerConfig(tls=TlsFiles(cert=tmp_path / "no.pem", key=tmp_path / "no.key")))
    with pytest.raises(SetupError, match="--tls-key"):
        GrpcServer(ServerConfig(tls=TlsFiles(cert=tmp_path / "no.pem")))
