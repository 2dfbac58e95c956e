"""What the benchmarks of the router share: real router processes, each on a core of its choice, between fake workers and load clients.

    workers     processes of router_workers.py, with Redis beside them
    routers     `python -P -m router`, as deployed
    clients     processes of router_load.py, which keep the bytes they are sent and look at them after the measurement: every token of every
                answer must be the right one, once, in order, and the text that of all of them; or, for one request at a time, this process

Where nothing else is said, everything but the routers runs on the last core there is, the first router on the first one.
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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from redis.asyncio import Redis
from router_cores import CorePlan, cpu_s
from router_helper import ROOT, Helper, Reply
from router_place import Place, Stream, encode_request

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
    """`clients[i]` is that of router i; several routers may have the same one."""

    place: Place
    plan: CorePlan
    routers: list[RouterProcess] = field(default_factory=list)
    workers: list[Helper] = field(default_factory=list)
    clients: list[Helper] = field(default_factory=list)
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def spawn(self, argv: Sequence[str], core: int) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
        self._children.append(child)
        return child

    async def add_router(self, *flags: str) -> RouterProcess:
        """On the next core of the plan; returns once it answers. Raises AioRpcError: it has ended, or does not answer within 30 s."""
        port, place = _free_port(), self.place
        core = self.plan.routers[len(self.routers) % len(self.plan.routers)]
        argv = (
            *(sys.executable, "-P", "-m", "router", "--host", "127.0.0.1", "--port", str(port), "--health-port", "-1"),
            *("--model", str(place.model), "--served-model-name", "m", "--load-format", "dummy", "--secret-file", str(place.secret)),
            *(
                "--redis-url",
                place.redis_url,
                "--metrics-port",
                "-1",
                "--http-port",
                "-1",
                "--log-level",
                "warning",
                "--max-inflight",
                "4096",
                *flags,
            ),
        )
        child = self.spawn(argv, core)
        router = RouterProcess(port, child.pid)
        self.routers.append(router)
        # Others that are added at the same time are forked now, before gRPC has threads here.
        await asyncio.sleep(0)
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

    def redis_cpu_s(self) -> float:
        return cpu_s(self._children[0].pid)

    @asynccontextmanager
    async def streams(self, num_routers: int, *, streams: int, connections: int, num_tokens: int) -> AsyncIterator[list[Reply]]:
        """Decode workers hold their tokens until `streams` of each of the first routers have begun, so that all of them run together
        while the body is executed. What comes within it is counted; the list has it afterwards, a reply of Load.finish from each client."""
        ports: dict[Helper, list[int]] = {}
        for client, router in zip(self.clients, self.routers[:num_routers], strict=False):
            ports.setdefault(client, []).append(router.port)
        replies: list[Reply] = []
        await self.tell(self.workers, "hold", held=True)
        await asyncio.gather(
            *(client.ask("start", ports=p, streams=streams, connections=connections, num_tokens=num_tokens) for client, p in ports.items())
        )
        await self.tell(self.workers, "hold", held=False)
        await asyncio.sleep(_SETTLE_S)
        await self.tell(ports, "mark")
        yield replies
        marks = await self.tell(ports, "mark")
        assert not any(mark["ended"] for mark in marks), "answers ended while they were measured; more tokens for each"
        replies += await self.tell(ports, "finish")

    @staticmethod
    async def tell(helpers: Sequence[Helper] | dict[Helper, list[int]], command: str, **arguments: object) -> list[Reply]:
        return await asyncio.gather(*(helper.ask(command, **arguments) for helper in helpers))

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
        """Redis, workers and clients."""
        self.spawn(server_argv(server_binary(), self.place.directory), self.plan.rest)
        await until(socket_path(self.place.directory).exists)
        words = (str(self.place.directory), str(pace.step_s), str(pace.prefill_s))
        for i, core in enumerate(self.plan.workers):
            names = [f"p{i}", *(f"d{j}" for j in range(i, pace.num_decode, len(self.plan.workers)))]
            self.workers.append(await Helper.start(f"workers {','.join(names)}", "router_workers.py", *words, *names, core=core))
        by_core: dict[int, Helper] = {}
        for core in self.plan.clients:
            if core not in by_core:
                by_core[core] = await Helper.start(f"client on core {core}", "router_load.py", words[0], core=core)
            self.clients.append(by_core[core])
        await self.tell(self.workers, "hold", held=False)

    async def close(self) -> None:
        # Routers first, so that nothing is said of workers that go.
        for child in reversed(self._children[1:]):
            _end(child)
        await asyncio.gather(*(helper.close() for helper in (*dict.fromkeys(self.clients), *self.workers)))
        for child in self._children[:1]:
            _end(child)


@asynccontextmanager
async def rig(pace: Pace, *, tokenizer: Path | None = None, plan: CorePlan | None = None) -> AsyncIterator[Rig]:
    """Workers, clients and Redis, without a router yet. This process moves to the plan's `rest`."""
    plan = plan or CorePlan(routers=(FIRST_CORE,), workers=(LAST_CORE,), clients=(LAST_CORE,), rest=LAST_CORE, alone=1)
    os.sched_setaffinity(0, {plan.rest})
    with tempfile.TemporaryDirectory() as directory:
        place = Place(Path(directory))
        place.fill(tokenizer)
        all_of_it = Rig(place, plan)
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Client:
    """One request at a time, as an application would send it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/twostep.v1.Inference/Generate")

    async def ask(self, request: bytes) -> Stream:
        stream = Stream(sent_at=time.monotonic())
        call = self._generate(request, timeout=600)
        async for message in call:
            if not stream.messages:
                stream.first_at = time.monotonic()
            stream.messages.append(message)
        return stream


@asynccontextmanager
async def open_client(port: int) -> AsyncIterator[Client]:
    """With a connection of its own."""
    options = channel_options()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield Client(channel)


async def until(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"not within {timeout_s:g} s"
        await asyncio.sleep(0.01)


def tokens_for(seconds: float, step_s: float) -> int:
    """How many an answer must have at least so that it does not end within so many seconds of Rig.streams."""
    return math.ceil((seconds + _SETTLE_S + _SLACK_S) / step_s)


def busy() -> str:
    return f"load average {os.getloadavg()[0]:.1f}"
