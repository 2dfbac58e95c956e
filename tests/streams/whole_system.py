"""Routers and workers as they are, in one process: real gRPC between them, a real Redis, the local transport, and proxies in front of the
decode workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from bare_deployment import MAX_MODEL_LEN, SECRET, RedisServer, until
from brake import Brake
from cutting_proxy import CuttingProxy

from decode_worker.edge import DecodeEdge
from decode_worker.sequences import SequencesConfig
from kv_transfer.local.transport import LocalHub, LocalTransport
from kv_transfer.transports import Transports
from prefill_worker.edge import PrefillEdge
from router.config import RouterConfig
from router.server import Router
from twostep.checkpoint.fingerprint import model_fingerprint
from twostep.cluster.epochs import first_epoch
from twostep.engine.batch import Runner
from twostep.engine.fake import FakeRunner, fake_next_token
from twostep.rpc.call_signing import CallSigner
from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostep.text.model_card import ModelCard
from twostep.worker.config import ROLES, WorkerConfig
from twostep.worker.edge import Edge, EdgeParts
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import ServedModel, layout_of, resolve_config
from twostep.worker.worker import Worker

BLOCK = 16


def fake_runner(model_dir: Path, *, step_s: float = 0.004) -> FakeRunner:
    card = ModelCard.load(model_dir)
    return FakeRunner(num_blocks=1024, block_size=BLOCK, vocab_size=card.vocab_size, max_model_len=MAX_MODEL_LEN, step_s=step_s)


def expected(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The fake runner's answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


async def start_worker(
    model_dir: Path,
    redis_url: str,
    role: str,
    make_edge: Callable[[EdgeParts], Edge],
    runner: Runner,
    draft: Runner | None = None,
    has_head: bool = False,
    **options: Any,
) -> Worker:
    card, layout = ModelCard.load(model_dir), layout_of(runner.kv_shape, model_fingerprint(model_dir))
    model = ServedModel(name="m", runner=runner, layout=layout, eos_token_ids=card.eos_token_ids, tokenizer_dir=model_dir)
    model = replace(model, draft=draft, has_head=has_head)
    config = WorkerConfig(role=role, redis_url=redis_url, **{"transport_timeout": 60.0, "chunk_bytes": 4096} | options)
    settled = resolve_config(config)
    worker = Worker(settled, LocalEngine(settled, model), SECRET, make_edge, await first_epoch(redis_url))
    await worker.start()
    return worker


async def start_router(model_dir: Path, redis_url: str, secret_file: Path, **options: Any) -> Router:
    defaults: dict[str, Any] = {
        "model": model_dir,
        "redis_url": redis_url,
        "host": "127.0.0.1",
        "port": 0,
        "grpc_port": 0,
        "served_model_name": ("m",),
        "secret_file": secret_file,
        "no_worker_grace": 60.0,
        "prefix_lookup_timeout": 30.0,
        "redis_start_timeout": 60.0,
    }
    router = Router(RouterConfig(**defaults | options))
    await router.start()
    return router


@dataclass(eq=False)
class WholeSystem:
    model_dir: Path
    redis_url: str
    secret_file: Path
    start_worker: Callable[[str, CuttingProxy | None], Awaitable[Worker]]
    prefill: Worker | None = None
    decodes: list[Worker] = field(default_factory=list)
    proxies: list[CuttingProxy] = field(default_factory=list)
    routers: list[Router] = field(default_factory=list)
    brake: Brake = field(default_factory=Brake)

    def target(self, router: int = 0) -> str:
        return f"127.0.0.1:{self.routers[router].grpc_port}"

    async def add_decode(self) -> Worker:
        proxy = CuttingProxy()
        await proxy.start()
        worker = await self.start_worker("decode", proxy)
        proxy.target = f"127.0.0.1:{worker.server.port}"
        self.proxies.append(proxy)
        self.decodes.append(worker)
        return worker

    async def lose_decode(self, index: int) -> Worker:
        """Nothing listens at its address any more, from one moment to the next, and nobody hears of what it does until it has stopped.
        Returns it, for its figures."""
        proxy, worker = self.proxies.pop(index), self.decodes.pop(index)
        await proxy.stop()
        await worker.stop(0.0)
        return worker

    async def stop_workers(self) -> None:
        await asyncio.gather(*(worker.stop(0.5) for worker in filter(None, (self.prefill, *self.decodes))))
        for proxy in self.proxies:
            await proxy.stop()

    async def add_router(self, **options: Any) -> Router:
        router = await start_router(self.model_dir, self.redis_url, self.secret_file, **options)
        self.routers.append(router)
        # Its first look at Redis has a deadline, which may be over on a busy machine.
        await until(lambda: len(router.pool.decode) == len(self.decodes), "it knows the workers")
        await until(lambda: all(link.stream.open for link in router.pool.decode.values()), "the streams of tokens are open")
        return router

    async def stats(self) -> list[worker_pb2.WorkerStats]:
        """Returns the stats of all workers, asked around the proxies."""
        result = []
        for worker in filter(None, (self.prefill, *self.decodes)):
            signature = CallSigner(SECRET, "test").sign(worker.worker_id, worker.epoch)
            async with open_channel(f"127.0.0.1:{worker.server.port}", signature=signature) as channel:
                request = worker_pb2.WorkerStatsRequest(check_integrity=True)
                result.append(await worker_pb2_grpc.WorkerStub(channel).Stats(request, timeout=60))
        return result

    async def settled(self, within_s: float = 60.0) -> None:
        """Waits until no worker holds anything; fails with what still is held."""
        give_up, names = time.monotonic() + within_s, ("num_running", "num_waiting", "num_reserved", "num_held", "num_leases")
        while held := [
            (name, value)
            for stats in await self.stats()
            for name in (*names, "num_sequences", "integrity_error")
            if (value := getattr(stats, name))
        ]:
            assert time.monotonic() < give_up, held
            await asyncio.sleep(0.05)


@asynccontextmanager
async def whole_system(
    model_dir: Path,
    tmp_path: Path,
    *,
    num_decode: int = 1,
    num_routers: int = 1,
    aggregated: bool = False,
    make_runner: Callable[[], Runner] | None = None,
    limits: SequencesConfig | None = None,
    step_tokens: int = 0,
    make_draft: Callable[[], Runner] | None = None,
    has_head: bool = False,
    worker_options: Mapping[str, Any] | None = None,
    **router_options: Any,
) -> AsyncIterator[WholeSystem]:
    """`aggregated`: without a prefill worker; the decode workers compute prompts themselves. Otherwise they compute none. `step_tokens`: of
    a step of each worker; 0: its default. `make_draft`, `has_head`: what drafts beside or in a
    runner, where `worker_options` say so."""
    async with AsyncExitStack() as stack:
        (tmp_path / "redis").mkdir(parents=True)
        redis_server = RedisServer(tmp_path / "redis")
        stack.callback(redis_server.kill)
        url = redis_server.url
        secret_file = tmp_path / "secret"
        secret_file.write_bytes(SECRET.own)
        make_edge = _edges(LocalHub(), replace(limits or SequencesConfig(), local_prefill=aggregated))
        runner_of, brake = make_runner or (lambda: fake_runner(model_dir)), Brake()
        numbers = {role: count() for role in ROLES}

        async def start(role: str, proxy: CuttingProxy | None = None) -> Worker:
            options: dict[str, Any] = {
                "worker_id": f"{role}-{next(numbers[role])}",
                "advertise_address": "" if proxy is None else proxy.address,
                "local_prefill": aggregated,
                "max_num_batched_tokens": step_tokens,
                "fixed_roles": True,
                "otlp_endpoint": router_options.get("otlp_endpoint", ""),
            }
            draft = None if make_draft is None else make_draft()
            options |= worker_options or {}
            return await start_worker(model_dir, url, role, make_edge, brake.on(runner_of()), draft, has_head, **options)

        system = WholeSystem(model_dir, url, secret_file, start, brake=brake)
        stack.push_async_callback(system.stop_workers)
        if not aggregated:
            system.prefill = await start("prefill")
        for _ in range(num_decode):
            await system.add_decode()
        stack.push_async_callback(_drain, system.routers)
        for _ in range(num_routers):
            await system.add_router(**router_options)
        try:
            yield system
        finally:
            brake.open()


async def _drain(routers: Sequence[Router]) -> None:
    await asyncio.gather(*(router.drain(0.0) for router in routers))


def _edges(hub: LocalHub, limits: SequencesConfig) -> Callable[[EdgeParts], Edge]:
    def make(parts: EdgeParts) -> Edge:
        assert isinstance(parts.engine, LocalEngine)
        runner = parts.engine.runner
        life: dict[str, Any] = {"worker_id": parts.worker_id, "epoch": parts.epoch, "budget_bytes": 64 << 20}
        transports = Transports([LocalTransport(runner, runner.kv_shape.block_bytes, hub, **life)])
        if parts.config.role == "prefill":
            return PrefillEdge(parts, transports)
        return DecodeEdge(parts, transports, limits=limits)

    return make
