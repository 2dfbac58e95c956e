"""Callers without the deployment's secret get nothing of anybody's from a worker, and keep nobody out. Routers of another version."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from raw_http2 import RawHttp2
from worker_harness import SECRET, WAIT_S, expected, prompt_of, refused, routed, started

from twostep.keys.secret import DeploymentSecret
from twostep.rpc.call_signing import CallSigner
from twostep.rpc.channel import open_channel
from twostep.rpc.convert import sampling_to_proto
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, kv_pb2, kv_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostep.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("patient_redis")


async def test_without_a_signature_there_is_no_ticket_no_block_and_no_token(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        prompt = prompt_of(40)
        answer = await router.generate("r", prompt, 5)
        assert answer.tokens == expected(prompt, 5)
        request = {"request_id": "x", "attempt": 1, "token_ids": prompt, "num_prompt_tokens": len(prompt), "tenant": "somebody"}
        sampling = sampling_to_proto(SamplingParams(max_tokens=4))
        foreign = CallSigner(DeploymentSecret(b"secret of another deployment"), "router-1")
        for worker in (pair.prefill_worker, pair.decode_worker):
            for signature in ((), foreign.sign(worker.worker_id, worker.epoch)):
                async with open_channel(worker.address, signature=signature) as channel:
                    kv, decode = kv_pb2_grpc.KvStub(channel), decode_pb2_grpc.DecodeStub(channel)
                    for call in (
                        prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.PrefillRequest(**request, sampling=sampling)).read(),
                        kv.Watch(kv_pb2.WatchRequest(ticket=kv_pb2.Ticket(worker_id="p"))).read(),
                        kv.Acknowledge(kv_pb2.AcknowledgeRequest()),
                        kv.Probe(kv_pb2.ProbeRequest()),
                        decode.Reserve(decode_pb2.ReserveRequest(**request, sampling=sampling)),
                        decode.Attach(decode_pb2.AttachRequest()),
                        decode.Cancel(decode_pb2.CancelRequest(request_id="r", attempt=1)),
                        decode.Stream(decode_pb2.StreamRequest(router_id="router-1")).read(),
                        worker_pb2_grpc.WorkerStub(channel).Stats(worker_pb2.WorkerStatsRequest()),
                        worker_pb2_grpc.WorkerStub(channel).SwitchRole(worker_pb2.SwitchRoleRequest(role="decode")),
                    ):
                        await refused(asyncio.wait_for(call, WAIT_S), grpc.StatusCode.UNAUTHENTICATED)
        # Who said it was the router has not taken its stream from it.
        assert (await router.generate("s", prompt, 5)).tokens == answer.tokens
        assert (pair.prefill_worker.engine.stats().num_held, pair.decode_worker.engine.stats().num_reserved) == (0, 0)


async def test_what_was_signed_for_one_worker_opens_no_other(redis_url: str) -> None:
    async with started(redis_url) as pair:
        signature = CallSigner(SECRET, "router-1").sign(pair.prefill_worker.worker_id, pair.prefill_worker.epoch)
        async with open_channel(pair.decode_worker.address, signature=signature) as channel:
            asked = worker_pb2_grpc.WorkerStub(channel).Stats(worker_pb2.WorkerStatsRequest(), timeout=WAIT_S)
            await refused(asked, grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize("signed", [False, True])
async def test_half_open_calls_at_a_worker_keep_no_request_waiting(redis_url: str, signed: bool) -> None:
    """As many calls as it has places for, also from a caller that holds the secret."""
    options = {"max_concurrent_rpcs": 64}
    async with started(redis_url, prefill_options=options, decode_options=options) as pair, routed(pair) as router:
        raws = []
        for worker, method in ((pair.prefill_worker, "/twostep.v1.Prefill/Run"), (pair.decode_worker, "/twostep.v1.Decode/Reserve")):
            raws.append(raw := await RawHttp2.open("127.0.0.1", worker.server.port))
            signature = CallSigner(SECRET, "another router").sign(worker.worker_id, worker.epoch) if signed else ()
            streams = [raw.call(method, signature) for _ in range(64)]
            await raw.drain()
            if not signed:
                await asyncio.wait_for(raw.until_ended(streams), WAIT_S)
        prompts = [prompt_of(40, seed=seed) for seed in range(8)]
        answers = await asyncio.gather(*(router.generate(f"r{i}", prompt, 5) for i, prompt in enumerate(prompts)))
        assert [answer.tokens for answer in answers] == [expected(prompt, 5) for prompt in prompts]
        for raw in raws:
            await raw.__aexit__(None, None, None)


# ---- versions ---------------------------------------------------------------------------------------------------------------


async def test_workers_tell_their_version_and_serve_a_router_one_minor_away(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.worker.worker.__version__", "0.2.3")
    monkeypatch.setattr("twostep.rpc.channel.__version__", "0.1.0")
    async with started(redis_url) as pair, routed(pair) as router:
        assert pair.prefill_worker.record().version == pair.decode_worker.record().version == "0.2.3"
        assert (await router.generate("r", prompt_of(20), 3)).tokens == expected(prompt_of(20), 3)


async def test_workers_refuse_a_router_two_minors_away_on_every_call(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.worker.worker.__version__", "0.3.0")
    monkeypatch.setattr("twostep.rpc.channel.__version__", "0.1.0")
    async with started(redis_url) as pair:
        for call in (
            pair.decode.Reserve(decode_pb2.ReserveRequest(request_id="r", attempt=1), timeout=30),
            pair.decode.Stream(decode_pb2.StreamRequest(router_id="router-1"), timeout=30).read(),
            pair.decode.Cancel(decode_pb2.CancelRequest(request_id="r", attempt=1), timeout=30),
        ):
            says = "the caller runs version 0.1.0 and decode-1 0.3.0, more than one minor version apart; upgrade the caller"
            assert says in await refused(call, grpc.StatusCode.FAILED_PRECONDITION)
        await pair.settled()
