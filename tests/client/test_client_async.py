"""The asyncio client against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from scripted_server import WORDS, ScriptedInference, serving

import twostep
from twostep import AsyncClient, Message


@pytest.fixture
async def server() -> AsyncIterator[tuple[ScriptedInference, str]]:
    servicer = ScriptedInference()
    async with serving(servicer) as target:
        yield servicer, target


@pytest.fixture
async def client(server: tuple[ScriptedInference, str]) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server[1], timeout=60) as client:
        yield client


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  what it waits for is on the server's side
            await asyncio.sleep(0.01)


async def test_pieces_then_the_end(client: AsyncClient) -> None:
    generation = client.generate("ok", logprobs=0)
    pieces = [piece async for piece in generation]
    assert [p.text for p in pieces] == list(WORDS)
    assert pieces[2].logprobs[0].logprob == pytest.approx(-0.5)
    assert generation.finish_reason == "stop"
    assert generation.usage.prompt_tokens == 5
    assert generation.transfer.blocks_reused == 1
    assert generation.request_id == "made-by-router"


async def test_result(client: AsyncClient) -> None:
    completion = await client.chat([Message("user", "ok")]).result()
    assert completion.text == "one two three"
    assert completion.usage.completion_tokens == 3


async def test_retry_then_answer_and_bound(client: AsyncClient, server: tuple[ScriptedInference, str]) -> None:
    assert (await client.generate("refuse-1").result()).text == "one two three"
    assert server[0].calls["refuse-1"] == 2
    with pytest.raises(twostep.ResourceExhausted):
        await client.generate("refuse-99").result()
    assert server[0].calls["refuse-99"] == 4


async def test_broken_stream(client: AsyncClient) -> None:
    with pytest.raises(twostep.StreamBroken, match="after 2 tokens") as caught:
        await client.generate("break").result()
    assert caught.value.token_ids == (100, 101)


async def test_a_stream_that_breaks_goes_on_where_the_server_can(client: AsyncClient, server: tuple[ScriptedInference, str]) -> None:
    generation = client.chat([Message("user", "crash")])
    pieces = [piece async for piece in generation]
    assert [p.position for p in pieces] == [0, 1, 2]
    completion = await generation.result()
    assert (completion.text, completion.resumes, generation.seed) == ("one two three", 1, 1234)
    assert list(server[0].requests[-1].resume_token_ids) == [100, 101]
    with pytest.raises(twostep.StreamBroken) as caught:
        await client.chat([Message("user", "crash")], resume=False).result()
    rest = client.chat([Message("user", "crash")], resume_token_ids=caught.value.token_ids, seed=caught.value.seed)
    assert (await rest.result()).text == "three"


@pytest.mark.parametrize("prompt", ["noend", "skip"])
async def test_a_server_that_breaks_the_contract(client: AsyncClient, prompt: str) -> None:
    with pytest.raises(twostep.StreamBroken):
        await client.generate(prompt).result()


async def test_deadline(server: tuple[ScriptedInference, str]) -> None:
    # The server answers after a minute, and the client's own timeout is longer: only the call's own comes before.
    async with AsyncClient(server[1], timeout=600) as client:
        with pytest.raises(twostep.DeadlineExceeded):
            await client.generate("silent", timeout=0.2).result()


async def test_leaving_the_loop_cancels_the_call(client: AsyncClient, server: tuple[ScriptedInference, str]) -> None:
    generation = client.generate("endless")
    async for _ in generation:
        break
    await until(lambda: server[0].cancelled["endless"] == 1)
    with pytest.raises(twostep.Cancelled):
        await generation.result()


async def test_cancelling_the_task_cancels_the_call(client: AsyncClient, server: tuple[ScriptedInference, str]) -> None:
    task = asyncio.create_task(client.generate("silent").result())
    await until(lambda: server[0].calls["silent"] == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: server[0].cancelled["silent"] == 1)


async def test_cancel_while_another_task_reads(client: AsyncClient, server: tuple[ScriptedInference, str]) -> None:
    generation = client.generate("silent")
    task = asyncio.create_task(generation.result())
    await until(lambda: server[0].calls["silent"] == 1)
    generation.cancel()
    with pytest.raises(twostep.Cancelled):
        await task
    await until(lambda: server[0].cancelled["silent"] == 1)


async def test_dropping_a_generation_cancels(client: AsyncClient, server: tuple[ScriptedInference, str]) -> None:
    generation = client.generate("endless")
    await until(lambda: server[0].calls["endless"] == 1)
    del generation
    await until(lambda: server[0].cancelled["endless"] == 1)


async def test_many_at_once(client: AsyncClient, server: tuple[ScriptedInference, str]) -> None:
    answers = await asyncio.gather(*(client.generate(f"many {i}").result() for i in range(100)))
    assert {a.text for a in answers} == {"one two three"}
    assert sum(server[0].calls.values()) == 100


async def test_unary(client: AsyncClient) -> None:
    assert (await client.models())[0].name == "scripted"
    assert (await client.tokenize("refuse once")).token_ids == tuple(b"refuse once")


async def test_closed_and_absent(server: tuple[ScriptedInference, str]) -> None:
    client = AsyncClient(server[1])
    await client.close()
    with pytest.raises(twostep.InvalidRequest, match="closed"):
        await client.models()
    with pytest.raises(twostep.InvalidRequest, match="closed"):
        client.generate("ok")
    async with AsyncClient("127.0.0.1:9", max_retries=0) as absent:
        with pytest.raises(twostep.Unavailable, match="twostep up"):
            await absent.generate("ok").result()
