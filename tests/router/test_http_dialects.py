"""/v1/responses and /v1/messages: the same answers as a chat's, told otherwise; the workers' answers are scripted."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from http_fakes import CHAT, open_client, served, streamed, told
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from router_fakes import Cluster, RedisServer
from test_http_tools import CALLS, TEMPLATE, THOUGHT, answer_with, model_dir, prompt_of, tool_request
from test_http_tools import TOOLS as CHAT_TOOLS

from router.http.blocks import BlockAnswer, Dialect
from router.http.choices import AnswerOptions
from router.http.messages import MessagesDialect
from router.http.responses import ResponsesDialect
from router.json_pieces import json_pieces
from router.request.answer import AnswerReader, Finish
from router.request.memory_budget import MemoryBudget
from router.request.tool_calls import CallTaker
from twostep.keys.api_key_file import put_in_file
from twostep.keys.api_keys import make_key
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.text.tool_calls import ToolCallParser
from twostep.text.tool_formats.json_calls import HERMES

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OPENAI_TOOLS: list[Any] = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("weather", "time")]
TOOLS: list[Any] = [{"name": name, "input_schema": SCHEMA} for name in ("weather", "time")]
CITIES = [("weather", {"city": "größer 🙂"}), ("time", {"city": "Rome"})]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
# Thought, text and calls.
EVERYTHING = f"{THOUGHT.partition('</think>')[0]}</think>\n\n{CALLS}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "größer"}}\n</tool_call>'
REASONING = "They ask, größtenteils 🙂, again."


@pytest.fixture(scope="module")
def hermes_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("hermes") / "m", TEMPLATE, added=("<think>", "</think>", "<tool_call>", "</tool_call>"))


@pytest.fixture
async def hermes(hermes_dir: Path, redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Cluster]:
    built = Cluster(hermes_dir, redis_server, tmp_path)
    yield built
    await built.close()


def asked(path: str, **fields: Any) -> dict[str, Any]:
    return (
        {"input": "hi", **fields} if path == RESPONSES else {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, **fields}
    )


async def post(http: aiohttp.ClientSession, path: str, status: int = 200, **fields: Any) -> Any:
    async with http.post(path, json=asked(path, **fields)) as answer:
        found = await answer.json()
        assert answer.status == status, found
    return found


async def stream(http: aiohttp.ClientSession, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The events, each of which has its type as its name."""
    async with http.post(path, json=asked(path, stream=True, **fields)) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        return events_in(await answer.read())


def events_in(raw: bytes) -> list[dict[str, Any]]:
    found = []
    for event in raw.decode("ascii").removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_a_response_whole_and_streamed(hermes: Cluster) -> None:
    answer_with(hermes, EVERYTHING)
    fields: dict[str, Any] = {"tools": OPENAI_TOOLS, "instructions": "Be short.", "metadata": {"a": "b"}, "max_output_tokens": 200}
    async with served(hermes) as http:
        whole = Response.model_validate(await post(http, RESPONSES, **fields))
        assert prompt_of(hermes).index("Be short.") < prompt_of(hermes).index("<|im_start|>user\nhi")
        assert (whole.status, whole.error, whole.incomplete_details, whole.metadata) == ("completed", None, None, {"a": "b"})
        reasoning, message, *calls = whole.output
        assert reasoning.type == "reasoning"
        assert [part.text for part in reasoning.content or []] == [REASONING]
        assert (message.type, whole.output_text) == ("message", "I look.\n")
        assert [(call.name, json.loads(call.arguments)) for call in calls if call.type == "function_call"] == CITIES
        usage = whole.usage
        assert usage is not None
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens == usage.total_tokens - usage.input_tokens
        events = [EVENT.validate_python(event) for event in await stream(http, RESPONSES, **fields)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    order = [event.type.removeprefix("response.") for event in events]
    kinds = [name for i, name in enumerate(order) if i == 0 or name != order[i - 1]]
    part = ["output_item.added", "content_part.added", "{0}.delta", "{0}.done", "content_part.done", "output_item.done"]
    arguments = "function_call_arguments"
    call = ["output_item.added", f"{arguments}.delta", f"{arguments}.done", "output_item.done"]
    texts = [name.format(kind) for kind in ("reasoning_text", "output_text") for name in part]
    assert kinds == ["created", "in_progress", *texts, *call, *call, "completed"]
    # What was told on the way is what is told in the end, and what is told whole.
    for index, item in enumerate(events[-1].response.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        [done] = [event.item for event in mine if event.type == "response.output_item.done"]
        deltas = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        assert done == item
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
    assert [item.type for item in events[-1].response.output] == [item.type for item in whole.output]


async def test_a_message_whole_and_streamed(hermes: Cluster) -> None:
    answer_with(hermes, EVERYTHING)
    fields: dict[str, Any] = {"tools": TOOLS, "system": [{"type": "text", "text": "Be short."}], "return_phases": True}
    async with served(hermes) as http:
        whole = await post(http, MESSAGES, **fields)
        assert prompt_of(hermes).index("Be short.") < prompt_of(hermes).index("<|im_start|>user\nhi")
        thinking, text, *calls = whole["content"]
        assert (thinking["thinking"], text["text"]) == (REASONING, "I look.\n")
        assert [(call["name"], call["input"]) for call in calls] == CITIES
        assert (whole["role"], whole["stop_reason"], whole["stop_sequence"]) == ("assistant", "tool_use", None)
        start, ping, *events, delta, stop = await stream(http, MESSAGES, **fields)
        counted = await post(http, f"{MESSAGES}/count_tokens", **fields)
    assert (start["type"], ping["type"], delta["type"], stop["type"]) == ("message_start", "ping", "message_delta", "message_stop")
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert whole["twostep"]["phases"].keys() == stop["twostep"]["phases"].keys()
    used = [whole["usage"], delta["usage"]]
    assert [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in used] == [counted["input_tokens"]] * 2
    assert start["message"]["usage"]["input_tokens"] == counted["input_tokens"]
    for index, block in enumerate(whole["content"]):
        first, *deltas, last = [event for event in events if event["index"] == index]
        assert (first["type"], last["type"]) == ("content_block_start", "content_block_stop")
        assert first["content_block"]["type"] == block["type"]
        told_of = "".join(value for event in deltas for name, value in event["delta"].items() if name != "type")
        assert (json.loads(told_of) if block["type"] == "tool_use" else told_of) == block.get(
            {"thinking": "thinking", "text": "text", "tool_use": "input"}[block["type"]]
        )


async def test_the_turn_after_a_call(hermes: Cluster) -> None:
    """The prompt is the chat's, whichever dialect says it."""
    answer_with(hermes, "It rains.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    ]
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]}
    messages = [chat[0], {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    async with served(hermes) as http:
        await told(http, CHAT, {"messages": chat, "max_tokens": 200})
        wanted = prompt_of(hermes)
        assert "Hm.</think>I look.<tool_call>" in wanted
        await post(http, RESPONSES, input=items)
        assert prompt_of(hermes) == wanted
        await post(http, MESSAGES, messages=messages)
        assert prompt_of(hermes) == wanted
        # The assistant's beginning of an answer.
        await post(http, MESSAGES, messages=[chat[0], {"role": "assistant", "content": "It"}])
        assert prompt_of(hermes).endswith("assistant\nIt")


@pytest.mark.parametrize(
    ("responses", "messages"),
    [
        ({}, {}),
        ({"tool_choice": "required"}, {"tool_choice": {"type": "any"}}),
        ({"tool_choice": {"type": "function", "name": "time"}}, {"tool_choice": {"type": "tool", "name": "time"}}),
        ({"tool_choice": "none"}, {"tool_choice": {"type": "none"}}),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
    ],
)
async def test_what_holds_an_answer_is_the_same(hermes: Cluster, responses: dict[str, Any], messages: dict[str, Any]) -> None:
    answer_with(hermes, CALLS)
    async with served(hermes) as http:
        await post(http, RESPONSES, tools=OPENAI_TOOLS, **responses)
        await post(http, MESSAGES, tools=TOOLS, **messages)
    one, other = hermes.prefills[0].requests
    assert one.sampling.grammar == other.sampling.grammar
    assert one.token_ids == other.token_ids
    assert one.sampling.HasField("grammar") == (responses not in ({}, {"tool_choice": "none"}))


async def test_how_answers_end(hermes: Cluster) -> None:
    answer_with(hermes, "It rains in Rome.")
    async with served(hermes) as http:
        cut = await post(http, RESPONSES, max_output_tokens=2)
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert cut["output"][0]["status"] == "incomplete"
        assert (await stream(http, RESPONSES, max_output_tokens=2))[-1]["type"] == "response.incomplete"
        for fields, stop in (
            ({}, ("end_turn", None)),
            ({"max_tokens": 2}, ("max_tokens", None)),
            ({"stop_sequences": ["in"]}, ("stop_sequence", "in")),
        ):
            found = await post(http, MESSAGES, **fields)
            assert (found["stop_reason"], found["stop_sequence"]) == stop
            assert (await stream(http, MESSAGES, **fields))[-2]["delta"] == {"stop_reason": stop[0], "stop_sequence": stop[1]}


@pytest.mark.parametrize(
    ("answer", "stop", "fields", "whole_calls", "cut"),
    [
        ("I look.\n" + CALL, '"weather', {}, 0, False),
        (CALL, '"weather', {"tool_choice": "required"}, 0, True),
        (CALL, "größer", {}, 0, True),
        (CALL, "größer", {"tool_choice": "required"}, 0, True),
        (CALL + CALL.replace("weather", "time"), '"time', {}, 1, True),
        (CALL + CALL.replace("größer", "Rome"), "Rome", {"tool_choice": "required"}, 1, True),
        # The call is whole.
        (CALL, "</tool_call>", {}, 1, False),
        (CALL + "\nIt rains.", "rains", {}, 1, False),
    ],
)
async def test_a_stop_string_in_a_call_is_no_finished_call(
    hermes: Cluster, answer: str, stop: str, fields: dict[str, Any], whole_calls: int, cut: bool
) -> None:
    answer_with(hermes, answer)
    calls = whole_calls > 0 and not cut
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "tools": CHAT_TOOLS, "stop": stop}
    chat |= fields
    async with served(hermes) as http:
        (choice,) = (await told(http, CHAT, chat))["choices"]
        ended = await streamed(http, CHAT, chat)
        response = await post(http, RESPONSES, tools=OPENAI_TOOLS, max_output_tokens=200, stop=stop, **fields)
        response_events = await stream(http, RESPONSES, tools=OPENAI_TOOLS, max_output_tokens=200, stop=stop, **fields)
        of_messages = {"tools": TOOLS, "stop_sequences": [stop]} | ({"tool_choice": {"type": "any"}} if fields else {})
        message = await post(http, MESSAGES, **of_messages)
        message_events = await stream(http, MESSAGES, **of_messages)
        request = tool_request(**fields)
        request.sampling.stop.append(stop)
        end = (await hermes.ask(request)).end
    assert end is not None
    finish = ("tool_calls" if calls else "stop", stop)
    assert [(each["finish_reason"], each["stop_reason"]) for each in (choice, ended[-1]["choices"][0])] == [finish] * 2
    assert (end.finish_reason, end.stop_reason) == (pb.FINISH_REASON_TOOL_CALLS if calls else pb.FINISH_REASON_STOP, stop)
    status, details = ("incomplete", {"reason": "stop_sequence"}) if cut else ("completed", None)
    assert response_events[-1]["type"] == f"response.{status}"
    for each in (response, response_events[-1]["response"]):
        assert (each["status"], each["incomplete_details"]) == (status, details)
        called = [item for item in each["output"] if item["type"] == "function_call"]
        assert [item["status"] for item in called][:whole_calls] == ["completed"] * whole_calls
        assert {item["status"] for item in called[whole_calls:]} <= {"incomplete"}
    stopped = {"stop_reason": "tool_use", "stop_sequence": None} if calls else {"stop_reason": "stop_sequence", "stop_sequence": stop}
    assert {name: message[name] for name in stopped} == message_events[-2]["delta"] == stopped


@pytest.mark.parametrize(
    ("answer", "stop", "fields", "status"),
    [
        ("<think>\nThey ask.\n</think>\n\nIt rains.", "ask", {}, "incomplete"),
        ("<think>\nThey ask.\n</think>\n\nIt rains.", "rains", {}, "completed"),
        ('{"city": "Rome"}', "Rome", {"text": {"format": {"type": "json_object"}}}, "incomplete"),
        ('{"city": "Rome"}', "never", {"text": {"format": {"type": "json_object"}}}, "completed"),
    ],
)
async def test_a_stop_string_leaves_a_part_of_a_response(
    hermes: Cluster, answer: str, stop: str, fields: dict[str, Any], status: str
) -> None:
    """Reasoning and JSON that a stop string cuts are incomplete. Plain text ends there as the client wishes."""
    answer_with(hermes, answer)
    async with served(hermes) as http:
        whole = await post(http, RESPONSES, max_output_tokens=200, stop=stop, **fields)
        last = (await stream(http, RESPONSES, max_output_tokens=200, stop=stop, **fields))[-1]
    for found in (whole, last["response"]):
        assert (found["status"], found["output"][-1]["status"]) == (status, status)
        assert found["incomplete_details"] == ({"reason": "stop_sequence"} if status == "incomplete" else None)


async def test_log_probabilities_of_a_response(hermes: Cluster) -> None:
    answer_with(hermes, THOUGHT)
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 200}
    async with served(hermes) as http:
        [text] = [item["content"][0] for item in (await post(http, RESPONSES, **fields))["output"] if item["type"] == "message"]
        events = await stream(http, RESPONSES, **fields)
    assert "".join(each["token"] for each in text["logprobs"]).strip() == text["text"]
    assert all(len(each["top_logprobs"]) == 1 for each in text["logprobs"])
    assert [each for event in events if event["type"] == "response.output_text.delta" for each in event["logprobs"]] == text["logprobs"]


@pytest.mark.parametrize(
    ("path", "fields", "about"),
    [
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"max_tokens": 5}, "max_tokens"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        (RESPONSES, {"input": []}, "input"),
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        (MESSAGES, {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (MESSAGES, {"model": "other"}, "model"),
    ],
)
async def test_refusals_name_what_is_wrong(hermes: Cluster, path: str, fields: dict[str, Any], about: str) -> None:
    async with served(hermes) as http:
        found = await post(http, path, 404 if "model" in fields else 400, **fields)
    if path == RESPONSES:
        assert found["error"]["param"] == about
    else:
        assert (set(found), found["type"]) == ({"type", "error"}, "error")
        assert found["error"]["type"] == ("not_found_error" if "model" in fields else "invalid_request_error")
        assert about in found["error"]["message"]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_client_that_goes_frees_everything(hermes: Cluster, path: str) -> None:
    answer_with(hermes, THOUGHT)
    async with served(hermes) as http:
        hermes.decodes[0].script.tokens_per_step, hermes.decodes[0].script.step_s = 4, 600.0
        async with http.post(path, json=asked(path, stream=True)) as answer:
            assert await answer.content.readline()
        await hermes.all_free()


async def test_openais_client_adds_up_a_stream(hermes: Cluster) -> None:
    answer_with(hermes, EVERYTHING)
    fields: dict[str, Any] = {"model": "m", "input": "hi", "tools": OPENAI_TOOLS, "max_output_tokens": 200}
    async with served(hermes), open_client(hermes) as client, client.responses.stream(**fields) as events:
        final = await events.get_final_response()
    assert final.output_text == "I look.\n"


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_stream_that_breaks_off_says_so(hermes: Cluster, path: str) -> None:
    answer_with(hermes, THOUGHT)
    async with served(hermes) as http:
        hermes.decodes[0].script.tokens_per_step, hermes.decodes[0].script.step_s = 4, 600.0
        async with http.post(path, json=asked(path, stream=True)) as answer:
            await answer.content.readuntil(b"\n\n")
            await hermes.router.drain(0.1)
            last = events_in(await answer.read())[-1]
    if path == RESPONSES:
        assert (last["type"], last["response"]["status"], last["response"]["error"]["code"]) == (
            "response.failed",
            "failed",
            "server_error",
        )
    else:
        assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
    await hermes.all_free()


async def test_a_key_in_anthropics_header(hermes: Cluster, tmp_path: Path) -> None:
    shown, key = make_key()
    put_in_file(tmp_path / "api-keys", key)
    answer_with(hermes, "It rains.")
    async with served(hermes, api_keys_file=tmp_path / "api-keys") as http:
        for given, status, kind in ((shown, 200, "message"), (f"{shown}x", 401, "error")):
            async with http.post(MESSAGES, json=asked(MESSAGES), headers={"x-api-key": given}) as answer:
                assert (answer.status, (await answer.json())["type"]) == (status, kind)


async def test_prompts_that_are_too_long(hermes: Cluster) -> None:
    """In the words by which each dialect's clients know it."""
    async with served(hermes) as http:
        for text, most in (("so many words " * 20_000, 200), ("many words " * 300, 200), ("hi", 100_000)):
            for path, fields in (
                (RESPONSES, {"input": text, "max_output_tokens": most}),
                (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": most}),
            ):
                error = (await post(http, path, 400, **fields))["error"]
                assert (error["code"], "maximum context length is 2048 tokens" in error["message"]) == ("context_length_exceeded", True)
            message = (await post(http, MESSAGES, 400, max_tokens=most, messages=[{"role": "user", "content": text}]))["error"]["message"]
            counted = re.search(r"prompt is too long: (\d+) tokens > 2048 maximum|(\d+) \+ 100000 > 2048", message)
            assert counted is not None, message


async def test_schemas_are_read_strictly_unless_the_client_says_otherwise(hermes: Cluster) -> None:
    answer_with(hermes, "{}")
    text = json.dumps(SCHEMA)
    async with served(hermes) as http:
        for strict, is_open in ((None, False), (True, False), (False, True)):
            schema = {"name": "x", "schema": SCHEMA, "strict": strict}
            function = {"name": "weather", "parameters": SCHEMA, "strict": strict}
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
            await post(http, CHAT, **chat, response_format={"type": "json_schema", "json_schema": schema})
            await post(http, CHAT, **chat, structured_outputs={"json": SCHEMA, "disable_additional_properties": strict})
            await post(http, CHAT, **chat, tool_choice="required", tools=[{"type": "function", "function": function}])
            await post(http, RESPONSES, text={"format": {"type": "json_schema", **schema}})
            request = hermes.request(max_tokens=20)
            request.sampling.grammar.CopyFrom(pb.Grammar(json_schema=text, strict=strict))
            await hermes.ask(request)
            for asked_of in hermes.prefills[0].requests[-5:]:
                assert ("additionalProperties" not in str(asked_of.sampling.grammar)) == is_open


@given(
    reasoning=st.text(max_size=8),
    parts=st.lists(st.sampled_from(["It rains. ", "größer 🙂", CALL, "<tool_call>no call</tool_call>"]), max_size=5),
    cuts=st.lists(st.integers(0, 200), max_size=20),
    cut=st.booleans(),
)
async def test_events_add_up_to_the_whole(reasoning: str, parts: list[str], cuts: list[int], cut: bool) -> None:
    """However the text comes in pieces."""
    text = "".join(parts)
    at = sorted({0, len(text), *(each for each in cuts if each < len(text))})
    pieces = [pb.Piece(reasoning=reasoning)] * bool(reasoning) + [pb.Piece(text=text[a:b]) for a, b in pairwise(at)]
    at_once = [pb.Piece(reasoning=reasoning)] * bool(reasoning) + [pb.Piece(text=text)]
    finish = Finish(pb.FINISH_REASON_LENGTH if cut else pb.FINISH_REASON_STOP)
    wanted = AnswerOptions(n=1, stop_strings=(), logprobs=False, token_ids=False, phases=False, include_usage=False, continuous_usage=False)

    async def told_by(dialect: Dialect, pieces: list[pb.Piece], *, streamed: bool) -> tuple[list[dict[str, Any]], Any]:
        sent = bytearray()

        async def send(data: bytes) -> None:
            sent.extend(data)

        ids = map("call_{}".format, count())
        parser = ToolCallParser(HERMES, functions={"weather": dict}, parallel=True, must=False, new_id=lambda: next(ids))
        holding = MemoryBudget().hold("anybody")
        answer = BlockAnswer(dialect, wanted, holding, with_reasoning=True, send=send if streamed else None)
        taker = CallTaker(parser, cast(AnswerReader, SimpleNamespace(finish=None, num_tokens=0)), answer.write)
        for piece in pieces:
            response = pb.GenerateResponse()
            response.piece.CopyFrom(piece)
            await taker(response)
        end = pb.End(finish_reason=(await taker.end(finish)).reason)
        await answer.end(end)
        whole = json.loads("".join(json_pieces(dialect.whole(answer.blocks, end))))
        return (events_in(bytes(sent)) if streamed else []), whole

    for make in (lambda: ResponsesDialect({}, "name", None), lambda: MessagesDialect({}, ())):
        _, whole = await told_by(make(), pieces, streamed=False)
        assert (await told_by(make(), at_once, streamed=False))[1] == whole
        events, _ = await told_by(make(), pieces, streamed=True)
        if events[0]["type"] == "response.created":
            assert events[-1]["response"] == whole
            assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            continue
        assert [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"] == [
            block["type"] for block in whole["content"]
        ]
        for index, block in enumerate(whole["content"]):
            deltas = [event["delta"] for event in events if event.get("index") == index and event["type"] == "content_block_delta"]
            joined = "".join(value for delta in deltas for name, value in delta.items() if name != "type")
            assert joined == block.get("text", block.get("thinking", joined))
        assert events[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
