"""Probing many prefill workers at once: some frozen, more than there is room for. Real gRPC; the transport is one within the process."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from one_sided import OneSidedHub, OneSidedTransport
from worker_harness import until

from decode_worker.paths import Paths
from decode_worker.peers import Peers, Source
from kv_transfer.telemetry import ProbeResult, TransferTelemetry
from kv_transfer.transport import ProbeTiming
from kv_transfer.transports import Transports
from twostep.errors import ResourceExhausted
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.call_signing import CallSigner
from twostep.rpc.server import server_options
from twostep.rpc.v1 import kv_pb2, kv_pb2_grpc
from twostep.settings.tls import TlsFiles

NAME = "one_sided"


class Transport(OneSidedTransport):
    """Endpoints say how a probe goes."""

    def __init__(self) -> None:
        super().__init__(None, 1, OneSidedHub(), worker_id="d")  # type: ignore[arg-type]
        self.refused: Counter[str] = Counter()

    async def probe(self, endpoint: str, *, deadline: float) -> ProbeTiming:
        if endpoint.startswith("frozen"):
            await asyncio.sleep(3600)
        if endpoint.startswith("full") and not self.refused[endpoint]:
            self.refused[endpoint] += 1
            raise ResourceExhausted("no room in the ring")
        return ProbeTiming(num_bytes=1000, seconds=1e-3)


class Kv(kv_pb2_grpc.KvServicer):
    """The Kv service of all prefill workers at once: a worker's endpoint is its name."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    async def Probe(self, request: kv_pb2.ProbeRequest, context: Any) -> kv_pb2.ProbeResponse:
        self.asked[request.worker_id] += 1
        return kv_pb2.ProbeResponse(paths=[kv_pb2.ProbeResponse.Path(transport=NAME, endpoint=request.worker_id)])


class World:
    def __init__(self, paths: Paths, kv: Kv, port: int) -> None:
        self.paths, self.kv, self.port = paths, kv, port

    def source(self, name: str, port: int | None = None) -> Source:
        return Source(worker_id=name, epoch=1, address=f"127.0.0.1:{port or self.port}")

    def works(self, name: str) -> bool:
        return any(result.worker_id == name and result.usable for result in self.paths.results)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch, patient_paths: None) -> None:
    """Gives workers on a busy machine time to answer: asking twice would count here."""
    monkeypatch.setattr("decode_worker.paths._ASK_S", 600.0)
    monkeypatch.setattr("decode_worker.paths._PROBE_S", 600.0)


@asynccontextmanager
async def made() -> AsyncIterator[World]:
    transports, peers = Transports([Transport()]), Peers(TlsFiles(), CallSigner(DeploymentSecret(b"secret of a deployment"), "d"))
    kv = Kv()  # type: ignore[abstract]  # what it lacks is not asked for
    await transports.start()
    server = grpc.aio.server(options=server_options())
    kv_pb2_grpc.add_KvServicer_to_server(kv, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    paths = Paths(transports, peers, DeploymentSecret(b"secret of a deployment"), TransferTelemetry())
    try:
        yield World(paths, kv, port)
    finally:
        await paths.close()
        await peers.close()
        await server.stop(0)
        await transports.close()


@pytest.fixture
def frozen_ports() -> Iterator[list[int]]:
    """Connections are taken, by the kernel, and nothing is ever answered."""
    with ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(8)]
        yield [listener.getsockname()[1] for listener in listening]


async def test_frozen_prefill_workers_do_not_hold_up_probing_the_others(frozen_ports: list[int]) -> None:
    async with made() as world:
        for number, port in enumerate(frozen_ports):
            world.paths.learn(world.source(f"silent-{number}", port))
        # These freeze once they have answered.
        world.paths.learn(world.source("frozen-0"))
        world.paths.learn(world.source("frozen-1"))
        world.paths.learn(world.source("live"))
        await until(lambda: world.works("live"))


async def test_looking_at_more_workers_than_there_is_room_for_probes_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.paths._MAX_SOURCES", 4)
    async with made() as world:
        names = [f"p{number}" for number in range(6)]
        for _ in range(3):
            for name in names:
                world.paths.learn(world.source(name))
            await until(lambda: all(world.works(name) for name in names[:4]))
        assert world.kv.asked == Counter(names[:4])
        # A ticket makes room for its source.
        await world.paths.offered(world.source("p5"))
        assert world.works("p5")
        assert len(world.paths.results) == 4
        # And one that is gone leaves some.
        await world.paths.forget([("p5", 1)])
        world.paths.learn(world.source("p4"))
        await until(lambda: world.works("p4"))


async def test_a_probe_without_room_says_nothing_of_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[ProbeResult] = []
    monkeypatch.setattr(TransferTelemetry, "probe", lambda _, result: stored.append(result))
    async with made() as world:
        world.paths.learn(world.source("full-0"))
        await until(lambda: world.works("full-0"))
        assert [result.usable for result in stored] == [True]
        assert world.kv.asked["full-0"] == 2


async def test_a_channel_asked_for_while_others_are_closed_is_an_open_one(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(TlsFiles(), CallSigner(DeploymentSecret(b"secret of a deployment"), "d"))
    may_close = asyncio.Event()
    closed: list[grpc.aio.Channel] = []

    def slow_to_close(channel: grpc.aio.Channel) -> None:
        close = channel.close

        async def closing() -> None:
            await may_close.wait()
            closed.append(channel)
            await close()

        monkeypatch.setattr(channel, "close", closing)

    for address in ("a:1", "b:1"):
        async with peers.channel(Source(worker_id="p", epoch=1, address=address)) as channel:
            slow_to_close(channel)
    ending = asyncio.create_task(peers.close())
    await asyncio.sleep(0)
    async with peers.channel(Source(worker_id="p", epoch=1, address="b:1")) as again:
        may_close.set()
        await ending
        assert len(closed) == 2
        assert again not in closed
    await peers.close()
