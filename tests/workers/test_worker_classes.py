"""Classes of requests on a decode worker: batch work gives its blocks to a reservation within one call, and everybody's answer is right."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from worker_harness import WAIT_S, Answer, HeldRunner, RouterDouble, expected, prompt_of, routed, started, until

from decode_worker.sequences import Sequences
from twostep.errors import ResourceExhausted
from twostep.rpc.v1 import decode_pb2, inference_pb2

BATCH = inference_pb2.REQUEST_CLASS_BATCH


async def reserve(router: RouterDouble, request_id: str, prompt: list[int], max_tokens: int, **options: Any) -> None:
    fields = router.request(request_id, prompt, max_tokens) | options
    await router.pair.decode.Reserve(decode_pb2.ReserveRequest(router_id=router.router_id, **fields), timeout=WAIT_S)


async def test_a_reservation_pushes_batch_sequences_out_in_one_call(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, take = asyncio.Event(), Sequences.reserve

    def reserved(self: Sequences, *args: Any, **options: Any) -> Any:
        try:
            return take(self, *args, **options)
        except ResourceExhausted:
            refused.set()
            raise

    monkeypatch.setattr(Sequences, "reserve", reserved)
    # In which the batch sequences, who are held up here, give way.
    monkeypatch.setattr("decode_worker.service._GIVING_WAY_S", WAIT_S)
    runner = HeldRunner(num_blocks=40)
    async with (
        started(redis_url, decode_runner=runner, decode_options={"max_num_batched_tokens": 64, "max_num_seqs": 8}) as pair,
        routed(pair) as router,
    ):
        prompts = {f"b{i}": prompt_of(50, seed=i + 2) for i in range(2)}
        for name, prompt in prompts.items():
            await reserve(router, name, prompt, 25, prefill_here=True, request_class=BATCH)
        answers = {name: Answer() for name in prompts}
        batch = [asyncio.create_task(router.collect(name, answer)) for name, answer in answers.items()]
        runner.allow(4)
        await until(lambda: all(answer.tokens for answer in answers.values()))
        # 80 tokens are 20 blocks; 40 less two times 13 are not as many.
        asked = asyncio.create_task(router.generate("s", prompt_of(80), 10))
        await asyncio.wait_for(refused.wait(), WAIT_S)
        runner.let_go()
        answer = await asked
        assert answer.tokens == expected(prompt_of(80), 10)
        await asyncio.wait_for(asyncio.gather(*batch), WAIT_S)
        for name, prompt in prompts.items():
            assert answers[name].failed is None
            assert answers[name].tokens == expected(prompt, 25)
        assert pair.decode_worker.engine.stats().num_preemptions >= 1
        await pair.settled()


async def test_a_batch_reservation_pushes_nobody_out(redis_url: str) -> None:
    runner = HeldRunner(num_blocks=40)
    async with (
        started(redis_url, decode_runner=runner, decode_options={"max_num_batched_tokens": 64, "max_num_seqs": 8}) as pair,
        routed(pair) as router,
    ):
        await reserve(router, "b", prompt_of(90), 40, prefill_here=True, request_class=BATCH)
        answer = Answer()
        task = asyncio.create_task(router.collect("b", answer))
        runner.allow(3)
        await until(lambda: bool(answer.tokens))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reserve(router, "c", prompt_of(80, seed=9), 10, request_class=BATCH)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        runner.let_go()
        await asyncio.wait_for(task, WAIT_S)
        assert answer.tokens == expected(prompt_of(90), 40)
        assert pair.decode_worker.engine.stats().num_preemptions == 0
        await pair.settled()


async def test_a_promised_tpot_reaches_the_engine_and_must_be_one(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reserve(router, "r", prompt_of(20), 4, tpot_ms=0.0)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await reserve(router, "r", prompt_of(20), 4, tpot_ms=12.5)
        sequence = pair.decode_worker.engine._scheduler.live("r/1")
        assert sequence is not None
        assert sequence.request.tpot_s == 0.0125
        assert await router.cancel("r")
        await pair.settled()
