"""Prompts that the decode worker computes itself, beside those handed over, and who gives way to whom. Ends: test_worker_cancel.py."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from worker_harness import (
    BLOCK,
    PROMPT,
    WAIT_S,
    Answer,
    HeldRunner,
    RouterDouble,
    engine_of,
    held_pair,
    local_transports,
    prompt_of,
    read_to_end,
    refused,
    routed,
    started,
    turned,
    until,
)

from decode_worker.sequences import Sequences
from kv_transfer.local.transport import LocalHub
from kv_transfer.transports import Transports
from twostep.errors import ResourceExhausted
from twostep.pooling import PoolingParams
from twostep.rpc.convert import pooling_to_proto
from twostep.rpc.v1 import decode_pb2, inference_pb2, prefill_pb2
from twostep.worker.edge import EdgeParts

Code = grpc.StatusCode


async def test_prompts_computed_here_and_handed_over_answer_alike_side_by_side(redis_url: str) -> None:
    async with started(redis_url, decode_options={"max_num_batched_tokens": 24}) as pair, routed(pair) as router:
        prompts = [prompt_of(5 + 13 * i, seed=i) for i in range(12)]

        async def ask(i: int) -> Answer:
            generate = router.generate_here if i % 3 else router.generate
            return await generate(f"r{i}", prompts[i], 5 + i)

        for i, answer in enumerate(await asyncio.gather(*(ask(i) for i in range(12)))):
            answer.check(prompts[i], 5 + i)
            assert (answer.committed is None) == bool(i % 3), "nothing is committed of a prompt computed here"
        await pair.settled()
        prefill, decode = await pair.both()
        assert decode.blocks_moved > 0
        assert not prefill.num_sequences


async def test_the_first_token_tells_what_was_cached(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        first = await router.generate_here("turn-1", PROMPT, 20)
        first.check(PROMPT, 20)
        # The second turn: prompt, answer and a question. The last token's KV was never computed.
        prompt = [*PROMPT, *first.tokens, 7, 8, 9]
        second = await router.generate_here("turn-2", prompt, 5)
        second.check(prompt, 5)
        assert first.first is not None
        assert second.first is not None
        assert (first.first.cached_tokens, second.first.cached_tokens) == (0, (len(PROMPT) + 19) // BLOCK * BLOCK)


@pytest.mark.parametrize("here", [False, True])
async def test_sequences_that_must_give_way_answer_alike(redis_url: str, here: bool) -> None:
    """Four sequences that end at 12 blocks each, on 16 blocks."""
    runner, options = HeldRunner(num_blocks=16), {"max_num_batched_tokens": 8}
    async with started(redis_url, decode_runner=runner, decode_options=options) as pair, routed(pair) as router:
        prompts = {f"r{i}": prompt_of(8, seed=i) for i in range(4)}
        for name, prompt in prompts.items():
            await router.reserve(name, prompt, 40, prefill_here=here)
        if not here:
            for name, prompt in prompts.items():
                await router.attach(name, (await router.run(name, prompt, 40).read()).accepted.ticket)
            for name in prompts:
                await router.event("committed", name)
        # All are there when the first one grows.
        runner.let_go()
        for name, prompt in prompts.items():
            (await router.rest(name)).check(prompt, 40, first=0 if here else 1)
        _, decode = await pair.both()
        assert decode.num_preemptions


# ---- refusals ------------------------------------------------------------------------------------------------------------


async def test_what_waits_is_bounded(redis_url: str) -> None:
    async with held_pair(redis_url, decode_options={"max_num_seqs": 1, "max_waiting": 2}) as h:
        h.decode.allow(8)
        await h.router.reserve("runs", PROMPT, 400, prefill_here=True)
        await h.router.event("first_token", "runs")
        for i in range(2):
            await h.router.reserve(f"waits-{i}", PROMPT, 5, prefill_here=True)
        await refused(h.router.reserve("one-more", PROMPT, 5, prefill_here=True), Code.RESOURCE_EXHAUSTED)
        await h.router.cancel("runs")
        h.let_go()
        for i in range(2):
            (await h.router.rest(f"waits-{i}")).check(PROMPT, 5)


async def test_a_worker_may_compute_no_prompts(redis_url: str) -> None:
    async with started(redis_url, decode_options={"local_prefill": False, "max_num_batched_tokens": 24}) as pair, routed(pair) as router:
        record = pair.decode_worker.record()
        assert (pair.prefill_worker.record().local_prefill, record.local_prefill, record.step_tokens) == (False, False, 24)
        await refused(router.reserve("r", PROMPT, 5, prefill_here=True), Code.FAILED_PRECONDITION)
        (await router.generate("r2", PROMPT, 5)).check(PROMPT, 5)


async def test_there_is_no_ticket_for_a_prompt_computed_here(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        await h.router.reserve("r", PROMPT, 50, prefill_here=True)
        call = h.router.run("r", PROMPT, 50)
        await refused(h.router.attach("r", (await call.read()).accepted.ticket), Code.INVALID_ARGUMENT)
        call.cancel()
        h.let_go()
        (await h.router.rest()).check(PROMPT, 50)


async def test_no_kv_transport_is_needed_for_it(redis_url: str) -> None:
    """As a worker of an aggregated deployment is."""
    make = local_transports(LocalHub())

    def none_on_decode(parts: EdgeParts) -> Transports:
        return Transports([]) if parts.config.kv_transfer == "none" else make(parts)

    without = {"kv_transfer": "none", "fixed_roles": False}
    async with (
        started(redis_url, make_transports=none_on_decode, decode_options=without) as pair,
        turned(pair) as back,
        routed(pair) as router,
    ):
        record = pair.decode_worker.record()
        assert (record.ready, record.transports, record.local_prefill, record.both_roles) == (True, (), True, True)
        (await router.generate_here("r", PROMPT, 10)).check(PROMPT, 10)
        prompt = prefill_pb2.PrefillRequest(**RouterDouble.request("e", PROMPT, 1), pooling=pooling_to_proto(PoolingParams()))
        assert (await read_to_end(back.prefill.Embed(prompt, timeout=WAIT_S)))[-1].HasField("pooled")


# ---- classes: batch work gives its blocks to a reservation within one call -----------------------------------------------------

BATCH = inference_pb2.REQUEST_CLASS_BATCH


def reserving(router: RouterDouble, name: str, prompt: list[int], max_tokens: int, **fields: Any) -> Any:
    request = router.request(name, prompt, max_tokens) | {"router_id": router.router_id} | fields
    return router.pair.decode.Reserve(decode_pb2.ReserveRequest(**request), timeout=WAIT_S)


async def test_a_reservation_pushes_batch_sequences_out_in_one_call(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, take = asyncio.Event(), Sequences.reserve

    async def reserved(self: Sequences, *args: Any, **options: Any) -> Any:
        try:
            return await take(self, *args, **options)
        except ResourceExhausted:
            tried.set()
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
            await reserving(router, name, prompt, 25, prefill_here=True, request_class=BATCH)
        answers = {name: Answer() for name in prompts}
        batch = [asyncio.create_task(router.rest(name, answer)) for name, answer in answers.items()]
        runner.allow(4)
        await until(lambda: all(answer.tokens for answer in answers.values()))
        # Between two steps they would give way at once.
        await until(lambda: runner.num_begun == 5)
        # 80 tokens are 20 blocks; 40 less two times 13 are not as many.
        asked = asyncio.create_task(router.generate("s", prompt_of(80), 10))
        await asyncio.wait_for(tried.wait(), WAIT_S)
        runner.let_go()
        answer = await asked
        answer.check(prompt_of(80), 10)
        await asyncio.wait_for(asyncio.gather(*batch), WAIT_S)
        for name, prompt in prompts.items():
            answers[name].check(prompt, 25)
        assert pair.decode_worker.engine.stats().num_preemptions >= 1


async def test_a_batch_reservation_pushes_nobody_out(redis_url: str) -> None:
    runner = HeldRunner(num_blocks=40)
    async with (
        started(redis_url, decode_runner=runner, decode_options={"max_num_batched_tokens": 64, "max_num_seqs": 8}) as pair,
        routed(pair) as router,
    ):
        await reserving(router, "b", prompt_of(90), 40, prefill_here=True, request_class=BATCH)
        answer = Answer()
        task = asyncio.create_task(router.rest("b", answer))
        runner.allow(3)
        await until(lambda: bool(answer.tokens))
        await refused(reserving(router, "c", prompt_of(80, seed=9), 10, request_class=BATCH), Code.RESOURCE_EXHAUSTED)
        runner.let_go()
        await asyncio.wait_for(task, WAIT_S)
        answer.check(prompt_of(90), 40)
        assert pair.decode_worker.engine.stats().num_preemptions == 0


async def test_what_was_promised_reaches_the_engine_and_must_be_milliseconds(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        await refused(reserving(router, "r", prompt_of(20), 4, tpot_ms=0.0), Code.INVALID_ARGUMENT)
        await refused(reserving(router, "r", prompt_of(20), 4, gap_ms=-1.0), Code.INVALID_ARGUMENT)
        await reserving(router, "r", prompt_of(20), 4, tpot_ms=12.5, gap_ms=30.0)
        sequence = engine_of(pair.decode_worker)._scheduler.live("r/1")
        assert sequence is not None
        assert (sequence.request.tpot_s, sequence.request.gap_s) == (0.0125, 0.03)
        assert await router.cancel("r")
