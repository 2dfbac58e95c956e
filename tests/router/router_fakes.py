"""A cluster without an engine: real gRPC servers that play prefill and decode workers by script, beside a real Redis.

The answer to every prompt is ANSWER_TEXT over and over, so that the token at every position is known beforehand.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import redis.asyncio
from bare_deployment import EOS_ID, MAX_MODEL_LEN, SECRET, RedisServer, make_bare_model_dir, until
from tokenizers import Tokenizer

from decode_worker.reservations import ReservationCalls
from router.config import RouterConfig
from router.request.job import Metadata
from router.server import Router
from twostep import __version__
from twostep.checkpoint.fingerprint import model_fingerprint
from twostep.cluster.records import WORKERS_KEY, LayoutRecord, WorkerLoad, WorkerRecord, prefix_key, worker_key
from twostep.cluster.shared_clock import SharedClock
from twostep.cluster.signed import RECORDS, Signer
from twostep.errors import TwostepError, error_from_grpc
from twostep.keys.secret import DeploymentSecret, secret_check
from twostep.local.ports import free_ports
from twostep.rpc.channel import open_channel
from twostep.rpc.server import server_options
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc, kv_pb2, prefill_pb2, prefill_pb2_grpc
from twostep.sampling_params import NEWER_PARAMETERS

ANSWER_TEXT = " Paris is the größte city, and naïve café 🙂 the end."
# A worker that has stopped beating is gone after so long. One that beats is not, however late the tests' process is with it.
SILENCE_MS = 300
_PATIENCE_MS = 120_000
_PORTS_TRIED = 4
HASH_UNIT = 64

_CHATML = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_model_dir(path: Path) -> Path:
    make_bare_model_dir(path, text="the capital of France is Paris, the end of the answer and so on", chat_template=_CHATML)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_p": 0.9}))
    return path


class SetClock(SharedClock):
    """Shows the time that a test sets, whatever Redis says."""

    def __init__(self, now: float) -> None:
        self.now = now
        super().__init__(monotonic=lambda: self.now)
        self._known = True

    def unix(self) -> float:
        return self.now


# ---- workers -------------------------------------------------------------------------------------------------------------

AttemptId = tuple[str, int]


@dataclass(eq=False)
class HandOver:
    """The link between the two sides of one attempt behind the router's back."""

    first: asyncio.Future[prefill_pb2.Token]
    committed: asyncio.Event = field(default_factory=asyncio.Event)


class Exchange:
    def __init__(self, answer: list[int]) -> None:
        self.answer = answer
        self._by_id: dict[AttemptId, HandOver] = {}
        # Whether the router has all tokens before this position. A first token comes another way than the others, and may be overtaken.
        self.arrived: Callable[[AttemptId, int], bool] = lambda attempt, position: True

    def of(self, attempt: AttemptId) -> HandOver:
        if attempt not in self._by_id:
            self._by_id[attempt] = HandOver(asyncio.get_running_loop().create_future())
        return self._by_id[attempt]

    def token(self, position: int, sampling: inference_pb2.SamplingParams) -> prefill_pb2.Token:
        token = prefill_pb2.Token(token_id=self.answer[position % len(self.answer)], position=position)
        if (token.token_id == EOS_ID and not sampling.ignore_eos) or token.token_id in sampling.stop_token_ids:
            token.finish_reason = inference_pb2.FINISH_REASON_STOP
        elif position + 1 >= sampling.max_tokens:
            token.finish_reason = inference_pb2.FINISH_REASON_LENGTH
        if sampling.HasField("logprobs"):
            token.logprobs.logprob = -0.5 - position
            token.logprobs.top.extend(inference_pb2.TopLogprob(token_id=i, logprob=-1.0 - i) for i in range(sampling.logprobs))
        return token


Hook = Callable[[Any, Any], Awaitable[None]]


class FakeWorker:
    """`record` is what stands in Redis. `beating` False: its heartbeat has stopped."""

    role = ""

    def __init__(self, name: str, exchange: Exchange, record: WorkerRecord) -> None:
        self.exchange = exchange
        self.record = dataclasses.replace(record, worker_id=name, role=self.role, epoch=time.time_ns() // 1000)
        self.beating = True
        self.hooks: deque[Hook] = deque()  # one is run, and used up, by each next Run, Reserve
        self.server: grpc.aio.Server | None = None
        self.requests: list[Any] = []
        self.held: set[AttemptId] = set()

    async def start(self, port: int | None = None) -> None:
        # Pings are allowed as often as real workers allow them: otherwise a busy connection is closed for "too many pings".
        self.server = grpc.aio.server(options=server_options())
        self._add()
        # Not one that the system picks: after this life of it, anybody's outgoing connection could have that one.
        ports = free_ports(_PORTS_TRIED) if port is None else [port]
        self.record = dataclasses.replace(self.record, address=f"127.0.0.1:{self._bound(ports)}")
        await self.server.start()

    def _bound(self, ports: list[int]) -> int:
        """Returns the first of them that is still free: what does not ask for ports, like Ray, may have taken one meanwhile."""
        assert self.server is not None
        for port in ports[:-1]:
            with contextlib.suppress(RuntimeError):
                return self.server.add_insecure_port(f"127.0.0.1:{port}")
        return self.server.add_insecure_port(f"127.0.0.1:{ports[-1]}")

    def _add(self) -> None:
        raise NotImplementedError

    async def die(self) -> None:
        """At once: connections are closed, all calls end; the heartbeat stops too."""
        self.beating = False
        if self.server is not None:
            await self.server.stop(0)
            self.server = None

    async def run_hook(self, request: Any, context: Any) -> None:
        if self.hooks:
            await self.hooks.popleft()(request, context)


def refuse(code: grpc.StatusCode, message: str) -> Hook:
    async def hook(_request: Any, context: Any) -> None:
        await context.abort(code, message)

    return hook


def after(seconds: float) -> Hook:
    async def hook(_request: Any, _context: Any) -> None:
        await asyncio.sleep(seconds)

    return hook


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    role = "prefill"

    def __init__(self, name: str, exchange: Exchange, record: WorkerRecord) -> None:
        super().__init__(name, exchange, record)
        self.cancelled: list[AttemptId] = []
        self.before_first: deque[Hook] = deque()  # run between Accepted and FirstToken
        self.after_first: deque[Hook] = deque()  # run between FirstToken and the wait for the commit
        self.cached_tokens = 0
        self.never_done = False

    def _add(self) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, self.server)

    async def Run(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.requests.append(request)
        await self.run_hook(request, context)
        attempt = (request.request_id, request.attempt)
        hand_over = self.exchange.of(attempt)
        self.held.add(attempt)
        try:
            ticket = kv_pb2.Ticket(worker_id=self.record.worker_id, request_id=request.request_id, attempt=request.attempt)
            yield prefill_pb2.PrefillEvent(accepted=prefill_pb2.PrefillAccepted(ticket=ticket))
            if self.before_first:
                await self.before_first.popleft()(request, context)
            token = self.exchange.token(len(request.token_ids) - request.num_prompt_tokens, request.sampling)
            yield prefill_pb2.PrefillEvent(
                first_token=prefill_pb2.FirstToken(token=token, cached_tokens=self.cached_tokens, queue_s=0.001, prefill_s=0.002)
            )
            if self.after_first:
                await self.after_first.popleft()(request, context)
            done = prefill_pb2.PrefillDone(state=kv_pb2.LEASE_STATE_RELEASED, transport="local", bytes=4096, chunks=1, publish_s=0.003)
            if token.finish_reason:
                # Nothing to hand over, and the decode worker is never told.
                done = prefill_pb2.PrefillDone(state=kv_pb2.LEASE_STATE_ABORTED)
            else:
                hand_over.first.set_result(token)
                await hand_over.committed.wait()
            if self.never_done:
                await asyncio.sleep(600)
            yield prefill_pb2.PrefillEvent(done=done)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(attempt)
            raise
        finally:
            self.held.discard(attempt)

    async def Embed(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[prefill_pb2.EmbedEvent]:
        """A vector is the prompt's length, its first and its last token."""
        self.requests.append(request)
        await self.run_hook(request, context)
        attempt = (request.request_id, request.attempt)
        self.held.add(attempt)
        try:
            yield prefill_pb2.EmbedEvent(accepted=prefill_pb2.EmbedAccepted())
            if self.before_first:
                await self.before_first.popleft()(request, context)
            values = vector_of(request.token_ids)[: request.pooling.dimensions or None]
            pooled = prefill_pb2.PooledStates(
                values=struct.pack(f"<{len(values)}f", *values), cached_tokens=self.cached_tokens, queue_s=0.001, prefill_s=0.002
            )
            yield prefill_pb2.EmbedEvent(pooled=pooled)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(attempt)
            raise
        finally:
            self.held.discard(attempt)


def vector_of(token_ids: Sequence[int]) -> list[float]:
    return [float(len(token_ids)), float(token_ids[0]), float(token_ids[-1])]


@dataclass(eq=False)
class Script:
    """The behaviour of a decode worker with the sequences to come. Positions count from 0 over all attempts."""

    step_s: float = 0.0
    fail_at: int | None = None  # DecodeFailed instead of the token at this position
    fail_in_order: bool = True  # once the router has all before it; else at once, even if that overtakes the first token
    fail_code: str = "UNAVAILABLE"
    fail_retryable: bool = True
    fail_before_commit: bool = False
    fail_after: asyncio.Event | None = None  # and as soon as this, whether or not there is a first token
    break_stream_at: int | None = None  # the stream breaks before the token at this position
    forget_at_break: bool = False  # and the sequence is lost with it
    repeat: bool = False  # every token twice, and once more out of the past
    swap: bool = False  # tokens in pairs, the later one first
    skip: int | None = None  # the token at this position never comes
    tokens_per_step: int = 1
    prefill_s: float = 0.0  # of prompts computed here
    prompt_tokens: int = 0  # of others, in each step
    hold_at: int | None = None  # the token at this position comes when it may `go_on`
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    once: bool = True  # faults happen to the first sequence only


@dataclass(frozen=True)
class StreamedCall:
    """What hooks see of a call that came over a stream."""

    metadata: Metadata

    def invocation_metadata(self) -> Metadata:
        return self.metadata

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise error_from_grpc(code.name, details)


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    role = "decode"

    def __init__(self, name: str, exchange: Exchange, record: WorkerRecord) -> None:
        super().__init__(name, exchange, record)
        self.script = Script()
        self.cancels: list[AttemptId] = []
        self.attaches: list[AttemptId] = []
        self.attach_hooks: deque[Hook] = deque()
        self.max_held = 1 << 30
        self.num_cached_tokens = 0
        self.with_reservations = True
        self.max_local = 1 << 30  # prompts computed here at once
        self._reservations: dict[AttemptId, decode_pb2.ReserveRequest] = {}
        self._tasks: dict[AttemptId, asyncio.Task[None]] = {}
        self._streams: dict[str, asyncio.Queue[decode_pb2.StepEvents | None]] = {}
        self._history: dict[AttemptId, list[decode_pb2.DecodeEvent]] = {}
        self.positions: list[list[decode_pb2.StreamPosition]] = []  # of each Stream
        self.num_streams = 0
        self._num_steps = 0

    def _add(self) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self.server)

    async def die(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await super().die()

    def freeze(self) -> None:
        """Nothing more is computed, nothing is held, no heartbeat comes; its connections stay."""
        self.beating = False
        for task in self._tasks.values():
            task.cancel()
        self.held.clear()

    def break_stream(self) -> None:
        for queue in self._streams.values():
            queue.put_nowait(None)
        self._streams.clear()

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        self.requests.append(request)
        attempt = (request.request_id, request.attempt)
        if self.hooks:
            self.held.add(attempt)
            try:
                await self.run_hook(request, context)
            except (grpc.aio.AbortError, TwostepError):
                self.held.discard(attempt)
                raise
        if len(self.held - {attempt}) >= self.max_held:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no free blocks")
        assert request.router_id in self._streams, "a router opens its stream before it reserves"
        if request.prefill_here and sum(r.prefill_here for a, r in self._reservations.items() if a in self.held) >= self.max_local:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "prompts are waiting here already")
        self.held.add(attempt)
        self._reservations[attempt] = request
        if request.prefill_here:
            self.begin(attempt)
            # As on a fast worker: tokens overtake this answer.
            await asyncio.sleep(0.01)
        return decode_pb2.ReserveResponse(num_cached_tokens=self.num_cached_tokens, lease_s=60.0, epoch=self.record.epoch)

    async def Reservations(
        self, calls: AsyncIterator[decode_pb2.ReservationCall], context: Any
    ) -> AsyncIterator[decode_pb2.ReservationAnswer]:
        """As a worker does; `with_reservations` False: as an older one."""
        if not self.with_reservations:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not known")

        async def reserve(request: decode_pb2.ReserveRequest, metadata: Metadata) -> decode_pb2.ReserveResponse:
            return await self.Reserve(request, StreamedCall(metadata))

        async def cancel(request_id: str, attempt: int) -> bool:
            return self._free((request_id, attempt))

        async for answer in ReservationCalls(reserve, cancel).answers(calls):
            yield answer

    async def Attach(self, request: decode_pb2.AttachRequest, context: Any) -> decode_pb2.AttachResponse:
        attempt = (request.request_id, request.attempt)
        if self.attach_hooks:
            await self.attach_hooks.popleft()(request, context)
        if attempt not in self._reservations:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such reservation")
        self.begin(attempt)
        return decode_pb2.AttachResponse()

    def begin(self, attempt: AttemptId) -> None:
        """A ticket has come, or none is needed."""
        if not self._reservations[attempt].prefill_here:
            self.attaches.append(attempt)
        script = self.script
        if script.once:
            self.script = Script(step_s=script.step_s, tokens_per_step=script.tokens_per_step, prefill_s=script.prefill_s)
        self._tasks[attempt] = asyncio.create_task(self._decode(attempt, self._reservations[attempt], script))

    async def Cancel(self, request: decode_pb2.CancelRequest, context: Any) -> decode_pb2.CancelResponse:
        attempt = (request.request_id, request.attempt)
        self.cancels.append(attempt)
        return decode_pb2.CancelResponse(found=self._free(attempt))

    def _free(self, attempt: AttemptId) -> bool:
        task = self._tasks.pop(attempt, None)
        if task is not None:
            task.cancel()
        found = attempt in self.held
        self.held.discard(attempt)
        self._reservations.pop(attempt, None)
        return found

    async def Stream(self, request: decode_pb2.StreamRequest, context: Any) -> AsyncIterator[decode_pb2.StepEvents]:
        queue: asyncio.Queue[decode_pb2.StepEvents | None] = asyncio.Queue()
        self._streams[request.router_id] = queue
        self.num_streams += 1
        self.positions.append(list(request.positions))
        for position in request.positions:
            self._replay(queue, position)
        await context.send_initial_metadata(())
        while (message := await queue.get()) is not None:
            yield message
        await context.abort(grpc.StatusCode.UNAVAILABLE, "this stream breaks")

    def _replay(self, queue: asyncio.Queue[decode_pb2.StepEvents | None], position: decode_pb2.StreamPosition) -> None:
        attempt = (position.request_id, position.attempt)
        history = self._history.get(attempt, [] if attempt in self._reservations else None)
        if history is not None:
            missed = [
                e
                for e in history
                if e.HasField("failed")
                or (e.HasField("committed") and not position.committed)
                or (e.HasField("first_token") and e.first_token.token.position >= position.next_position)
                or (e.HasField("token") and e.token.position >= position.next_position)
            ]
            queue.put_nowait(decode_pb2.StepEvents(events=missed))
        elif not position.reserving:
            self.held.discard(attempt)
            failed = decode_pb2.DecodeFailed(code="NOT_FOUND", message="not here", retryable=True)
            queue.put_nowait(
                decode_pb2.StepEvents(events=[decode_pb2.DecodeEvent(request_id=attempt[0], attempt=attempt[1], failed=failed)])
            )

    async def _decode(self, attempt: AttemptId, reserved: decode_pb2.ReserveRequest, script: Script) -> None:
        def send(*events: decode_pb2.DecodeEvent) -> None:
            history.extend(events)
            queue = self._streams.get(reserved.router_id)
            if queue is not None:
                self._num_steps += 1
                steps = [decode_pb2.StepRecord(step=self._num_steps, ended_s=time.monotonic(), prompt_tokens=script.prompt_tokens)]
                of_step = any(each.HasField("token") for each in events)
                queue.put_nowait(decode_pb2.StepEvents(events=events, steps=steps if of_step else [], sent_s=time.monotonic()))

        def event(**kind: Any) -> decode_pb2.DecodeEvent:
            return decode_pb2.DecodeEvent(request_id=attempt[0], attempt=attempt[1], **kind)

        def failed() -> decode_pb2.DecodeEvent:
            self.held.discard(attempt)
            return event(failed=decode_pb2.DecodeFailed(code=script.fail_code, message="scripted", retryable=script.fail_retryable))

        history = self._history.setdefault(attempt, [])
        if script.fail_before_commit and script.fail_after is not None:
            await script.fail_after.wait()
            send(failed())
            return
        if reserved.prefill_here:
            await asyncio.sleep(script.prefill_s)
            if script.hold_at == 0:
                await script.go_on.wait()
            first = self.exchange.token(len(reserved.token_ids) - reserved.num_prompt_tokens, reserved.sampling)
        else:
            hand_over = self.exchange.of(attempt)
            first = await hand_over.first
        if script.fail_before_commit:
            send(failed())
            return
        if reserved.prefill_here:
            if first.finish_reason:
                self.held.discard(attempt)
            cached = self.num_cached_tokens
            send(event(first_token=prefill_pb2.FirstToken(token=first, cached_tokens=cached, queue_s=0.001, prefill_s=0.002)))
            if first.finish_reason:
                return
        else:
            committed = decode_pb2.Committed(transport="local", bytes=4096, chunks=1, blocks_moved=3, blocks_reused=1, fetch_s=0.004)
            send(event(committed=committed))
            hand_over.committed.set()
        position = first.position + 1
        past: list[decode_pb2.DecodeEvent] = []
        while True:
            batch: list[decode_pb2.DecodeEvent] = []
            for _ in range(2 if script.swap else script.tokens_per_step):
                if position == script.fail_at:
                    send(*batch)
                    if script.fail_in_order:
                        await until(lambda at=position: self.exchange.arrived(attempt, at), "the router has the tokens before")  # type: ignore[misc]
                    send(failed())
                    return
                if position == script.hold_at:
                    send(*batch)
                    batch = []
                    await script.go_on.wait()
                if position == script.break_stream_at:
                    send(*batch)
                    batch = []
                    self.break_stream()
                    if script.forget_at_break:
                        del self._history[attempt], self._reservations[attempt]
                        return
                token = self.exchange.token(position, reserved.sampling)
                if position != script.skip:
                    batch.append(event(token=token))
                position += 1
                if token.finish_reason:
                    break
            ended = bool(batch) and bool(batch[-1].token.finish_reason)
            if ended:
                self.held.discard(attempt)
            if script.swap:
                batch.reverse()
            if script.repeat:
                past += batch
                batch = batch[:1] * 2 + batch[1:] + past[:1]
            send(*batch)
            if ended:
                return
            await asyncio.sleep(script.step_s)


# ---- all of it -----------------------------------------------------------------------------------------------------------


def signed(record: WorkerRecord, secret: DeploymentSecret = SECRET) -> str:
    """As its worker writes it to Redis."""
    return Signer(secret, RECORDS).sign_object(record.to_json())


class Cluster:
    def __init__(self, model_dir: Path, redis_server: RedisServer, tmp_path: Path) -> None:
        self.model_dir = model_dir
        self.redis_server = redis_server
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.answer: list[int] = self.tokenizer.encode(ANSWER_TEXT).ids
        self.exchange = Exchange(self.answer)
        self.workers: list[FakeWorker] = []
        self.secret_file = tmp_path / "secret"
        self.secret_file.write_bytes(SECRET.own)
        self.layout = LayoutRecord(
            model_fingerprint=model_fingerprint(model_dir), dtype="float32", block_size=16, num_layers=2, num_kv_heads=2, head_dim=8
        )
        self.template = WorkerRecord(
            worker_id="",
            role="",
            address="",
            epoch=1,
            model="m",
            layout=self.layout,
            hash_unit=HASH_UNIT,
            secret_check=secret_check(SECRET),
            num_blocks=1024,
            max_num_seqs=256,
            max_model_len=MAX_MODEL_LEN,
            transports=("local",),
            load=WorkerLoad(num_free_blocks=1024),
            version=__version__,
            sampling=NEWER_PARAMETERS,
            cached_at_watch=True,
            embeds=True,
        )
        self.redis = redis.asyncio.Redis.from_url(redis_server.url)
        self.router: Router
        self.stub: inference_pb2_grpc.InferenceAsyncStub
        self._beat_task: asyncio.Task[None] | None = None

    @property
    def prefills(self) -> list[FakePrefill]:
        return [worker for worker in self.workers if isinstance(worker, FakePrefill)]

    @property
    def decodes(self) -> list[FakeDecode]:
        return [worker for worker in self.workers if isinstance(worker, FakeDecode)]

    async def prefill(self, name: str = "p0", **record: Any) -> FakePrefill:
        worker = FakePrefill(name, self.exchange, dataclasses.replace(self.template, **record))
        await self._start(worker)
        return worker

    async def decode(self, name: str = "d0", *, local: bool = False, **record: Any) -> FakeDecode:
        """`local`: it computes prompts too."""
        worker = FakeDecode(name, self.exchange, dataclasses.replace(self.template, local_prefill=local, **record))
        await self._start(worker)
        return worker

    async def _start(self, worker: FakeWorker) -> None:
        await worker.start()
        self.workers.append(worker)
        await self.beat()

    async def revive(self, worker: FakeWorker) -> None:
        """A new life of it at the same address."""
        worker.record = dataclasses.replace(worker.record, epoch=worker.record.epoch + 1)
        await worker.start(int(worker.record.address.rpartition(":")[2]))
        worker.beating = True
        await self.beat()

    async def beat(self) -> None:
        """All heartbeats, now."""
        async with self.redis.pipeline(transaction=False) as pipe:
            for worker in self.workers:
                if worker.beating:
                    pipe.set(worker_key(worker.record.worker_id), signed(worker.record), px=_PATIENCE_MS)
                    pipe.sadd(WORKERS_KEY, worker.record.worker_id)
                else:
                    pipe.pexpire(worker_key(worker.record.worker_id), SILENCE_MS, lt=True)
            await pipe.execute()

    async def seen(self) -> None:
        """Until the router goes by what the workers say of themselves now, and has a stream open to each decode worker."""
        await self.beat()

        def known() -> bool:
            found = {record.worker_id: record.to_json() for record in self.router.registry.workers}
            return all(found.get(w.record.worker_id) == w.record.to_json() for w in self.workers if w.beating)

        await until(known, "the router has read what the workers say")
        await self._streams_open()

    async def _streams_open(self) -> None:
        listening = {worker.record.address for worker in self.workers if worker.server is not None}
        links = self.router.pool.decode
        await until(
            lambda: all(link.stream.open for link in links.values() if link.record.address in listening), "the streams of tokens are open"
        )

    def _arrived(self, attempt: AttemptId, position: int) -> bool:
        outputs = (link.stream._sinks[attempt]._output for link in self.router.pool.decode.values() if attempt in link.stream._sinks)  # type: ignore[attr-defined]
        return all(output.next_position >= position for output in outputs)

    async def announce(self, worker: FakeWorker, hashes: list[bytes]) -> None:
        await self.redis.sadd(prefix_key(worker.record.worker_id, worker.record.epoch), *hashes)

    async def beat_forever(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        # The Redis client can take a cancellation for a lost connection.
        while not task.cancelling():
            await asyncio.sleep(0.3)
            try:
                await self.beat()
            except redis.exceptions.RedisError:
                continue

    def held(self) -> set[AttemptId]:
        """Attempts that any worker still holds something of."""
        return set().union(*(worker.held for worker in self.workers))

    async def all_free(self) -> None:
        """Waits until no worker holds anything; fails after a minute."""
        await until(lambda: not self.held(), "the workers hold nothing")

    def config(self, **options: Any) -> RouterConfig:
        return RouterConfig(
            **{
                # Hints are a matter of content here, not of this machine's speed.
                "prefix_lookup_timeout": 30.0,
                "model": self.model_dir,
                "redis_url": self.redis_server.url,
                "host": "127.0.0.1",
                "port": 0,
                "grpc_port": 0,
                "served_model_name": ("m",),
                "secret_file": self.secret_file,
                # Longer than this process may stand still; who tests the grace, or the lease, gives one.
                "no_worker_grace": 8.0,
                "stream_lease": 60.0,
                "hash_unit": HASH_UNIT,
                "default_max_tokens": 16,
            }
            | options
        )

    @asynccontextmanager
    async def serving(self, **options: Any) -> AsyncIterator[None]:
        """A router in front of the workers started so far."""
        self.router = Router(self.config(**options))
        self.exchange.arrived = self._arrived
        await self.beat()
        beat = asyncio.create_task(self.beat_forever())
        try:
            await self.router.start()
            try:
                # Its first look at Redis has a deadline, and so has the wait of a request for a stream: both may be over on a busy machine.
                await until(lambda: self.router.registry.connected, "Redis was read")
                await self._streams_open()
                async with open_channel(f"127.0.0.1:{self.router.grpc_port}") as channel:
                    self.stub = inference_pb2_grpc.InferenceStub(channel)
                    yield
            finally:
                beat.cancel()
                await asyncio.wait([beat])
                await self.router.drain(0.0)
        finally:
            beat.cancel()

    @asynccontextmanager
    async def paired(self, **options: Any) -> AsyncIterator[tuple[FakePrefill, FakeDecode]]:
        """A router in front of a worker of each role, p0 and d0."""
        pair = await self.prefill(), await self.decode()
        async with self.serving(**options):
            yield pair

    async def close(self) -> None:
        for worker in self.workers:
            await worker.die()
        try:
            await self.redis.aclose()
        except redis.exceptions.RedisError:
            pass

    # ---- a client ---------------------------------------------------------------------------------------------------

    def request(self, prompt: str = "the capital of France", **sampling: Any) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(text=prompt, sampling=inference_pb2.SamplingParams(**sampling))

    async def ask(self, request: inference_pb2.GenerateRequest | None = None, timeout: float = 60.0, **sampling: Any) -> Reply:
        """The whole answer, its pieces checked for order. Raises AioRpcError, with the reply so far as `reply`."""
        reply = Reply()
        call = self.stub.Generate(request or self.request(**sampling), timeout=timeout)
        async for response in call:
            reply.add(response)
        assert reply.end is not None, "a stream that ends well has an End"
        return reply

    def expected(self, num_tokens: int) -> list[int]:
        return [self.answer[i % len(self.answer)] for i in range(num_tokens)]

    def text_of(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


@dataclass(eq=False)
class Reply:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    pieces: list[inference_pb2.Piece] = field(default_factory=list)
    end: inference_pb2.End | None = None

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        assert self.end is None, "nothing follows the End"
        if response.HasField("end"):
            self.end = response.end
            return
        piece = response.piece
        assert piece.position == len(self.token_ids), "each position once, in order"
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.pieces.append(piece)
