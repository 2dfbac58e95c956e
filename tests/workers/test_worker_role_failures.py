"""A change of roles that fails, or that something else comes into: where the worker is then, and that nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from role_harness import WAIT_S, ask, edges_of_both_roles, role_system, until, vocab_of
from worker_harness import RedisServer

from decode_worker.edge import DecodeEdge
from kv_transfer.local.transport import LocalHub
from prefill_worker.edge import PrefillEdge
from twostep import AsyncClient
from twostep.cluster.records import WorkerRecord, prefix_key, worker_key
from twostep.engine.fake import FakeRunner
from twostep.errors import Incompatible, InternalError, SetupError, Unavailable
from twostep.worker.edge import Edge, EdgeParts


@pytest.mark.system
async def test_a_stop_in_the_middle_drains_as_ever(model_dir: Path, redis_url: str, tmp_path: Path) -> None:
    async with role_system(model_dir, redis_url, tmp_path, roles=("prefill", "decode"), local_prefill=False) as system:
        vocab = vocab_of(system)
        await system.knows(1, 1)
        async with AsyncClient(system.target, max_retries=0) as client:
            worker = system.workers["w1"]
            runner = worker.engine.runner
            assert isinstance(runner, FakeRunner)
            # Until the stop, its answer would take a minute.
            step_s, runner.step_s = runner.step_s, 0.3
            running = asyncio.create_task(ask(client, [7] * 50, 200, vocab))
            await until(lambda: worker.engine.stats().num_running > 0, "it decodes")
            switching = asyncio.create_task(system.switch("w1", "prefill"))
            await until(lambda: worker.record().draining, "it drains")
            assert not running.done()
            runner.step_s = step_s
            await worker.stop(WAIT_S)
            with pytest.raises(Unavailable):
                await switching
            # Its request had the time of the stop's own drain.
            await running


def failing_edges(hub: LocalHub, failures: list[str]) -> Callable[[EdgeParts], Edge]:
    """While `failures` names a role, its edge does not start."""
    make = edges_of_both_roles(hub)

    def edge_of(parts: EdgeParts) -> Edge:
        edge = make(parts)
        if parts.config.role in failures:

            async def start() -> None:
                raise SetupError("its transport cannot start: give it another network")

            edge.start = start  # type: ignore[method-assign]
        return edge

    return edge_of


async def test_a_worker_that_cannot_take_the_role_goes_on_in_its_own(model_dir: Path, redis_url: str, tmp_path: Path) -> None:
    failures: list[str] = []
    make_edge = failing_edges(LocalHub(), failures)
    options = {"roles": ("prefill", "decode"), "make_edge": make_edge, "local_prefill": False}
    async with role_system(model_dir, redis_url, tmp_path, **options) as system:
        vocab, epoch = vocab_of(system), system.workers["w0"].epoch
        await system.knows(1, 1)
        failures.append("decode")
        with pytest.raises(Incompatible):
            await system.switch("w0", "decode")
        worker = system.workers["w0"]
        assert (worker.record().role, worker.record().ready) == ("prefill", True)
        assert worker.epoch > epoch
        await system.knows(1, 1)
        async with AsyncClient(system.target, max_retries=0) as client:
            await ask(client, [9] * 70, 10, vocab)
        await system.settled()
        failures.clear()
        assert (await system.switch("w0", "decode")).role == "decode"


async def test_a_worker_that_can_serve_no_role_ends(model_dir: Path, redis_url: str, tmp_path: Path) -> None:
    failures: list[str] = []
    make_edge = failing_edges(LocalHub(), failures)
    async with role_system(model_dir, redis_url, tmp_path, roles=("prefill",), make_edge=make_edge, with_router=False) as system:
        failures += ["decode", "prefill"]
        with pytest.raises(InternalError):
            await system.switch("w0", "decode")
        worker = system.workers["w0"]
        # Its process sees that, and exits with status 1.
        assert worker.engine_failed.is_set()
        assert not worker.record().ready


async def test_a_process_of_one_role_says_so(model_dir: Path, redis_url: str, tmp_path: Path) -> None:
    make = edges_of_both_roles(LocalHub())
    prefills: list[Edge] = []

    def prefill_only(parts: EdgeParts) -> Edge:
        edge = make(parts) if not prefills or parts.config.role == "prefill" else prefills[0]
        prefills.append(edge)
        return edge

    async with role_system(model_dir, redis_url, tmp_path, roles=("prefill",), make_edge=prefill_only, with_router=False) as system:
        with pytest.raises(Incompatible):
            await system.switch("w0", "decode")
        assert system.workers["w0"].record().ready


async def test_a_worker_without_kv_transports_stays_a_decode_worker(model_dir: Path, redis_url: str, tmp_path: Path) -> None:
    async with role_system(model_dir, redis_url, tmp_path, roles=("decode",), with_router=False, kv_transfer="none") as system:
        with pytest.raises(Incompatible, match="--kv-transfer none"):
            await system.switch("w0", "prefill")
        record = system.workers["w0"].record()
        assert (record.role, record.ready, record.draining) == ("decode", True, False)


async def test_transports_of_neither_role_leave_it_in_its_own(
    model_dir: Path, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while Ray's head is away: the process goes on, and is of use again once KV has a way."""
    async with role_system(model_dir, redis_url, tmp_path, roles=("prefill",), with_router=False, transport_timeout=0.2) as system:
        worker = system.workers["w0"]
        with monkeypatch.context() as away:
            for edge in (PrefillEdge, DecodeEdge):
                away.setattr(edge, "ready_transports", ())
            with pytest.raises(Incompatible):
                await system.switch("w0", "decode")
            assert not worker.engine_failed.is_set()
            assert (worker.record().role, worker.record().transports) == ("prefill", ())
            assert "no KV transport works" in worker.record().not_ready_reason
        await until(lambda: not worker.record().not_ready_reason, "KV has a way again")


async def test_a_stop_does_not_wait_for_transports_that_do_not_come_up(
    model_dir: Path, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    def none_ready(_: DecodeEdge) -> tuple[str, ...]:
        asked.set()
        return ()

    monkeypatch.setattr(DecodeEdge, "ready_transports", property(none_ready))
    async with role_system(model_dir, redis_url, tmp_path, roles=("prefill",), with_router=False, transport_timeout=600.0) as system:
        switching, worker = asyncio.create_task(system.switch("w0", "decode")), system.workers["w0"]
        await asyncio.wait_for(asked.wait(), WAIT_S)
        assert worker.record().role == "prefill", "nobody is told of a life that does not serve yet"
        async with asyncio.timeout(WAIT_S):
            await worker.stop(0.0)
        with pytest.raises(Unavailable):
            await switching


async def test_without_redis_it_changes_all_the_same_and_says_so_later(model_dir: Path, own_redis: RedisServer, tmp_path: Path) -> None:
    async with role_system(model_dir, own_redis.url, tmp_path, roles=("prefill",), with_router=False) as system:
        worker, epoch = system.workers["w0"], system.workers["w0"].epoch
        own_redis.stop()
        assert (await system.switch("w0", "decode")).role == "decode"
        own_redis.start()
        async with Redis.from_url(own_redis.url) as redis:

            async def told() -> bool:
                text = await redis.get(worker_key("w0"))
                if text is None:
                    return False
                record = WorkerRecord.from_json(text)
                return record.role == "decode" and record.epoch == worker.epoch > epoch

            await until(told, "its record is there again")
            assert not await redis.exists(prefix_key("w0", epoch))
