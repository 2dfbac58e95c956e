"""Log probabilities of prompts, from the worker that computes them to the client: each once, on the way of every deployment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from whole_system import expected, until, whole_system

from decode_worker.sequences import SequencesConfig
from twostep import AsyncClient, TokenLogprobs, TopLogprob
from twostep.engine.fake import fake_next_token
from twostep.text.model_card import ModelCard

PROMPT = [3 + 7 * i % 200 for i in range(900)]


def wanted(prompt: Sequence[int], num_top: int, vocab_size: int) -> tuple[TokenLogprobs | None, ...]:
    """The fake runner's."""
    told: list[TokenLogprobs | None] = [None]
    for i in range(1, len(prompt)):
        predicted = fake_next_token(prompt[:i], vocab_size)
        above = (prompt[i] - predicted) % vocab_size
        top = tuple(TopLogprob((predicted + k) % vocab_size, -float(k)) for k in range(num_top))
        told.append(TokenLogprobs(-float(above), top, above + 1))
    return tuple(told)


@pytest.mark.parametrize("aggregated", [False, True])
async def test_both_fronts_tell_the_same_whatever_is_cached(fake_model_dir: Path, tmp_path: Path, aggregated: bool) -> None:
    vocab_size = ModelCard.load(fake_model_dir).vocab_size
    async with whole_system(fake_model_dir, tmp_path, aggregated=aggregated, port=0) as system, AsyncClient(system.target()) as client:
        for count, num_top in ((4, 2), (0, 1), (1, 0)):
            answer = await client.generate(token_ids=PROMPT, max_tokens=count, prompt_logprobs=num_top, ignore_eos=True).result()
            assert answer.prompt_logprobs == wanted(PROMPT, num_top, vocab_size)
            assert list(answer.token_ids) == expected(PROMPT, count, vocab_size)
            assert answer.usage.cached_tokens == 0
        several = await client.generate(token_ids=PROMPT, max_tokens=3, prompt_logprobs=1, ignore_eos=True, n=3).result()
        assert several.prompt_logprobs == wanted(PROMPT, 1, vocab_size), "once for all of them"
        assert [list(each.token_ids) for each in several.choices] == [expected(PROMPT, 3, vocab_size)] * 3
        # What a decode worker has of the prompt is not moved again.
        assert (await client.generate(token_ids=PROMPT, max_tokens=4, prompt_logprobs=0).result()).transfer.blocks_moved < 20
        assert (await client.generate(token_ids=PROMPT, max_tokens=4).result()).usage.cached_tokens > 0
        url = f"http://127.0.0.1:{system.routers[0].http_port}/v1/completions"
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 0, "ignore_eos": True}
        told = wanted(PROMPT, 1, vocab_size)
        answered = expected(PROMPT, 2, vocab_size)
        async with aiohttp.ClientSession() as http:
            async with http.post(url, json=body | {"n": 2, "return_tokens_as_token_ids": True}) as response:
                choices = (await response.json())["choices"]
            for choice in choices:
                of_prompt, logprobs = choice["prompt_logprobs"], choice["logprobs"]
                assert logprobs["tokens"] == [f"token_id:{token}" for token in (*PROMPT, *answered)]
                assert logprobs["token_logprobs"] == [each and each.logprob for each in told] + [0.0, 0.0]
                assert logprobs["top_logprobs"][0] is of_prompt[0] is None
                for i, each in enumerate(told[1:], 1):
                    assert each is not None
                    assert of_prompt[i][str(PROMPT[i])]["rank"] == each.rank
                    assert len(of_prompt[i]) == 1
                    top = {f"token_id:{each.top[0].token_id}": 0.0, f"token_id:{PROMPT[i]}": each.logprob}
                    assert logprobs["top_logprobs"][i] == top
            async with http.post(url, json=body | {"stream": True, "return_tokens_as_token_ids": True}) as response:
                events = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: {")]
        streamed = [json.loads(event)["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in streamed) == choices[0]["text"]
        for name, value in choices[0]["logprobs"].items():
            assert [each for choice in streamed if choice["logprobs"] for each in choice["logprobs"][name]] == value
        assert [each for choice in streamed for each in choice.get("prompt_logprobs", ())] == choices[0]["prompt_logprobs"]
        await system.settled()


@pytest.mark.parametrize("aggregated", [False, True])
async def test_a_lost_worker_costs_none_and_repeats_none(fake_model_dir: Path, tmp_path: Path, aggregated: bool) -> None:
    """After the first token the prompt is computed again for its KV alone."""
    vocab_size = ModelCard.load(fake_model_dir).vocab_size
    leases: Any = {"limits": SequencesConfig(router_lease_s=1.0), "stream_lease": 1.0}
    async with (
        whole_system(fake_model_dir, tmp_path, aggregated=aggregated, num_decode=2, **leases) as system,
        AsyncClient(system.target()) as client,
    ):
        system.brake.hold_at(5)
        answer = client.generate(token_ids=PROMPT, max_tokens=20, prompt_logprobs=1, ignore_eos=True)
        cut = False
        async for _ in answer:
            for worker, proxy in zip(system.decodes, system.proxies, strict=True):
                if not cut and worker.record().load.num_running:
                    proxy.down = cut = True
                    proxy.cut()
                    system.brake.open()
        result = await answer.result()
        assert result.prompt_logprobs == wanted(PROMPT, 1, vocab_size)
        assert list(result.token_ids) == expected(PROMPT, 20, vocab_size)
        assert result.attempts == 2


async def test_a_stream_cut_in_the_middle_of_a_prompt(fake_model_dir: Path, tmp_path: Path) -> None:
    """The worker keeps none: the prompt begins again, and the client gets each once."""
    vocab_size = ModelCard.load(fake_model_dir).vocab_size
    async with whole_system(fake_model_dir, tmp_path, aggregated=True) as system, AsyncClient(system.target()) as client:
        (proxy,) = system.proxies
        num_steps = system.brake.num_steps
        asked = asyncio.ensure_future(client.generate(token_ids=PROMPT, max_tokens=9, prompt_logprobs=0, ignore_eos=True).result())
        await until(lambda: system.brake.num_steps > num_steps, "the prompt is begun")
        proxy.cut()
        result = await asked
        assert result.prompt_logprobs == wanted(PROMPT, 0, vocab_size)
        assert list(result.token_ids) == expected(PROMPT, 9, vocab_size)
