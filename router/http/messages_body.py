"""The body of POST /v1/messages, read as that of a chat: each field by its name here, and as a chat has it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from router.http.body import Body, Unsupported, Whole, packed
from router.http.errors import HttpError
from router.http.offered_tools import MAX_TOOL_NAME, Choice, Offered, is_hosted, unknown_tool
from router.http.request_bodies import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOKENS,
    MAX_TOOLS,
    ChatBody,
    FunctionSpec,
    JsonFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StopString,
    tool_text,
)
from router.prompting.tool_use import ToolText
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.sampling_params import MAX_STOP_STRINGS


class DocumentSource(Body):
    type: str = Field(max_length=64)
    """`text` or `content`; others are refused: models here read text."""
    data: str | None = None
    content: str | Annotated[list[ContentBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


class ContentBlock(Body):
    type: str = Field(max_length=64)
    """`text`, `document`, `thinking`, `tool_use` or `tool_result`; others are refused: models here read text."""
    text: str | None = None
    source: DocumentSource | None = None
    """A document's."""
    title: str | None = None
    context: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, JsonValue] | None = None
    tool_use_id: str = ""
    content: str | Annotated[list[ContentBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    is_error: bool | None = None
    """Ignored: the result says it."""


Blocks = Annotated[list[ContentBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


def _messages(given: list[AnthropicMessage]) -> bytes:
    """Returns the messages as those of a chat, serialized. A message is one of a chat; results of tools become messages of their own."""
    messages: list[pb.ChatMessage] = []
    for i, message in enumerate(given):
        path = f"messages[{i}].content"
        if isinstance(message.content, str):
            messages.append(pb.ChatMessage(role=message.role, content=message.content))
            continue
        own, texts = pb.ChatMessage(role=message.role), list[str]()
        for j, block in enumerate(message.content):
            if block.type == "tool_result":
                result = _text(f"{path}[{j}].content", block.content)
                messages.append(pb.ChatMessage(role="tool", content=result, tool_call_id=block.tool_use_id))
            elif block.type == "tool_use":
                if not block.name:
                    raise HttpError(400, f"{path}[{j}].name is missing; say which tool was used", param=f"{path}[{j}].name")
                own.tool_calls.add(id=block.id, name=block.name, arguments=json.dumps(block.input or {}))
            elif block.type == "thinking":
                own.reasoning += block.thinking or ""
            elif block.type != "redacted_thinking":  # which nobody here can read
                texts.append(_text_of(f"{path}[{j}]", block))
        own.content = "\n".join(texts)
        if texts or own.tool_calls or own.reasoning or not message.content:
            messages.append(own)
    return pb.Chat(messages=messages).SerializeToString()


def _text(path: str, content: str | list[ContentBlock] | None) -> str:
    """Returns the text of blocks. Blocks are lines, as the parts of a chat's message are."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text_of(f"{path}[{i}]", block) for i, block in enumerate(content))


def _text_of(path: str, block: ContentBlock) -> str:
    if block.type == "document":
        return _document(path, block)
    if block.type != "text" or block.text is None:
        message = f'{path} is of type {block.type!r}; models here read text: send {{"type": "text", "text": ...}}'
        raise HttpError(400, message, param=f"{path}.type", code="unsupported_parameter")
    return block.text


def _document(path: str, block: ContentBlock) -> str:
    """Returns a document's title, what the client says about it, and its text: a line each."""
    source = block.source
    if source is not None and source.type == "text" and source.data is not None:
        text = source.data
    elif source is not None and source.type == "content":
        text = _text(f"{path}.source.content", source.content)
    else:
        kind = "missing" if source is None else f"of type {source.type[:64]!r}"
        message = f'{path}.source is {kind}; models here read text: send {{"type": "text", "media_type": "text/plain", "data": ...}}'
        raise HttpError(400, message, param=f"{path}.source", code="unsupported_parameter")
    return "\n".join(part for part in (block.title, block.context, text) if part)


def _system(given: str | list[ContentBlock] | None) -> bytes:
    text = _text("system", given)
    return pb.Chat(messages=[pb.ChatMessage(role="system", content=text)]).SerializeToString() if text else b""


class AnthropicTool(Body):
    type: str | None = Field(default=None, max_length=64)
    """`custom`; tools of Anthropic's own, as `web_search_20250305`, are left out: no tools are run here."""
    name: str = Field(default="", max_length=MAX_TOOL_NAME)
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None
    """A JSON Schema."""
    strict: bool | None = None


def _offered(tools: list[AnthropicTool]) -> Offered:
    functions, omitted = list[ToolText](), list[str]()
    for i, tool in enumerate(tools):
        if tool.type in (None, "custom"):
            if not tool.name:
                raise HttpError(400, f"tools[{i}].name is missing; name the tool", param=f"tools[{i}].name")
            functions.append(tool_text(_function(tool.model_dump(exclude_unset=True))))
        elif is_hosted(tool.type):
            omitted.append(tool.type)
        else:
            raise unknown_tool(f"tools[{i}]", tool.type, "send tools of your own with input_schema, and run them where you are")
    return Offered(tuple(functions), tuple(omitted))


def _function(given: dict[str, Any]) -> FunctionSpec:
    return FunctionSpec.model_construct(**{_FUNCTION.get(name, name): value for name, value in given.items() if name != "type"})


_FUNCTION = {"input_schema": "parameters"}


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def _choice(choice: ToolChoice) -> Choice:
    if choice.type == "tool":
        if not choice.name:
            raise HttpError(400, "tool_choice.name is missing; name the tool", param="tool_choice.name")
        return Choice("required", choice.name)
    return Choice({"any": "required"}.get(choice.type, choice.type))


def _parallel(choice: ToolChoice) -> bool | None:
    return None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use


class AnthropicFormat(JsonSchemaFormat):
    type: Literal["json_schema"]


class OutputConfig(Body):
    effort: str | None = Field(default=None, max_length=32)
    """Goes to the chat template as `reasoning_effort`, for models that know it."""
    format: AnthropicFormat | None = None


def _format(config: OutputConfig) -> ResponseFormat | None:
    return None if config.format is None else JsonFormat(type="json_schema", json_schema=config.format)


class MessagesBody(ChatBody):
    messages: Annotated[
        bytes, packed(_messages, Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)])
    ]
    """The answer goes on with the last message if that is the assistant's."""
    system: Annotated[bytes, packed(_system, str | Blocks | None)] = b""
    max_tokens: Annotated[int, Whole(1, MAX_TOKENS)]
    stop: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = Field(
        default=None, alias="stop_sequences"
    )
    tools: Annotated[Offered, packed(_offered, Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)])] | None = None
    tool_choice: Annotated[Choice, packed(_choice, ToolChoice)] | None = None
    parallel_tool_calls: Annotated[bool | None, packed(_parallel, ToolChoice)] | None = Field(default=None, alias="tool_choice")
    response_format: Annotated[ResponseFormat | None, packed(_format, OutputConfig)] | None = Field(default=None, alias="output_config")
    reasoning_effort: Annotated[str | None, packed(lambda config: config.effort, OutputConfig)] | None = Field(
        default=None, alias="output_config"
    )
    service_tier: (
        Annotated[
            Literal["auto", "default", "flex", "priority"],
            packed(lambda tier: {"standard_only": "default"}.get(tier, tier), Literal["auto", "standard_only", "flex", "priority"]),
        ]
        | None
    ) = None

    stop_: Annotated[Any, Unsupported("use stop_sequences")] = Field(default=None, alias="stop")
    response_format_: Annotated[Any, Unsupported("use output_config.format")] = Field(default=None, alias="response_format")
    reasoning_effort_: Annotated[Any, Unsupported("use output_config.effort")] = Field(default=None, alias="reasoning_effort")
    parallel_tool_calls_: Annotated[Any, Unsupported("use tool_choice.disable_parallel_tool_use", unless=True)] = Field(
        default=None, alias="parallel_tool_calls"
    )
    container: Annotated[Any, Unsupported("no code is run here; leave it out")] = None
    mcp_servers: Annotated[Any, Unsupported("the router calls no servers; leave it out", unless=[])] = None
    n: Annotated[Any, Unsupported("send the request again for another answer", unless=1)] = None
    logprobs: Annotated[Any, Unsupported("use /v1/chat/completions for them", unless=False)] = None
    return_token_ids: Annotated[Any, Unsupported("use /v1/chat/completions for them", unless=False)] = None
    prompt_logprobs: Annotated[Any, Unsupported("use /v1/chat/completions for them")] = None

    @property
    def opening(self) -> bytes:
        return self.system

    def prompt(self) -> pb.Chat:
        chat = super().prompt()
        last = chat.messages[-1] if chat.messages else pb.ChatMessage()
        chat.continue_final_message = last.role == "assistant" and not last.tool_calls
        return chat


class CountBody(MessagesBody):
    """Nothing is generated: fields that say how change nothing."""

    max_tokens: Annotated[int, packed(lambda most: most or 1, Annotated[int, Whole(1, MAX_TOKENS)] | None)] = 1
