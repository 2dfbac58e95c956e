"""Answers over HTTP, by OpenAI's own client and by hand. What gRPC promises too is in test_fronts.py."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from http_fakes import CHAT, MESSAGES, RENDERED, TEXT, chat, raw_events, served, streamed, text_in, told
from openai import AsyncOpenAI
from router_fakes import ANSWER_TEXT, Cluster, FakeDecode, FakePrefill

from router.serving.answers import choice_seed
from twostep.text.tokenizer import Tokenizer


async def test_an_answer_whole(cluster: Cluster, prefill: FakePrefill, client: AsyncOpenAI) -> None:
    prefill.cached_tokens = 3
    answer = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=90, seed=7)
    await cluster.all_free()
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", cluster.text_of(cluster.expected(90)))
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "m", "chatcmpl-")
    prompt = cluster.tokenizer.encode(RENDERED).ids
    assert list(prefill.requests[0].token_ids) == prompt
    assert answer.usage is not None
    usage = answer.usage.model_dump()
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (len(prompt), 90, len(prompt) + 90)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_an_answer_streamed(cluster: Cluster, decode: FakeDecode, client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    *pieces, end, usage = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == cluster.text_of(cluster.expected(40))
    assert all(chunk.usage is None and chunk.choices[0].finish_reason is None for chunk in pieces)
    assert (end.choices[0].finish_reason, end.choices[0].delta.content, end.usage) == ("length", None, None)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 40
    # The beginning of an answer is sent while the rest is far away.
    decode.script.step_s = 600.0
    slow = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=40, stream=True)
    _, begun = [(await anext(slow)).choices[0] for _ in range(2)]
    assert cluster.text_of(cluster.expected(40)).startswith(begun.delta.content or "nothing")
    await slow.close()
    await cluster.all_free()


async def test_what_the_client_builds_on_streams(cluster: Cluster, client: AsyncOpenAI) -> None:
    """Its own helpers: accumulated streams, raw responses, models, legacy completions."""
    async with client.chat.completions.stream(model="m", messages=MESSAGES, max_tokens=400, stop="the end") as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER_TEXT[: ANSWER_TEXT.index("the end")]
    raw = await client.chat.completions.with_raw_response.create(
        model="m", messages=MESSAGES, max_tokens=20, extra_headers={"x-request-id": "of-the-client"}
    )
    assert (raw.request_id, raw.parse().id) == ("of-the-client", "chatcmpl-of-the-client")
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).owned_by == "twostep"
    pieces = await client.completions.create(model="m", prompt="x", max_tokens=20, stream=True)
    assert "".join([piece.choices[0].text async for piece in pieces]) == cluster.text_of(cluster.expected(20))


async def test_how_a_prompt_ends_is_the_callers_choice(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    beginning = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    for fields, end in (
        ({"messages": MESSAGES}, "<|im_start|>assistant\n"),
        ({"messages": MESSAGES, "add_generation_prompt": False}, "the capital of France<|im_end|>\n"),
        ({"messages": beginning, "continue_final_message": True, "add_generation_prompt": False}, "<|im_start|>assistant\nIt is"),
    ):
        ids = (await told(http, "/tokenize", fields))["tokens"]
        assert cluster.tokenizer.decode(ids, skip_special_tokens=False).endswith(end)
    both = {"messages": beginning, "continue_final_message": True, "add_generation_prompt": True}
    assert (await told(http, "/tokenize", both, 400))["error"]["param"] == "continue_final_message"


async def test_developers_are_heard_by_templates_that_know_no_such_role(
    cluster: Cluster, prefill: FakePrefill, http: aiohttp.ClientSession
) -> None:
    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    await told(http, CHAT, {"messages": [{"role": "developer", "content": parts}, *MESSAGES], "max_tokens": 1})
    text = cluster.tokenizer.decode(list(prefill.requests[0].token_ids), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nbe\nbrief<|im_end|>")


async def test_completions_of_every_kind_of_prompt(cluster: Cluster, prefill: FakePrefill, http: aiohttp.ClientSession) -> None:
    ids = cluster.tokenizer.encode("the capital").ids
    for prompt, wanted in (
        ("the capital", [ids]),
        (["the capital", "and so on"], [ids, cluster.tokenizer.encode("and so on").ids]),
        (ids, [ids]),
        ([ids, [5, 6]], [ids, [5, 6]]),
    ):
        prefill.requests.clear()
        answer = await told(http, TEXT, {"prompt": prompt, "max_tokens": 7})
        assert sorted(list(request.token_ids) for request in prefill.requests) == sorted(wanted)
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(wanted)))
        assert {choice["text"] for choice in answer["choices"]} == {cluster.text_of(cluster.expected(7))}
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (sum(map(len, wanted)), 7 * len(wanted))
    assert (await told(http, TEXT, {"prompt": "x"}))["usage"]["completion_tokens"] == 16, "as OpenAI's, where nothing is said"


async def test_several_choices_are_repeatable_and_count_the_prompt_once(
    cluster: Cluster, prefill: FakePrefill, http: aiohttp.ClientSession
) -> None:
    one = await told(http, CHAT, chat(seed=5, max_tokens=4))
    three = await told(http, CHAT, chat(seed=5, max_tokens=4, n=3))
    first, *seeds = [request.sampling.seed for request in prefill.requests]
    assert (first, sorted(seeds)) == (5, sorted(choice_seed(5, i) for i in range(3)))
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert (three["usage"]["prompt_tokens"], three["usage"]["completion_tokens"]) == (one["usage"]["prompt_tokens"], 12)
    events = await streamed(http, CHAT, chat(n=3, max_tokens=30, stream_options={"include_usage": True}))
    assert (events[-1]["choices"], events[-1]["usage"]["completion_tokens"]) == ([], 90)
    for index in range(3):
        choices = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert text_in(events, index) == cluster.text_of(cluster.expected(30))
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]


async def test_echoes_of_texts_and_ids(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    texts = ["the capital", "of France"]
    prompts = [cluster.tokenizer.encode(text).ids for text in texts]
    for prompt in (texts, prompts):
        body = {"prompt": prompt, "n": 2, "max_tokens": 2, "echo": True}
        wanted = [text + cluster.text_of(cluster.expected(2)) for text in texts for _ in range(2)]
        assert [choice["text"] for choice in (await told(http, TEXT, body))["choices"]] == wanted
        events = await streamed(http, TEXT, body)
        assert [text_in(events, index) for index in range(4)] == wanted


@pytest.mark.parametrize("stream", [False, True])
async def test_equal_prompts_without_a_seed_have_seeds_of_their_own(
    prefill: FakePrefill, http: aiohttp.ClientSession, stream: bool
) -> None:
    async def seeds_of(fields: dict[str, Any], **headers: str) -> tuple[list[int], str]:
        prefill.requests.clear()
        async with http.post(TEXT, json={"max_tokens": 2, "stream": stream} | fields, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        return sorted(request.sampling.seed for request in prefill.requests), answer.headers["x-twostep-seed"]

    for fields in ({"prompt": ["a"] * 8}, {"prompt": [[5, 6]] * 4, "n": 2}):
        seeds, drawn = await seeds_of(fields)
        assert len(set(seeds)) == 8
        assert seeds == sorted(choice_seed(int(drawn), i) for i in range(8))
        assert await seeds_of(fields, **{"x-twostep-seed": drawn}) == (seeds, drawn), "the header repeats all of it"
    # A seed that is given is each prompt's, and goes before the header.
    assert await seeds_of({"prompt": ["a"] * 3, "seed": 7}, **{"x-twostep-seed": "8"}) == ([7, 7, 7], "7")
    assert await seeds_of({"prompt": "a"}, **{"x-twostep-seed": "-8"}) == ([-8], "-8")


async def test_logprobs_of_chats(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    num = len(cluster.answer)
    body = chat(max_tokens=num, logprobs=True, top_logprobs=2)
    choices = [event["choices"][0] for event in await streamed(http, CHAT, body)]
    content = (await told(http, CHAT, body))["choices"][0]["logprobs"]["content"]
    assert [each for choice in choices for each in (choice["logprobs"] or {"content": []})["content"]] == content
    assert [each["logprob"] for each in content] == [-0.5 - position for position in range(num)]
    # Characters may be split over tokens: bytes are right all the same.
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == ANSWER_TEXT
    assert all(each["token"].startswith("bytes:") or each["token"].encode() == bytes(each["bytes"]) for each in content)
    assert any(each["token"].startswith("bytes:\\x") for each in content)
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["<|endoftext|>", "<|im_start|>"]


async def test_logprobs_of_completions(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    body = {"prompt": "x", "max_tokens": 12, "logprobs": 1}
    parts = [event["choices"][0]["logprobs"] or {} for event in await streamed(http, TEXT, body)]
    whole = (await told(http, TEXT, body))["choices"][0]["logprobs"]
    assert {key: [value for part in parts for value in part.get(key, [])] for key in whole} == whole
    by_id = (await told(http, TEXT, body | {"return_tokens_as_token_ids": True}))["choices"][0]["logprobs"]["tokens"]
    assert whole["token_logprobs"] == [-0.5 - position for position in range(12)]
    assert [int(name.removeprefix("token_id:")) for name in by_id] == cluster.expected(12)
    for name, top in zip(whole["tokens"], whole["top_logprobs"], strict=True):
        assert set(top) == {"<|endoftext|>", name}


@pytest.mark.parametrize(
    "fields", [{}, {"echo": True}, {"stop": "größte"}, {"skip_special_tokens": False}, {"prompt": [5, 6, 7], "echo": True}]
)
async def test_offsets_of_tokens_are_places_in_the_text(cluster: Cluster, http: aiohttp.ClientSession, fields: dict[str, Any]) -> None:
    body = {"prompt": "Größe 日本?", "max_tokens": 40, "logprobs": 1, **fields}
    # The first token of a prompt has no log probability, which OpenAI's type does not know.
    async with http.post(TEXT, json=body) as answer:
        choice = (await answer.json())["choices"][0]
    async with http.post(TEXT, json=body | {"stream": True}) as answer:
        events = [event["choices"][0] for event in (await raw_events(answer))[:-1]]
    text, found = choice["text"], choice["logprobs"]
    assert "".join(event["text"] for event in events) == text
    on_the_way = [at for event in events for at in (event["logprobs"] or {"text_offset": []})["text_offset"]]
    assert on_the_way == found["text_offset"][-len(on_the_way) :]
    assert found["text_offset"] == sorted(found["text_offset"])
    seen = [text.startswith(name, at) for name, at in zip(found["tokens"], found["text_offset"], strict=True) if at < len(text)]
    named = [name for name, at in zip(found["tokens"], found["text_offset"], strict=True) if at < len(text)]
    # Others are parts of characters.
    assert all(there or name.startswith("bytes:") for there, name in zip(seen, named, strict=True))
    assert "stop" in fields or any(name.startswith("bytes:") for name in named)
    assert sum(seen) > 3


async def test_phases_come_to_whoever_asks(http: aiohttp.ClientSession) -> None:
    asked = chat(max_tokens=4, return_phases=True)
    assert "twostep" not in await told(http, CHAT, chat(max_tokens=4))
    for answer in (
        await told(http, CHAT, chat(max_tokens=4), headers={"x-twostep-phases": "1"}),
        await told(http, TEXT, {"prompt": "x", "max_tokens": 4, "return_phases": True}),
        (await streamed(http, CHAT, asked))[-1],
        (await streamed(http, CHAT, asked | {"stream_options": {"include_usage": True}}))[-1],
    ):
        found = answer["twostep"]
        assert (found["phases"]["queue_s"], found["phases"]["fetch_s"]) == (0.001, 0.004)
        assert 0 < found["phases"]["ttft_s"] < found["phases"]["total_s"]
        assert (found["transfer"]["transport"], found["transfer"]["bytes"], found["attempts"]) == ("local", 4096, 1)
    assert len((await told(http, CHAT, asked | {"n": 2}))["twostep"]["choices"]) == 2


async def test_usage_in_every_chunk_and_token_ids(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    body = chat(max_tokens=9, return_token_ids=True)
    events = await streamed(http, CHAT, body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert (counts, counts[0], counts[-1]) == (sorted(counts), 0, 9)
    ids = [token_id for event in events[:-1] for token_id in event["choices"][0].get("token_ids") or ()]
    whole = await told(http, CHAT, body)
    assert ids == whole["choices"][0]["token_ids"] == cluster.expected(9)
    assert whole["prompt_token_ids"] == events[0]["prompt_token_ids"]
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    text = {"prompt": [5, 6], "max_tokens": 9, "return_token_ids": True}
    parts = [event["choices"][0] for event in await streamed(http, TEXT, text)]
    assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [[5, 6]], "in its first event"
    (choice,) = (await told(http, TEXT, text))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], ids)


async def test_many_long_prompts_wait_for_the_tokenizer_and_each_is_read_once(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads refuse what is too much for them; one request alone is not."""
    read: list[str] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        read.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    long = "the capital of France is " * 200
    for path, body, num_choices, num_read in (
        (CHAT, {"messages": [{"role": "user", "content": long}], "n": 80}, 80, 1),
        (TEXT, {"prompt": [long] * 70}, 70, 70),
        (TEXT, {"prompt": [long, "short"], "n": 2, "add_special_tokens": False}, 4, 2),
    ):
        read.clear()
        found = await told(http, path, {**body, "max_tokens": 1})
        assert [choice["index"] for choice in found["choices"]] == list(range(num_choices))
        assert len(read) == num_read


async def test_a_trace_context_that_is_none_costs_nothing_but_itself(http: aiohttp.ClientSession) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for headers in ({"traceparent": parent, "tracestate": "a=é"}, {"traceparent": "é"}, {"tracestate": "a=" + "b" * 7000}):
        await told(http, CHAT, chat(max_tokens=1), headers=headers)


async def test_without_max_tokens_a_chat_may_use_the_context(cluster: Cluster) -> None:
    prefill, _ = await cluster.prefill(), await cluster.decode(num_blocks=20)
    async with served(cluster, default_max_tokens=0) as http:
        usage = (await told(http, CHAT, chat(stop=["Paris"])))["usage"]
    # A worker's pool holds 20 blocks of 16 tokens.
    assert prefill.requests[0].sampling.max_tokens == 320 - usage["prompt_tokens"]
