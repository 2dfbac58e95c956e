"""A worker drains and takes the other role, and back: what others are told, what it keeps, what happens to requests, and what may fail."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from bare_deployment import SECRET, RedisServer
from one_sided import OneSidedHub
from redis.asyncio import Redis
from worker_harness import WAIT_S, edges_of_both_roles, engine_of, health, held_by, refused, until

from kv_transfer.local.transport import LocalHub
from kv_transfer.transports import Transports
from router.server import Router
from twostep import AsyncClient
from twostep.cluster.records import WorkerRecord, prefix_key, worker_key
from twostep.engine.config import prompt_room
from twostep.engine.fake import FakeRunner
from twostep.errors import Incompatible, InternalError, SetupError, Unauthenticated, Unavailable
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.call_signing import CallSigner, channel_to_worker, introduced
from twostep.rpc.channel import open_channel
from twostep.rpc.convert import sampling_to_proto
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostep.rpc.worker_role import RolePass, switch_role
from twostep.sampling_params import SamplingParams
from twostep.text.model_card import ModelCard
from twostep.worker.edge import Edge, EdgeParts
from twostep.worker.worker import Worker

sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("streams", "system")]
from loads import SteadyLoad, fake_cases
from whole_system import expected, fake_runner, start_router, start_worker

Code = grpc.StatusCode


@dataclass(eq=False)
class RoleSystem:
    vocab: int
    workers: dict[str, Worker] = field(default_factory=dict)
    router: Router | None = None

    @property
    def target(self) -> str:
        assert self.router is not None
        return f"127.0.0.1:{self.router.grpc_port}"

    async def switch(
        self, name: str, role: str, drain_timeout_s: float = WAIT_S, *, secret: DeploymentSecret = SECRET
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
        held: list[dict[str, Any]] = []

        async def nothing() -> bool:
            held[:] = [held_by(await self.stats(name)) for name in self.workers]
            return not any(held)

        await until(nothing, held)

    async def ask(self, client: AsyncClient, prompt: list[int], max_tokens: int) -> None:
        """Fails unless the answer is the fake model's."""
        answer = await client.generate(
            token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout=2 * WAIT_S
        ).result()
        assert list(answer.token_ids) == expected(prompt, max_tokens, self.vocab)


@asynccontextmanager
async def role_system(
    model_dir: Path,
    redis_url: str,
    tmp_path: Path,
    *roles: str,
    make_edge: Callable[[EdgeParts], Edge] | None = None,
    **options: Any,
) -> AsyncIterator[RoleSystem]:
    """Workers `w0`, `w1`, ... that begin in these roles; several of them behind a router."""
    make_edge = make_edge or edges_of_both_roles(LocalHub())
    system = RoleSystem(ModelCard.load(model_dir).vocab_size)
    async with AsyncExitStack() as stack:
        # If it stood still for a second while Redis answers, a worker would say a heartbeat later what it says at once.
        stack.enter_context(pytest.MonkeyPatch.context()).setattr("twostep.cluster.connection._TIMEOUT_S", WAIT_S)
        for number, role in enumerate(roles):
            config: dict[str, Any] = {"worker_id": f"w{number}", "router_lease": WAIT_S, "lease_ttl": WAIT_S} | options
            worker = await start_worker(model_dir, redis_url, role, make_edge, fake_runner(model_dir), **config)
            stack.push_async_callback(_stop, worker)
            system.workers[worker.worker_id] = worker
        if len(roles) > 1:
            (tmp_path / "secret").write_bytes(SECRET.own)
            system.router = await start_router(model_dir, redis_url, tmp_path / "secret")
            stack.push_async_callback(system.router.drain, 0.0)
        yield system


async def _stop(worker: Worker) -> None:
    # A test may have stopped it.
    if not worker.record().draining or worker.engine_failed.is_set():
        await worker.stop(0.5)


Make = Callable[..., AbstractAsyncContextManager[RoleSystem]]


@pytest.fixture
def make(model_dir: Path, redis_url: str, tmp_path: Path) -> Make:
    return partial(role_system, model_dir, redis_url, tmp_path)


def prompt_to_hand_over() -> prefill_pb2.PrefillRequest:
    """Its lease holds the worker until the call is cancelled, since nobody fetches."""
    sampling = sampling_to_proto(SamplingParams(max_tokens=4, temperature=0.0))
    return prefill_pb2.PrefillRequest(request_id="r", attempt=1, token_ids=[5] * 40, num_prompt_tokens=40, sampling=sampling)


@pytest.mark.system
@pytest.mark.parametrize(
    ("drain_timeout_s", "hub"),
    [
        pytest.param(WAIT_S, LocalHub, id="drained-copied-out"),
        pytest.param(0.0, OneSidedHub, id="at-once-one-sided", marks=pytest.mark.smoke),
    ],
)
async def test_under_load_every_answer_is_right_and_nothing_is_left(
    make: Make, drain_timeout_s: float, hub: Callable[[], LocalHub | OneSidedHub]
) -> None:
    roles = "prefill", "prefill", "decode", "decode"
    options: dict[str, Any] = {"make_edge": edges_of_both_roles(hub()), "local_prefill": drain_timeout_s > 0}
    async with make(*roles, **options) as system:
        await system.knows(2, 2)
        cases = fake_cases(system.vocab, 40, max_tokens=(1, 40))
        # No retries: whatever is lost, the router is to mend it.
        async with SteadyLoad([system.target], cases, num_clients=4, fresh=True, max_retries=0) as load:
            await load.more(4)
            # Until nobody is left in a role but those that have come to it, and one of them back.
            for name, role, prefill, decode in (
                ("w1", "decode", 1, 3),
                ("w2", "prefill", 2, 2),
                ("w0", "decode", 1, 3),
                ("w3", "prefill", 2, 2),
                ("w1", "prefill", 3, 1),
            ):
                assert (await system.switch(name, role, drain_timeout_s)).role == role
                await system.knows(prefill, decode)
                # Nothing runs over two switches: where they take what runs from a worker, a router gives it up the third time.
                await load.settled()
                await load.more(1)
        await system.settled()
    assert [(outcome.error, outcome.token_ids) for outcome in load.ended] == [("", tuple(outcome.case.expected)) for outcome in load.ended]


# ---- what others see -------------------------------------------------------------------------------------------------------


async def test_the_same_worker_under_a_new_epoch_with_all_its_prefixes(make: Make, redis_url: str) -> None:
    async with (
        make("prefill", "decode", "decode", local_prefill=False) as system,
        Redis.from_url(redis_url) as redis,
    ):
        worker = system.workers["w0"]
        before = worker.record()
        await system.knows(1, 2)
        async with AsyncClient(system.target, max_retries=0) as client:
            await system.ask(client, [5 + i % 300 for i in range(200)], 4)
        change = await system.switch("w0", "decode")
        after = WorkerRecord.from_json(await redis.get(worker_key("w0")))
        assert (after.worker_id, after.address, after.role, after.ready, after.draining) == ("w0", before.address, "decode", True, False)
        assert after.epoch == change.epoch == worker.epoch > before.epoch
        assert not await redis.exists(prefix_key("w0", before.epoch)), "a life that is over announces nothing"
        announced = await redis.smembers(prefix_key("w0", after.epoch))
        assert announced == set(engine_of(worker).cached_prefixes())
        assert len(announced) == 200 // 64
        # To the role it has, nothing happens.
        again = await system.switch("w0", "decode")
        assert (again.epoch, again.drain_s, again.switch_s) == (after.epoch, 0.0, 0.0)


async def test_the_other_role_s_calls_are_refused_and_health_tells_what_is_the_case(make: Make) -> None:
    async with (
        make("prefill", fixed_roles=True) as system,
        open_channel(system.workers["w0"].address) as channel,
    ):
        first = await introduced(channel, CallSigner(SECRET, "test"))
        prefill, decode = prefill_pb2_grpc.PrefillStub(first), decode_pb2_grpc.DecodeStub(first)

        run = prompt_to_hand_over()
        cancel = decode_pb2.CancelRequest(request_id="r", attempt=1)
        assert "w0 is a prefill worker now" in await refused(decode.Cancel(cancel, timeout=WAIT_S), Code.UNAVAILABLE)
        assert "w0 is a prefill worker now" in await refused(
            decode.Stream(decode_pb2.StreamRequest(router_id="a"), timeout=WAIT_S).read(), Code.UNAVAILABLE
        )

        call = prefill.Run(run, timeout=WAIT_S)
        assert (await call.read()).HasField("accepted")
        switching = asyncio.create_task(system.switch("w0", "decode"))
        await until(lambda: system.workers["w0"].record().draining, "it drains")
        assert await health(system.workers["w0"]) == (True, False)
        assert "is becoming a decode worker" in await refused(prefill.Run(run, timeout=WAIT_S).read(), Code.UNAVAILABLE)
        stats = await system.stats("w0")
        assert (stats.role, stats.ready, stats.draining) == ("prefill", False, True)
        call.cancel()
        assert (await switching).role == "decode"
        assert await health(system.workers["w0"]) == (True, True)
        assert "look it up again" in await refused(prefill.Run(run, timeout=WAIT_S).read(), Code.UNAVAILABLE), "signed for the life before"
        second = await introduced(channel, CallSigner(SECRET, "test"))
        prefill, decode = prefill_pb2_grpc.PrefillStub(second), decode_pb2_grpc.DecodeStub(second)
        assert "w0 is a decode worker now" in await refused(prefill.Run(run, timeout=WAIT_S).read(), Code.UNAVAILABLE)
        assert not (await decode.Cancel(cancel, timeout=WAIT_S)).found
        stats = await system.stats("w0")
        assert (stats.role, stats.ready, stats.draining) == ("decode", True, False)


async def test_the_scheduler_is_that_of_the_role(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_num_batched_tokens": 96, "other_step_tokens": 32, "fixed_roles": True}
    async with make("prefill", **options) as system:
        worker = system.workers["w0"]
        for role, budget in (("decode", 32), ("prefill", 96), ("decode", 32)):
            await system.switch("w0", role)
            assert worker.engine.max_num_batched_tokens == worker.record().step_tokens == budget
            assert worker.record().local_prefill == (role == "decode")
            assert worker.record().max_prompt_tokens == 0
        facts = worker.engine.facts
        monkeypatch.setattr(worker.engine, "facts", replace(facts, shape=replace(facts.shape, has_encoder=True)))
        assert worker.record().max_prompt_tokens == prompt_room(32, worker.config.max_num_seqs)


# ---- who may, and when -----------------------------------------------------------------------------------------------------


async def test_only_holders_of_the_secret_may(make: Make) -> None:
    async with make("prefill") as system:
        worker = system.workers["w0"]
        async with channel_to_worker(worker.address, SECRET, caller="test") as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)

            async def code(request: worker_pb2.SwitchRoleRequest) -> grpc.StatusCode:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.SwitchRole(request, timeout=WAIT_S)
                return caught.value.code()

            good = RolePass.issue(SECRET, worker_id="w0", epoch=worker.epoch, role="decode", drain_timeout_s=1.0).to_proto()
            assert await code(worker_pb2.SwitchRoleRequest(role="decode")) is grpc.StatusCode.UNAUTHENTICATED
            other = worker_pb2.SwitchRoleRequest()
            other.CopyFrom(good)
            other.drain_timeout_s = 0.0
            assert await code(other) is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(Unauthenticated, match="--secret-file"):
                await system.switch("w0", "decode", secret=DeploymentSecret(b"not the secret of these"))
            stale = RolePass.issue(SECRET, worker_id="w0", epoch=worker.epoch - 1, role="decode", drain_timeout_s=1.0)
            assert await code(stale.to_proto()) is grpc.StatusCode.UNAVAILABLE
            for role, seconds in (("router", 1.0), ("decode", -1.0), ("decode", float("nan"))):
                wrong = RolePass.issue(SECRET, worker_id="w0", epoch=worker.epoch, role=role, drain_timeout_s=seconds)
                assert await code(wrong.to_proto()) is grpc.StatusCode.INVALID_ARGUMENT
            assert worker.record().role == "prefill"
            assert (await stub.SwitchRole(good, timeout=WAIT_S)).role == "decode"
            # The life that it was good for is over.
            assert await code(good) is grpc.StatusCode.UNAVAILABLE


async def test_a_second_switch_is_refused_and_the_first_goes_on_without_its_caller(make: Make) -> None:
    async with make("prefill") as system:
        worker = system.workers["w0"]
        async with channel_to_worker(worker.address, SECRET, caller="test") as channel:
            run = prompt_to_hand_over()
            call = prefill_pb2_grpc.PrefillStub(channel).Run(run, timeout=WAIT_S)
            assert (await call.read()).HasField("accepted")
            request = RolePass.issue(SECRET, worker_id="w0", epoch=worker.epoch, role="decode", drain_timeout_s=WAIT_S).to_proto()
            first = worker_pb2_grpc.WorkerStub(channel).SwitchRole(request, timeout=WAIT_S)
            await until(lambda: worker.record().draining, "it drains")
            with pytest.raises(Unavailable):
                await system.switch("w0", "prefill", 0.0)
            first.cancel()
            call.cancel()
            await until(lambda: worker.record().role == "decode" and worker.record().ready, "it has changed")


# ---- what may fail ---------------------------------------------------------------------------------------------------------


@pytest.mark.system
async def test_a_stop_in_the_middle_drains_as_ever(make: Make) -> None:
    async with make("prefill", "decode", local_prefill=False) as system:
        await system.knows(1, 1)
        async with AsyncClient(system.target, max_retries=0) as client:
            worker = system.workers["w1"]
            runner = worker.engine.runner
            assert isinstance(runner, FakeRunner)
            # Until the stop, its answer would take a minute.
            step_s, runner.step_s = runner.step_s, 0.3
            running = asyncio.create_task(system.ask(client, [7] * 50, 200))
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


async def test_a_worker_that_cannot_take_the_role_goes_on_in_its_own(make: Make) -> None:
    failures: list[str] = []
    make_edge = failing_edges(LocalHub(), failures)
    options: dict[str, Any] = {"make_edge": make_edge, "local_prefill": False}
    async with make("prefill", "decode", **options) as system:
        epoch = system.workers["w0"].epoch
        await system.knows(1, 1)
        failures.append("decode")
        with pytest.raises(Incompatible):
            await system.switch("w0", "decode")
        worker = system.workers["w0"]
        assert (worker.record().role, worker.record().ready) == ("prefill", True)
        assert worker.epoch > epoch
        await system.knows(1, 1)
        async with AsyncClient(system.target, max_retries=0) as client:
            await system.ask(client, [9] * 70, 10)
        await system.settled()
        failures.clear()
        assert (await system.switch("w0", "decode")).role == "decode"


async def test_a_worker_that_can_serve_no_role_ends(make: Make) -> None:
    failures: list[str] = []
    make_edge = failing_edges(LocalHub(), failures)
    async with make("prefill", make_edge=make_edge) as system:
        failures += ["decode", "prefill"]
        with pytest.raises(InternalError):
            await system.switch("w0", "decode")
        worker = system.workers["w0"]
        # Its process sees that, and exits with status 1.
        assert worker.engine_failed.is_set()
        assert not worker.record().ready


async def test_transports_of_neither_role_leave_it_in_its_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while Ray's head is away: the process goes on, and is of use again once KV has a way."""
    async with make("prefill", transport_timeout=0.2, fixed_roles=True) as system:
        worker = system.workers["w0"]
        with monkeypatch.context() as away:
            away.setattr(Transports, "ready", ())
            with pytest.raises(Incompatible):
                await system.switch("w0", "decode")
            assert not worker.engine_failed.is_set()
            assert (worker.record().role, worker.record().transports) == ("prefill", ())
            assert "no KV transport works" in worker.record().not_ready_reason
        await until(lambda: not worker.record().not_ready_reason, "KV has a way again")


async def test_a_stop_does_not_wait_for_transports_that_do_not_come_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    def none_ready(_: Transports) -> tuple[str, ...]:
        asked.set()
        return ()

    async with make("prefill", transport_timeout=600.0) as system:
        monkeypatch.setattr(Transports, "ready", property(none_ready))
        switching, worker = asyncio.create_task(system.switch("w0", "decode")), system.workers["w0"]
        await asyncio.wait_for(asked.wait(), WAIT_S)
        assert worker.record().role == "prefill", "nobody is told of a life that does not serve yet"
        async with asyncio.timeout(WAIT_S):
            await worker.stop(0.0)
        with pytest.raises(Unavailable):
            await switching


async def test_without_redis_it_changes_all_the_same_and_says_so_later(model_dir: Path, own_redis: RedisServer, tmp_path: Path) -> None:
    async with role_system(model_dir, own_redis.url, tmp_path, "prefill") as system:
        worker, epoch = system.workers["w0"], system.workers["w0"].epoch
        own_redis.kill()
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
