"""Requests through both workers: tokens, order, what is moved and what is not."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from worker_harness import (
    BLOCK,
    PROMPT,
    WAIT_S,
    HeldRunner,
    expected,
    held_pair,
    make_runner,
    prompt_of,
    read_to_end,
    refused,
    routed,
    started,
    until,
)

from twostep.rpc.v1 import decode_pb2, inference_pb2, kv_pb2


async def test_tokens_are_those_of_the_fake_model(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        block_bytes = pair.prefill_runner.kv_shape.block_bytes
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 61):
            prompt = prompt_of(length, seed=length)
            answer = await router.generate(f"r{length}", prompt, 9)
            answer.check(prompt, 9)
            assert answer.committed is not None
            assert answer.done is not None
            num_blocks = -(-length // BLOCK)
            committed, done = answer.committed, answer.done
            assert (committed.transport, committed.blocks_moved, committed.bytes) == ("local", num_blocks, num_blocks * block_bytes)
            assert (done.state, done.blocks, done.bytes) == (kv_pb2.LEASE_STATE_RELEASED, num_blocks, num_blocks * block_bytes)
            assert committed.chunks == done.chunks
            await pair.settled()


async def test_many_at_once_with_chunked_prefill_and_several_chunks_each(redis_url: str) -> None:
    """A small token budget splits and fuses prompts; chunks of one block overlap with the prefill."""
    small, runner = {"max_num_batched_tokens": 16, "max_num_seqs": 16, "chunk_bytes": 1}, HeldRunner()
    async with (
        started(redis_url, prefill_options=small, decode_options={"max_num_seqs": 64}, decode_runner=runner) as pair,
        routed(pair) as router,
    ):
        prompts = [prompt_of(3 + 5 * i, seed=i) for i in range(12)]
        asked = asyncio.gather(*(router.generate(f"r{i}", p, 5 + i) for i, p in enumerate(prompts)))
        # So that they meet in a step.
        await until(lambda: pair.decode_worker.engine.stats().num_running == len(prompts))
        runner.let_go()
        for i, (prompt, answer) in enumerate(zip(prompts, await asked, strict=True)):
            answer.check(prompt, 5 + i)
        # No step's tokens in two messages, however many sequences had one in it.
        steps = [m.step for m in router.messages if any(e.WhichOneof("event") == "token" for e in m.events)]
        assert len(steps) == len(set(steps))
        assert max(len(m.events) for m in router.messages) > 1


@pytest.mark.parametrize("told", [None, 0, 2 * BLOCK, 10 * BLOCK])
async def test_blocks_that_decode_holds_are_not_moved_again(redis_url: str, told: int | None) -> None:
    """Whatever Run was told, by a router that had not asked the decode worker yet."""
    async with started(redis_url) as pair, routed(pair) as router:
        shared, block_bytes = prompt_of(10 * BLOCK), pair.prefill_runner.kv_shape.block_bytes
        seen = []
        # The last is held whole: nothing is moved for it.
        for name, more in (("a", [1, 2]), ("b", [7, 8, 9]), ("c", [])):
            answer = await router.generate(name, [*shared, *more], 3, told=told)
            answer.check([*shared, *more], 3)
            assert answer.committed is not None
            assert answer.first is not None
            moved = answer.committed.blocks_moved
            assert answer.committed.bytes == moved * block_bytes
            seen.append((answer.num_decode_cached, answer.first.cached_tokens, moved, answer.committed.blocks_reused))
        # The prefill worker computes the last block of what it holds, too, for its last token.
        assert seen == [(0, 0, 11, 0), (40, 40, 1, 10), (40, 40 - BLOCK, 0, 10)]
        stats = await pair.both()
        assert [s.blocks_moved for s in stats] == [12, 12]
        assert [s.bytes_moved for s in stats] == [12 * block_bytes] * 2
        request = router.request("salted", shared, 2) | {"cache_salt": "other", "router_id": router.router_id}
        assert (await pair.decode.Reserve(decode_pb2.ReserveRequest(**request))).num_cached_tokens == 0
        await router.cancel("salted")


async def test_a_decode_cache_longer_than_the_prompt_is_refused_and_a_part_of_a_block_is_published_whole(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        details = await refused(read_to_end(router.run("r", prompt_of(10), 3, cached=12)), grpc.StatusCode.INVALID_ARGUMENT)
        assert "12" in details
        await pair.settled()
        call, _ = await router.begin("s", prompt_of(10), 3, cached=3)
        assert (await router.event("committed", "s")).committed.blocks_moved == 3
        (await router.rest("s")).check(prompt_of(10), 3, first=1)
        call.cancel()


async def test_the_first_watch_says_what_decode_holds_and_an_older_one_leaves_it_to_run(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        for name, said, first_block in (("unsaid", None, 1), ("said", 2 * BLOCK + 1, 2), ("all", 10, 2)):
            call = router.run(name, prompt_of(10), 3, cached=BLOCK)
            ticket = (await call.read()).accepted.ticket
            too_many = kv_pb2.WatchRequest(ticket=ticket, num_cached_tokens=11)
            await refused(pair.kv.Watch(too_many).read(), grpc.StatusCode.INVALID_ARGUMENT)
            manifest = (await pair.kv.Watch(kv_pb2.WatchRequest(ticket=ticket, num_cached_tokens=said)).read()).manifest
            assert (manifest.first_block, manifest.first_block + manifest.num_blocks) == (first_block, 3)
            again = (await pair.kv.Watch(kv_pb2.WatchRequest(ticket=ticket, num_cached_tokens=0)).read()).manifest
            assert again == manifest
            call.cancel()
        await pair.settled()


@pytest.mark.parametrize("here", [False, True])
async def test_answers_end_where_they_must_and_go_on_where_another_attempt_was(redis_url: str, here: bool) -> None:
    tokens = expected(PROMPT, 12)
    async with started(redis_url, eos=frozenset({tokens[5]})) as pair, routed(pair) as router:
        generate: Any = router.generate_here if here else router.generate
        for name, count, options in (
            ("by length", 8, {"max_tokens": 8, "ignore_eos": True}),
            ("by eos", 6, {"max_tokens": 8}),
            ("by a stop token", 4, {"max_tokens": 8, "stop_token_ids": (tokens[3],)}),
            ("at once", 1, {"max_tokens": 1}),
            ("at once by a stop token", 1, {"max_tokens": 5, "stop_token_ids": (tokens[0],)}),
        ):
            answer = await generate(name, PROMPT, options.pop("max_tokens"), **options)
            answer.check(PROMPT, count)
            if count == 1 and not here:
                assert answer.done is not None
                assert answer.done.state == kv_pb2.LEASE_STATE_ABORTED, "there is nothing to hand over"
                assert answer.first is not None
                stop, length = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH
                assert answer.first.token.finish_reason == (length if name == "at once" else stop)
        again = {"attempt": 2, "num_prompt_tokens": len(PROMPT), "ignore_eos": True}
        (await generate("r", [*PROMPT, *tokens[:5]], 12, **again)).check(PROMPT, 12, first=5)


async def test_the_first_token_does_not_wait_for_the_publishing(redis_url: str) -> None:
    """The byte budget is taken by a lease whose reader never says that it has all of it."""
    block_bytes = make_runner().kv_shape.block_bytes
    options = {"chunk_bytes": 1, "lease_ttl": 10 * WAIT_S}
    async with started(redis_url, prefill_options=options, budget_bytes=8 * block_bytes) as pair, routed(pair) as router:
        hog = router.run("hog", prompt_of(5 * BLOCK), 4)
        taken = await read_to_end(pair.kv.Watch(kv_pb2.WatchRequest(ticket=(await hog.read()).accepted.ticket)))
        assert taken[-1].WhichOneof("event") == "complete"
        call = router.run("r", prompt_of(8 * BLOCK, seed=1), 4)
        watch: Any = pair.kv.Watch(kv_pb2.WatchRequest(ticket=(await call.read()).accepted.ticket))
        assert (await watch.read()).manifest.num_blocks == 8
        first = (await asyncio.wait_for(call.read(), WAIT_S)).first_token
        assert first.token.token_id == expected(prompt_of(8 * BLOCK, seed=1), 1)[0]
        stored = (await pair.both())[0].transports[0]
        assert (stored.num_leases, stored.stored_bytes) == (1, 5 * block_bytes), "there is no room for all of it still"
        hog.cancel()
        assert (await watch.read()).WhichOneof("event") == "chunk"
        call.cancel()


async def test_blocks_are_published_while_the_prefill_runs_and_once_they_are_final(redis_url: str) -> None:
    """Steps of a block and a half."""
    async with held_pair(redis_url, prefill_options={"max_num_batched_tokens": 6}) as h:
        call, _ = await h.router.begin("r", prompt_of(80), 5)
        h.prefill.allow(1)
        await until(lambda: h.pair.hand_overs.blocks_published)
        stats = (await h.pair.both())[0]
        assert (stats.num_running, stats.blocks_moved) == (1, 1)
        h.let_go()
        (await h.router.rest("r")).check(prompt_of(80), 5, first=1)
        call.cancel()


async def test_hand_overs_share_a_budget_that_holds_only_one_of_them(redis_url: str) -> None:
    """Each gets room for all of it or none: with a part each, all would wait for each other until their leases end."""
    runner = make_runner()
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
        (await router.generate("last", prompt_of(10 * BLOCK, seed=9), 4)).check(prompt_of(10 * BLOCK, seed=9), 4)


async def test_logprobs_travel(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        await router.generate("r", prompt_of(5), 3, logprobs=2)
        tokens = [e.token for m in router.messages for e in m.events if e.WhichOneof("event") == "token"]
        assert [t.logprobs.top[1].token_id for t in tokens] == [t.token_id + 1 for t in tokens]
        assert [t.logprobs.top[1].logprob for t in tokens] == [-1.0, -1.0]


# ---- phases: they are of real time, of the engine's thread and of the loop's ---------------------------------------------------


@pytest.mark.system
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
