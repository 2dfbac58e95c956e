"""The body of POST /v1/responses, read as that of a chat: each field by its name here, and as a chat has it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from router.http.errors import HttpError
from router.http.request_bodies import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOKENS,
    MAX_TOOLS,
    Body,
    ChatBody,
    FunctionSpec,
    JsonFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    NamedFunction,
    NamedTool,
    RegexFormat,
    ResponseFormat,
    TextFormat,
    Unsupported,
    Whole,
    packed,
    tool_text,
)
from router.prompting.tool_use import ToolText
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.sampling_params import MAX_LOGPROBS

_LOGPROBS = "message.output_text.logprobs"


class ItemContentPart(Body):
    type: str = Field(max_length=64)
    """`input_text`, `output_text`, `refusal`, `reasoning_text` or `summary_text`; others are refused: models here read text."""
    text: str | None = None
    refusal: str | None = None


ContentParts = Annotated[list[ItemContentPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class Item(Body):
    """One of the conversation so far: a message, a call of a tool, its output, or reasoning that an answer had."""

    type: str = Field(default="message", max_length=64)
    role: str = Field(default="", max_length=64)
    content: str | ContentParts | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | ContentParts | None = None
    summary: ContentParts | None = None


def _messages(given: str | list[Item]) -> bytes:
    """Returns the items as messages of a chat. An assistant's reasoning, text and calls that follow each other are one message of a
    chat."""
    if isinstance(given, str):
        return pb.Chat(messages=[pb.ChatMessage(role="user", content=given)]).SerializeToString()
    messages: list[pb.ChatMessage] = []
    turn: pb.ChatMessage | None = None  # the assistant's, where it goes on
    for i, item in enumerate(given):
        path = f"input[{i}]"
        match item.type:
            case "message" if item.role and item.role != "assistant":
                messages.append(pb.ChatMessage(role=item.role, content=_text(f"{path}.content", item.content)))
                turn = None
            case "function_call_output":
                output = _text(f"{path}.output", item.output)
                messages.append(pb.ChatMessage(role="tool", content=output, tool_call_id=item.call_id))
                turn = None
            case "message" | "function_call" | "reasoning":
                if item.type == "message" and not item.role:
                    raise HttpError(400, f'{path}.role is missing; say "user", "assistant", "system" or "developer"', param=f"{path}.role")
                over = turn is None or (item.type != "function_call" and (turn.content or turn.tool_calls))
                if turn is None or over or (item.type == "reasoning" and turn.reasoning):
                    turn = pb.ChatMessage(role="assistant")
                    messages.append(turn)
                if item.type == "message":
                    turn.content = _text(f"{path}.content", item.content)
                elif item.type == "reasoning":
                    turn.reasoning = _text(f"{path}.content", item.content) or _text(f"{path}.summary", item.summary)
                elif not item.name:
                    raise HttpError(400, f"{path}.name is missing; say which function was called", param=f"{path}.name")
                else:
                    turn.tool_calls.add(id=item.call_id, name=item.name, arguments=item.arguments)
            case kind:
                raise HttpError(
                    400,
                    f"{path} is of type {kind!r}; send messages, function_call, function_call_output and reasoning items: nothing is kept "
                    "here that could be referred to, and models here read text",
                    param=f"{path}.type",
                    code="unsupported_parameter",
                )
    return pb.Chat(messages=messages).SerializeToString()


_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _text(path: str, content: str | list[ItemContentPart] | None) -> str:
    """Parts are lines, as in chats."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text if part.type in _PARTS else None
        if text is None:
            message = f'{path}[{i}] is of type {part.type!r}; models here read text: send {{"type": "input_text", "text": ...}}'
            raise HttpError(400, message, param=f"{path}[{i}].type", code="unsupported_parameter")
        texts.append(text)
    return "\n".join(texts)


class FlatTool(Body):
    type: str = Field(max_length=64)
    """`function`; others are refused: no tools are run here."""
    name: str = Field(default="", max_length=64)
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    """A JSON Schema."""
    strict: bool | None = None


def _tools(tools: list[FlatTool]) -> list[ToolText]:
    for i, tool in enumerate(tools):
        if tool.type != "function":
            message = f"tools[{i}] is of type {tool.type!r}; no tools are run here: send functions, and run them where you are"
            raise HttpError(400, message, param=f"tools[{i}].type", code="unsupported_parameter")
        if not tool.name:
            raise HttpError(400, f"tools[{i}].name is missing; name the function", param=f"tools[{i}].name")
    return [tool_text(FunctionSpec.model_construct(**tool.model_dump(exclude_unset=True, exclude={"type"}))) for tool in tools]


class FunctionChoice(Body):
    type: Literal["function"]
    name: str = Field(min_length=1)


def _choice(choice: str | FunctionChoice) -> str | NamedTool:
    return choice if isinstance(choice, str) else NamedTool(type="function", function=NamedFunction(name=choice.name))


class FlatJsonFormat(JsonSchemaFormat):
    type: Literal["json_schema"]


class TextConfig(Body):
    format: Annotated[TextFormat | JsonObjectFormat | FlatJsonFormat | RegexFormat | LarkFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = None
    """Ignored."""


def _format(text: TextConfig) -> ResponseFormat | None:
    if isinstance(text.format, FlatJsonFormat):
        return JsonFormat(type="json_schema", json_schema=text.format)
    return text.format


class Reasoning(Body):
    effort: str | None = Field(default=None, max_length=32)
    """Goes to the chat template, for models that know it."""
    summary: str | None = None
    """Ignored: reasoning is told as it is."""


def _metadata(given: dict[str, Any]) -> str:
    if len(given) > 16 or any(not isinstance(value, str) or len(value) > 512 or len(name) > 64 for name, value in given.items()):
        message = "metadata is not up to 16 texts of 512 characters by names of 64; shorten it, or leave it out"
        raise HttpError(400, message, param="metadata")
    return json.dumps(given)


class ResponsesBody(ChatBody):
    messages: Annotated[
        bytes, packed(_messages, str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)])
    ] = Field(alias="input")
    instructions: str | None = None
    """A system message before all others."""
    max_tokens: Annotated[int, Whole(1, MAX_TOKENS)] | None = Field(default=None, alias="max_output_tokens")
    tools: Annotated[list[ToolText], packed(_tools, Annotated[list[FlatTool], Field(max_length=MAX_TOOLS, fail_fast=True)])] | None = None
    tool_choice: (
        Annotated[Literal["none", "auto", "required"] | NamedTool, packed(_choice, Literal["none", "auto", "required"] | FunctionChoice)]
        | None
    ) = None
    response_format: Annotated[ResponseFormat | None, packed(_format, TextConfig)] | None = Field(default=None, alias="text")
    reasoning_effort: Annotated[str | None, packed(lambda reasoning: reasoning.effort, Reasoning)] | None = Field(
        default=None, alias="reasoning"
    )
    logprobs: (
        Annotated[bool | None, packed(lambda include: _LOGPROBS in include, Annotated[list[str], Field(max_length=64, fail_fast=True)])]
        | None
    ) = Field(default=None, alias="include")
    """`message.output_text.logprobs`; others change nothing here."""
    top_logprobs: Annotated[int, Whole(0, MAX_LOGPROBS)] | None = None
    metadata: Annotated[str, packed(_metadata, dict[str, JsonValue])] | None = None
    """Up to 16 texts by name; they are told in the answer."""

    store: Annotated[Any, Unsupported("answers are not kept: set store to false, and send the items so far as `input`", unless=False)] = (
        None
    )
    previous_response_id: Annotated[Any, Unsupported("answers are not kept: send the items so far as `input`")] = None
    conversation: Annotated[Any, Unsupported("conversations are not kept: send the items so far as `input`")] = None
    background: Annotated[Any, Unsupported("leave it out, and stream; or send it to /v1/batches as a chat", unless=False)] = None
    prompt_: Annotated[Any, Unsupported("templates are not kept: send `instructions` and `input`")] = Field(default=None, alias="prompt")
    n: Annotated[Any, Unsupported("send the request again for another answer", unless=1)] = None
    max_tokens_: Annotated[Any, Unsupported("use max_output_tokens")] = Field(default=None, alias="max_tokens")
    max_completion_tokens: Annotated[Any, Unsupported("use max_output_tokens")] = None
    response_format_: Annotated[Any, Unsupported("use text.format")] = Field(default=None, alias="response_format")
    return_token_ids: Annotated[Any, Unsupported("use /v1/chat/completions for them", unless=False)] = None
    prompt_logprobs: Annotated[Any, Unsupported("use /v1/chat/completions for them")] = None

    @property
    def limit_field(self) -> str | None:
        return None if self.max_tokens is None else "max_output_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None

    @property
    def opening(self) -> bytes:
        if not self.instructions:
            return b""
        return pb.Chat(messages=[pb.ChatMessage(role="system", content=self.instructions)]).SerializeToString()
