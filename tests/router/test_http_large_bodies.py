"""JSON of strangers: counted before it is parsed, and parsed beside the event loop if it has many values."""

from __future__ import annotations

import json
import pickle
import pickletools
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import pytest
from http_fakes import CHAT, TEXT, chat, told
from hypothesis import given
from hypothesis import strategies as st

from router.batches.lines import LineError, parse_line
from router.http.body import parse_body
from router.http.body_parser import BodyParser
from router.http.errors import HttpError
from router.http.request_bodies import ChatBody, CompletionBody
from router.json_size import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, checked_size
from twostep.errors import InvalidRequest

LISTS = b"[" + b"[]," * MAX_CONTAINERS + b"[]]"


@pytest.mark.parametrize(
    ("raw", "containers", "values"),
    [
        (b"{}", 1, 1),
        (b'[1, 2, {"a": "b, [{"}]', 2, 4),
        (b'"' + b'[{,\\\\\\"' * 100_000 + b'"', 0, 0),
        (b'"' + b"\\\\" * 300_000 + b'", [', 1, 2),
        (b'["' + b"x" * 262_141 + b'\\"[[[[", []]', 2, 3),
    ],
)
def test_what_stands_in_texts_does_not_count(raw: bytes, containers: int, values: int) -> None:
    size = checked_size(raw)
    assert containers == size.containers
    assert values <= size.values <= values + 1 + len(raw) // (256 << 10) + 1


_TEXTS = st.text(alphabet='a"\\[]{},', max_size=20)


@given(st.recursive(st.none() | st.integers() | _TEXTS, lambda inner: st.lists(inner) | st.dictionaries(_TEXTS, inner)))
def test_no_value_is_missed(value: object) -> None:
    def count(each: object) -> tuple[int, int]:
        inner = list(each.values()) if isinstance(each, dict) else each if isinstance(each, list) else []
        counts = [count(one) for one in inner]
        return isinstance(each, list | dict) + sum(c for c, _ in counts), 1 + sum(v for _, v in counts)

    containers, values = count(value)
    size = checked_size(json.dumps(value).encode())
    assert size.containers == containers
    assert size.values >= values - 1


@pytest.mark.parametrize("raw", [LISTS, b'[""' + b',""' * MAX_STRINGS + b"]", b"[1" + b",1" * MAX_VALUES + b"]"])
def test_more_than_anybody_needs_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        checked_size(raw)
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"a": ' + raw + b"}}"
    assert isinstance(parse_line(line, 1, endpoint="/v1/completions", max_bytes=1 << 24), LineError)


@pytest.fixture
async def parser() -> AsyncIterator[BodyParser]:
    made = BodyParser()
    yield made
    await made.close()


def many_messages(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "a, b"}]}] * 2000, **fields}).encode()


async def test_what_comes_back_is_what_the_loop_would_have_made(parser: BodyParser) -> None:
    read = partial(parse_body, ChatBody)
    raw = many_messages(stop=["a"], temperature=0.5)
    assert await parser.parse(read, raw, "caller") == read(raw)
    with pytest.raises(HttpError) as refused:
        await parser.parse(read, many_messages(temperature="hot"), "caller")
    assert (refused.value.status, refused.value.param) == (400, "temperature")
    with pytest.raises(HttpError) as refused:
        await parser.parse(read, many_messages()[:-1], "caller")
    assert refused.value.code == "invalid_json"
    assert await parser.parse(read, raw, "caller") == read(raw), "the process goes on"


PART = {"type": "text", "text": "a"}
TOOL_CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatBody, {"messages": [{"role": "user", "content": [PART] * 6}] * 4000}),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [TOOL_CALL] * 1000}] * 15}),
        (ChatBody, {"messages": [{"role": "user"}], "chat_template_kwargs": {"a": [[]] * 30_000}, "documents": [{"a": "b"}] * 2000}),
        (
            ChatBody,
            {
                "messages": [{"role": "user"}],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [{}] * 20_000}}}],
            },
        ),
        (CompletionBody, {"prompt": [70_000] * 1_000_000}),
        (CompletionBody, {"prompt": "a", "structured_outputs": {"json": {"a": [{}] * 30_000, "b": [0] * 100_000}}}),
    ],
)
def test_what_comes_back_is_quickly_made_of_its_pickle(kind: type[ChatBody] | type[CompletionBody], fields: dict[str, object]) -> None:
    """The event loop does it."""
    raw = json.dumps(fields).encode()
    checked_size(raw)
    assert sum(1 for _ in pickletools.genops(pickle.dumps(parse_body(kind, raw), 5))) < 1000


async def test_large_bodies_of_honest_clients_are_answered(http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, data=LISTS, headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 400
        assert "lists and objects" in (await answer.json())["error"]["message"]
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": {}}}} for i in range(800)]
    await told(http, CHAT, chat(max_tokens=2, tools=tools, tool_choice="none"))
    assert len((await told(http, TEXT, {"prompt": [[5, 6, 7]] * 700, "max_tokens": 1}))["choices"]) == 700
