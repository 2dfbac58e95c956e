"""Workers that can take either role, in one process on the local transport, behind a real router."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from decode_worker.edge import DecodeEdge
from kv_transfer.local import LocalHub, LocalTransport
from kv_transfer.testing_one_sided import OneSidedHub, OneSidedTransport
from kv_transfer.transports import Transports
from prefill_worker.edge import PrefillEdge
from router.config import RouterConfig
from router.server import Router
from twostep import AsyncClient
from twostep.engine.batch import Runner
from twostep.fingerprint import model_fingerprint
from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostep.rpc.worker_role import switch_role
from twostep.text.model_card import ModelCard
from twostep.worker.config import WorkerConfig
from twostep.worker.edge import Edge, EdgeParts
from twostep.worker.model import ServedModel, layout_of
from twostep.worker.worker import Worker

sys.path.append(str(Path(__file__).parent.parent / "streams"))
from whole_system import SECRET, expected, fake_runner, make_model_dir

__all__ = ["SECRET", "expected", "fake_runner", "make_model_dir"]

WAIT_S = 60.0


def edges_of_both_roles(hub: LocalHub | OneSidedHub) -> Callable[[EdgeParts], Edge]:
    """As twostep.worker.roles.edges_of_packages, on the local transport or on the tests' one-sided one."""

    def transports(parts: EdgeParts) -> Transports:
        if isinstance(parts.carried, Transports):
            return parts.carried
        runner = parts.model.runner
        shape = runner.kv_shape
        options: dict[str, Any] = {"worker_id": parts.worker_id, "epoch": parts.epoch, "num_layers": shape.num_layers}
        if isinstance(hub, OneSidedHub):
            return Transports([OneSidedTransport(runner, shape.block_bytes, hub, **options)])
        return Transports([LocalTransport(runner, shape.block_bytes, hub, budget_bytes=64 << 20, **options)])

    return lambda parts: (PrefillEdge if parts.config.role == "prefill" else DecodeEdge)(parts, transports(parts))


@dataclass(eq=False)
class RoleSystem:
    workers: dict[str, Worker] = field(default_factory=dict)
    router: Router | None = None

    @property
    def target(self) -> str:
        assert self.router is not None
        return f"127.0.0.1:{self.router.port}"

    async def switch(self, name: str, role: str, drain_timeout_s: float = 10.0) -> worker_pb2.SwitchRoleResponse:
        async with open_channel(self.workers[name].address) as channel:
            return await switch_role(channel, SECRET, role=role, drain_timeout_s=drain_timeout_s)

    async def stats(self, name: str) -> worker_pb2.WorkerStats:
        async with open_channel(self.workers[name].address) as channel:
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

        await until(empty, "nothing is held", held)


async def until(condition: Callable[[], Any], what: str, seen: object = None) -> None:
    give_up = time.monotonic() + WAIT_S
    while True:
        value = condition()
        if value if isinstance(value, bool) else await value:
            return
        assert time.monotonic() < give_up, f"not within {WAIT_S} s: {what}; {seen}"
        await asyncio.sleep(0.02)


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
        for number, role in enumerate(roles):
            runner = make_runner() if make_runner is not None else fake_runner(model_dir)
            model = ServedModel(name="m", runner=runner, layout=layout_of(runner.kv_shape, fingerprint), eos_token_ids=eos)
            defaults: dict[str, Any] = {"transport_timeout": 5.0, "chunk_bytes": 4096, "router_lease": 5.0}
            config = WorkerConfig(role=role, worker_id=f"w{number}", redis_url=redis_url, **(defaults | options))
            worker = Worker(config, model, SECRET, make_edge)
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
                    no_worker_grace=20.0,
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
    answer = await client.generate(token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout=60).result()
    assert list(answer.token_ids) == expected(prompt, max_tokens, vocab)
    return answer.usage.cached_tokens
