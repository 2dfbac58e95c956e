"""Prompts that the decode worker computes itself, beside those handed over. Their ends: test_worker_cancel.py."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest
from worker_harness import (
    BLOCK,
    PROMPT,
    Answer,
    HeldRunner,
    held_pair,
    local_transports,
    prompt_of,
    refused,
    routed,
    started,
)

from kv_transfer.local.transport import LocalHub
from kv_transfer.transports import Transports
from twostep.engine.batch import Batch, Sampled
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
        await pair.settled()


class Noting(HeldRunner):
    """Notes how many tokens of each sequence a step computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[list[int]] = []

    def run(self, batch: Batch) -> Sampled:
        self.counts.append(np.diff(batch.query_start).tolist())
        return super().run(batch)


async def test_a_long_prompt_leaves_every_step_a_token_for_each_that_decodes(redis_url: str) -> None:
    runner, options = Noting(), {"max_num_batched_tokens": 8, "max_num_seqs": 8}
    async with started(redis_url, decode_runner=runner, decode_options=options) as pair, routed(pair) as router:
        runner.allow(1)
        await router.reserve("short", [1, 2, 3], 200, prefill_here=True)
        await router.event("first_token", "short")
        await router.reserve("long", prompt_of(200), 3, prefill_here=True)
        runner.let_go()
        (await router.rest("long")).check(prompt_of(200), 3)
        # 200 tokens in chunks of 7, beside one decode of a budget of 8: 29 steps, none without a token of the other.
        through = [counts for counts in runner.counts if max(counts) > 3]
        assert [sorted(counts) for counts in through] == [[1, 7]] * 28 + [[1, 4]]
        sent = [e.request_id for m in router.messages for e in m.events if e.HasField("token") or e.HasField("first_token")]
        assert sent.index("long") >= 28, "its neighbour's tokens are sent meanwhile"
        await router.cancel("short")
        await pair.settled()


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
        await pair.settled()


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
        await h.pair.settled()


async def test_hand_overs_do_not_starve_a_prompt_that_waits_for_blocks(redis_url: str) -> None:
    """24 blocks: two answers hold 5 each and grow, and the long prompt needs 16."""
    async with held_pair(redis_url, decode_blocks=24) as h:
        small, long = prompt_of(16), prompt_of(64, seed=3)
        for name in ("a", "b"):
            await h.router.reserve(name, small, 25, prefill_here=True)
            h.decode.allow(4)
            await h.router.event("first_token", name)
        await h.router.reserve("long", long, 3, prefill_here=True)
        # The next step is planned without it.
        planned = (await h.pair.both())[1].steps
        h.decode.allow(1)
        await h.until_steps(planned + 1)
        await refused(h.router.reserve("small", small, 5), Code.RESOURCE_EXHAUSTED)
        h.let_go()
        (await h.router.rest("long")).check(long, 3)
        (await h.router.generate("small", small, 5)).check(small, 5)
        await h.pair.settled()


async def test_a_worker_may_compute_no_prompts(redis_url: str) -> None:
    async with started(redis_url, decode_options={"local_prefill": False, "max_num_batched_tokens": 24}) as pair, routed(pair) as router:
        record = pair.decode_worker.record()
        assert (pair.prefill_worker.record().local_prefill, record.local_prefill, record.step_tokens) == (False, False, 24)
        await refused(router.reserve("r", PROMPT, 5, prefill_here=True), Code.FAILED_PRECONDITION)
        (await router.generate("r2", PROMPT, 5)).check(PROMPT, 5)
        await pair.settled()


async def test_there_is_no_ticket_for_a_prompt_computed_here(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        await h.router.reserve("r", PROMPT, 50, prefill_here=True)
        call = h.router.run("r", PROMPT, 50)
        await refused(h.router.attach("r", (await call.read()).accepted.ticket), Code.INVALID_ARGUMENT)
        call.cancel()
        h.let_go()
        (await h.router.rest()).check(PROMPT, 50)
        await h.pair.settled()


async def test_no_kv_transport_is_needed_for_it(redis_url: str) -> None:
    """As a worker of an aggregated deployment is."""
    make = local_transports(LocalHub())

    def none_on_decode(parts: EdgeParts) -> Transports:
        return Transports([]) if parts.config.kv_transfer == "none" else make(parts)

    without = {"kv_transfer": "none"}
    async with started(redis_url, make_transports=none_on_decode, decode_options=without) as pair, routed(pair) as router:
        record = pair.decode_worker.record()
        assert (record.ready, record.transports, record.local_prefill) == (True, (), True)
        (await router.generate_here("r", PROMPT, 10)).check(PROMPT, 10)
        await pair.settled()
