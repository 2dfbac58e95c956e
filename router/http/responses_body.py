"""The body of POST /v1/responses, read as that of a chat: each field by its name here, and as a chat has it. Its messages are fragments:
see router/http/response_items.py."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from router.http.body import Body, Unsupported, Whole, packed
from router.http.errors import HttpError
from router.http.offered_tools import (
    MAX_TOOL_NAME,
    Choice,
    Offered,
    allowed_choice,
    flat_name,
    hosted_choice,
    is_hosted,
    unknown_tool,
)
from router.http.request_bodies import (
    MAX_MESSAGES,
    MAX_TOKENS,
    MAX_TOOLS,
    ChatBody,
    FunctionSpec,
    JsonFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    Reasoning,
    RegexFormat,
    ResponseFormat,
    TextFormat,
    ToolMode,
    tool_text,
)
from router.http.response_items import Item, fragments
from router.prompting.tool_use import ToolText
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.sampling_params import MAX_LOGPROBS

_LOGPROBS = "message.output_text.logprobs"


def _messages(given: str | list[Item]) -> bytes:
    """Returns the items as fragments of a chat, serialized."""
    return pb.Chat(messages=list(fragments(given))).SerializeToString()


class FlatTool(Body):
    type: str = Field(max_length=64)
    """`function`, or a `namespace` of functions; tools that others would run, as `web_search`, are left out."""
    name: str = Field(default="", max_length=MAX_TOOL_NAME)
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    """A JSON Schema."""
    strict: bool | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """A namespace's."""


def _offered(tools: list[FlatTool]) -> Offered:
    functions, omitted = list[ToolText](), list[str]()
    _offer("tools", tools, "", functions, omitted)
    if len(functions) > MAX_TOOLS:
        raise HttpError(400, f"tools has {len(functions)} functions; send at most {MAX_TOOLS}", param="tools")
    return Offered(tuple(functions), tuple(omitted))


def _offer(path: str, tools: list[FlatTool], namespace: str, functions: list[ToolText], omitted: list[str]) -> None:
    for i, tool in enumerate(tools):
        where = f"{path}[{i}]"
        is_namespace = tool.type == "namespace" and not namespace
        if (is_namespace or tool.type == "function") and not tool.name:
            raise HttpError(400, f"{where}.name is missing; name the {tool.type}", param=f"{where}.name")
        if is_namespace:
            _offer(f"{where}.tools", tool.tools or [], tool.name, functions, omitted)
        elif tool.type == "function":
            fields = tool.model_dump(exclude_unset=True, exclude={"type", "tools"}) | {"name": flat_name(namespace, tool.name)}
            functions.append(tool_text(FunctionSpec.model_construct(**fields), namespace))
        elif is_hosted(tool.type):
            omitted.append(tool.type)
        else:
            raise unknown_tool(where, tool.type, "no tools are run here: send functions, and run them where you are")


class AllowedFunction(Body):
    type: str = Field(max_length=64)
    name: str | None = None
    namespace: str | None = None


class FlatToolChoice(AllowedFunction):
    """`type`: `function` or `allowed_tools`."""

    mode: str | None = Field(default=None, max_length=64)
    """Returns the mode of `allowed_tools`: `auto` or `required`."""
    tools: Annotated[list[AllowedFunction], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


def _choice(given: str | FlatToolChoice) -> Choice:
    if isinstance(given, str):
        return Choice(given)
    if given.type == "allowed_tools":
        return allowed_choice(given.mode, [_flat(tool) if tool.type == "function" else None for tool in given.tools or ()])
    if given.type != "function":
        raise hosted_choice(given.type)
    if not given.name:
        raise HttpError(400, "tool_choice.name is missing; name the function", param="tool_choice.name")
    return Choice("required", _flat(given))


def _flat(tool: AllowedFunction) -> str:
    return flat_name(tool.namespace or "", tool.name or "")


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
    tools: Annotated[Offered, packed(_offered, Annotated[list[FlatTool], Field(max_length=MAX_TOOLS, fail_fast=True)])] | None = None
    tool_choice: Annotated[Choice, packed(_choice, ToolMode | FlatToolChoice)] | None = None
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
    store: bool | None = None
    """false: nothing of the answer is kept."""
    previous_response_id: str | None = Field(default=None, max_length=256)
    """The conversation goes on after this answer, which was stored."""

    conversation: Annotated[Any, Unsupported("conversations are not kept: send the items so far as `input`")] = None
    background: Annotated[Any, Unsupported("leave it out, and stream; or send it to /v1/batches as a chat", unless=False)] = None
    prompt_: Annotated[Any, Unsupported("templates are not kept: send `instructions` and `input`")] = Field(default=None, alias="prompt")
    n: Annotated[Any, Unsupported("send the request again for another answer", unless=1)] = None
    max_tokens_: Annotated[Any, Unsupported("use max_output_tokens")] = Field(default=None, alias="max_tokens")
    max_completion_tokens: Annotated[Any, Unsupported("use max_output_tokens")] = None
    response_format_: Annotated[Any, Unsupported("use text.format")] = Field(default=None, alias="response_format")
    reasoning_effort_: Annotated[Any, Unsupported("use reasoning.effort")] = Field(default=None, alias="reasoning_effort")
    logprobs_: Annotated[Any, Unsupported("use include, with message.output_text.logprobs", unless=False)] = Field(
        default=None, alias="logprobs"
    )
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
