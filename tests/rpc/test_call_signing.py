"""Which calls a worker takes: those that are signed with the deployment's secret, for its present life."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from served import serving

from twostep.errors import Unauthenticated, Unavailable
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.call_signing import HEADER, CallGate, CallSigner, challenge_in, channel_to_worker
from twostep.rpc.channel import Signature, open_channel
from twostep.rpc.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostep.rpc.worker_role import who_is

SECRET = DeploymentSecret(b"secret of this deployment")
WAIT_S = 60.0
# Whatever a record says is an epoch.
names, epochs = st.text(max_size=20), st.integers(-(2**70), 2**70)


def admit(signature: Signature, life: tuple[str, int] = ("w", 7), secret: DeploymentSecret = SECRET) -> str:
    gate = CallGate(secret, lambda: life)
    first = gate.admit("/m", [("user-agent", "x"), *signature])
    assert gate.admit("/m", signature) == first, "and again, from memory"
    return first


@given(names, names, epochs)
def test_what_is_signed_for_a_life_is_admitted_there_and_nowhere_else(caller: str, worker_id: str, epoch: int) -> None:
    signature = CallSigner(SECRET, caller).sign(worker_id, epoch)
    assert admit(signature, (worker_id, epoch)) == caller
    for other in ((worker_id + "x", epoch), (worker_id, epoch ^ 1)):
        with pytest.raises(Unavailable):
            admit(signature, other)
    with pytest.raises(Unauthenticated):
        admit(signature, (worker_id, epoch), DeploymentSecret(b"secret of another deployment"))


def test_names_do_not_run_into_each_other() -> None:
    ((_, one),) = CallSigner(SECRET, "ab").sign("c", 1)
    ((_, other),) = CallSigner(SECRET, "a").sign("bc", 1)
    assert one[-32:] != other[-32:]


@given(st.integers(0), st.integers(1, 255))
def test_any_flipped_bit_is_seen(position: int, flip: int) -> None:
    ((header, value),) = CallSigner(SECRET, "router").sign("w", 7)
    damaged = bytearray(value)
    damaged[position % len(value)] ^= flip
    with pytest.raises(Unauthenticated):
        admit(((header, bytes(damaged)),))


@pytest.mark.parametrize("told", [b"", b"x", bytes(32), bytes(60), b"\xff" * 100])
def test_what_is_no_signature_is_refused_with_what_would_be_one(told: bytes) -> None:
    with pytest.raises(Unauthenticated) as refused:
        CallGate(SECRET, lambda: ("w", 7)).admit("/m", [(HEADER, told)])
    assert challenge_in([("twostep-challenge-bin", refused.value.challenge)]) == ("w", 7)
    assert "--secret-file" in refused.value.message


def test_a_challenge_of_something_else_is_no_worker() -> None:
    assert challenge_in(()) is None
    for damaged in (b"x", b"\xff\xff\xff\xff", b"\x01\0\0\0w\x01\0\0\0x"):
        with pytest.raises(Unavailable):
            challenge_in([("twostep-challenge-bin", damaged)])


@asynccontextmanager
async def worker() -> AsyncIterator[str]:
    async with serving(health_port=-1, admit=[CallGate(SECRET, lambda: ("w", 7)).admit]) as served:
        yield served.address


async def test_calls_of_every_kind_are_signed_and_others_refused() -> None:
    async with worker() as address, open_channel(address, signature=CallSigner(SECRET, "r").sign("w", 7)) as channel:
        assert (await who_is(channel)).epoch == 7
        run = prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.PrefillRequest(), metadata=(("traceparent", "t"),), timeout=WAIT_S)
        assert (await run.read()).done.chunks == 1
        for kind in (channel.stream_unary, channel.stream_stream):
            call = kind("/twostep.v1.Worker/Stats")(iter([b""]), timeout=WAIT_S)
            assert await (call.read() if hasattr(call, "read") else call)
    async with worker() as address, open_channel(address) as unsigned:
        for call in (
            worker_pb2_grpc.WorkerStub(unsigned).Stats(worker_pb2.WorkerStatsRequest(), timeout=WAIT_S),
            prefill_pb2_grpc.PrefillStub(unsigned).Run(prefill_pb2.PrefillRequest(), timeout=WAIT_S).read(),
            unsigned.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(iter([b""]), timeout=WAIT_S).read(),
            unsigned.unary_unary("/twostep.v1.Worker/Nothing")(b"", timeout=WAIT_S),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await health_pb2_grpc.HealthStub(unsigned).Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=WAIT_S)


async def test_who_knows_an_address_alone_signs_for_who_answers_there() -> None:
    async with worker() as address:
        async with channel_to_worker(address, SECRET, caller="test") as channel:
            assert (await who_is(channel)).worker_id == "w"
        async with channel_to_worker(address, DeploymentSecret(b"secret of another deployment"), caller="test") as channel:
            with pytest.raises(Unauthenticated, match="another secret"):
                await who_is(channel)
    with pytest.raises(Unavailable):
        async with channel_to_worker(address, SECRET, caller="test"):
            pass
