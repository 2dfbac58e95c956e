"""Workers that can take either role, in one process on the local transport, behind a real router."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from one_sided import OneSidedHub
from worker_harness import WAIT_S, local_transport, one_sided_transport, until

from decode_worker.edge import DecodeEdge
from kv_transfer.local.transport import LocalHub
from kv_transfer.transports import Transports
from prefill_worker.edge import PrefillEdge
from router.config import RouterConfig
from router.server import Router
from twostep import AsyncClient
from twostep.checkpoint.fingerprint import model_fingerprint
from twostep.cluster.epochs import first_epoch
from twostep.engine.batch import Runner
from twostep.rpc.call_signing import channel_to_worker
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostep.rpc.worker_role import switch_role
from twostep.text.model_card import ModelCard
from twostep.worker.config import WorkerConfig
from twostep.worker.edge import Edge, EdgeParts
from twostep.worker.model import ServedModel, layout_of, settle
from twostep.worker.worker import Worker

sys.path.append(str(Path(__file__).parent.parent / "streams"))
from bare_deployment import make_bare_model_dir as make_model_dir
from whole_system import SECRET, expected, fake_runner

__all__ = ["SECRET", "WAIT_S", "expected", "fake_runner", "make_model_dir", "until"]


def edges_of_both_roles(hub: LocalHub | OneSidedHub) -> Callable[[EdgeParts], Edge]:
    """As twostep.worker.roles.edges_of_packages, on the local transport or on the tests' one-sided one."""

    def transports(parts: EdgeParts) -> Transports:
        if isinstance(parts.carried, Transports):
            return parts.carried
        if isinstance(hub, OneSidedHub):
            return Transports([one_sided_transport(parts, hub)])
        return Transports([local_transport(parts, hub, 64 << 20)])

    return lambda parts: (PrefillEdge if parts.config.role == "prefill" else DecodeEdge)(parts, transports(parts))


@dataclass(eq=False)
class RoleSystem:
    workers: dict[str, Worker] = field(default_factory=dict)
    router: Router | None = None

    @property
    def target(self) -> str:
        assert self.router is not None
        return f"127.0.0.1:{self.router.port}"

    async def switch(
        self, name: str, role: str, drain_timeout_s: float = WAIT_S, *, secret: bytes = SECRET
    ) -> worker_pb2.SwitchRoleResponse:
        # Asked here, where it may take as long as it likes.
        worker = await self.stats(name)
        async with channel_to_worker(self.workers[name].address, SECRET, caller="test") as channel:
            return await switch_role(channel, secret, role=role, drain_timeout_s=drain_timeout_s, worker=worker)

    async def stats(self, name: str) -> worker_pb2.WorkerStats:
        async with channel_to_worker(self.workers[name].address, SECRET, caller="test") as channel:
            request = worker_pb2.WorkerStatsRequest(check_integrity=True)
            stats: worker_pb2.WorkerStats = await worker_pb2_grpc.WorkerStub(channel).Stats(request, timeout=WAIT_S)
            return stats

    async def knows(self, prefill: int, decode: int) -> None:
        """Returns when the router sees so many ready workers of each role."""
        async with AsyncClient(self.target, max_retries=0) as client:

            async def seen() -> bool:
                models = await client.models(timeout=WAIT_S)
                return bool(models) and (models[0].prefill_workers, models[0].decode_workers) == (prefill, decode)

            await until(seen, f"the router sees {prefill} + {decode}")

    async def settled(self) -> None:
        """Returns when no worker holds anything, and every pool adds up."""
        held: list[object] = []

        async def empty() -> bool:
            held.clear()
            for name in self.workers:
                s = await self.stats(name)
                assert not s.integrity_error, s.integrity_error
                held.append((name, s.num_running, s.num_waiting, s.num_reserved, s.num_held, s.num_leases, s.num_sequences))
                held.append([(t.num_leases, t.num_objects, t.stored_bytes) for t in s.transports])
                held.append(s.num_blocks - s.num_free_blocks - s.num_cached_blocks)
            return not any(any(h[1:]) if isinstance(h, tuple) else any(any(t) for t in h) if isinstance(h, list) else h for h in held)

        await until(empty, held)


@asynccontextmanager
async def role_system(
    model_dir: Path,
    redis_url: str,
    tmp_path: Path,
    *,
    roles: Sequence[str] = ("prefill", "decode"),
    make_runner: Callable[[], Runner] | None = None,
    make_edge: Callable[[EdgeParts], Edge] | None = None,
    with_router: bool = True,
    **options: Any,
) -> AsyncIterator[RoleSystem]:
    """Workers `w0`, `w1`, ... that begin in these roles."""
    system, make_edge = RoleSystem(), make_edge or edges_of_both_roles(LocalHub())
    fingerprint, eos = model_fingerprint(model_dir), ModelCard.load(model_dir).eos_token_ids
    async with AsyncExitStack() as stack:
        # What a worker says at once, it would say a heartbeat later if it stood still for a second while Redis answers.
        stack.enter_context(pytest.MonkeyPatch.context()).setattr("twostep.cluster.connection._TIMEOUT_S", WAIT_S)
        for number, role in enumerate(roles):
            runner = make_runner() if make_runner is not None else fake_runner(model_dir)
            model = ServedModel(name="m", runner=runner, layout=layout_of(runner.kv_shape, fingerprint), eos_token_ids=eos)
            defaults: dict[str, Any] = {"transport_timeout": WAIT_S, "chunk_bytes": 4096, "router_lease": WAIT_S, "lease_ttl": WAIT_S}
            config = settle(WorkerConfig(role=role, worker_id=f"w{number}", redis_url=redis_url, **(defaults | options)))
            worker = Worker(config, model, SECRET, make_edge, await first_epoch(redis_url))
            await worker.start()
            stack.push_async_callback(_stop, worker)
            system.workers[worker.worker_id] = worker
        if with_router:
            (tmp_path / "secret").write_bytes(SECRET)
            system.router = Router(
                RouterConfig(
                    model=model_dir,
                    redis_url=redis_url,
                    host="127.0.0.1",
                    port=0,
                    served_model_name="m",
                    secret_file=tmp_path / "secret",
                    no_worker_grace=WAIT_S,
                    prefix_lookup_timeout=5.0,
                )
            )
            await system.router.start()
            stack.push_async_callback(system.router.drain, 0.0)
        yield system


async def _stop(worker: Worker) -> None:
    # A test may have stopped it.
    if not worker.record().draining or worker.engine_failed.is_set():
        with suppress(grpc.aio.AioRpcError):
            await worker.stop(0.5)


def vocab_of(system: RoleSystem) -> int:
    return next(iter(system.workers.values())).engine.runner.vocab_size


async def ask(client: AsyncClient, prompt: list[int], max_tokens: int, vocab: int) -> int:
    """Fails unless the answer is the fake model's; how many of the prompt's tokens were cached."""
    answer = await client.generate(token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout=2 * WAIT_S).result()
    assert list(answer.token_ids) == expected(prompt, max_tokens, vocab)
    return answer.usage.cached_tokens


class Load:
    """Clients that ask one thing after another until the block ends; what `ask_one` raises ends it, too."""

    def __init__(
        self, system: RoleSystem, ask_one: Callable[[AsyncClient, random.Random], Awaitable[object]], *, num_clients: int = 4, seed: int = 1
    ) -> None:
        self._system = system
        self._ask_one = ask_one
        self._seeds = [seed * 1000 + number for number in range(num_clients)]
        self._stop = asyncio.Event()
        self._num_answers = [0] * num_clients
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._run(number, random.Random(seed))) for number, seed in enumerate(self._seeds)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def _run(self, number: int, rng: random.Random) -> None:
        # No retries: whatever is lost, the router is to mend it.
        async with AsyncClient(self._system.target, max_retries=0) as client:
            while not self._stop.is_set():
                await self._ask_one(client, rng)
                self._num_answers[number] += 1

    async def rounds(self, count: int) -> None:
        """Returns when each client has so many more answers: what runs now is over then."""
        wanted = [num_answers + count for num_answers in self._num_answers]

        def there() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return all(has >= least for has, least in zip(self._num_answers, wanted, strict=True))

        await until(there, self._num_answers)
