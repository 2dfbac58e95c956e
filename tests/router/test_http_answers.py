"""Answers over HTTP, by OpenAI's own client and by hand: texts, usage, log probabilities, several choices, phases, stops."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from http_fakes import CHAT, MESSAGES, RENDERED, TEXT, chat, check_shape, open_http, raw_events
from openai import AsyncOpenAI
from router_fakes import ANSWER_TEXT, Cluster, FakeDecode, FakePrefill

from router.http.generation import choice_seed
from twostep.text.tokenizer import Tokenizer


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


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    async with http.post(path, json=body, headers=headers) as answer:
        told: dict[str, Any] = await answer.json()
        assert answer.status == 200, told
        check_shape(told)
        return told


async def stream(http: aiohttp.ClientSession, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    async with http.post(path, json=body | {"stream": True}, headers=headers) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        *events, done = await raw_events(answer)
        assert done == "[DONE]"
        for event in events:
            check_shape(event)
        return events


async def test_completions_of_every_kind_of_prompt(
    cluster: Cluster, prefill: FakePrefill, http: aiohttp.ClientSession, client: AsyncOpenAI
) -> None:
    ids = cluster.tokenizer.encode("the capital").ids
    for prompt, wanted in (
        ("the capital", [ids]),
        (["the capital", "and so on"], [ids, cluster.tokenizer.encode("and so on").ids]),
        (ids, [ids]),
        ([ids, [5, 6]], [ids, [5, 6]]),
    ):
        prefill.requests.clear()
        answer = await client.completions.create(model="m", prompt=prompt, max_tokens=7)
        assert sorted(list(request.token_ids) for request in prefill.requests) == sorted(wanted)
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))
        assert {choice.text for choice in answer.choices} == {cluster.text_of(cluster.expected(7))}
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, wanted))
        assert answer.usage.completion_tokens == 7 * len(wanted)
    # As OpenAI's: 16 tokens where nothing is said.
    assert (await post(http, TEXT, {"prompt": "x"}))["usage"]["completion_tokens"] == 16
    for body in ({"prompt": "the capital", "echo": True, "max_tokens": 3}, {"prompt": ids, "echo": True, "max_tokens": 3}):
        assert (await post(http, TEXT, body))["choices"][0]["text"] == "the capital" + cluster.text_of(cluster.expected(3))
        events = await stream(http, TEXT, body)
        assert "".join(event["choices"][0]["text"] for event in events) == "the capital" + cluster.text_of(cluster.expected(3))


async def test_several_choices_are_repeatable_and_count_the_prompt_once(
    cluster: Cluster, prefill: FakePrefill, http: aiohttp.ClientSession
) -> None:
    one = await post(http, CHAT, chat(seed=5, max_tokens=4))
    three = await post(http, CHAT, chat(seed=5, max_tokens=4, n=3))
    seeds = [request.sampling.seed for request in prefill.requests]
    assert seeds[0] == 5
    assert sorted(seeds[1:]) == sorted(choice_seed(5, i) for i in range(3))
    assert len(set(seeds[1:])) == 3
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 12
    events = await stream(http, CHAT, chat(n=3, max_tokens=30, stream_options={"include_usage": True}))
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 90
    for index in range(3):
        choices = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == cluster.text_of(cluster.expected(30))
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    both = await stream(http, TEXT, {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "seed": 9})
    assert {event["choices"][0]["index"] for event in both} == {0, 1, 2, 3}
    assert sorted(r.sampling.seed for r in prefill.requests[-4:]) == sorted([9, 9, choice_seed(9, 1), choice_seed(9, 1)])


async def test_the_drawn_seed_is_told_and_repeats_the_answer(prefill: FakePrefill, http: aiohttp.ClientSession) -> None:
    for body in (chat(max_tokens=2), chat(max_tokens=2, stream=True)):
        async with http.post(CHAT, json=body) as answer:
            await answer.read()
            assert int(answer.headers["x-twostep-seed"]) == prefill.requests[-1].sampling.seed


@pytest.mark.parametrize("streamed", [False, True])
async def test_equal_prompts_without_a_seed_have_seeds_of_their_own(
    prefill: FakePrefill, http: aiohttp.ClientSession, streamed: bool
) -> None:

    async def seeds_of(fields: dict[str, Any], **headers: str) -> tuple[list[int], str]:
        prefill.requests.clear()
        async with http.post(TEXT, json={"max_tokens": 2, "stream": streamed} | fields, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        return sorted(request.sampling.seed for request in prefill.requests), answer.headers["x-twostep-seed"]

    for fields in ({"prompt": ["a"] * 8}, {"prompt": [[5, 6]] * 4, "n": 2}):
        seeds, told = await seeds_of(fields)
        assert len(set(seeds)) == 8
        assert seeds == sorted(choice_seed(int(told), i) for i in range(8))
        assert await seeds_of(fields, **{"x-twostep-seed": told}) == (seeds, told), "the header repeats all of it"
    # A seed that is given is each prompt's, and goes before the header.
    assert await seeds_of({"prompt": ["a"] * 3, "seed": 7}, **{"x-twostep-seed": "8"}) == ([7, 7, 7], "7")
    assert await seeds_of({"prompt": "a"}, **{"x-twostep-seed": "-8"}) == ([-8], "-8")


@pytest.mark.parametrize("seed", ["x", "1.5", str(1 << 63), "-", "9" * 5000])
async def test_a_header_that_is_no_seed_is_refused(http: aiohttp.ClientSession, seed: str) -> None:
    for path, body in ((TEXT, {"prompt": "a"}), (CHAT, chat())):
        async with http.post(path, json=body, headers={"x-twostep-seed": seed}) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "x-twostep-seed")


@pytest.mark.parametrize("streamed", [False, True])
async def test_logprobs_of_chats(cluster: Cluster, http: aiohttp.ClientSession, streamed: bool) -> None:
    num = len(cluster.answer)
    body = chat(max_tokens=num, logprobs=True, top_logprobs=2)
    if streamed:
        events = await stream(http, CHAT, body)
        content = [each for event in events for each in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    else:
        content = (await post(http, CHAT, body))["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in content] == [-0.5 - position for position in range(num)]
    # Characters may be split over tokens: bytes are right all the same.
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == ANSWER_TEXT
    assert all(each["token"].startswith("bytes:") or each["token"].encode() == bytes(each["bytes"]) for each in content)
    assert any(each["token"].startswith("bytes:\\x") for each in content)
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["<|endoftext|>", "<|im_start|>"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_logprobs_of_completions(cluster: Cluster, http: aiohttp.ClientSession, streamed: bool) -> None:
    body = {"prompt": "x", "max_tokens": 12, "logprobs": 1}
    if streamed:
        parts = [event["choices"][0]["logprobs"] for event in await stream(http, TEXT, body)]
        told: dict[str, list[Any]] = {}
        for part in filter(None, parts):
            for key, values in part.items():
                told.setdefault(key, []).extend(values)
    else:
        told = (await post(http, TEXT, body))["choices"][0]["logprobs"]
    by_id = await post(http, TEXT, body | {"return_tokens_as_token_ids": True})
    assert told["token_logprobs"] == [-0.5 - position for position in range(12)]
    assert [int(name.removeprefix("token_id:")) for name in by_id["choices"][0]["logprobs"]["tokens"]] == cluster.expected(12)
    offset = 0
    for name, at, top in zip(told["tokens"], told["text_offset"], told["top_logprobs"], strict=True):
        assert at == offset
        offset += len(name)
        assert set(top) == {"<|endoftext|>", name}


async def test_stops_and_what_they_were(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    stop = "größte city"
    (choice,) = (await post(http, CHAT, chat(stop=[stop, "never"], max_tokens=400)))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
        ANSWER_TEXT[: ANSWER_TEXT.index(stop)],
        "stop",
        stop,
    )
    *_, last = await stream(http, TEXT, {"prompt": "x", "stop": stop, "max_tokens": 400})
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("stop", stop)
    (choice,) = (await post(http, CHAT, chat(stop_token_ids=[cluster.answer[2]], max_tokens=9)))["choices"]
    assert choice["stop_reason"] == cluster.answer[2]
    await cluster.all_free()


async def test_phases_come_to_whoever_asks(http: aiohttp.ClientSession) -> None:
    assert "twostep" not in await post(http, CHAT, chat(max_tokens=4))
    for told in (
        (await post(http, CHAT, chat(max_tokens=4), **{"x-twostep-phases": "1"}))["twostep"],
        (await post(http, TEXT, {"prompt": "x", "max_tokens": 4, "return_phases": True}))["twostep"],
        (await stream(http, CHAT, chat(max_tokens=4, return_phases=True)))[-1]["twostep"],
        (await stream(http, CHAT, chat(max_tokens=4, return_phases=True, stream_options={"include_usage": True})))[-1]["twostep"],
    ):
        assert (told["phases"]["queue_s"], told["phases"]["fetch_s"]) == (0.001, 0.004)
        assert 0 < told["phases"]["ttft_s"] < told["phases"]["total_s"]
        assert (told["transfer"]["transport"], told["transfer"]["bytes"], told["attempts"]) == ("local", 4096, 1)
    several = await post(http, CHAT, chat(max_tokens=4, n=2, return_phases=True))
    assert len(several["twostep"]["choices"]) == 2


async def test_usage_in_every_chunk_and_token_ids(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stream(http, CHAT, chat(max_tokens=9, stream_options=options, return_token_ids=True))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 9)
    ids = [token_id for event in events[:-1] for token_id in event["choices"][0].get("token_ids") or ()]
    assert ids == cluster.expected(9)
    whole = await post(http, CHAT, chat(max_tokens=9, return_token_ids=True))
    assert whole["choices"][0]["token_ids"] == ids
    assert whole["prompt_token_ids"] == events[0]["prompt_token_ids"]
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]


async def test_sampling_and_class_reach_the_workers(prefill: FakePrefill, client: AsyncOpenAI) -> None:
    await client.chat.completions.create(
        model="m",
        messages=MESSAGES,
        max_completion_tokens=5,
        temperature=0,
        top_p=0.5,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        service_tier="flex",
        user="somebody",
        extra_body={"top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True, "unheard_of": 1},
    )
    request = prefill.requests[-1]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.0, 0.5, 7)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.min_p) == (0.25, -0.5, 0.125)
    assert (sampling.repetition_penalty, sampling.min_tokens, sampling.ignore_eos) == (1.5, 2, True)


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
        async with http.post(path, json={**body, "max_tokens": 1}) as answer:
            found = await answer.json()
            assert answer.status == 200, found
        assert [choice["index"] for choice in found["choices"]] == list(range(num_choices))
        assert len(read) == num_read


async def test_echoed_ids_of_several_answers(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    prompts = [cluster.tokenizer.encode(text).ids for text in ("the capital", "of France")]
    body = {"prompt": prompts, "n": 2, "max_tokens": 2, "echo": True}
    wanted = [cluster.text_of(prompt) + cluster.text_of(cluster.expected(2)) for prompt in prompts for _ in range(2)]
    async with http.post(TEXT, json=body) as answer:
        assert [choice["text"] for choice in (await answer.json())["choices"]] == wanted
    texts = [""] * 4
    async with http.post(TEXT, json={**body, "stream": True}) as answer:
        for event in (await raw_events(answer))[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == wanted


async def test_a_trace_context_that_is_none_costs_nothing_but_itself(http: aiohttp.ClientSession) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for headers in ({"traceparent": parent, "tracestate": "a=é"}, {"traceparent": "é"}, {"tracestate": "a=" + "b" * 7000}):
        async with http.post(CHAT, json=chat(max_tokens=1), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
