"""A worker drains and takes the other role, and back: what it is told by others, what it keeps, and what happens to requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from one_sided import OneSidedHub
from redis.asyncio import Redis
from role_harness import SECRET, WAIT_S, Load, RoleSystem, ask, edges_of_both_roles, expected, role_system, until, vocab_of
from worker_harness import make_runner

from kv_transfer.local.transport import LocalHub
from router.config import RouterConfig
from twostep import AsyncClient, Completion
from twostep.cluster.records import WorkerRecord, host_prefix_key, prefix_key, worker_key
from twostep.cluster.registration import Registration
from twostep.engine.fake import FakeRunner
from twostep.engine.types import PrefixDelta
from twostep.errors import Unauthenticated, Unavailable
from twostep.rpc.call_signing import CallSigner, channel_to_worker, introduced
from twostep.rpc.channel import open_channel
from twostep.rpc.convert import sampling_to_proto
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostep.rpc.worker_role import RolePass
from twostep.sampling_params import SamplingParams
from twostep.worker.model import layout_of


def prompt_to_hand_over() -> prefill_pb2.PrefillRequest:
    """Its lease holds the worker until the call is cancelled, since nobody fetches."""
    sampling = sampling_to_proto(SamplingParams(max_tokens=4, temperature=0.0))
    return prefill_pb2.PrefillRequest(request_id="r", attempt=1, token_ids=[5] * 40, num_prompt_tokens=40, sampling=sampling)


async def ask_anything(system: RoleSystem, client: AsyncClient, rng: random.Random) -> None:
    vocab = vocab_of(system)
    await ask(client, [rng.randrange(3, vocab) for _ in range(rng.randrange(1, 300))], rng.randrange(1, 40), vocab)


# ---- under load ------------------------------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize(
    ("drain_timeout_s", "hub"),
    [
        pytest.param(WAIT_S, LocalHub, id="drained-copied-out"),
        pytest.param(0.0, OneSidedHub, id="at-once-one-sided", marks=pytest.mark.smoke),
        pytest.param(WAIT_S, OneSidedHub, id="drained-one-sided"),
        pytest.param(0.0, LocalHub, id="at-once-copied-out"),
    ],
)
async def test_under_load_every_answer_is_right_and_nothing_is_left(
    model_dir: Path, redis_url: str, tmp_path: Path, drain_timeout_s: float, hub: Callable[[], LocalHub | OneSidedHub]
) -> None:
    options: dict[str, Any] = {"roles": ("prefill", "prefill", "decode", "decode"), "make_edge": edges_of_both_roles(hub())}
    async with role_system(model_dir, redis_url, tmp_path, local_prefill=drain_timeout_s > 0, **options) as system:
        await system.knows(2, 2)
        async with Load(system, partial(ask_anything, system)) as load:
            await load.rounds(1)
            # Until nobody is left in a role but those that have come to it, and one of them back.
            for name, role, prefill, decode in (
                ("w1", "decode", 1, 3),
                ("w2", "prefill", 2, 2),
                ("w0", "decode", 1, 3),
                ("w3", "prefill", 2, 2),
                ("w1", "prefill", 3, 1),
            ):
                change = await system.switch(name, role, drain_timeout_s)
                assert change.role == role
                await system.knows(prefill, decode)
                # Nothing runs over two switches: where they take what runs from a worker, a router gives it up the third time.
                await load.rounds(1)
        await system.settled()


@pytest.mark.system
async def test_an_answer_taken_from_its_worker_by_two_switches_goes_on(
    model_dir: Path, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A router may try a worker that begins to switch in this moment: such tries are not what is looked at.
    monkeypatch.setattr("role_harness.RouterConfig", partial(RouterConfig, max_attempts=10))
    roles = "prefill", "decode", "decode", "decode"
    async with role_system(model_dir, redis_url, tmp_path, roles=roles, local_prefill=False) as system:
        await system.knows(1, 3)
        vocab, prompt, max_tokens = vocab_of(system), [7] * 50, 300
        runners = [runner for worker in system.workers.values() if isinstance(runner := worker.engine.runner, FakeRunner)]
        assert len(runners) == len(roles)
        # Until the switches are over, an answer would take a minute.
        for runner in runners[1:]:
            runner.step_s = 0.2
        seen: list[int] = []

        async def asked(client: AsyncClient) -> Completion:
            answer = client.generate(token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout=2 * WAIT_S)
            async for piece in answer:
                seen.extend(piece.token_ids)
            return await answer.result()

        def decoding() -> list[str]:
            records = [worker.record() for worker in system.workers.values()]
            return [record.worker_id for record in records if record.role == "decode" and record.load.num_running]

        async with AsyncClient(system.target, max_retries=0) as client:
            running = asyncio.create_task(asked(client))
            for prefill, decode in ((2, 2), (3, 1)):
                before = len(seen)
                await until(lambda before=before: running.done() or (len(seen) > before and len(decoding()) == 1), "more of it")
                assert not running.done(), running
                (name,) = decoding()
                assert (await system.switch(name, "prefill", 0.0)).role == "prefill"
                assert not running.done(), running
                await system.knows(prefill, decode)
            for runner in runners:
                runner.step_s = 0.0
            answer = await running
        assert list(answer.token_ids) == seen == expected(prompt, max_tokens, vocab)
        assert answer.attempts >= 3, "each switch took it from a worker"
        await system.settled()


# ---- what others see -------------------------------------------------------------------------------------------------------


async def test_the_same_worker_under_a_new_epoch_with_all_its_prefixes(model_dir: Path, redis_url: str, tmp_path: Path) -> None:
    async with (
        role_system(model_dir, redis_url, tmp_path, roles=("prefill", "decode", "decode"), local_prefill=False) as system,
        Redis.from_url(redis_url) as redis,
    ):
        worker, vocab = system.workers["w0"], vocab_of(system)
        before = worker.record()
        await system.knows(1, 2)
        async with AsyncClient(system.target, max_retries=0) as client:
            await ask(client, [5 + i % 300 for i in range(200)], 4, vocab)
        change = await system.switch("w0", "decode")
        after = WorkerRecord.from_json(await redis.get(worker_key("w0")))
        assert (after.worker_id, after.address, after.role, after.ready, after.draining) == ("w0", before.address, "decode", True, False)
        assert after.epoch == change.epoch == worker.epoch > before.epoch
        assert not await redis.exists(prefix_key("w0", before.epoch)), "a life that is over announces nothing"
        announced = await redis.smembers(prefix_key("w0", after.epoch))
        assert announced == set(worker.engine.cached_prefixes())
        assert len(announced) == 200 // 64
        # To the role it has, nothing happens.
        again = await system.switch("w0", "decode")
        assert (again.epoch, again.drain_s, again.switch_s) == (after.epoch, 0.0, 0.0)


async def test_a_new_epoch_announces_what_is_held_in_pool_and_host_memory_and_what_comes_after(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Redis is not given up where this process stands still for a moment.
    monkeypatch.setattr("twostep.cluster.connection._TIMEOUT_S", WAIT_S)
    runner = make_runner()
    layout = layout_of(runner.kv_shape, "fake")
    record = WorkerRecord(
        worker_id="tiers", role="prefill", address="a:1", epoch=1, model="m", layout=layout, hash_unit=64, secret_check="s", num_blocks=8,
        max_num_seqs=1, max_model_len=8,
    )  # fmt: skip
    told, deltas = [record], [PrefixDelta(added=(b"a", b"b"), removed=(), host_added=(b"c",), host_removed=())]
    nothing = PrefixDelta(added=(), removed=(), host_added=(), host_removed=())
    registration = Registration(
        redis_url, secret=SECRET, describe=lambda: told[-1], take_delta=lambda: deltas.pop(0) if deltas else nothing
    )
    async with Redis.from_url(redis_url) as redis:

        async def announced(epoch: int) -> tuple[set[bytes], set[bytes]]:
            return await redis.smembers(prefix_key("tiers", epoch)), await redis.smembers(host_prefix_key("tiers", epoch))

        await registration.start()
        assert await announced(1) == ({b"a", b"b"}, {b"c"})
        told.append(replace(record, role="decode", epoch=2))
        deltas.append(PrefixDelta(added=(b"d",), removed=(b"a",), host_added=(b"a",), host_removed=(b"c",)))
        await registration.announce()
        assert await announced(1) == (set(), set())
        assert await announced(2) == ({b"b", b"d"}, {b"a"})
        await registration.close()
        assert await announced(2) == (set(), set())
        # Once it is closed, nothing brings it back.
        await registration.announce()
        assert not await redis.exists(worker_key("tiers"))


async def test_the_other_role_s_calls_are_refused_and_health_tells_what_is_the_case(
    model_dir: Path, redis_url: str, tmp_path: Path
) -> None:
    async with (
        role_system(model_dir, redis_url, tmp_path, roles=("prefill",), with_router=False) as system,
        open_channel(system.workers["w0"].address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        first = await introduced(channel, CallSigner(SECRET, "test"))
        prefill, decode = prefill_pb2_grpc.PrefillStub(first), decode_pb2_grpc.DecodeStub(first)

        async def serving(service: str) -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        async def refusal(call: Any) -> str:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            return caught.value.details() or ""

        run = prompt_to_hand_over()
        cancel = decode_pb2.CancelRequest(request_id="r", attempt=1)
        assert "w0 is a prefill worker now" in await refusal(decode.Cancel(cancel, timeout=WAIT_S))
        assert "w0 is a prefill worker now" in await refusal(decode.Stream(decode_pb2.StreamRequest(router_id="a"), timeout=WAIT_S).read())

        call = prefill.Run(run, timeout=WAIT_S)
        assert (await call.read()).HasField("accepted")
        switching = asyncio.create_task(system.switch("w0", "decode"))
        await until(lambda: system.workers["w0"].record().draining, "it drains")
        assert await serving("liveness")
        assert not await serving("readiness")
        assert "is becoming a decode worker" in await refusal(prefill.Run(run, timeout=WAIT_S).read())
        stats = await system.stats("w0")
        assert (stats.role, stats.ready, stats.draining) == ("prefill", False, True)
        call.cancel()
        assert (await switching).role == "decode"
        assert await serving("liveness")
        assert await serving("readiness")
        assert "look it up again" in await refusal(prefill.Run(run, timeout=WAIT_S).read()), "signed for the life before"
        second = await introduced(channel, CallSigner(SECRET, "test"))
        prefill, decode = prefill_pb2_grpc.PrefillStub(second), decode_pb2_grpc.DecodeStub(second)
        assert "w0 is a decode worker now" in await refusal(prefill.Run(run, timeout=WAIT_S).read())
        assert not (await decode.Cancel(cancel, timeout=WAIT_S)).found
        stats = await system.stats("w0")
        assert (stats.role, stats.ready, stats.draining) == ("decode", True, False)


async def test_scheduler_and_swap_space_are_those_of_the_role(model_dir: Path, redis_url: str, tmp_path: Path) -> None:
    options = {"max_num_batched_tokens": 96, "other_step_tokens": 32}
    async with role_system(model_dir, redis_url, tmp_path, roles=("prefill",), with_router=False, **options) as system:
        worker = system.workers["w0"]
        for role, budget in (("decode", 32), ("prefill", 96), ("decode", 32)):
            await system.switch("w0", role)
            assert worker.engine.max_num_batched_tokens == worker.record().step_tokens == budget
            assert worker.record().local_prefill == (role == "decode")


# ---- who may, and when -----------------------------------------------------------------------------------------------------


async def test_only_holders_of_the_secret_may(model_dir: Path, redis_url: str, tmp_path: Path) -> None:
    async with role_system(model_dir, redis_url, tmp_path, roles=("prefill",), with_router=False) as system:
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
                await system.switch("w0", "decode", secret=b"not the secret of these")
            stale = RolePass.issue(SECRET, worker_id="w0", epoch=worker.epoch - 1, role="decode", drain_timeout_s=1.0)
            assert await code(stale.to_proto()) is grpc.StatusCode.UNAVAILABLE
            for role, seconds in (("router", 1.0), ("decode", -1.0), ("decode", float("nan"))):
                wrong = RolePass.issue(SECRET, worker_id="w0", epoch=worker.epoch, role=role, drain_timeout_s=seconds)
                assert await code(wrong.to_proto()) is grpc.StatusCode.INVALID_ARGUMENT
            assert worker.record().role == "prefill"
            assert (await stub.SwitchRole(good, timeout=WAIT_S)).role == "decode"
            # The life that it was good for is over.
            assert await code(good) is grpc.StatusCode.UNAVAILABLE


async def test_a_second_switch_is_refused_and_the_first_goes_on_without_its_caller(model_dir: Path, redis_url: str, tmp_path: Path) -> None:
    async with role_system(model_dir, redis_url, tmp_path, roles=("prefill",), with_router=False) as system:
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
