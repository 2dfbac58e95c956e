"""Runs what the benchmarks of the router share: a real router process on a core of its own, between fake workers and a load client.

    workers     processes of router_workers.py, with Redis beside them
    router      `python -P -m router`, as deployed
    client      a process of router_load.py, which keeps the bytes it is sent and looks at them after the measurement: every token of every
                answer must be the right one, once, in order, and the text that of all of them; or, for one request at a time, this process

The router has the first core to itself; everything else runs on the last one, unless a benchmark of several routers says other `Cores`.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from redis.asyncio import Redis
from router_helper import ROOT, BenchHelper, Reply, cpu_s
from router_place import AnswerStream, RigFiles, encode_request

from twostep.cluster.records import WorkerRecord, worker_key
from twostep.local.redis_server import server_argv, server_binary, socket_path
from twostep.rpc.channel import channel_options
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, prefill_pb2, prefill_pb2_grpc

CORES = sorted(os.sched_getaffinity(0))
FIRST_CORE, LAST_CORE = CORES[0], CORES[-1]
# From when workers send to when it counts, and what it may take until everybody has been told to begin and to end.
_SETTLE_S, _SLACK_S = 0.5, 0.5


@dataclass(frozen=True, kw_only=True)
class Pace:
    """`step_s`: from one step of a decode worker to the next."""

    num_decode: int
    step_s: float
    prefill_s: float = 0.0
    num_prefill: int = 1

    @property
    def names(self) -> list[str]:
        return [*(f"p{i}" for i in range(self.num_prefill)), *(f"d{i}" for i in range(self.num_decode))]


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Says where processes run; those of one kind take its cores in turn. As many processes of fake workers as cores for them, at most."""

    routers: Sequence[int] = (FIRST_CORE,)
    workers: Sequence[int] = (LAST_CORE,)
    clients: Sequence[int] = (LAST_CORE,)
    rest: int = LAST_CORE


@dataclass(frozen=True)
class RouterProcess:
    port: int
    pid: int

    def cpu_s(self) -> float:
        """User and system time of all its threads so far."""
        return cpu_s(self.pid)


class Workers:
    """A prefill and a decode worker as a router calls them, one request at a time."""

    def __init__(self, to_prefill: grpc.aio.Channel, to_decode: grpc.aio.Channel) -> None:
        self._prefill = prefill_pb2_grpc.PrefillStub(to_prefill)
        self._decode = decode_pb2_grpc.DecodeStub(to_decode)

    async def first_token_s(self, token_ids: Sequence[int]) -> float:
        """Seconds from nothing to the first token, the first two of a router's calls between: Reserve and Run."""
        name, sampling = secrets.token_hex(16), inference_pb2.SamplingParams(max_tokens=2)
        began = time.monotonic()
        reserve = decode_pb2.ReserveRequest(request_id=name, attempt=1, token_ids=token_ids, sampling=sampling)
        await self._decode.Reserve(reserve, timeout=10)
        call = self._prefill.Run(prefill_pb2.PrefillRequest(request_id=name, attempt=1, token_ids=token_ids, sampling=sampling), timeout=10)
        while isinstance(event := await call.read(), prefill_pb2.PrefillEvent) and not event.HasField("first_token"):
            pass
        took = time.monotonic() - began
        call.cancel()
        await self._decode.Cancel(decode_pb2.CancelRequest(request_id=name, attempt=1), timeout=10)
        return took


@dataclass(eq=False)
class Rig:
    place: RigFiles
    cores: Cores = field(default_factory=Cores)
    workers: list[BenchHelper] = field(default_factory=list)  # the processes of fake workers
    clients: list[BenchHelper] = field(default_factory=list)
    _num_routers: int = 0
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def spawn(self, argv: Sequence[str], core: int) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
        self._children.append(child)
        return child

    async def add_router(self, *flags: str) -> RouterProcess:
        """Returns once it answers. Raises AioRpcError: it has ended, or does not answer within 30 s."""
        port, place = free_port(), self.place
        argv = (
            *(sys.executable, "-P", "-m", "router", "--host", "127.0.0.1", "--grpc-port", str(port), "--health-port", "-1"),
            *("--model", str(place.model), "--served-model-name", "m", "--load-format", "dummy", "--secret-file", str(place.secret)),
            *(
                "--redis-url",
                place.redis_url,
                "--metrics-port",
                "-1",
                "--log-level",
                "warning",
                "--max-inflight",
                "4096",
                *flags,
            ),
        )
        child = self.spawn(argv, self.cores.routers[self._num_routers % len(self.cores.routers)])
        self._num_routers += 1
        router = RouterProcess(port, child.pid)
        request = encode_request([1, 2, 3], num_tokens=2)
        give_up = time.monotonic() + 30
        while True:
            try:
                async with open_client(port) as client:
                    await client.ask(request)
                return router
            except grpc.aio.AioRpcError:
                if time.monotonic() > give_up or child.poll() is not None:
                    raise
                await asyncio.sleep(0.2)

    @asynccontextmanager
    async def streams(self, loads: Sequence[tuple[BenchHelper, Mapping[str, object]]]) -> AsyncIterator[list[Reply]]:
        """Decode workers hold their tokens until all streams of all clients' loads (Load.start's words) have begun, so that all of them run
        together while the body is executed. What comes within it is counted; the list then has the replies of Load.finish."""
        replies: list[Reply] = []
        clients = [client for client, _ in loads]
        await self.hold(True)
        await asyncio.gather(*(client.ask("start", **load) for client, load in loads))
        await self.hold(False)
        await asyncio.sleep(_SETTLE_S)
        await asyncio.gather(*(client.ask("mark") for client in clients))
        yield replies
        marks = await asyncio.gather(*(client.ask("mark") for client in clients))
        assert not any(mark["ended"] for mark in marks), "answers ended while they were measured; more tokens for each"
        replies += await asyncio.gather(*(client.ask("finish") for client in clients))

    async def hold(self, held: bool) -> None:
        await asyncio.gather(*(worker.ask("hold", held=held) for worker in self.workers))

    async def add_client(self, script: str) -> BenchHelper:
        """Starts a load client: router_load.py or http_load.py."""
        core = self.cores.clients[len(self.clients) % len(self.cores.clients)]
        client = await BenchHelper.start(script, script, str(self.place.directory), core=core)
        self.clients.append(client)
        return client

    @asynccontextmanager
    async def open_workers(self) -> AsyncIterator[Workers]:
        """The first pair of them, called directly."""
        async with Redis.from_url(self.place.redis_url) as redis:
            prefill, decode = [WorkerRecord.from_json(await redis.get(worker_key(name)) or b"") for name in ("p0", "d0")]
        options = channel_options()
        async with (
            grpc.aio.insecure_channel(prefill.address, options=options) as to_prefill,
            grpc.aio.insecure_channel(decode.address, options=options) as to_decode,
        ):
            yield Workers(to_prefill, to_decode)

    async def open(self, pace: Pace) -> None:
        """Redis and workers."""
        self.spawn(server_argv(server_binary(), self.place.directory), self.cores.rest)
        await until(socket_path(self.place.directory).exists)
        words = (str(self.place.directory), str(pace.step_s), str(pace.prefill_s))
        cores = self.cores.workers[: len(pace.names)]
        for i, core in enumerate(cores):
            names = pace.names[i :: len(cores)]
            self.workers.append(await BenchHelper.start(f"workers {i}", "router_workers.py", *words, *names, core=core))
        await self.hold(False)

    async def close(self) -> None:
        # The router first, so that nothing is said of workers that go.
        for child in reversed(self._children[1:]):
            _end(child)
        await asyncio.gather(*(helper.close() for helper in reversed([*self.workers, *self.clients])))
        for child in self._children[:1]:
            _end(child)


@asynccontextmanager
async def rig(pace: Pace, *, tokenizer: Path | None = None, cores: Cores | None = None) -> AsyncIterator[Rig]:
    """Workers and Redis, without a router or a client yet. This process moves to the core for the rest."""
    cores = cores or Cores()
    os.sched_setaffinity(0, {cores.rest})
    with tempfile.TemporaryDirectory() as directory:
        place = RigFiles(Path(directory))
        place.fill(tokenizer)
        all_of_it = Rig(place, cores)
        try:
            await all_of_it.open(pace)
            yield all_of_it
        finally:
            await all_of_it.close()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RigClient:
    """One request at a time, as an application would send it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/twostep.v1.Inference/Generate")

    async def ask(self, request: bytes) -> AnswerStream:
        stream = AnswerStream(sent_at=time.monotonic())
        call = self._generate(request, timeout=600)
        async for message in call:
            if not stream.messages:
                stream.first_at = time.monotonic()
            stream.messages.append(message)
        return stream


@asynccontextmanager
async def open_client(port: int) -> AsyncIterator[RigClient]:
    """With a connection of its own."""
    options = channel_options()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield RigClient(channel)


async def until(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"not within {timeout_s:g} s"
        await asyncio.sleep(0.01)


def tokens_for(seconds: float, step_s: float) -> int:
    """Returns the fewest tokens of an answer that does not end within so many seconds of Rig.streams."""
    return math.ceil((seconds + _SETTLE_S + _SLACK_S) / step_s)


def busy() -> str:
    return f"load average {os.getloadavg()[0]:.1f}"
