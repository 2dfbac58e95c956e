"""Requests through both workers: tokens, order, what is moved and what is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from worker_harness import BLOCK, WAIT_S, HeldRunner, expected, make_runner, prompt_of, read_to_end, routed, started

from twostep.rpc.v1 import decode_pb2, inference_pb2, kv_pb2


async def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 61])
async def test_tokens_are_those_of_the_fake_model(redis_url: str, length: int) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        prompt = prompt_of(length)
        answer = await router.generate("r", prompt, 9)
        assert answer.tokens == expected(prompt, 9)
        assert answer.positions == list(range(9))
        assert answer.committed is not None
        assert answer.done is not None
        num_blocks = -(-length // BLOCK)
        block_bytes = pair.prefill_runner.kv_shape.block_bytes
        assert (answer.committed.transport, answer.committed.blocks_moved, answer.committed.bytes) == (
            "local",
            num_blocks,
            num_blocks * block_bytes,
        )
        assert (answer.done.state, answer.done.blocks, answer.done.bytes) == (
            kv_pb2.LEASE_STATE_RELEASED,
            num_blocks,
            num_blocks * block_bytes,
        )
        assert answer.committed.chunks == answer.done.chunks
        await pair.settled()


async def test_many_at_once_with_chunked_prefill_and_several_chunks_each(redis_url: str) -> None:
    """A small token budget splits and fuses prompts; chunks of one block overlap with the prefill."""
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 16}
    runner = HeldRunner()
    async with (
        started(
            redis_url,
            prefill_options=options | {"chunk_bytes": 1},
            decode_options={"max_num_seqs": 64},
            decode_runner=runner,
        ) as pair,
        routed(pair) as router,
    ):
        prompts = [prompt_of(3 + 5 * i, seed=i) for i in range(12)]
        asked = asyncio.gather(*(router.generate(f"r{i}", p, 5 + i) for i, p in enumerate(prompts)))
        # So that they meet in a step.
        await until(lambda: pair.decode_worker.engine.stats().num_running == len(prompts))
        runner.let_go()
        answers = await asked
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert answer.tokens == expected(prompt, 5 + i)
            assert answer.positions == list(range(5 + i))
        # No step's tokens in two messages, however many sequences had one in it.
        steps = [m.step for m in router.messages if any(e.WhichOneof("event") == "token" for e in m.events)]
        assert len(steps) == len(set(steps))
        assert max(len(m.events) for m in router.messages) > 1
        await pair.settled()


async def test_blocks_that_decode_holds_are_not_moved_again(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        shared = prompt_of(10 * BLOCK)
        first = await router.generate("a", [*shared, 1, 2], 3)
        second = await router.generate("b", [*shared, 7, 8, 9], 3)
        assert second.tokens == expected([*shared, 7, 8, 9], 3)
        assert (first.num_decode_cached, second.num_decode_cached) == (0, 10 * BLOCK)
        assert first.committed is not None
        assert second.committed is not None
        assert second.first is not None
        assert (first.committed.blocks_moved, first.committed.blocks_reused) == (11, 0)
        assert (second.committed.blocks_moved, second.committed.blocks_reused) == (1, 10)
        assert second.committed.bytes == pair.prefill_runner.kv_shape.block_bytes
        # The prefill worker did not compute them again either.
        assert second.first.cached_tokens == 10 * BLOCK
        stats = await pair.both()
        assert [s.blocks_moved for s in stats] == [12, 12]
        assert stats[0].bytes_moved == stats[1].bytes_moved == 12 * pair.prefill_runner.kv_shape.block_bytes
        await pair.settled()


async def test_a_prompt_that_decode_holds_whole_moves_nothing(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        prompt = prompt_of(4 * BLOCK)
        await router.generate("a", prompt, 6)
        again = await router.generate("b", prompt, 6)
        assert again.tokens == expected(prompt, 6)
        assert again.committed is not None
        assert (again.num_decode_cached, again.committed.blocks_moved, again.committed.chunks) == (4 * BLOCK, 0, 0)
        await pair.settled()


async def test_salts_do_not_share(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        prompt = prompt_of(4 * BLOCK)
        await router.generate("a", prompt, 2)
        request = router._request("b", prompt, 2) | {"cache_salt": "other", "router_id": router.router_id}
        reserved = await pair.decode.Reserve(decode_pb2.ReserveRequest(**request))
        assert reserved.num_cached_tokens == 0
        await router.cancel("b")
        await pair.settled()


async def test_a_first_token_that_ends_the_request_aborts_the_hand_over(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        one = await router.generate("one", prompt_of(20), 1)
        assert one.tokens == expected(prompt_of(20), 1)
        assert one.first is not None
        assert one.first.token.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        assert one.done is not None
        assert one.done.state == kv_pb2.LEASE_STATE_ABORTED
        stop = await router.generate("stop", prompt_of(20), 5, stop_token_ids=(expected(prompt_of(20), 1)[0],))
        assert stop.first is not None
        assert stop.first.token.finish_reason == inference_pb2.FINISH_REASON_STOP
        await pair.settled()


async def test_stop_tokens_and_eos_end_decode(redis_url: str) -> None:
    prompt = prompt_of(9)
    tokens = expected(prompt, 8)
    async with started(redis_url, eos=frozenset({tokens[5]})) as pair, routed(pair) as router:
        by_eos = await router.generate("eos", prompt, 8)
        assert by_eos.tokens == tokens[:6]
        by_stop = await router.generate("stop", prompt, 8, stop_token_ids=(tokens[3],))
        assert by_stop.tokens == tokens[:4]
        ignoring = await router.generate("ignore", prompt, 8, ignore_eos=True)
        assert ignoring.tokens == tokens
        await pair.settled()


async def test_a_later_attempt_continues_positions(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        prompt = prompt_of(11)
        tokens = expected(prompt, 10)
        answer = await router.generate("r", [*prompt, *tokens[:4]], 10, attempt=2, num_prompt_tokens=len(prompt))
        assert answer.tokens == tokens[4:]
        assert answer.positions == list(range(4, 10))
        await pair.settled()


async def test_the_first_token_does_not_wait_for_the_publishing(redis_url: str) -> None:
    """The byte budget is taken by a lease whose reader never says that it has all of it."""
    block_bytes = make_runner().kv_shape.block_bytes
    options = {"chunk_bytes": 1, "lease_ttl": 10 * WAIT_S}
    async with started(redis_url, prefill_options=options, budget_bytes=8 * block_bytes) as pair, routed(pair) as router:
        hog = router.run("hog", prompt_of(8 * BLOCK), 4)
        taken = await read_to_end(pair.kv.Watch(kv_pb2.WatchRequest(ticket=(await hog.read()).accepted.ticket)))
        assert taken[-1].WhichOneof("event") == "complete"
        call = router.run("r", prompt_of(8 * BLOCK, seed=1), 4)
        watch: Any = pair.kv.Watch(kv_pb2.WatchRequest(ticket=(await call.read()).accepted.ticket))
        assert (await watch.read()).manifest.num_blocks == 8
        first = (await asyncio.wait_for(call.read(), WAIT_S)).first_token
        assert first.token.token_id == expected(prompt_of(8 * BLOCK, seed=1), 1)[0]
        stored = (await pair.both())[0].transports[0]
        assert (stored.num_leases, stored.stored_bytes) == (1, 8 * block_bytes), "there is no room for it still"
        hog.cancel()
        assert (await watch.read()).WhichOneof("event") == "chunk"
        call.cancel()
        await pair.settled()


async def test_chunks_are_published_while_the_prefill_runs(redis_url: str) -> None:
    runner = HeldRunner()
    options = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "chunk_bytes": 1}
    async with started(redis_url, prefill_runner=runner, prefill_options=options) as pair, routed(pair) as router:
        call = router.run("r", prompt_of(80), 4)
        ticket = (await call.read()).accepted.ticket
        watch: Any = pair.kv.Watch(kv_pb2.WatchRequest(ticket=ticket))
        assert (await watch.read()).manifest.num_blocks == 20
        runner.allow(1)
        # Of the two chunks of a step, either may be published first.
        first_chunk = (await watch.read()).chunk
        assert first_chunk.index == first_chunk.first_block < 2
        assert (await pair.both())[0].num_running == 1  # still computing
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(watch)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        runner.let_go()
        await pair.settled()


async def test_hand_overs_share_a_budget_that_holds_only_one_of_them(redis_url: str) -> None:
    """Each gets room for all of it or none: with a part each, all would wait for each other until their leases end."""
    runner = make_runner(step_s=0.005)
    budget_bytes = 10 * runner.kv_shape.block_bytes
    async with (
        started(redis_url, budget_bytes=budget_bytes, prefill_options={"chunk_bytes": 1}, prefill_runner=runner) as pair,
        routed(pair) as router,
    ):
        prompts = [prompt_of(6 * BLOCK, seed=i) for i in range(8)]
        answers = await asyncio.gather(*(router.generate(f"r{i}", prompt, 4) for i, prompt in enumerate(prompts)))
        assert [answer.tokens for answer in answers] == [expected(prompt, 4) for prompt in prompts]
        await pair.settled()
        # Nothing of the budget is lost, however a hand-over ends.
        for i in range(4):
            call = router.run(f"cut{i}", prompt_of(10 * BLOCK, seed=20 + i), 4)
            assert (await call.read()).WhichOneof("event") == "accepted"
            if i % 2:
                await call.read()
            call.cancel()
        await pair.settled()
        assert (await router.generate("last", prompt_of(10 * BLOCK, seed=9), 4)).tokens == expected(prompt_of(10 * BLOCK, seed=9), 4)
        await pair.settled()


async def test_logprobs_travel(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        await router.generate("r", prompt_of(5), 3, logprobs=2)
        tokens = [e.token for m in router.messages for e in m.events if e.WhichOneof("event") == "token"]
        assert [t.logprobs.top[1].token_id for t in tokens] == [t.token_id + 1 for t in tokens]
        assert [t.logprobs.top[1].logprob for t in tokens] == [-1.0, -1.0]
        await pair.settled()


async def test_phases_say_where_the_time_went(redis_url: str) -> None:
    runner = HeldRunner()
    options = {"max_num_batched_tokens": 8, "max_num_seqs": 8}
    async with started(redis_url, prefill_runner=runner, prefill_options=options) as pair, routed(pair) as router:
        engine = pair.prefill_worker.engine
        begun = time.monotonic()
        asked = [asyncio.create_task(router.generate("a", prompt_of(16), 2))]
        await until(lambda: engine.stats().num_running == 1)
        asked.append(asyncio.create_task(router.generate("b", prompt_of(16, seed=2), 2)))
        await until(lambda: engine.stats().num_waiting == 1)
        # Two steps for each of them, those of a first: each pause is a part of what is told, whatever else takes its time.
        await asyncio.sleep(0.1)
        runner.allow(1)
        await until(lambda: engine.stats().steps > 1)
        one_step = time.monotonic()
        await asyncio.sleep(0.1)
        runner.let_go()
        ahead, behind = (answer.first for answer in await asyncio.gather(*asked))
        took = time.monotonic() - begun
        assert ahead is not None
        assert behind is not None
        assert ahead.queue_s <= one_step - begun - 0.1, "a step that takes long is no queue"
        assert ahead.prefill_s >= 0.1
        assert behind.queue_s >= 0.2
        for first in (ahead, behind):
            assert 0 < first.queue_s + first.prefill_s <= took
        await pair.settled()
