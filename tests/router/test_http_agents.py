"""Coding agents and SDKs on their default paths are served: hosted tools, namespaces, long names, allowed tools, documents, no model."""

# ruff: noqa: F811  # fixtures of another file

from __future__ import annotations

import json
from typing import Any

import pytest
from http_fakes import CHAT, refused, served, told
from router_fakes import Cluster
from test_http_dialects import MESSAGES, RESPONSES, SCHEMA, hermes, hermes_dir, post, stream  # noqa: F401
from test_http_tools import answer_with, prompt_of

HI: list[Any] = [{"role": "user", "content": "hi"}]
LONG = f"mcp__{'server' * 20}__{'search' * 10}"


def calls(*names: str) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Rome"}}}}\n</tool_call>' for name in names)


def tools_of(path: str, *names: str) -> list[Any]:
    """The functions, as each API has them."""
    fields = {CHAT: "parameters", RESPONSES: "parameters", MESSAGES: "input_schema"}[path]
    flat = [{"name": name, fields: SCHEMA} for name in names]
    if path == CHAT:
        return [{"type": "function", "function": function} for function in flat]
    return [{"type": "function", **function} for function in flat] if path == RESPONSES else flat


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return {"input": "hi", "max_output_tokens": 200, **fields} if path == RESPONSES else {"messages": HI, "max_tokens": 200, **fields}


HOSTED = {
    CHAT: [{"type": "custom", "custom": {"name": "patch"}}, {"type": "web_search"}],
    RESPONSES: [
        {"type": "web_search", "external_web_access": False},
        {"type": "file_search", "vector_store_ids": ["x"]},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
        {"type": "image_generation"},
        {"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1"},
        {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
    ],
    MESSAGES: [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    ],
}


@pytest.mark.parametrize("path", HOSTED)
async def test_hosted_tools_are_left_out_and_named(hermes: Cluster, path: str) -> None:
    answer_with(hermes, "Hello.")
    hosted = HOSTED[path]
    async with served(hermes) as http:
        await told(http, path, body_of(path, tools=tools_of(path, "weather")))
        wanted = prompt_of(hermes)
        async with http.post(path, json=body_of(path, tools=[*hosted, *tools_of(path, "weather")])) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["x-twostep-omitted-tools"].split(", ") == [tool["type"] for tool in hosted]
        assert prompt_of(hermes) == wanted
        # Nothing but hosted ones: a chat without tools.
        await told(http, path, body_of(path))
        wanted = prompt_of(hermes)
        await told(http, path, body_of(path, tools=hosted))
        assert prompt_of(hermes) == wanted


async def test_a_choice_of_a_hosted_tool_is_refused(hermes: Cluster) -> None:
    only = {"tools": [{"type": "web_search"}]}
    async with served(hermes) as http:
        for body in (
            body_of(RESPONSES, **only, tool_choice={"type": "web_search"}),
            body_of(RESPONSES, **only, tool_choice="required"),
            body_of(RESPONSES, tools=tools_of(RESPONSES, "weather"), tool_choice={"type": "mcp", "server_label": "x"}),
        ):
            error = await refused(http, RESPONSES, body)
            assert error["param"] == "tool_choice"
        error = await refused(http, CHAT, body_of(CHAT, **only, tool_choice="required"))
        assert ("web_search" in error["message"], error["param"]) == (True, "tool_choice")
        async with http.post(MESSAGES, json=body_of(MESSAGES, tools=HOSTED[MESSAGES], tool_choice={"type": "any"})) as answer:
            assert answer.status == 400
        # A name that no API has is a mistake, not a tool of somebody else's.
        error = await refused(http, RESPONSES, body_of(RESPONSES, tools=[{"type": "fucntion", "name": "weather"}]))
        assert error["param"] == "tools[0].type"


@pytest.mark.parametrize("namespace", ["mcp__rome__", "mcp__rome"])
async def test_functions_of_a_namespace(hermes: Cluster, namespace: str) -> None:
    answer_with(hermes, calls("mcp__rome__weather", "time"))
    inner = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    tools = [{"type": "namespace", "name": namespace, "description": "Rome.", "tools": inner}, *tools_of(RESPONSES, "time")]
    async with served(hermes) as http:
        whole = await post(http, RESPONSES, max_output_tokens=200, tools=tools)
        assert '"name": "mcp__rome__weather"' in prompt_of(hermes)
        events = await stream(http, RESPONSES, max_output_tokens=200, tools=tools)
        first, second = whole["output"]
        assert (first["name"], first["namespace"], json.loads(first["arguments"])) == ("weather", namespace, {"city": "Rome"})
        assert (second["name"], second.get("namespace")) == ("time", None)
        added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
        assert [(item["name"], item.get("namespace")) for item in added] == [("weather", namespace), ("time", None)]
        # The turn after it tells the model the names that it knows.
        result = {"type": "function_call_output", "call_id": first["call_id"], "output": "rain"}
        await post(http, RESPONSES, max_output_tokens=200, tools=tools, input=[{"role": "user", "content": "hi"}, first, result])
        assert '<tool_call>{"name": "mcp__rome__weather"' in prompt_of(hermes)
        choice = {"type": "function", "name": "weather", "namespace": namespace}
        forced = await post(http, RESPONSES, max_output_tokens=200, tools=tools, tool_choice=choice)
        assert forced["output"][0]["namespace"] == namespace


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_names_as_long_as_those_of_mcp(hermes: Cluster, path: str) -> None:
    answer_with(hermes, calls(LONG))
    async with served(hermes) as http:
        whole = await told(http, path, body_of(path, tools=tools_of(path, LONG)))
        assert LONG in json.dumps(whole)
        async with http.post(path, json=body_of(path, tools=tools_of(path, "x" * 257))) as answer:
            assert answer.status == 400


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/v1/completions", "/tokenize", "/v1/messages/count_tokens"])
async def test_no_model(hermes: Cluster, path: str) -> None:
    answer_with(hermes, "Hello.")
    body = {"prompt": "hi"} if path == "/v1/completions" else body_of(path)
    async with served(hermes) as http:
        await told(http, path, body | {"model": None})


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_allowed_tools(hermes: Cluster, path: str) -> None:
    answer_with(hermes, calls("time"))
    tools = tools_of(path, "weather", "time")

    def choice(mode: str, *names: str) -> dict[str, Any]:
        if path == RESPONSES:
            return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
        named = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}

    async with served(hermes) as http:
        await told(http, path, body_of(path, tools=tools))
        wanted = prompt_of(hermes)
        for mode in ("auto", "required"):
            await told(http, path, body_of(path, tools=tools, tool_choice=choice(mode, "time")))
            # The prompt, and so what is cached of it, is that of all tools; the answer is held to those that are allowed.
            assert prompt_of(hermes) == wanted
            grammar = hermes.workers[0].requests[-1].sampling.grammar.lark
            assert ("time" in grammar, "weather" in grammar) == (True, False)
        await refused(http, path, body_of(path, tools=tools, tool_choice=choice("auto", "none_of_them")))
        await refused(http, path, body_of(path, tools=tools, tool_choice=choice("auto")))
        await refused(http, path, body_of(path, tools=tools, tool_choice=choice("perhaps", "time")))


async def test_documents_of_text(hermes: Cluster) -> None:
    answer_with(hermes, "Hello.")
    text = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "It rains."}, "title": "Rome"}
    parts = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "The sun shines."}]}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [text]}
    async with served(hermes) as http:
        await post(http, MESSAGES, messages=[{"role": "user", "content": [text, parts, {"type": "text", "text": "Which?"}]}])
        assert "Rome\nIt rains.\nThe sun shines.\nWhich?" in prompt_of(hermes)
        await post(http, MESSAGES, messages=[*HI, {"role": "user", "content": [result]}])
        assert "Rome\nIt rains." in prompt_of(hermes)
        for source in ({"type": "base64", "media_type": "application/pdf", "data": "AA=="}, {"type": "url", "url": "http://localhost"}):
            await post(http, MESSAGES, 400, messages=[{"role": "user", "content": [{"type": "document", "source": source}]}])


async def test_a_prediction_changes_nothing(hermes: Cluster) -> None:
    answer_with(hermes, "Hello.")
    async with served(hermes) as http:
        plain = await told(http, CHAT, body_of(CHAT, seed=1))
        for content in ("Hello there.", [{"type": "text", "text": "Hello"}]):
            hinted = await told(http, CHAT, body_of(CHAT, seed=1, prediction={"type": "content", "content": content}))
            assert hinted["choices"] == plain["choices"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_structural_tags(hermes: Cluster, path: str) -> None:
    answer_with(hermes, "Hello.")
    tag = {"structures": [{"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"}], "triggers": ["<function="]}
    asked = {"prompt": "hi", "max_tokens": 20} if path != CHAT else body_of(CHAT)
    async with served(hermes) as http:
        grammars = []
        for fields in (
            {"response_format": {"type": "structural_tag", **tag}},
            {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **tag})}},
            {"structured_outputs": {"structural_tag": tag}},
        ):
            await told(http, path, asked | fields)
            grammars.append(hermes.workers[0].requests[-1].sampling.grammar.lark)
        assert "<function=" in grammars[0]
        assert len(set(grammars)) == 1
        for wrong in ({}, {"format": {"type": "x"}}, {**tag, "triggers": ["<tool"]}):
            await refused(http, path, asked | {"response_format": {"type": "structural_tag", **wrong}})
