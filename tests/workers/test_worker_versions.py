"""Workers of one version and a router of another."""

from __future__ import annotations

import grpc
import pytest
from worker_harness import expected, prompt_of, routed, started

from twostep.rpc.v1 import decode_pb2

PROMPT = prompt_of(20)


async def test_workers_tell_their_version_and_serve_a_router_one_minor_away(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.worker.worker.__version__", "0.2.3")
    monkeypatch.setattr("twostep.rpc.channel.__version__", "0.1.0")
    async with started(redis_url) as pair, routed(pair) as router:
        assert pair.prefill_worker.record().version == pair.decode_worker.record().version == "0.2.3"
        assert (await router.generate("r", PROMPT, 3)).tokens == expected(PROMPT, 3)


async def test_workers_refuse_a_router_two_minors_away_on_every_call(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.worker.worker.__version__", "0.3.0")
    monkeypatch.setattr("twostep.rpc.channel.__version__", "0.1.0")
    async with started(redis_url) as pair:
        for call in (
            pair.decode.Reserve(decode_pb2.ReserveRequest(request_id="r", attempt=1), timeout=30),
            pair.decode.Stream(decode_pb2.StreamRequest(router_id="router-1"), timeout=30).read(),
            pair.decode.Cancel(decode_pb2.CancelRequest(request_id="r", attempt=1), timeout=30),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "the caller runs version 0.1.0 and decode-1 0.3.0, more than one minor version apart; upgrade the caller" in str(
                refused.value.details()
            )
        await pair.settled()
