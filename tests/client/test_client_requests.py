"""Tests of what is written into a request, and of what never leaves."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import TraceState

import twostep
from twostep import Client, Message, ToolCall
from twostep.client._channel import Attempts, trace_metadata
from twostep.client._types import Usage, read_message
from twostep.client._wire import chat_request, generate_request
from twostep.errors import ResourceExhausted, Unavailable, error_from_grpc, trailing_metadata
from twostep.process.tracing import trace_id_of
from twostep.rpc.v1 import inference_pb2 as pb

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("application")


def request(**options: Any) -> pb.GenerateRequest:
    return generate_request(options.pop("prompt", "ok"), options.pop("token_ids", None), options)  # type: ignore[arg-type]


def test_what_is_sent() -> None:
    sent = request(
        prompt=None,
        token_ids=[1, 2, 3],
        **{"model": "scripted", "cache_salt": "s", "max_tokens": 9, "temperature": 0.0, "stop": "END", "stop_token_ids": [4]},
        **{"ignore_eos": True, "seed": -5, "request_class": "batch", "ttft_ms": 250, "tpot_ms": 12.5, "gap_ms": 30, "tenant": "alice"},
        keep_special_tokens=True,
    )
    assert list(sent.token_ids.ids) == [1, 2, 3]
    assert (sent.model, sent.cache_salt, sent.keep_special_tokens) == ("scripted", "s", True)
    assert (sent.request_class, sent.ttft_ms, sent.tpot_ms, sent.gap_ms) == (pb.REQUEST_CLASS_BATCH, 250.0, 12.5, 30.0)
    assert sent.tenant == "alice"
    sampling = sent.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.ignore_eos) == (9, 0.0, -5, True)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["END"], [4])
    assert sampling.HasField("temperature")
    assert not sampling.HasField("top_p")
    plain = request(model=None, seed=None, ttft_ms=None, resume=None)
    assert (plain.request_class, plain.keep_special_tokens) == (pb.REQUEST_CLASS_STANDARD, False)
    assert not any(map(plain.HasField, ("ttft_ms", "tpot_ms", "gap_ms")))  # type: ignore[arg-type]


class Schema:
    """As pydantic makes them."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA), Schema])
def test_a_schema_is_sent_as_text(schema: Any) -> None:
    assert json.loads(request(json_schema=schema).sampling.grammar.json_schema) == SCHEMA


class Instance(Schema):
    @classmethod
    def model_validate_json(cls, text: str) -> Any:
        return json.loads(text)


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


@pytest.mark.parametrize("given", [Instance, JSON_SCHEMA])
def test_a_response_format_is_a_schema(given: Any) -> None:
    assert json.loads(request(response_format=given).sampling.grammar.json_schema) == SCHEMA
    assert request(response_format={"type": "json_object"}).sampling.grammar.json_object
    assert not request(response_format={"type": "text"}).sampling.HasField("grammar")


def test_calls_are_asked_for_apart_from_the_text() -> None:
    def asked(**options: Any) -> pb.ToolUse | None:
        chat = chat_request("hello", {"tools": [TOOL], **options}).chat  # type: ignore[typeddict-item]
        return chat.tool_use if chat.HasField("tool_use") else None

    assert asked() == pb.ToolUse()
    assert asked(tool_choice="required", parallel_tool_calls=False) == pb.ToolUse(tool_choice="required", single=True)
    assert asked(tool_choice={"type": "function", "function": {"name": "weather"}}) == pb.ToolUse(function="weather")
    assert asked(tool_calls="text") is None
    assert asked(tools=None) is None
    assert chat_request("hello", {}).chat.messages[0] == pb.ChatMessage(role="user", content="hello")


def test_the_other_grammars() -> None:
    assert request(regex=r"\d+").sampling.grammar.regex == r"\d+"
    assert request(json_object=True).sampling.grammar.json_object
    assert request(lark='start: "a"').sampling.grammar.lark == 'start: "a"'
    assert not request(json_object=False).sampling.HasField("grammar")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": None}, "either a prompt or token_ids"),
        ({"token_ids": [1]}, "either a prompt or token_ids"),
        ({"prompt": None, "token_ids": []}, "token_ids is empty"),
        ({"prompt": None, "token_ids": [1, -2]}, "-2"),
        ({"prompt": None, "token_ids": [1 << 32]}, "4294967296"),
        ({"prompt": None, "token_ids": ["x"]}, "'x'"),
        ({"prompt": "a\ud800b"}, "lone surrogate"),
        ({"prompt": b"bytes"}, "bytes"),
        ({"stop": ["\udfff"]}, "lone surrogate"),
        ({"max_tokens": 1 << 70}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_token_ids": [1 << 70]}, "stop_token_ids"),
        ({"request_class": "urgent"}, "request_class is 'urgent'; give one of 'interactive', 'standard', 'batch'"),
        ({"request_class": ["batch"]}, "request_class"),
        ({"ttft_ms": 0}, "ttft_ms"),
        ({"ttft_ms": float("nan")}, "ttft_ms"),
        ({"tpot_ms": float("inf")}, "tpot_ms"),
        ({"tpot_ms": "10"}, "tpot_ms"),
        ({"gap_ms": True}, "gap_ms"),
        ({"tenant": 7}, "tenant"),
        ({"tenant": "\ud800"}, "lone surrogate"),
        ({"regex": "a", "json_object": True}, "json_object and regex are given"),
        ({"json_schema": 7}, "json_schema is 7"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema cannot be written as JSON"),
        ({"json_schema": {"a": float("nan")}}, "json_schema cannot be written as JSON"),
        ({"json_schema": {"a": "\ud800"}}, "lone surrogate"),
        ({"json_object": "yes"}, "json_object is 'yes'"),
        ({"regex": 7}, "regex is of type int"),
        ({"regex": "a", "response_format": Instance}, "response_format and regex are given"),
        ({"response_format": "json"}, "response_format is 'json'"),
        ({"response_format": {"type": "xml"}}, "response_format is"),
        ({"response_format": {"type": "json_schema"}}, "response_format is"),
        *(({"n": n}, "n is") for n in (0, -1, True, 1.5, "2")),
        ({"n": 2, "resume_token_ids": [1], "seed": 1}, "resume_token_ids is of one answer"),
    ],
)
def test_requests_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(twostep.InvalidRequest, match=message):
        request(**options)


def test_an_unknown_option_is_named() -> None:
    for options in ({"max_token": 3}, {"tools": [TOOL]}):
        with pytest.raises(TypeError, match=f"{next(iter(options))};"):
            request(**options)


@pytest.mark.parametrize("timeout", [-1, 0, float("nan")])
def test_a_time_that_is_none(timeout: float) -> None:
    with Client("127.0.0.1:9") as client, pytest.raises(twostep.InvalidRequest, match="timeout"):
        client.generate("ok", timeout=timeout)


def test_tools_and_what_they_said() -> None:
    in_our_words = [
        Message("user", "ok"),
        Message("assistant", tool_calls=[ToolCall("weather", '{"city": "Bonn"}', id="call-1")], reasoning="I must look"),
        Message("tool", "rain", tool_call_id="call-1", name="weather"),
        Message("user", "ok"),
    ]
    call = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    in_open_ais = [
        {"role": "user", "content": [{"type": "text", "text": "o"}, {"type": "text", "text": "k"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I must look"},
        {"role": "tool", "content": "rain", "tool_call_id": "call-1", "name": "weather"},
        {"role": "user", "content": "ok"},
    ]
    chat = chat_request(in_our_words, {"tools": [TOOL], "template_kwargs": {"a": False}, "continue_final_message": True}).chat
    sent = chat.messages[1].tool_calls[0]
    assert (sent.id, sent.name, sent.arguments) == ("call-1", "weather", '{"city": "Bonn"}')
    assert (chat.messages[1].reasoning, chat.messages[2].tool_call_id, chat.messages[2].name) == ("I must look", "call-1", "weather")
    assert [json.loads(tool) for tool in chat.tools] == [TOOL]
    assert json.loads(chat.template_kwargs) == {"a": False}
    assert chat.continue_final_message
    assert chat_request(in_open_ais, {}).chat.messages == chat.messages


USER = {"role": "user", "content": "ok"}


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        *((bad, {}, "messages") for bad in ([], b"hello", {"role": "user"}, [{"role": "user"}], [None])),
        ([{"role": "user", "content": "\udc80"}], {}, "lone surrogate"),
        ([{"role": "user", "content": None}], {}, r"messages\[0\] has no content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "only parts of type 'text'"),
        ([{"role": "user", "content": ["x"]}], {}, "only parts of type 'text'"),
        ([{"role": "user", "contents": "x"}], {}, r"messages\[0\]"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], {}, "give a ToolCall or"),
        ([{"role": "assistant", "tool_calls": "x"}], {}, "give a list of ToolCall"),
        ([Message("assistant", tool_calls=[ToolCall("weather", {})])], {}, r"tool_calls\[0\].function.arguments is of type dict"),
        ([USER], {"tools": TOOL}, "tools is one value"),
        ([USER], {"tools": ["weather"]}, r"tools\[0\] is 'weather'"),
        ([USER], {"tools": [{"a": object()}]}, r"tools\[0\] cannot be written as JSON"),
        ([USER], {"template_kwargs": {"a": object()}}, "template_kwargs cannot be written"),
        ([USER], {"tools": [TOOL], "tool_calls": "raw"}, "tool_calls is 'raw'"),
        ([USER], {"tools": [TOOL], "tool_calls": "text", "tool_choice": "required"}, "tool_choice and parallel_tool_calls need"),
        ([USER], {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice is"),
    ],
)
def test_chats_that_cannot_be(messages: Any, options: Any, message: str) -> None:
    with pytest.raises(twostep.InvalidRequest, match=message):
        chat_request(messages, options)


VALUES = st.sampled_from([None, "", "user", "\ud800", 7, [], ["x"], {}, [{"type": "text", "text": "x"}], [{"function": {"name": 1}}]])
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "other")


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4), max_size=2))
def test_whatever_is_not_a_message_is_refused_as_our_error(messages: list[dict[str, Any]]) -> None:
    try:
        chat = chat_request(messages, {}).chat
    except twostep.InvalidRequest:
        return
    assert len(chat.messages) == len(messages)


def test_what_the_end_brings() -> None:
    sent = pb.Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=2, reasoning_tokens=3)
    assert read_message(sent, Usage) == Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=2, reasoning_tokens=3)


# ---- when to come again ----------------------------------------------------------------------------------------------------


@given(st.floats(0.0, 100.0), st.integers(0, 5), st.integers(0, 1 << 30))
def test_pauses_keep_to_what_was_said_and_are_spread(after_s: float, num_retries: int, seed: int) -> None:
    random.seed(seed)
    attempts = Attempts(600.0, 10, num_retries)
    delay = attempts.delay_s(ResourceExhausted("full", retry_after_s=after_s))
    if after_s > 30.0:
        assert delay is None
        return
    assert delay is not None
    assert after_s <= delay <= max(5.0, after_s * 1.25)
    delays = {Attempts(600.0, 10).delay_s(ResourceExhausted("full", retry_after_s=1.0)) for _ in range(20)}
    assert len(delays) > 10, "those refused together do not come back together"


def test_what_no_later_try_would_get_is_not_tried_again() -> None:
    behind = trailing_metadata(ResourceExhausted("never", hopeless=True))
    assert behind == (("x-should-retry", "false"),)
    back = error_from_grpc("RESOURCE_EXHAUSTED", "never", behind)
    assert isinstance(back, ResourceExhausted)
    assert back.hopeless
    assert Attempts(600.0, 10).delay_s(back) is None
    assert Attempts(600.0, 10).delay_s(error_from_grpc("RESOURCE_EXHAUSTED", "full", [("x-should-retry", "true")])) is not None


def test_metadata_there_and_back() -> None:
    assert trailing_metadata(ResourceExhausted("full")) == trailing_metadata(Unavailable("away")) == ()
    behind = trailing_metadata(ResourceExhausted("full", retry_after_s=0.2501))
    assert behind == (("x-twostep-retry-after-ms", "251"),), "rounded up: not before"
    back = error_from_grpc("RESOURCE_EXHAUSTED", "full", behind)
    assert isinstance(back, ResourceExhausted)
    assert back.retry_after_s == 0.251


@pytest.mark.parametrize("value", ["", "-1", "soon", "1.5", "9" * 30, b"\xff", "\u0663"])
def test_metadata_that_makes_no_sense_is_no_metadata(value: str | bytes) -> None:
    back = error_from_grpc("RESOURCE_EXHAUSTED", "full", [("x-twostep-retry-after-ms", value)])
    assert isinstance(back, ResourceExhausted)
    assert back.retry_after_s is None


# ---- the application's trace -------------------------------------------------------------------------------------------------


def test_the_active_span_goes_along() -> None:
    assert trace_metadata() == ()
    with TRACER.start_as_current_span("work") as span:
        context, told = span.get_span_context(), trace_metadata()
        assert [key for key, _ in told] == ["traceparent"]
        version, trace_id, _, flags = told[0][1].split("-")
        assert (version, int(trace_id, 16), int(flags, 16) & 1) == ("00", context.trace_id, 1)
        assert trace_id_of(told) == trace_id
    remote = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(0), trace_state=TraceState([("vendor", "1")]))
    with trace.use_span(trace.NonRecordingSpan(remote)):
        assert trace_metadata() == (("traceparent", f"00-{1:032x}-{2:016x}-00"), ("tracestate", "vendor=1"))


@pytest.mark.parametrize("api", [SimpleNamespace(), SimpleNamespace(get_current_span=lambda: None)])
def test_an_api_that_is_another_one_costs_no_call(api: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", api)
    assert trace_metadata() == ()


def test_nothing_is_imported_for_it() -> None:
    code = "import sys, twostep.client\nprint([m for m in sys.modules if m.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
