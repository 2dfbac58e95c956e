"""Both workers in one process, on a fake model and the local transport, and a router that speaks to them by hand."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from one_sided import OneSidedHub, OneSidedTransport

from decode_worker.edge import DecodeEdge
from decode_worker.sequences import SequencesConfig
from kv_transfer.lease import Lease
from kv_transfer.local.transport import LocalHub, LocalTransport
from kv_transfer.ticket import Ticket
from kv_transfer.transports import Transports
from prefill_worker.edge import PrefillEdge
from prefill_worker.hand_over import HandOvers
from twostep.cluster.epochs import first_epoch
from twostep.engine.batch import Batch, Sampled
from twostep.engine.engine import Engine
from twostep.engine.fake import FakeRunner, fake_next_token
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.call_signing import channel_to_worker
from twostep.rpc.channel import open_channel
from twostep.rpc.convert import sampling_to_proto
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, kv_pb2, kv_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostep.sampling_params import SamplingParams
from twostep.worker.config import WorkerConfig
from twostep.worker.edge import Edge, EdgeParts, edge_maker
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import ServedModel, layout_of, resolve_config
from twostep.worker.worker import Worker

SECRET = DeploymentSecret(b"sixteen bytes or more")
BLOCK = 4
VOCAB = 1000
# For what takes a moment, on a machine that has a lot else to do.
WAIT_S = 60.0


async def until(condition: Callable[[], Any], what: object = "it did not happen") -> None:
    """Returns once the condition, or what it awaits, is true. Engines run in threads of their own and Redis in a process: no event of this
    loop says when, so it is looked at again and again. `what`, or the log file of this name, is said when it does not come."""
    give_up = time.monotonic() + 2 * WAIT_S
    while not (await value if inspect.isawaitable(value := condition()) else value):
        assert time.monotonic() < give_up, what.read_text() if isinstance(what, Path) else what
        await asyncio.sleep(0.005)


async def refused(call: Awaitable[Any], *codes: grpc.StatusCode) -> str:
    """Awaits a call that must fail with one of the codes; returns the details."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() in codes, caught.value
    return caught.value.details() or ""


async def health(worker: Worker) -> tuple[bool, bool]:
    """Liveness and readiness, as its health port tells them."""
    async with open_channel(f"127.0.0.1:{worker.server.health_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        asked = [health_pb2.HealthCheckRequest(service=service) for service in ("liveness", "readiness")]
        answers = [(await stub.Check(request, timeout=WAIT_S)).status for request in asked]
    live, ready = (status == health_pb2.HealthCheckResponse.SERVING for status in answers)
    return live, ready


RUNNER: dict[str, Any] = {"num_blocks": 256, "block_size": BLOCK, "vocab_size": VOCAB, "max_model_len": 512}


def make_runner(**options: Any) -> FakeRunner:
    return FakeRunner(**RUNNER | options)


class HeldRunner(FakeRunner):
    """Ends no step that a test has not allowed: what is in the middle of something stays there for as long as the test takes to look. A
    step that is held has been planned, so its sequences run, and what is cancelled meanwhile is free once the step has ended. The next
    `failures` steps that end do so with an error."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**RUNNER | options)
        self.failures = 0
        # Steps that have begun: one more than were allowed, once the next is held.
        self.num_begun = 0
        self._held = True
        self._allowed = threading.Semaphore(0)

    def allow(self, num_steps: int) -> None:
        self._allowed.release(num_steps)

    def let_go(self) -> None:
        """Steps end by themselves from now on."""
        self._held = False
        self._allowed.release()

    def run(self, batch: Batch) -> Sampled:
        self.num_begun += 1
        assert not self._held or self._allowed.acquire(timeout=2 * WAIT_S), "the test never let the step go"
        if self.failures > 0:
            self.failures -= 1
            raise RuntimeError("the device is on fire")
        return super().run(batch)


class LateClock:
    """Stands for the module `time` in another one: the real time, or with `frozen` that of now, and so much later as a test says. What a
    lease of half a minute does once it is over is seen at once, and no pause of the machine ends one before."""

    def __init__(self, *, frozen: bool = False) -> None:
        self.late_s = 0.0
        self._frozen_at = time.monotonic() if frozen else None

    def monotonic(self) -> float:
        return (time.monotonic() if self._frozen_at is None else self._frozen_at) + self.late_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def make_model(runner: FakeRunner, *, eos: frozenset[int] = frozenset(), tokenizer_dir: Path | None = None) -> ServedModel:
    return ServedModel(
        name="fake", runner=runner, layout=layout_of(runner.kv_shape, "fake"), eos_token_ids=eos, tokenizer_dir=tokenizer_dir
    )


def worker_config(role: str, redis_url: str, **options: Any) -> WorkerConfig:
    defaults: dict[str, Any] = {
        "worker_id": f"{role}-1",
        "hash_unit": 2 * BLOCK,
        "chunk_bytes": 1024,
        "redis_url": redis_url,
        "transport_timeout": 2.0,
        "fixed_roles": True,
    }
    return resolve_config(WorkerConfig(role=role, **(defaults | options)))


def make_worker(config: WorkerConfig, model: ServedModel, make_edge: Callable[[EdgeParts], Edge], epoch: int) -> Worker:
    return Worker(config, LocalEngine(config, model), SECRET, make_edge, epoch)


def engine_of(worker: Worker) -> Engine:
    assert isinstance(worker.engine, LocalEngine)
    return worker.engine.engine


MakeTransports = Callable[[EdgeParts], Transports]
EDGES: dict[str, type[PrefillEdge | DecodeEdge]] = {"prefill": PrefillEdge, "decode": DecodeEdge}


def edges_of_both_roles(hub: LocalHub | OneSidedHub) -> Callable[[EdgeParts], Edge]:
    """As a worker's process has them, on the local transport or on the tests' one-sided one."""

    def transports(parts: EdgeParts) -> Transports:
        if isinstance(parts.carried, Transports):
            return parts.carried
        one = one_sided_transport(parts, hub) if isinstance(hub, OneSidedHub) else local_transport(parts, hub, 64 << 20)
        return Transports([one])

    return edge_maker(EDGES, transports)


def local_transports(hub: LocalHub, *, budget_bytes: int = 1 << 20) -> MakeTransports:
    return lambda parts: Transports([local_transport(parts, hub, budget_bytes if parts.config.role == "prefill" else 1 << 20)])


def one_sided_transports(hub: OneSidedHub, made: dict[str, OneSidedTransport] | None = None) -> MakeTransports:
    """`made` gets them by role."""

    def make(parts: EdgeParts) -> Transports:
        transport = one_sided_transport(parts, hub)
        if made is not None:
            made[parts.config.role] = transport
        return Transports([transport])

    return make


def life_of(parts: EdgeParts) -> dict[str, Any]:
    assert isinstance(parts.engine, LocalEngine)
    shape = parts.engine.facts.shape
    return {"store": parts.engine.runner, "block_bytes": shape.block_bytes, "num_layers": shape.num_layers} | {
        "worker_id": parts.worker_id,
        "epoch": parts.epoch,
    }


def one_sided_transport(parts: EdgeParts, hub: OneSidedHub, **options: Any) -> OneSidedTransport:
    return OneSidedTransport(hub=hub, **life_of(parts) | options)


def local_transport(
    parts: EdgeParts, hub: LocalHub, budget_bytes: int = 1 << 20, kind: type[LocalTransport] = LocalTransport
) -> LocalTransport:
    return LocalTransport(hub=hub, budget_bytes=budget_bytes, **life_of(parts))


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """The fake model's answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return [(i * 7 + seed * 13) % VOCAB for i in range(length)]


PROMPT = prompt_of(60)


@dataclass
class Answer:
    """All that a router saw of one request."""

    ticket: kv_pb2.Ticket | None = None
    first: prefill_pb2.FirstToken | None = None
    done: prefill_pb2.PrefillDone | None = None
    committed: decode_pb2.Committed | None = None
    failed: decode_pb2.DecodeFailed | None = None
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    num_decode_cached: int = 0

    def add(self, token: prefill_pb2.Token) -> bool:
        """Returns whether it was the last."""
        self.tokens.append(token.token_id)
        self.positions.append(token.position)
        return bool(token.finish_reason)

    def check(self, prompt: Sequence[int], count: int, first: int = 0) -> None:
        """Fails unless it is the fake model's answer, from the token `first` on."""
        assert self.failed is None, self.failed
        assert self.tokens == expected(prompt, count)[first:]
        assert self.positions == list(range(first, count))


class RouterDouble:
    """One router's stream, sorted by request."""

    def __init__(self, pair: Pair, router_id: str = "router-1") -> None:
        self.pair = pair
        self.router_id = router_id
        self.messages: list[decode_pb2.StepEvents] = []
        self._inboxes: dict[tuple[str, int], asyncio.Queue[decode_pb2.DecodeEvent]] = {}
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None

    async def open(self, *positions: decode_pb2.StreamPosition) -> None:
        self._call = self.pair.decode.Stream(decode_pb2.StreamRequest(router_id=self.router_id, positions=positions))
        await self._call.initial_metadata()
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        if self._reader is not None:
            self._call.cancel()
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def ended(self) -> grpc.StatusCode:
        """Returns the stream's status, once it has ended."""
        assert self._reader is not None
        await asyncio.wait([self._reader])
        code: grpc.StatusCode = await self._call.code()
        return code

    async def _read(self) -> None:
        async for message in self._call:
            self.messages.append(message)
            for event in message.events:
                self.inbox(event.request_id, event.attempt).put_nowait(event)

    def inbox(self, request_id: str, attempt: int = 1) -> asyncio.Queue[decode_pb2.DecodeEvent]:
        return self._inboxes.setdefault((request_id, attempt), asyncio.Queue())

    async def reserve(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, *, prefill_here: bool = False, **options: Any
    ) -> decode_pb2.ReserveResponse:
        request = decode_pb2.ReserveRequest(
            router_id=self.router_id, prefill_here=prefill_here, **self.request(request_id, prompt, max_tokens, **options)
        )
        return await self.pair.decode.Reserve(request, timeout=WAIT_S)

    def run(self, request_id: str, prompt: Sequence[int], max_tokens: int, *, cached: int = 0, **options: Any) -> Any:
        return self.pair.prefill.Run(
            prefill_pb2.PrefillRequest(num_decode_cached_tokens=cached, **self.request(request_id, prompt, max_tokens, **options)),
            timeout=WAIT_S,
        )

    async def attach(self, request_id: str, ticket: kv_pb2.Ticket, attempt: int = 1) -> None:
        await self.pair.decode.Attach(decode_pb2.AttachRequest(request_id=request_id, attempt=attempt, ticket=ticket), timeout=WAIT_S)

    async def cancel(self, request_id: str, attempt: int = 1) -> bool:
        return (await self.pair.decode.Cancel(decode_pb2.CancelRequest(request_id=request_id, attempt=attempt), timeout=WAIT_S)).found

    async def begin(
        self, request_id: str = "r", prompt: Sequence[int] = PROMPT, max_tokens: int = 200, **options: Any
    ) -> tuple[Any, kv_pb2.Ticket]:
        """Reserved, accepted, attached: Run's call and the ticket."""
        await self.reserve(request_id, prompt, max_tokens)
        call = self.run(request_id, prompt, max_tokens, **options)
        ticket = (await call.read()).accepted.ticket
        await self.attach(request_id, ticket)
        return call, ticket

    async def event(self, kind: str, request_id: str = "r") -> decode_pb2.DecodeEvent:
        """The request's next one of this kind; those before it are passed over."""
        while True:
            event = await asyncio.wait_for(self.inbox(request_id).get(), WAIT_S)
            if event.WhichOneof("event") == kind:
                return event

    async def failure(self, request_id: str = "r") -> tuple[str, bool]:
        """Code of its failure, and whether it is worth repeating."""
        failed = (await self.event("failed", request_id)).failed
        return failed.code, failed.retryable

    async def generate(self, request_id: str, prompt: Sequence[int], max_tokens: int, *, told: int | None = None, **options: Any) -> Answer:
        """The whole life of a request, as a router lives it. `told`: what Run is told that the decode worker holds, rightly or not; None:
        what it holds."""
        answer = Answer()
        answer.num_decode_cached = (await self.reserve(request_id, prompt, max_tokens, **options)).num_cached_tokens
        call = self.run(request_id, prompt, max_tokens, cached=answer.num_decode_cached if told is None else told, **options)
        async for event in call:
            match event.WhichOneof("event"):
                case "accepted":
                    answer.ticket = event.accepted.ticket
                    await self.attach(request_id, event.accepted.ticket, options.get("attempt", 1))
                case "first_token":
                    answer.first = event.first_token
                    if answer.add(event.first_token.token):
                        await self.cancel(request_id)
                case "done":
                    answer.done = event.done
        assert answer.first is not None
        if not answer.first.token.finish_reason:
            await self.rest(request_id, answer, options.get("attempt", 1))
        return answer

    async def generate_here(self, request_id: str, prompt: Sequence[int], max_tokens: int, **options: Any) -> Answer:
        """The whole life of a request whose prompt the decode worker computes."""
        await self.reserve(request_id, prompt, max_tokens, prefill_here=True, **options)
        return await self.rest(request_id, attempt=options.get("attempt", 1))

    async def rest(self, request_id: str = "r", answer: Answer | None = None, attempt: int = 1) -> Answer:
        """Returns what is still to come of it: until the last token, or a failure."""
        answer = answer or Answer()
        while True:
            event = await asyncio.wait_for(self.inbox(request_id, attempt).get(), WAIT_S)
            match event.WhichOneof("event"):
                case "committed":
                    answer.committed = event.committed
                    continue
                case "failed":
                    answer.failed = event.failed
                    return answer
                case "first_token":
                    assert answer.first is None, "there is one first token"
                    answer.first = event.first_token
            if answer.add(event.token if event.HasField("token") else event.first_token.token):
                return answer

    async def hears_no_more_of(self, request_id: str) -> None:
        """Checks that none of it comes behind another request's events on the same stream; events sent so far may still be on their way."""
        other = f"behind-{request_id}"
        assert (await self.generate_here(other, prompt_of(9, seed=77), 20)).failed is None
        events = [event for message in self.messages for event in message.events]
        first = next(i for i, event in enumerate(events) if event.request_id == other)
        assert not [event for event in events[first:] if event.request_id == request_id], f"{request_id} is over, and is told of"

    @staticmethod
    def request(
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        attempt: int = 1,
        num_prompt_tokens: int | None = None,
        tenant: str = "t",
        **sampling: Any,
    ) -> dict[str, Any]:
        return {
            "request_id": request_id,
            "attempt": attempt,
            "token_ids": prompt,
            "num_prompt_tokens": len(prompt) if num_prompt_tokens is None else num_prompt_tokens,
            "sampling": sampling_to_proto(SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)),
            "tenant": tenant,
        }


@dataclass
class Pair:
    """A prefill and a decode worker, and stubs to them."""

    prefill_worker: Worker
    decode_worker: Worker
    prefill: prefill_pb2_grpc.PrefillAsyncStub
    kv: kv_pb2_grpc.KvAsyncStub
    decode: decode_pb2_grpc.DecodeAsyncStub
    stats: tuple[worker_pb2_grpc.WorkerAsyncStub, worker_pb2_grpc.WorkerAsyncStub]
    prefill_runner: FakeRunner
    decode_runner: FakeRunner

    @property
    def hand_overs(self) -> HandOvers:
        edge = self.prefill_worker.edge
        assert isinstance(edge, PrefillEdge)
        return edge.hand_overs

    @property
    def decode_edge(self) -> DecodeEdge:
        edge = self.decode_worker.edge
        assert isinstance(edge, DecodeEdge)
        return edge

    def lease_of(self, ticket: kv_pb2.Ticket) -> Lease:
        """Raises Unavailable once it has ended."""
        return self.hand_overs.find(Ticket.from_proto(ticket)).lease

    async def both(self) -> list[worker_pb2.WorkerStats]:
        return [await stub.Stats(worker_pb2.WorkerStatsRequest(check_integrity=True), timeout=WAIT_S) for stub in self.stats]

    async def settled(self) -> None:
        """Waits until nothing is held on either side; fails with what still is."""
        held: list[dict[str, Any]] = []

        async def nothing() -> bool:
            held[:] = [held_by(stats) for stats in await self.both()]
            return not any(held)

        await until(nothing, held)


@asynccontextmanager
async def turned(pair: Pair) -> AsyncIterator[Pair]:
    """The same two workers, of both roles, the other way round."""
    workers = pair.decode_worker, pair.prefill_worker
    to_prefill, to_decode = [channel_to_worker(worker.address, SECRET, caller="test") for worker in workers]
    async with to_prefill as prefill, to_decode as decode:
        yield replace(
            pair,
            prefill_worker=workers[0],
            decode_worker=workers[1],
            prefill=prefill_pb2_grpc.PrefillStub(prefill),
            kv=kv_pb2_grpc.KvStub(prefill),
            decode=decode_pb2_grpc.DecodeStub(decode),
        )


def held_by(stats: worker_pb2.WorkerStats) -> dict[str, Any]:
    """Returns what a worker with nothing to do must not hold."""
    gauges = {n: getattr(stats, f"num_{n}") for n in ("running", "waiting", "reserved", "held", "leases", "sequences")}
    gauges["unreturned_blocks"] = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
    for transport in stats.transports:
        gauges |= {"objects": transport.num_objects, "bytes": transport.stored_bytes, "transport_leases": transport.num_leases}
    gauges["integrity"] = stats.integrity_error
    return {name: value for name, value in gauges.items() if value}


@asynccontextmanager
async def started(
    redis_url: str,
    *,
    prefill_options: dict[str, Any] | None = None,
    decode_options: dict[str, Any] | None = None,
    prefill_runner: FakeRunner | None = None,
    decode_runner: FakeRunner | None = None,
    limits: SequencesConfig | None = None,
    budget_bytes: int = 1 << 20,
    make_transports: MakeTransports | None = None,
    eos: frozenset[int] = frozenset(),
    tokenizer_dir: Path | None = None,
) -> AsyncIterator[Pair]:
    transports = make_transports or local_transports(LocalHub(), budget_bytes=budget_bytes)
    runners = prefill_runner or make_runner(), decode_runner or make_runner()

    prefill, decode = [
        make_worker(
            worker_config(role, redis_url, **(options or {})),
            make_model(runner, eos=eos, tokenizer_dir=tokenizer_dir),
            edge_maker({"prefill": PrefillEdge, "decode": partial(DecodeEdge, limits=limits)}, transports),
            await first_epoch(redis_url),
        )
        for role, runner, options in (("prefill", runners[0], prefill_options), ("decode", runners[1], decode_options))
    ]
    try:
        await prefill.start()
        await decode.start()
        async with (
            channel_to_worker(prefill.address, SECRET, caller="test") as to_prefill,
            channel_to_worker(decode.address, SECRET, caller="test") as to_decode,
        ):
            yield Pair(
                prefill_worker=prefill,
                decode_worker=decode,
                prefill=prefill_pb2_grpc.PrefillStub(to_prefill),
                kv=kv_pb2_grpc.KvStub(to_prefill),
                decode=decode_pb2_grpc.DecodeStub(to_decode),
                stats=(worker_pb2_grpc.WorkerStub(to_prefill), worker_pb2_grpc.WorkerStub(to_decode)),
                prefill_runner=runners[0],
                decode_runner=runners[1],
            )
    finally:
        for runner in runners:
            if isinstance(runner, HeldRunner):
                runner.let_go()
        # A test may have stopped either.
        for worker in (decode, prefill):
            if not worker.record().draining:
                await worker.stop(0.5)


@asynccontextmanager
async def routed(pair: Pair, router_id: str = "router-1") -> AsyncIterator[RouterDouble]:
    """Ends once nothing is held on either side, where both still serve; fails with what still is."""
    router = RouterDouble(pair, router_id)
    await router.open()
    try:
        yield router
        for runner in (pair.prefill_runner, pair.decode_runner):
            if isinstance(runner, HeldRunner):
                runner.let_go()
        if not any(worker.record().draining or worker.engine_failed.is_set() for worker in (pair.prefill_worker, pair.decode_worker)):
            await pair.settled()
    finally:
        await router.close()


async def read_to_end(call: Any) -> list[Any]:
    """All that is left of a stream; raises how it failed."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


@dataclass
class Held:
    """Two workers that take only the steps that they may."""

    pair: Pair
    router: RouterDouble
    prefill: HeldRunner
    decode: HeldRunner

    def let_go(self) -> None:
        self.prefill.let_go()
        self.decode.let_go()

    async def until_steps(self, num_steps: int) -> None:
        """So many were planned on the decode worker: those before the last one are over, and told of."""

        async def planned() -> bool:
            return (await self.pair.both())[1].steps >= num_steps

        await until(planned)


@asynccontextmanager
async def held_pair(redis_url: str, *, decode_blocks: int = 256, **options: Any) -> AsyncIterator[Held]:
    """Either worker takes 8 steps for PROMPT, and publishes each block as a chunk."""
    prefill, decode = HeldRunner(), HeldRunner(num_blocks=decode_blocks)
    small = {"max_num_batched_tokens": 8, "max_num_seqs": 8}
    prefill_options = small | {"chunk_bytes": 1} | options.pop("prefill_options", {})
    decode_options = small | options.pop("decode_options", {})
    async with (
        started(
            redis_url,
            prefill_runner=prefill,
            decode_runner=decode,
            prefill_options=prefill_options,
            decode_options=decode_options,
            **options,
        ) as pair,
        routed(pair) as router,
    ):
        yield Held(pair, router, prefill, decode)
