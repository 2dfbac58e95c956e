"""Which transport a hand-over goes by: probed before any request, the best that works between the two, another one when it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from one_sided import OneSidedHub, OneSidedTransport
from worker_harness import (
    SECRET,
    Pair,
    RouterDouble,
    local_transport,
    one_sided_transport,
    prompt_of,
    refused,
    routed,
    started,
    until,
)

from kv_transfer.local.transport import LocalHub
from kv_transfer.ticket import ProbePass
from kv_transfer.transport import KvTransport, ProbeTiming
from kv_transfer.transports import Transports
from prefill_worker.publisher import Publisher
from twostep.errors import SetupError
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.v1 import kv_pb2, worker_pb2
from twostep.worker.edge import EdgeParts

PROMPT = prompt_of(30)
FAST = "cuda_ipc"  # by name: in these tests a transport within the process stands for it


@dataclass
class World:
    pair: Pair
    router: RouterDouble
    fast: dict[str, OneSidedTransport]

    async def paths(self) -> dict[str, worker_pb2.PathStats]:
        """Returns the decode worker's paths from the prefill worker it is tested with."""
        stats = (await self.pair.both())[1]
        return {p.transport: p for p in stats.paths if p.epoch == self.pair.prefill_worker.epoch}

    async def until_path(self, name: str, condition: Callable[[worker_pb2.PathStats], bool]) -> worker_pb2.PathStats:
        seen: list[worker_pb2.PathStats] = []

        async def there() -> bool:
            seen[:] = [path for known, path in (await self.paths()).items() if known == name]
            return bool(seen) and condition(seen[0])

        await until(there, seen)
        return seen[0]

    async def transport_of(self, name: str) -> str:
        """That of a request that must get the right tokens."""
        answer = await self.router.generate(name, PROMPT, 3)
        answer.check(PROMPT, 3)
        assert answer.committed is not None
        assert answer.done is not None
        assert answer.committed.transport == answer.done.transport
        return answer.committed.transport


@asynccontextmanager
async def world(
    redis_url: str, *, prefill: str = "cuda_ipc,local", decode: str = "cuda_ipc,local", rate: float = 100e9
) -> AsyncIterator[World]:
    local_hub, hub, fast = LocalHub(), OneSidedHub(), dict[str, OneSidedTransport]()

    def make(parts: EdgeParts) -> Transports:
        names = {"prefill": prefill, "decode": decode}[parts.config.role]
        one_sided = fast[parts.config.role] = one_sided_transport(parts, hub, name=FAST, rate=rate)
        made: dict[str, KvTransport] = {FAST: one_sided, "local": local_transport(parts, local_hub, 1 << 20)}
        return Transports([made[name] for name in names.split(",")])

    async with started(redis_url, make_transports=make) as pair, routed(pair) as router:
        yield World(pair, router, fast)


async def test_paths_are_known_before_the_first_request(redis_url: str) -> None:
    async with world(redis_url) as w:
        path = await w.until_path(FAST, lambda p: p.bytes_per_s > 0)
        assert path.bytes_per_s == pytest.approx(100e9)
        assert path.worker_id == "prefill-1"
        await w.until_path("local", lambda p: p.bytes_per_s > 0)
        assert await w.transport_of("r") == FAST
        stats = await w.pair.both()
        moved = {t.name: (t.num_transfers, t.num_chunks > 0, t.num_bytes) for t in stats[1].transports}
        assert moved[FAST] == (1, True, 8 * w.pair.decode_runner.kv_shape.block_bytes)
        assert moved["local"] == (0, False, 0)
        assert {t.name: (t.num_transfers, t.num_bytes) for t in stats[0].transports} == {n: (c, b) for n, (c, _, b) in moved.items()}
        assert set(w.pair.prefill_worker.record().transports) == {FAST, "local"}


async def test_no_request_waits_for_a_probe_while_there_is_another_way(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, go_on = OneSidedTransport.probe, asyncio.Event()

    async def slow(self: OneSidedTransport, endpoint: str, *, deadline: float) -> ProbeTiming:
        await go_on.wait()
        return await real(self, endpoint, deadline=deadline)

    monkeypatch.setattr(OneSidedTransport, "probe", slow)
    async with world(redis_url) as w:
        assert await w.transport_of("r") == "local"
        go_on.set()
        await w.until_path(FAST, lambda p: p.bytes_per_s > 0)
        assert await w.transport_of("s") == FAST


async def test_a_path_too_slow_to_be_between_gpus_is_not_offered(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "decode_worker.paths")
    async with world(redis_url, rate=1e9) as w:
        path = await w.until_path(FAST, lambda p: bool(p.error))
        assert path.bytes_per_s == 0
        assert "1.00 GB/s" in path.error
        assert await w.transport_of("r") == "local"
        # Said once, however often it is tried again.
        w.fast["decode"].rate = 2e9
        await w.until_path(FAST, lambda p: "2.00 GB/s" in p.error)
        assert [r.message for r in caplog.records if "is not offered" in r.message and "prefill-1" in r.message] != []
        assert sum("2.00 GB/s" in r.message for r in caplog.records) == 0
        w.fast["decode"].rate = 200e9
        await w.until_path(FAST, lambda p: p.bytes_per_s > 0)
        assert await w.transport_of("s") == FAST


async def test_nothing_in_common_fails_with_the_reason(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.paths._WAIT_S", 0.1)
    async with world(redis_url, prefill="local", decode="cuda_ipc") as w:
        await w.until_path(FAST, lambda p: "not ready on the prefill worker" in p.error)
        answer = await _failed(w)
        assert (answer.code, answer.retryable) == ("UNAVAILABLE", True)
        assert "cuda_ipc: not ready on the prefill worker" in answer.message


async def test_a_manifest_of_a_way_that_was_not_offered_is_refused(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(redis_url, rate=1e9) as w:
        await w.until_path(FAST, lambda p: bool(p.error))
        choose = Publisher.choose
        # The prefill worker takes no notice of what it was offered.
        monkeypatch.setattr(Publisher, "choose", lambda self, offered, *rest: choose(self, (FAST,), *rest))
        answer = await _failed(w)
        assert (answer.code, answer.retryable) == ("FAILED_PRECONDITION", False)


async def _failed(w: World) -> Any:
    call, _ = await w.router.begin("r", PROMPT, 3)
    failed = (await w.router.event("failed")).failed
    call.cancel()
    return failed


async def test_another_way_is_taken_when_one_breaks_and_back(redis_url: str) -> None:
    async with world(redis_url) as w:
        await w.until_path(FAST, lambda p: p.bytes_per_s > 0)
        w.fast["decode"].broken = "the link is down"
        failed = await _failed(w)
        assert (failed.code, failed.retryable) == ("UNAVAILABLE", True)
        await w.until_path(FAST, lambda p: "the link is down" in p.error)
        assert await w.transport_of("s") == "local"
        w.fast["decode"].broken = ""
        await w.until_path(FAST, lambda p: p.bytes_per_s > 0)
        assert await w.transport_of("t") == FAST


async def test_a_probe_that_fails_unexpectedly_costs_one_try(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failing = OneSidedTransport.probe, [True]

    async def probe(self: OneSidedTransport, endpoint: str, *, deadline: float) -> ProbeTiming:
        if failing:
            raise RuntimeError("CUDA out of memory")
        return await real(self, endpoint, deadline=deadline)

    monkeypatch.setattr(OneSidedTransport, "probe", probe)
    async with world(redis_url) as w:
        await w.until_path(FAST, lambda p: "CUDA out of memory" in p.error)
        # Nor does it keep the others from being tried.
        await w.until_path("local", lambda p: p.bytes_per_s > 0)
        assert await w.transport_of("r") == "local"
        failing.clear()
        await w.until_path(FAST, lambda p: p.bytes_per_s > 0)
        assert await w.transport_of("s") == FAST


async def test_a_watch_that_fails_unexpectedly_ends_the_hand_over(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(redis_url) as w:
        with monkeypatch.context() as patch:
            patch.setattr("decode_worker.pull._info", lambda chunk, num_layers: 1 // 0)
            failed = await _failed(w)
        assert (failed.code, failed.retryable) == ("INTERNAL", True)
        assert "ZeroDivisionError" in failed.message
        await w.pair.settled()
        assert await w.transport_of("s") in (FAST, "local")


async def test_only_members_of_the_deployment_may_ask(redis_url: str) -> None:
    async with world(redis_url) as w:
        here: dict[str, Any] = {"worker_id": w.pair.prefill_worker.worker_id, "epoch": w.pair.prefill_worker.epoch}
        good = ProbePass.issue(SECRET, **here)
        answer = await w.pair.kv.Probe(good.to_proto())
        assert [(path.transport, bool(path.endpoint)) for path in answer.paths] == [(FAST, True), ("local", True)]
        for wrong, status in (
            (ProbePass.issue(DeploymentSecret(b"another deployment's"), **here), grpc.StatusCode.UNAUTHENTICATED),
            (replace(good, expires_unix_ms=good.expires_unix_ms + 1), grpc.StatusCode.UNAUTHENTICATED),
            (ProbePass.issue(SECRET, **here | {"worker_id": "other"}), grpc.StatusCode.UNAVAILABLE),
            (ProbePass.issue(SECRET, **here | {"epoch": good.epoch - 1}), grpc.StatusCode.UNAVAILABLE),
        ):
            await refused(w.pair.kv.Probe(wrong.to_proto()), status)


async def test_a_watch_that_names_no_transport_takes_none_that_must_be_asked(redis_url: str) -> None:
    async with world(redis_url) as w:
        await w.router.reserve("r", PROMPT, 3)
        call = w.router.run("r", PROMPT, 3)
        ticket = (await call.read()).accepted.ticket
        manifest = (await w.pair.kv.Watch(kv_pb2.WatchRequest(ticket=ticket)).read()).manifest
        assert (manifest.transport, manifest.checksum) == ("local", "xxh3_64")
        # The first watch has decided: a reader that cannot take it must ask for another attempt.
        await refused(w.pair.kv.Watch(kv_pb2.WatchRequest(ticket=ticket, transports=[FAST])).read(), grpc.StatusCode.UNAVAILABLE)
        await refused(w.pair.kv.Watch(kv_pb2.WatchRequest(ticket=ticket, transports=["pigeon"])).read(), grpc.StatusCode.UNAVAILABLE)
        call.cancel()
        await w.router.cancel("r")


async def test_a_transport_that_cannot_start_is_left_out_where_it_may_be() -> None:
    class Broken(OneSidedTransport):
        async def start(self) -> None:
            raise SetupError("no such device")

    def make(kind: type[OneSidedTransport], name: str) -> OneSidedTransport:
        return kind(None, 1, OneSidedHub(), worker_id="w", name=name)  # type: ignore[arg-type]

    some = Transports([make(Broken, "nixl"), make(OneSidedTransport, "ray")], optional=["nixl"])
    await some.start()
    assert [t.name for t in some.ready] == list(some.names) == ["ray"]
    with pytest.raises(SetupError, match="no such device"):
        await Transports([make(Broken, "nixl")]).start()
