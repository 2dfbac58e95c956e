"""Prompts that the decode worker computes itself: the same answers, beside those handed over, and the same ends whatever goes wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from worker_harness import (
    BLOCK,
    WAIT_S,
    Answer,
    HeldRunner,
    LateClock,
    Pair,
    RouterDouble,
    expected,
    local_transports,
    make_runner,
    prompt_of,
    routed,
    started,
)

from decode_worker.sequences import SequencesConfig
from kv_transfer.local.transport import LocalHub
from kv_transfer.transports import Transports
from twostep.engine.batch import Batch, Sampled
from twostep.rpc.v1 import decode_pb2, inference_pb2
from twostep.worker.edge import EdgeParts

PROMPT = prompt_of(60)


@asynccontextmanager
async def held_decode(redis_url: str, **options: Any) -> AsyncIterator[tuple[Pair, RouterDouble, HeldRunner]]:
    """The decode worker takes only the steps that it may; a prompt of 60 tokens takes 8."""
    decode_options = {"max_num_batched_tokens": 8, "max_num_seqs": 8} | options.pop("decode_options", {})
    runner = options.pop("decode_runner", None) or HeldRunner()
    async with (
        started(redis_url, decode_runner=runner, decode_options=decode_options, **options) as pair,
        routed(pair) as router,
    ):
        yield pair, router, runner


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not await condition():
        assert time.monotonic() < give_up, "it did not happen"
        await asyncio.sleep(0.01)


async def until_steps(pair: Pair, num_steps: int) -> None:
    """So many were planned on the decode worker: those before the last one are over, and told of."""

    async def planned() -> bool:
        return (await pair.both())[1].steps >= num_steps

    await until(planned)


async def until_event(router: RouterDouble, kind: str, request_id: str = "r") -> decode_pb2.DecodeEvent:
    while True:
        event = await asyncio.wait_for(router.inbox(request_id).get(), WAIT_S)
        if event.WhichOneof("event") == kind:
            return event


def check(answer: Answer, prompt: list[int], count: int) -> None:
    assert answer.failed is None, answer.failed
    assert answer.tokens == expected(prompt, count)
    assert answer.positions == list(range(count))


# ---- answers -------------------------------------------------------------------------------------------------------------


async def test_prompts_computed_here_and_handed_over_answer_alike_side_by_side(redis_url: str) -> None:
    async with started(redis_url, decode_options={"max_num_batched_tokens": 24}) as pair, routed(pair) as router:
        prompts = [prompt_of(5 + 13 * i, seed=i) for i in range(12)]

        async def ask(i: int) -> Answer:
            generate = router.generate_here if i % 3 else router.generate
            return await generate(f"r{i}", prompts[i], 5 + i)

        for i, answer in enumerate(await asyncio.gather(*(ask(i) for i in range(12)))):
            check(answer, prompts[i], 5 + i)
            assert (answer.committed is None) == bool(i % 3), "nothing is committed of a prompt computed here"
        await pair.settled()
        prefill, decode = await pair.both()
        assert decode.blocks_moved > 0
        assert not prefill.num_sequences


async def test_one_token_answers_a_prompt_and_ends_it(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        answer = await router.generate_here("r", PROMPT, 1)
        check(answer, PROMPT, 1)
        assert answer.first is not None
        assert answer.first.token.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        await pair.settled()


async def test_the_first_token_tells_what_was_cached_and_how_long_it_took(redis_url: str) -> None:
    async with held_decode(redis_url) as (pair, router, runner):
        begun = time.monotonic()
        asked = asyncio.create_task(router.generate_here("turn-1", PROMPT, 20))
        runner.allow(1)
        await until_steps(pair, 2)
        await asyncio.sleep(0.05)  # The other seven chunks take at least this long.
        runner.let_go()
        first = await asked
        took = time.monotonic() - begun
        check(first, PROMPT, 20)
        assert first.first is not None
        assert first.first.cached_tokens == 0
        assert 0.05 <= first.first.prefill_s <= took
        assert 0 <= first.first.queue_s <= took - 0.05
        # The second turn: prompt, answer and a question. The last token's KV was never computed.
        prompt = [*PROMPT, *first.tokens, 7, 8, 9]
        second = await router.generate_here("turn-2", prompt, 5)
        check(second, prompt, 5)
        assert second.first is not None
        assert second.first.cached_tokens == (len(PROMPT) + 19) // BLOCK * BLOCK
        await pair.settled()


@pytest.mark.parametrize("here", [False, True])
async def test_steps_that_a_busy_loop_hears_of_late_are_no_queue(redis_url: str, here: bool) -> None:
    role = "decode" if here else "prefill"
    slow = {f"{role}_runner": make_runner(step_s=0.02), f"{role}_options": {"max_num_batched_tokens": 8}}
    async with started(redis_url, **slow) as pair, routed(pair) as router:
        asked = asyncio.create_task((router.generate_here if here else router.generate)("r", PROMPT, 3))
        engine = (pair.decode_worker if here else pair.prefill_worker).engine
        while not engine.stats().num_running:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        # All eight are over when the loop goes on.
        time.sleep(0.4)  # noqa: ASYNC251 - it is to be held up
        answer = await asked
        check(answer, PROMPT, 3)
        assert answer.first is not None
        assert answer.first.prefill_s >= 8 * 0.02
        await pair.settled()


class Noting(HeldRunner):
    """Notes how many tokens of each sequence a step computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[list[int]] = []

    def run(self, batch: Batch) -> Sampled:
        self.counts.append(np.diff(batch.query_start).tolist())
        return super().run(batch)


async def test_a_long_prompt_leaves_every_step_a_token_for_who_decodes(redis_url: str) -> None:
    noting = Noting()
    async with held_decode(redis_url, decode_runner=noting) as (pair, router, runner):
        runner.allow(1)
        await router.reserve("short", [1, 2, 3], 200, prefill_here=True)
        await until_event(router, "first_token", "short")
        await router.reserve("long", prompt_of(200), 3, prefill_here=True)
        runner.let_go()
        answer = Answer()
        await router.collect("long", answer)
        check(answer, prompt_of(200), 3)
        # 200 tokens in chunks of 7, beside one decode of a budget of 8: 29 steps, none without a token of the other.
        through = [counts for counts in noting.counts if max(counts) > 3]
        assert [sorted(counts) for counts in through] == [[1, 7]] * 28 + [[1, 4]]
        told = [e.request_id for m in router.messages for e in m.events if e.HasField("token") or e.HasField("first_token")]
        assert told.index("long") >= 28, "its neighbour is told of its tokens meanwhile"
        await router.cancel("short")
        await pair.settled()


async def test_a_later_attempt_goes_on_where_an_earlier_one_was(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        whole = expected(PROMPT, 12)
        answer = await router.generate_here("r", [*PROMPT, *whole[:5]], 12, attempt=2, num_prompt_tokens=len(PROMPT))
        assert answer.tokens == whole[5:]
        assert answer.positions == list(range(5, 12))
        await pair.settled()


async def test_sequences_that_must_give_way_answer_alike(redis_url: str) -> None:
    """24 blocks for four sequences of up to 15 each."""
    runner = HeldRunner(num_blocks=24)
    async with started(redis_url, decode_runner=runner) as pair, routed(pair) as router:
        prompts = [prompt_of(20, seed=i) for i in range(4)]
        for i, prompt in enumerate(prompts):
            await router.reserve(f"r{i}", prompt, 40, prefill_here=True)
        runner.let_go()
        for i, prompt in enumerate(prompts):
            answer = Answer()
            await router.collect(f"r{i}", answer)
            check(answer, prompt, 40)
        await pair.settled()
        assert (await pair.both())[1].num_preemptions > 0


# ---- refusals ------------------------------------------------------------------------------------------------------------


async def refusal(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_what_waits_is_bounded(redis_url: str) -> None:
    async with held_decode(redis_url, decode_options={"max_num_seqs": 1, "max_waiting": 2}) as (pair, router, runner):
        runner.allow(8)
        await router.reserve("runs", PROMPT, 400, prefill_here=True)
        await until_event(router, "first_token", "runs")
        for i in range(2):
            await router.reserve(f"waits-{i}", PROMPT, 5, prefill_here=True)
        error = await refusal(router.reserve("one-more", PROMPT, 5, prefill_here=True))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "waiting" in (error.details() or "")
        await router.cancel("runs")
        runner.let_go()
        for i in range(2):
            answer = Answer()
            await router.collect(f"waits-{i}", answer)
            check(answer, PROMPT, 5)
        await pair.settled()


async def test_hand_overs_do_not_starve_a_prompt_that_waits_for_blocks(redis_url: str) -> None:
    """24 blocks: two answers hold 5 each and grow, and the long prompt needs 16."""
    async with held_decode(redis_url, decode_runner=HeldRunner(num_blocks=24)) as (pair, router, runner):
        small, long = prompt_of(16), prompt_of(64, seed=3)
        for name in ("a", "b"):
            await router.reserve(name, small, 25, prefill_here=True)
            runner.allow(4)
            await until_event(router, "first_token", name)
        await router.reserve("long", long, 3, prefill_here=True)
        # The next step is planned without it.
        planned = (await pair.both())[1].steps
        runner.allow(1)
        await until_steps(pair, planned + 1)
        error = await refusal(router.reserve("small", small, 5))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "waits here for KV blocks" in (error.details() or "")
        runner.let_go()
        answer = Answer()
        await router.collect("long", answer)
        check(answer, long, 3)
        check(await router.generate("small", small, 5), small, 5)
        await pair.settled()


async def test_a_worker_may_compute_no_prompts(redis_url: str) -> None:
    async with started(redis_url, decode_options={"local_prefill": False}) as pair, routed(pair) as router:
        assert not pair.decode_worker.record().local_prefill
        error = await refusal(router.reserve("r", PROMPT, 5, prefill_here=True))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        check(await router.generate("r2", PROMPT, 5), PROMPT, 5)
        await pair.settled()


async def test_workers_say_who_computes_prompts_and_in_steps_of_what(redis_url: str) -> None:
    async with started(redis_url, decode_options={"max_num_batched_tokens": 24}) as pair:
        prefill, decode = pair.prefill_worker.record(), pair.decode_worker.record()
        assert (prefill.local_prefill, decode.local_prefill, decode.step_tokens) == (False, True, 24)


async def test_there_is_no_ticket_for_a_prompt_computed_here(redis_url: str) -> None:
    async with held_decode(redis_url) as (pair, router, runner):
        await router.reserve("r", PROMPT, 50, prefill_here=True)
        call = router.run("r", PROMPT, 50)
        ticket = (await call.read()).accepted.ticket
        error = await refusal(router.attach("r", ticket))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        call.cancel()
        runner.let_go()
        answer = Answer()
        await router.collect("r", answer)
        check(answer, PROMPT, 50)
        await pair.settled()


# ---- ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding"])
async def test_a_cancel_frees_it_at_once(redis_url: str, phase: str) -> None:
    async with held_decode(redis_url, decode_options={"max_num_seqs": 1}) as (pair, router, runner):
        if phase == "waiting":
            runner.allow(8)
            await router.reserve("ahead", PROMPT, 300, prefill_here=True)
            await until_event(router, "first_token", "ahead")
        await router.reserve("r", PROMPT, 300, prefill_here=True)
        if phase != "waiting":
            await reach(phase, pair, router, runner)
        assert await router.cancel("r")
        assert not await router.cancel("r")
        await router.cancel("ahead")
        runner.let_go()
        await pair.settled()
        await router.hears_no_more_of("r")
        await pair.settled()


async def reach(phase: str, pair: Pair, router: RouterDouble, runner: HeldRunner) -> None:
    """Of r, which is the only one."""
    if phase == "prefilling":
        runner.allow(2)
        await until(lambda: _owns_blocks(pair))
    else:
        runner.allow(10)
        await until_event(router, "token")


async def _owns_blocks(pair: Pair) -> bool:
    decode = (await pair.both())[1]
    return decode.num_free_blocks + decode.num_cached_blocks < decode.num_blocks


@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
async def test_without_its_router_it_ends_with_the_router_s_lease(redis_url: str, phase: str) -> None:
    async with held_decode(redis_url, limits=SequencesConfig(router_lease_s=0.4)) as (pair, router, runner):
        await router.reserve("r", PROMPT, 400, prefill_here=True)
        await reach(phase, pair, router, runner)
        await router.close()

        async def gone() -> bool:
            return (await pair.both())[1].num_sequences == 0

        # It takes no step meanwhile: it cannot come to its own end.
        await until(gone)
        runner.let_go()
        await pair.settled()


async def test_a_reservation_s_lease_is_not_a_waiting_prompt_s(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LateClock()
    monkeypatch.setattr("decode_worker.sequences.time", clock)
    async with held_decode(redis_url, decode_options={"max_num_seqs": 2}, limits=SequencesConfig(reservation_lease_s=100)) as (
        pair,
        router,
        runner,
    ):
        await router.reserve("ahead", PROMPT, 100, prefill_here=True)
        await until(lambda: _owns_blocks(pair))
        assert (await pair.both())[1].oldest_lease_s == 0, "no hand-over is under way"
        await router.reserve("reserved", prompt_of(8, seed=4), 5)
        await router.reserve("r", PROMPT, 5, prefill_here=True)
        clock.late_s = 101.0
        failed = (await until_event(router, "failed", "reserved")).failed
        assert "no ticket was attached for 100 s" in failed.message
        # It has waited for as long, and goes on.
        runner.let_go()
        answer = Answer()
        await router.collect("r", answer)
        check(answer, PROMPT, 5)
        await pair.settled()


@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
async def test_a_failed_step_fails_it_retryably_and_frees_it(redis_url: str, phase: str) -> None:
    async with held_decode(redis_url) as (pair, router, runner):
        await router.reserve("r", PROMPT, 300, prefill_here=True)
        await reach(phase, pair, router, runner)
        await until_steps(pair, 3 if phase == "prefilling" else 11)
        runner.failures = 1
        runner.let_go()
        failed = (await until_event(router, "failed")).failed
        assert (failed.code, failed.retryable) == ("UNAVAILABLE", True)
        await pair.settled()
        check(await router.generate_here("after", PROMPT, 5), PROMPT, 5)


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_drain_lets_it_end_or_fails_it(redis_url: str, in_time: bool) -> None:
    async with held_decode(redis_url) as (pair, router, runner):
        await router.reserve("r", PROMPT, 20, prefill_here=True)
        stopping = asyncio.create_task(pair.decode_worker.stop(WAIT_S if in_time else 1.0))
        while not pair.decode_worker.record().draining:  # noqa: ASYNC110  it says so once, at once
            await asyncio.sleep(0)
        error = await refusal(router.reserve("late", PROMPT, 5, prefill_here=True))
        # Of a worker whose time is up already gRPC may cancel the call: routers take either for one that is gone.
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, *(() if in_time else (grpc.StatusCode.CANCELLED,)))
        if in_time:
            runner.let_go()
        answer = Answer()
        await router.collect("r", answer)
        if in_time:
            check(answer, PROMPT, 20)
        else:
            assert answer.failed is not None
            assert (answer.failed.code, answer.failed.retryable) == ("UNAVAILABLE", True)
            runner.let_go()
        await stopping


# ---- streams that break --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("got", [0, 1, 6])
async def test_a_stream_that_comes_back_goes_on_from_where_it_was(redis_url: str, got: int) -> None:
    """`got`: tokens that the router had, the first one included."""
    async with held_decode(redis_url, limits=SequencesConfig(router_lease_s=10 * WAIT_S)) as (pair, router, runner):
        await router.reserve("r", PROMPT, 40, prefill_here=True)
        answer = Answer()
        runner.allow(8 + got if got else 2)
        while len(answer.tokens) < got:
            event = await asyncio.wait_for(router.inbox("r").get(), WAIT_S)
            token = event.first_token.token if event.HasField("first_token") else event.token
            answer.tokens.append(token.token_id)
            answer.positions.append(token.position)
            answer.first = event.first_token if event.HasField("first_token") else answer.first
        await router.close()
        # What is missed includes the first token, or some after it.
        runner.allow(20)
        await until_steps(pair, 20)
        again = RouterDouble(pair)
        await again.open(decode_pb2.StreamPosition(request_id="r", attempt=1, next_position=got, committed=got > 0))
        runner.let_go()
        await again.collect("r", answer)
        check(answer, PROMPT, 40)
        await again.close()
        await pair.settled()


async def test_no_kv_transport_is_needed_for_it(redis_url: str) -> None:
    """As a worker of an aggregated deployment is."""
    make = local_transports(LocalHub())

    def none_on_decode(parts: EdgeParts) -> Transports:
        return Transports([]) if parts.config.kv_transfer == "none" else make(parts)

    without = {"kv_transfer": "none"}
    async with started(redis_url, make_transports=none_on_decode, decode_options=without) as pair, routed(pair) as router:
        record = pair.decode_worker.record()
        assert (record.ready, record.transports, record.local_prefill) == (True, (), True)
        check(await router.generate_here("r", PROMPT, 10), PROMPT, 10)
        await pair.settled()
