"""Hand-overs between pools that are cut into blocks of different sizes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from one_sided import OneSidedHub
from worker_harness import WAIT_S, expected, local_transport, make_runner, one_sided_transport, prompt_of, routed, started

from kv_transfer.local.transport import LocalHub
from kv_transfer.transports import Transports
from twostep.worker.edge import EdgeParts

SHAPE = {"num_layers": 6, "num_kv_heads": 2}
UNIT = {"hash_unit": 16}


def runners(prefill: int, decode: int, **prefill_options: Any) -> dict[str, Any]:
    return {
        "prefill_runner": make_runner(block_size=prefill, **SHAPE, **prefill_options),
        "decode_runner": make_runner(block_size=decode, **SHAPE),
        "prefill_options": UNIT | {"block_size": prefill, "max_num_batched_tokens": 24},
        "decode_options": UNIT | {"block_size": decode},
    }


@pytest.mark.parametrize(("prefill", "decode"), [(4, 8), (8, 4), (16, 2), (2, 16), (4, 4)])
async def test_tokens_are_right_and_prefixes_are_kept(redis_url: str, prefill: int, decode: int) -> None:
    async with started(redis_url, **runners(prefill, decode)) as pair, routed(pair) as router:
        prompts = [prompt_of(length, seed=length) for length in (1, 3, 16, 37, 64, 83)]
        answers = await asyncio.gather(*(router.generate(f"r{i}", prompt, 6) for i, prompt in enumerate(prompts)))
        assert [a.tokens for a in answers] == [expected(prompt, 6) for prompt in prompts]
        # Longer than before: what the decode worker holds is not moved again, and its last block may begin in the middle of the source's.
        for number, prompt in enumerate(prompts):
            longer = prompt + prompt_of(11, seed=99)
            answer = await router.generate(f"s{number}", longer, 6)
            assert answer.tokens == expected(longer, 6)
            assert answer.num_decode_cached == len(prompt) // decode * decode
        await pair.settled()


async def test_what_reads_the_pool_itself_is_not_offered(redis_url: str) -> None:
    local_hub, hub = LocalHub(), OneSidedHub()

    def make(parts: EdgeParts) -> Transports:
        return Transports([one_sided_transport(parts, hub), local_transport(parts, local_hub, 1 << 20)])

    async with started(redis_url, make_transports=make, **runners(8, 4)) as pair, routed(pair) as router:
        for number in range(3):
            answer = await router.generate(f"r{number}", prompt_of(40, seed=number), 4)
            assert answer.tokens == expected(prompt_of(40, seed=number), 4)
            assert answer.committed is not None
            assert answer.committed.transport == "local"


@pytest.mark.parametrize("differing", [{"num_layers": 4}, {"num_kv_heads": 1}, {"head_dim": 8}])
async def test_what_cannot_be_converted_is_refused_with_the_reason(redis_url: str, differing: dict[str, Any]) -> None:
    options = runners(8, 8)
    options["decode_runner"] = make_runner(**({"block_size": 8} | SHAPE | differing))
    async with started(redis_url, **options) as pair, routed(pair) as router:
        await router.reserve("r", prompt_of(20), 4)
        call = router.run("r", prompt_of(20), 4)
        await router.attach("r", (await call.read()).accepted.ticket)
        failed = (await asyncio.wait_for(router.inbox("r").get(), WAIT_S)).failed
        assert (failed.code, failed.retryable) == ("FAILED_PRECONDITION", False)
        name = next(iter(differing))
        assert {"num_kv_heads": "KV heads"}.get(name, name) in failed.message
        call.cancel()
        await pair.settled()
