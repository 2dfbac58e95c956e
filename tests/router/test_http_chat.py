"""Chats over HTTP, by OpenAI's own client and by hand."""

from __future__ import annotations

from http_fakes import MESSAGES, RENDERED, open_http
from openai import AsyncOpenAI
from router_fakes import ANSWER_TEXT, Cluster, FakeDecode, FakePrefill


async def test_an_answer_whole(cluster: Cluster, prefill: FakePrefill, client: AsyncOpenAI) -> None:
    prefill.cached_tokens = 3
    answer = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=90, seed=7)
    await cluster.all_free()
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", cluster.text_of(cluster.expected(90)))
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (answer.object, answer.model) == ("chat.completion", "m")
    assert answer.id.startswith("chatcmpl-")
    num_prompt = len(cluster.tokenizer.encode(RENDERED).ids)
    assert list(prefill.requests[0].token_ids) == cluster.tokenizer.encode(RENDERED).ids
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (num_prompt, 90, num_prompt + 90)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 0


async def test_an_answer_streamed(cluster: Cluster, decode: FakeDecode, client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    await cluster.all_free()
    # What there is of an answer is sent while the rest is far away.
    decode.script.step_s = 600.0
    slow = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=40, stream=True)
    begin = [(await anext(slow)).choices[0] for _ in range(2)]
    assert cluster.text_of(cluster.expected(40)).startswith(begin[1].delta.content or "nothing")
    assert begin[1].finish_reason is None
    await slow.close()
    await cluster.all_free()
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *pieces, end, usage = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == cluster.text_of(cluster.expected(40))
    assert all(chunk.usage is None and chunk.choices[0].finish_reason is None for chunk in pieces)
    assert (end.choices[0].finish_reason, end.choices[0].delta.content, end.usage) == ("length", None, None)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 40


async def test_what_the_client_builds_on_streams(cluster: Cluster, client: AsyncOpenAI) -> None:
    """Its own helpers: accumulated streams, raw responses, models, legacy completions."""
    text = cluster.text_of(cluster.expected(20))
    async with client.chat.completions.stream(model="m", messages=MESSAGES, max_tokens=400, stop="the end") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER_TEXT[: ANSWER_TEXT.index("the end")]
    raw = await client.chat.completions.with_raw_response.create(
        model="m", messages=MESSAGES, max_tokens=20, extra_headers={"x-request-id": "of-the-client"}
    )
    assert (raw.request_id, raw.headers["x-request-id"]) == ("of-the-client", "of-the-client")
    assert raw.parse().choices[0].message.content == text
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).owned_by == "twostep"
    pieces = await client.completions.create(model="m", prompt="x", max_tokens=20, stream=True)
    assert "".join([piece.choices[0].text async for piece in pieces]) == text
    several = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=20, n=2, logprobs=True, top_logprobs=1)
    for choice in several.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == 20


async def test_how_a_prompt_ends_is_the_callers_choice(cluster: Cluster) -> None:
    beginning = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    async with cluster.serving(), open_http(cluster) as http:
        for fields, end in (
            ({"messages": MESSAGES}, "<|im_start|>assistant\n"),
            ({"messages": MESSAGES, "add_generation_prompt": False}, "the capital of France<|im_end|>\n"),
            ({"messages": beginning, "continue_final_message": True, "add_generation_prompt": False}, "<|im_start|>assistant\nIt is"),
        ):
            async with http.post("/tokenize", json=fields) as answer:
                told = await answer.json()
            assert answer.status == 200, told
            assert cluster.tokenizer.decode(told["tokens"], skip_special_tokens=False).endswith(end)
        async with http.post(
            "/tokenize", json={"messages": beginning, "continue_final_message": True, "add_generation_prompt": True}
        ) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "continue_final_message")
