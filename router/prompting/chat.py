"""A chat as its protobuf message has it, to what chat templates take."""

from __future__ import annotations

import json
from typing import Any

from twostep.errors import InvalidRequest
from twostep.rpc.v1 import inference_pb2

_MAX_MESSAGES = 4096
_MAX_TOOLS = 1024
_MAX_TOOL_CALLS = 1024
# JSON within JSON: deeper than any real tools, and far from where Python's own recursion ends.
_MAX_DEPTH = 64
# What a template may add to a message, about.
_MESSAGE_CHARS = 32


def check_chat(chat: inference_pb2.Chat) -> None:
    """Checks what is quickly seen. Which roles there are is the template's business; a message without any is refused. Raises
    InvalidRequest."""
    if not chat.messages:
        raise InvalidRequest("chat.messages is empty; send at least one message with role and content")
    if len(chat.messages) > _MAX_MESSAGES:
        raise InvalidRequest(f"chat.messages has {len(chat.messages)} entries; send at most {_MAX_MESSAGES}")
    if len(chat.tools) > _MAX_TOOLS:
        raise InvalidRequest(f"chat.tools has {len(chat.tools)} entries; send at most {_MAX_TOOLS}")
    for i, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequest(f'chat.messages[{i}].role is empty; say "system", "user", "assistant" or "tool"')
        if len(message.tool_calls) > _MAX_TOOL_CALLS:
            raise InvalidRequest(f"chat.messages[{i}].tool_calls has {len(message.tool_calls)} entries; send at most {_MAX_TOOL_CALLS}")


def continued_content(chat: inference_pb2.Chat) -> str | None:
    """Returns the beginning of the answer; None: it begins anew."""
    return chat.messages[-1].content if chat.continue_final_message else None


def num_content_chars(chat: inference_pb2.Chat) -> int:
    """Counts what any template writes out."""
    return sum(len(message.content) for message in chat.messages)


def num_chars(chat: inference_pb2.Chat) -> int:
    """Returns about how many characters there are to read, render and tokenize."""
    num = len(chat.template_kwargs) + sum(len(tool) for tool in chat.tools)
    for message in chat.messages:
        num += len(message.role) + len(message.content) + len(message.reasoning) + _MESSAGE_CHARS
        num += sum(len(call.arguments) + len(call.name) + _MESSAGE_CHARS for call in message.tool_calls)
    return num


def conversation_of(chat: inference_pb2.Chat) -> dict[str, Any]:
    """Converts a chat that passed `check_chat` to what ChatTemplate.render takes: plain data, as transformers gives it to templates. Takes
    time in proportion to `num_chars`. Raises InvalidRequest for what is not JSON."""
    variables = _json(chat.template_kwargs, "chat.template_kwargs") if chat.template_kwargs else {}
    if not isinstance(variables, dict):
        raise InvalidRequest("chat.template_kwargs is not a JSON object; send {} with the chat template's variables by name")
    return {
        "messages": [_message(message) for message in chat.messages],
        "tools": [read_tool(i, tool) for i, tool in enumerate(chat.tools)] or None,
        "variables": variables,
        "continue_final_message": chat.continue_final_message,
    }


def _message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    """Templates ask which keys there are, so there is none without a value; but there always is a content."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        # Templates read one of these.
        plain |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.reasoning)
    return plain


def _tool_call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    """Templates write arguments out as JSON themselves: they are given an object wherever the model wrote one."""
    arguments: Any = {}
    if call.arguments:
        try:
            arguments = _json(call.arguments, "")
        except InvalidRequest:
            arguments = call.arguments
    plain: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **plain} if call.id else plain


def read_tool(index: int, text: str) -> Any:
    """Returns a tool that has a function with a name. Raises InvalidRequest."""
    where = f"chat.tools[{index}]"
    tool = _json(text, where)
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f'{where} is no tool; send {{"type": "function", "function": {{"name": ..., "parameters": {{...}}}}}}')
    return tool


def _json(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON ({error}); send a JSON object") from None
    if text.count("[") + text.count("{") > _MAX_DEPTH and _deeper(value, _MAX_DEPTH):
        raise InvalidRequest(f"{where} has objects or lists in each other to a depth beyond {_MAX_DEPTH}; make it flatter")
    return value


def _deeper(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return depth == 0 or any(_deeper(each, depth - 1) for each in value)
