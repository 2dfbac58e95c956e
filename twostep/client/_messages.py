"""A conversation to protobuf: our Message, or mappings as OpenAI's API has them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twostep.client._types import Message, ToolCall
from twostep.errors import InvalidRequest
from twostep.rpc.v1 import inference_pb2 as pb

Messages = Iterable[Message | Mapping[str, Any]]

_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"})


def chat(
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool | None = None,
) -> pb.Chat:
    """Raises InvalidRequest for what cannot be written down; what a template makes of it is the router's to judge."""
    if isinstance(messages, str | bytes | Mapping | Message):
        raise InvalidRequest("messages is one value; give a list of messages, each with role and content")
    result = pb.Chat(continue_final_message=bool(continue_final_message))
    for index, message in enumerate(messages):
        result.messages.append(_message(f"messages[{index}]", message))
    if not result.messages:
        raise InvalidRequest("messages is empty; give at least one")
    if isinstance(tools, str | bytes | Mapping):
        raise InvalidRequest("tools is one value; give a list of tools, each a mapping as in OpenAI's API")
    for index, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            raise InvalidRequest(f"tools[{index}] is {tool!r:.100}; give a mapping as in OpenAI's API: {{'type': 'function', ...}}")
        result.tools.append(as_json(f"tools[{index}]", tool))
    if template_kwargs:
        result.template_kwargs = as_json("template_kwargs", template_kwargs)
    return result


def text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} is of type {type(value).__name__}; give a str")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field} is not valid Unicode: lone surrogate {value[error.start]!r} at character {error.start}; "
            "decode the bytes it came from with errors='replace'"
        ) from error
    return value


def as_json(field: str, value: object) -> str:
    try:
        return text(field, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} cannot be written as JSON: {error}") from error


def _message(where: str, message: object) -> pb.ChatMessage:
    if isinstance(message, Message):
        message = {field: getattr(message, field) for field in Message.__dataclass_fields__}
    if not isinstance(message, Mapping) or "role" not in message or not set(message) <= _KEYS:
        raise InvalidRequest(f"{where} is {message!r:.100}; give a Message or a mapping with role, content and, if need be, {_optional()}")
    calls = message.get("tool_calls") or ()
    content = message.get("content")
    if content is None and not calls:
        raise InvalidRequest(f"{where} has no content; give a text, or the assistant's tool_calls")
    return pb.ChatMessage(
        role=text(f"{where}.role", message["role"]),
        content=_content(f"{where}.content", content),
        name=text(f"{where}.name", message.get("name") or ""),
        tool_calls=_tool_calls(f"{where}.tool_calls", calls),
        tool_call_id=text(f"{where}.tool_call_id", message.get("tool_call_id") or ""),
        reasoning=text(f"{where}.reasoning", message.get("reasoning") or message.get("reasoning_content") or ""),
    )


def _optional() -> str:
    return ", ".join(sorted(_KEYS - {"role", "content", "reasoning_content"}))


def _content(field: str, content: object) -> str:
    """A text, or OpenAI's list of parts, of which texts are taken and nothing else."""
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        return text(field, content)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise InvalidRequest(f"{field}[{index}] is {part!r:.100}; only parts of type 'text' are taken")
        texts.append(text(f"{field}[{index}].text", part.get("text")))
    return "".join(texts)


def _tool_calls(field: str, calls: object) -> list[pb.ToolCall]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise InvalidRequest(f"{field} is {calls!r:.100}; give a list of ToolCall, or of mappings as in OpenAI's API")
    result = []
    for index, call in enumerate(calls):
        where = f"{field}[{index}]"
        if isinstance(call, ToolCall):
            call = {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not {"name", "arguments"} <= set(function):
            raise InvalidRequest(
                f"{where} is {call!r:.100}; give a ToolCall or {{'id': ..., 'function': {{'name': ..., 'arguments': ...}}}}"
            )
        result.append(
            pb.ToolCall(
                id=text(f"{where}.id", call.get("id") or ""),
                name=text(f"{where}.function.name", function["name"]),
                arguments=text(f"{where}.function.arguments", function["arguments"]),
            )
        )
    return result
