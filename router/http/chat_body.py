"""The body of POST /v1/chat/completions, and what it comes to as a request."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, JsonValue, WithJsonSchema

from router.http.errors import HttpError
from router.http.fields import MAX_TOKENS, Body, CommonBody, JsonObject, Refused, packed
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.sampling_params import MAX_LOGPROBS

_MAX_TOOLS = 1024
_MAX_TOOL_CALLS = 1024
_MAX_MESSAGES = 4096
# Of one message, and documents of a chat.
_MAX_PARTS = 4096


class ContentPart(Body):
    type: Annotated[str, WithJsonSchema({"type": "string", "enum": ["text", "refusal"]})]
    """Others are refused: models here read text."""
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Body):
    name: str = Field(min_length=1)
    arguments: str = ""
    """A JSON object."""


class ToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[ContentPart], Field(max_length=_MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=_MAX_TOOL_CALLS, fail_fast=True)
    """Of an assistant."""
    tool_call_id: str | None = None
    """Of a tool."""
    reasoning_content: str | None = None
    """Of an assistant: what it thought before."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""


class FunctionSpec(Body):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    """A JSON Schema."""
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionSpec


class ToolText(NamedTuple):
    """`text`: the whole tool, as JSON."""

    name: str
    strict: bool
    text: str

    def parameters(self) -> dict[str, Any] | None:
        given: dict[str, Any] | None = json.loads(self.text)["function"].get("parameters")
        return given


def _tool_texts(tools: list[Tool]) -> list[ToolText]:
    return [ToolText(tool.function.name, tool.function.strict is True, json.dumps(tool.model_dump(exclude_unset=True))) for tool in tools]


def _messages(messages: list[Message]) -> bytes:
    return pb.Chat(messages=[_message(i, message) for i, message in enumerate(messages)]).SerializeToString()


class NamedFunction(Body):
    name: str = Field(min_length=1)


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatPrompt(Body):
    """The part of a chat that becomes the prompt; /tokenize takes it too."""

    model: str = ""
    messages: Annotated[bytes, packed(_messages, Annotated[list[Message], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)])]
    tools: Annotated[list[ToolText], packed(_tool_texts, Annotated[list[Tool], Field(max_length=_MAX_TOOLS, fail_fast=True)])] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The last message is the beginning of the answer; `add_generation_prompt` must be false then."""
    chat_template_kwargs: JsonObject | None = None
    """Further variables of the model's chat template."""

    def chat(self, *extra: str) -> pb.Chat:
        """`extra`: further variables of the template, in JSON objects. Raises HttpError 400."""
        if self.continue_final_message and self.add_generation_prompt:
            raise HttpError(
                400, "continue_final_message and add_generation_prompt exclude each other; set one of them", param="continue_final_message"
            )
        variables = [*extra, self.chat_template_kwargs or "{}"]
        if self.add_generation_prompt is not None and not self.continue_final_message:
            variables.append(json.dumps({"add_generation_prompt": self.add_generation_prompt}))
        # Of two members of the same name the later one counts.
        members = ", ".join(each[1:-1] for each in variables if each != "{}")
        chat = pb.Chat.FromString(self.messages)
        chat.tools.extend(tool.text for tool in self.tools or ())
        chat.template_kwargs = f"{{{members}}}" if members else ""
        chat.continue_final_message = bool(self.continue_final_message)
        return chat


class ChatBody(CommonBody, ChatPrompt):
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=32)
    """Goes to the chat template, for models that know it."""
    include_reasoning: bool | None = None
    """false: what the model thought is left out of the answer."""
    documents: (
        Annotated[str, packed(json.dumps, Annotated[list[dict[str, JsonValue]], Field(max_length=_MAX_PARTS, fail_fast=True)])] | None
    ) = None
    """Go to the chat template."""

    functions: Annotated[Any, Refused("use `tools`", unless=[])] = None
    function_call: Annotated[Any, Refused("use `tool_choice`", unless="none")] = None
    audio: Annotated[Any, Refused("models here write text", unless={})] = None
    modalities: Annotated[Any, Refused("models here write text", unless=["text"])] = None
    prediction: Annotated[Any, Refused("leave it out", unless={})] = None
    web_search_options: Annotated[Any, Refused("the router looks nothing up; leave it out", unless={})] = None
    chat_template: Annotated[Any, Refused("templates are not taken from clients; the model's own is used", unless="")] = None
    add_special_tokens: Annotated[Any, Refused("the chat template writes them", unless=False)] = None
    echo: Annotated[Any, Refused("use continue_final_message", unless=False)] = None
    best_of: Annotated[Any, Refused("use `n`", unless=1)] = None
    mm_processor_kwargs: Annotated[Any, Refused("models here read text", unless={})] = None

    @property
    def limit_field(self) -> str | None:
        return super().limit_field if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Raises HttpError 400: top_logprobs without logprobs."""
        if not self.logprobs:
            if self.top_logprobs:
                raise HttpError(400, "top_logprobs needs logprobs to be true; set it", param="top_logprobs")
            return None
        return self.top_logprobs or 0

    def prompt(self) -> pb.Chat:
        """Raises HttpError 400."""
        extra = []
        if self.reasoning_effort is not None:
            extra.append(json.dumps({"reasoning_effort": self.reasoning_effort}))
        if self.documents is not None:
            extra.append(f'{{"documents": {self.documents}}}')
        return self.chat(*extra)


def adapt_roles(chat: pb.Chat, template: str | None) -> None:
    """Newer clients say "developer" for "system", which few templates know. `template`: the chat template's source."""
    if "developer" not in (template or ""):
        for message in chat.messages:
            if message.role == "developer":
                message.role = "system"


def _message(index: int, message: Message) -> pb.ChatMessage:
    if message.role == "function":
        raise HttpError(400, 'the role "function" is not supported; use "tool", and `tools`', param=f"messages[{index}].role")
    calls = [pb.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments) for call in message.tool_calls or ()]
    return pb.ChatMessage(
        role=message.role,
        content=_text(index, message.content),
        name=message.name or "",
        tool_calls=calls,
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )


def _text(index: int, content: str | list[ContentPart] | None) -> str:
    """Parts are lines, as vLLM has them for templates that take strings."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal") or text is None:
            raise HttpError(
                400,
                f'messages[{index}].content[{i}] is of type "{part.type[:40]}"; send {{"type": "text", "text": ...}}',
                param=f"messages[{index}].content[{i}].type",
            )
        texts.append(text)
    return "\n".join(texts)
