"""Grammars, tools, reasoning: what is sent, what comes back, and what never leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import ScriptedInference, serving, serving_in_thread

import twostep
from twostep import AsyncClient, Client, Message, ToolCall
from twostep.client import _wire
from twostep.rpc.v1 import inference_pb2 as pb

Server = tuple[ScriptedInference, str]
SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    servicer = ScriptedInference()
    with serving_in_thread(servicer) as target:
        yield servicer, target


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server[1], timeout=60) as client:
        yield client


@pytest.fixture
async def async_server() -> AsyncIterator[Server]:
    servicer = ScriptedInference()
    async with serving(servicer) as target:
        yield servicer, target


class Answer:
    """As pydantic makes them."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA), Answer])
def test_a_schema_is_sent_as_text(client: Client, server: Server, schema: Any) -> None:
    client.generate("ok", json_schema=schema).result()
    sampling = server[0].requests[-1].sampling
    assert json.loads(sampling.grammar.json_schema) == SCHEMA
    assert sampling.grammar.WhichOneof("kind") == "json_schema"


def test_the_other_grammars(client: Client, server: Server) -> None:
    client.generate("ok", regex=r"\d+").result()
    assert server[0].requests[-1].sampling.grammar.regex == r"\d+"
    client.chat([Message("user", "ok")], json_object=True).result()
    assert server[0].requests[-1].sampling.grammar.json_object
    client.generate("ok", lark='start: "a"').result()
    assert server[0].requests[-1].sampling.grammar.lark == 'start: "a"'
    client.generate("ok", json_object=False).result()
    assert not server[0].requests[-1].sampling.HasField("grammar")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a", "json_object": True}, "json_object and regex are given"),
        ({"json_schema": 7}, "json_schema is 7"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema cannot be written as JSON"),
        ({"json_schema": {"a": float("nan")}}, "json_schema cannot be written as JSON"),
        ({"json_schema": {"a": "\ud800"}}, "lone surrogate"),
        ({"json_object": "yes"}, "json_object is 'yes'"),
        ({"regex": 7}, "regex is of type int"),
    ],
)
def test_grammars_that_cannot_be(client: Client, server: Server, options: dict[str, Any], message: str) -> None:
    before = len(server[0].requests)
    with pytest.raises(twostep.InvalidRequest, match=message):
        client.generate("ok", **options)
    assert len(server[0].requests) == before


def test_tools_and_what_they_said(client: Client, server: Server) -> None:
    in_our_words = [
        Message("user", "ok"),
        Message("assistant", tool_calls=[ToolCall("weather", '{"city": "Bonn"}', id="call-1")], reasoning="I must look"),
        Message("tool", "rain", tool_call_id="call-1", name="weather"),
        Message("user", "ok"),
    ]
    in_open_ais = [
        {"role": "user", "content": [{"type": "text", "text": "o"}, {"type": "text", "text": "k"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}],
            "reasoning_content": "I must look",
        },
        {"role": "tool", "content": "rain", "tool_call_id": "call-1", "name": "weather"},
        {"role": "user", "content": "ok"},
    ]
    client.chat(in_our_words, tools=[TOOL], template_kwargs={"enable_thinking": False}, continue_final_message=True).result()
    chat = server[0].requests[-1].chat
    call = chat.messages[1].tool_calls[0]
    assert (call.id, call.name, call.arguments) == ("call-1", "weather", '{"city": "Bonn"}')
    assert (chat.messages[1].reasoning, chat.messages[2].tool_call_id, chat.messages[2].name) == ("I must look", "call-1", "weather")
    assert [json.loads(tool) for tool in chat.tools] == [TOOL]
    assert json.loads(chat.template_kwargs) == {"enable_thinking": False}
    assert chat.continue_final_message
    assert _wire.chat_request(in_open_ais, {}).chat.messages == chat.messages
    client.tokenize(messages=in_our_words, tools=[TOOL])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\] has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "only parts of type 'text'"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "only parts of type 'text'"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "give a Message or a mapping with role, content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "give a ToolCall or"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "give a list of ToolCall"),
        ({"messages": [Message("assistant", tool_calls=[ToolCall("weather", {})])]}, r"tool_calls\[0\].function.arguments is of type dict"),
        ({"messages": [Message("user", "ok")], "tools": TOOL}, "tools is one value"),
        ({"messages": [Message("user", "ok")], "tools": ["weather"]}, r"tools\[0\] is 'weather'"),
        ({"messages": [Message("user", "ok")], "tools": [{"a": object()}]}, r"tools\[0\] cannot be written as JSON"),
        ({"messages": [Message("user", "ok")], "template_kwargs": {"a": object()}}, "template_kwargs cannot be written"),
    ],
)
def test_chats_that_cannot_be(client: Client, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(twostep.InvalidRequest, match=message):
        client.chat(**arguments)


def test_options_are_checked_by_name(client: Client) -> None:
    with pytest.raises(TypeError, match="unknown option tools;"):
        client.generate("ok", tools=[TOOL])  # type: ignore[call-arg]
    assert client.generate("ok", model=None, seed=None, ttft_ms=None, resume=None).result().text  # type: ignore[arg-type]


def test_special_tokens_may_be_kept(client: Client, server: Server) -> None:
    client.generate("ok", keep_special_tokens=True).result()
    assert server[0].requests[-1].keep_special_tokens


def test_reasoning_stands_apart(client: Client) -> None:
    answer = client.chat([Message("user", "think")])
    pieces = list(answer)
    assert [(piece.reasoning, piece.text) for piece in pieces] == [("let me ", ""), ("see", ""), ("", "42")]
    assert (answer.reasoning, answer.text) == ("let me see", "42")
    completion = answer.result()
    assert (completion.reasoning, completion.text, len(completion.token_ids)) == ("let me see", "42", 3)


async def test_without_blocking_it_is_the_same(async_server: Server) -> None:
    async with AsyncClient(async_server[1], timeout=60) as client:
        completion = await client.chat([Message("user", "think")], tools=[TOOL], json_schema=SCHEMA).result()
        assert (completion.reasoning, completion.text) == ("let me see", "42")
        request = async_server[0].requests[-1]
        assert json.loads(request.chat.tools[0]) == TOOL
        assert json.loads(request.sampling.grammar.json_schema) == SCHEMA


def test_what_the_end_brings() -> None:
    assert _wire.usage(pb.Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=2, reasoning_tokens=3)).reasoning_tokens == 3
    assert _wire.phases(pb.Phases(ttft_s=1.0, visible_ttft_s=2.5)).visible_ttft_s == 2.5


VALUES = st.sampled_from([None, "", "user", "\ud800", 7, [], ["x"], {}, [{"type": "text", "text": "x"}], [{"function": {"name": 1}}]])
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "other")


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4), max_size=2))
def test_whatever_is_not_a_message_is_refused_as_our_error(messages: list[dict[str, Any]]) -> None:
    try:
        chat = _wire.chat_request(messages, {}).chat
    except twostep.InvalidRequest:
        return
    assert len(chat.messages) == len(messages)
