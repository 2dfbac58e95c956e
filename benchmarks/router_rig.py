"""What the benchmarks of the router share: real router processes, each on a core of its choice, between fake workers and a load client.

    workers     one process: a prefill worker whose first token takes a set time, decode workers that send all tokens of a step in one
                message, as real ones do, at a set pace; Redis beside it
    routers     `python -P -m router`, as deployed
    client      this process; it keeps the bytes it is sent and looks at them after the measurement: every token of every answer must be
                the right one, once, in order, and the text that of all of them

Everything but the routers runs on the last core there is, the first router on the first one.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
from redis.asyncio import Redis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from twostep.cluster.records import WORKERS_KEY, LayoutRecord, WorkerRecord, worker_key
from twostep.fingerprint import dummy_fingerprint
from twostep.local.redis_server import server_argv, server_binary, server_url, socket_path
from twostep.prefix import secret_check
from twostep.rpc import event_loop
from twostep.rpc.channel import channel_options
from twostep.rpc.server import GrpcServer, ServerConfig
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, kv_pb2, prefill_pb2, prefill_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
CORES = sorted(os.sched_getaffinity(0))
FIRST_CORE, LAST_CORE = CORES[0], CORES[-1]
HASH_UNIT = 64
_SECRET = b"a secret of this benchmark, long enough"
_VOCAB = 4096
_TTL_S = 4.0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """`step_s`: from one step of a decode worker to the next."""

    num_decode: int
    step_s: float
    prefill_s: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where everything lies."""

    directory: Path

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def secret(self) -> Path:
        return self.directory / "secret"

    @property
    def redis_url(self) -> str:
        return server_url(self.directory)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.model / "tokenizer.json"))

    def answer(self) -> list[int]:
        """Token ids of a text, which every answer repeats."""
        text = (ROOT / "docs" / "architecture.md").read_text()
        ids: list[int] = self.tokenizer().encode(text).ids
        return ids


def make_model(path: Path, tokenizer: Path | None) -> None:
    """What a router reads. Without `tokenizer`: one of 4,096 tokens, trained on this project's documentation."""
    path.mkdir()
    if tokenizer is None:
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=_VOCAB, initial_alphabet=alphabet, show_progress=False)
        inner.train([str(page) for page in sorted((ROOT / "docs").glob("*.md"))], trainer)
    else:
        inner = Tokenizer.from_file(str(tokenizer))
    inner.save(str(path / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": inner.get_vocab_size(),
        "max_position_embeddings": 32768,
    }
    (path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


# ---- workers ------------------------------------------------------------------------------------------------------------------------

AttemptId = tuple[str, int]


def token_at(answer: Sequence[int], position: int, max_tokens: int) -> prefill_pb2.Token:
    token = prefill_pb2.Token(token_id=answer[position % len(answer)], position=position)
    if position + 1 >= max_tokens:
        token.finish_reason = inference_pb2.FINISH_REASON_LENGTH
    return token


class FakePrefill(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, answer: Sequence[int], prefill_s: float, committed: dict[AttemptId, asyncio.Event]) -> None:
        self._answer, self._prefill_s, self._committed = answer, prefill_s, committed

    async def Run(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        began = time.monotonic()
        attempt = (request.request_id, request.attempt)
        committed = self._committed[attempt] = asyncio.Event()
        try:
            ticket = kv_pb2.Ticket(worker_id="p0", request_id=request.request_id, attempt=request.attempt)
            yield prefill_pb2.PrefillEvent(accepted=prefill_pb2.PrefillAccepted(ticket=ticket))
            if self._prefill_s:
                await asyncio.sleep(self._prefill_s)
            token = token_at(self._answer, 0, request.sampling.max_tokens)
            took = time.monotonic() - began
            yield prefill_pb2.PrefillEvent(first_token=prefill_pb2.FirstToken(token=token, prefill_s=took))
            if not token.finish_reason:
                await committed.wait()
            yield prefill_pb2.PrefillEvent(done=prefill_pb2.PrefillDone(state=kv_pb2.LEASE_STATE_RELEASED, transport="local"))
        finally:
            del self._committed[attempt]


@dataclass(slots=True)
class _Running:
    next_position: int
    max_tokens: int


class FakeDecode(decode_pb2_grpc.DecodeServicer):
    """Steps of `step_s`, each one message to every router that has sequences here."""

    def __init__(self, answer: Sequence[int], step_s: float, epoch: int, committed: dict[AttemptId, asyncio.Event]) -> None:
        self._answer, self._step_s, self._epoch, self._committed = answer, step_s, epoch, committed
        self._reserved: dict[AttemptId, decode_pb2.ReserveRequest] = {}
        self._running: dict[str, dict[AttemptId, _Running]] = {}
        self._outboxes: dict[str, asyncio.Queue[decode_pb2.StepEvents]] = {}

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        self._reserved[request.request_id, request.attempt] = request
        return decode_pb2.ReserveResponse(lease_s=5.0, epoch=self._epoch)

    async def Attach(self, request: decode_pb2.AttachRequest, context: Any) -> decode_pb2.AttachResponse:
        attempt = (request.request_id, request.attempt)
        reserved = self._reserved.pop(attempt)
        committed = decode_pb2.DecodeEvent(
            request_id=attempt[0], attempt=attempt[1], committed=decode_pb2.Committed(transport="local", bytes=4096, chunks=1)
        )
        self._outboxes[reserved.router_id].put_nowait(decode_pb2.StepEvents(events=[committed]))
        self._committed[attempt].set()
        self._running.setdefault(reserved.router_id, {})[attempt] = _Running(1, reserved.sampling.max_tokens)
        return decode_pb2.AttachResponse()

    async def Cancel(self, request: decode_pb2.CancelRequest, context: Any) -> decode_pb2.CancelResponse:
        attempt = (request.request_id, request.attempt)
        found = [running.pop(attempt, None) for running in self._running.values()]
        return decode_pb2.CancelResponse(found=self._reserved.pop(attempt, None) is not None or any(found))

    async def Stream(self, request: decode_pb2.StreamRequest, context: Any) -> AsyncIterator[decode_pb2.StepEvents]:
        outbox = self._outboxes[request.router_id] = asyncio.Queue()
        await context.send_initial_metadata(())
        while True:
            yield await outbox.get()

    async def steps(self) -> None:
        due = time.monotonic()
        while True:
            for router_id, running in self._running.items():
                events = []
                for attempt, state in list(running.items()):
                    token = token_at(self._answer, state.next_position, state.max_tokens)
                    state.next_position += 1
                    events.append(decode_pb2.DecodeEvent(request_id=attempt[0], attempt=attempt[1], token=token))
                    if token.finish_reason:
                        del running[attempt]
                if events:
                    self._outboxes[router_id].put_nowait(decode_pb2.StepEvents(events=events))
            due = max(due + self._step_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())


async def _serve_workers(place: Place, pace: Pace) -> None:
    answer, epoch = place.answer(), time.time_ns() // 1000
    committed: dict[AttemptId, asyncio.Event] = {}
    records: list[WorkerRecord] = []
    tasks: list[asyncio.Task[None]] = []
    servers: list[GrpcServer] = []
    layout = LayoutRecord(
        model_fingerprint=dummy_fingerprint(place.model), dtype="float32", block_size=16, num_layers=2, num_kv_heads=2, head_dim=8
    )
    for name in ("p0", *(f"d{i}" for i in range(pace.num_decode))):
        server = GrpcServer(ServerConfig(max_concurrent_rpcs=8192, health_port=-1))
        if name == "p0":
            server.add(FakePrefill(answer, pace.prefill_s, committed), prefill_pb2_grpc.add_PrefillServicer_to_server, "twostep.v1.Prefill")
        else:
            decode = FakeDecode(answer, pace.step_s, epoch, committed)
            server.add(decode, decode_pb2_grpc.add_DecodeServicer_to_server, "twostep.v1.Decode")
            tasks.append(asyncio.create_task(decode.steps()))
        port = await server.start()
        servers.append(server)
        records.append(
            WorkerRecord(
                worker_id=name,
                role="prefill" if name == "p0" else "decode",
                address=f"127.0.0.1:{port}",
                epoch=epoch,
                model="m",
                layout=layout,
                hash_unit=HASH_UNIT,
                secret_check=secret_check(_SECRET),
                num_blocks=1 << 20,
                max_num_seqs=8192,
                max_model_len=32768,
                step_tokens=1 << 20,
                transports=("local",),
            )
        )
    redis = Redis.from_url(place.redis_url)
    while True:
        async with redis.pipeline(transaction=False) as pipe:
            for record in records:
                pipe.set(worker_key(record.worker_id), record.to_json(), px=int(1e3 * _TTL_S))
                pipe.sadd(WORKERS_KEY, record.worker_id)
            await pipe.execute()
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(_TTL_S / 4)


# ---- processes ----------------------------------------------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(eq=False)
class RouterProcess:
    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """User and system time of all its threads so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


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
        while not (await call.read()).HasField("first_token"):
            pass
        took = time.monotonic() - began
        call.cancel()
        await self._decode.Cancel(decode_pb2.CancelRequest(request_id=name, attempt=1), timeout=10)
        return took


@dataclass(eq=False)
class Rig:
    place: Place
    routers: list[RouterProcess] = field(default_factory=list)
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def spawn(self, argv: Sequence[str], core: int) -> int:
        child = subprocess.Popen(argv, cwd=ROOT, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
        self._children.append(child)
        return child.pid

    async def add_router(self, *flags: str, core: int = FIRST_CORE) -> RouterProcess:
        port = _free_port()
        place = self.place
        argv = (
            *(sys.executable, "-P", "-m", "router", "--host", "127.0.0.1", "--port", str(port), "--health-port", "-1"),
            *("--model", str(place.model), "--served-model-name", "m", "--load-format", "dummy", "--secret-file", str(place.secret)),
            *("--redis-url", place.redis_url, "--metrics-port", "-1", "--log-level", "warning", "--max-inflight", "4096", *flags),
        )
        router = RouterProcess(port, psutil.Process(self.spawn(argv, core)))
        self.routers.append(router)
        request = encode_request([1, 2, 3], num_tokens=2)
        give_up = time.monotonic() + 30
        while True:
            try:
                async with open_client(port) as client:
                    await client.ask(request)
                return router
            except grpc.aio.AioRpcError:
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(0.2)

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

    def close(self) -> None:
        for child in reversed(self._children):
            child.terminate()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@asynccontextmanager
async def rig(pace: Pace, *, tokenizer: Path | None = None) -> AsyncIterator[Rig]:
    """Workers and Redis, without a router yet. This process moves to the last core."""
    os.sched_setaffinity(0, {LAST_CORE})
    with tempfile.TemporaryDirectory() as directory:
        place = Place(Path(directory))
        make_model(place.model, tokenizer)
        place.secret.write_bytes(_SECRET)
        all_of_it = Rig(place)
        try:
            all_of_it.spawn(server_argv(server_binary(), place.directory), LAST_CORE)
            await until(socket_path(place.directory).exists)
            workers = [sys.executable, "-P", __file__, directory, str(pace.num_decode), str(pace.step_s), str(pace.prefill_s)]
            all_of_it.spawn(workers, LAST_CORE)
            yield all_of_it
        finally:
            all_of_it.close()


# ---- the client ---------------------------------------------------------------------------------------------------------------------


def encode_request(token_ids: Sequence[int], *, num_tokens: int) -> bytes:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=token_ids), sampling=inference_pb2.SamplingParams(max_tokens=num_tokens, temperature=0.0)
    ).SerializeToString()


def fresh_prompt(vocab_size: int, length: int) -> list[int]:
    return [secrets.randbelow(vocab_size) for _ in range(length)]


@dataclass(eq=False)
class Stream:
    """One answer as it came: messages undecoded. Instants in time.monotonic() seconds."""

    sent_at: float = 0.0
    first_at: float = 0.0
    messages: list[bytes] = field(default_factory=list)

    def responses(self) -> list[inference_pb2.GenerateResponse]:
        return [inference_pb2.GenerateResponse.FromString(data) for data in self.messages]

    def check(self, answer: Sequence[int], num_tokens: int, tokenizer: Tokenizer) -> inference_pb2.End:
        """The whole of it, each token once and in order."""
        *pieces, last = self.responses()
        assert last.HasField("end"), "an answer ends with its End"
        ids: list[int] = []
        for response in pieces:
            assert response.piece.position == len(ids), "each position once, in order"
            ids += response.piece.token_ids
        assert ids == [answer[i % len(answer)] for i in range(num_tokens)], "the right tokens"
        assert "".join(r.piece.text for r in pieces) == tokenizer.decode(ids), "the text of all of them"
        return last.end


def tokens_in(messages: Sequence[bytes]) -> int:
    return sum(len(inference_pb2.GenerateResponse.FromString(data).piece.token_ids) for data in messages)


class Client:
    """Calls without decoding what comes, so that the client leaves the core to the others."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._generate = channel.unary_stream("/twostep.v1.Inference/Generate")

    async def ask(self, request: bytes, stream: Stream | None = None) -> Stream:
        stream = Stream() if stream is None else stream
        messages = stream.messages
        stream.sent_at = time.monotonic()
        call = self._generate(request, timeout=600)
        async for message in call:
            if not messages:
                stream.first_at = time.monotonic()
            messages.append(message)
        return stream


@asynccontextmanager
async def open_client(port: int) -> AsyncIterator[Client]:
    """With a connection of its own."""
    options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield Client(channel)


async def until(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"not within {timeout_s:g} s"
        await asyncio.sleep(0.01)


def busy() -> str:
    return f"load average {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    _directory, _num_decode, _step_s, _prefill_s = sys.argv[1:]
    event_loop.run(
        _serve_workers(Place(Path(_directory)), Pace(num_decode=int(_num_decode), step_s=float(_step_s), prefill_s=float(_prefill_s)))
    )
