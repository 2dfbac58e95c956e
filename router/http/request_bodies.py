"""Bodies of requests. Their fields have OpenAI's names, then vLLM's, and this system has some of its own.

Unknown fields are ignored, as vLLM does, so that clients of newer APIs keep working. What is known, changes the answer, and is not done
here is refused with its name in `param` (router/http/foreign_fields.py).
"""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    Field,
    JsonValue,
    PlainValidator,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from router.http.body import Body, Unsupported, Whole, packed, without_point, wrong_value
from router.http.errors import HttpError
from router.http.foreign_fields import ForeignChatFields, ForeignEmbeddingFields, ForeignFields
from router.http.offered_tools import MAX_TOOL_NAME, Choice, Offered, allowed_choice, hosted_choice, is_hosted, unknown_tool
from router.prompting.tool_use import ToolText, ToolUse
from router.serving.answers import MAX_CHOICES
from twostep.errors import InvalidRequest
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from twostep.text.structural_tag import structural_tag_grammar
from twostep.text.tool_formats.format import ToolCallFormat

MAX_TOKENS = (1 << 31) - 1
_MAX_TIMEOUT_S = 86_400.0
_MAX_TAGS = 1024

MAX_TOKEN_ID = (1 << 31) - 1
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_STRING_CHARS)]


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def ids_of(values: list[int]) -> IdArray:
    return array("i", values)


if TYPE_CHECKING:
    IdArray = array[int]
else:
    IdArray = array
JsonObject = Annotated[str, packed(_text_of, dict[str, JsonValue])]
ModelName = Annotated[str, packed(lambda name: name or "", str | None)]
JsonSchema = Annotated[str, packed(_text_of, dict[str, JsonValue] | str)]


TokenId = Annotated[int, Whole(0, MAX_TOKEN_ID)]


class JsonSchemaFormat(Body):
    name: str = Field(default="schema", max_length=64)
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    """A JSON Schema; the answer is a document that it describes."""
    strict: bool | None = None
    """Output is always held to the schema; false: its objects may have other properties too, as JSON Schema has it."""


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


class RegexFormat(Body):
    type: Literal["regex"]
    pattern: str = Field(min_length=1)
    """The whole answer matches it."""


class LarkFormat(Body):
    type: Literal["grammar"]
    grammar: str = Field(min_length=1)
    """A context-free grammar in llguidance's dialect of Lark."""


class StructuralTag(Body):
    """Free text with structures in it: `structures` and `triggers`, or `format`."""

    structures: Annotated[list[dict[str, JsonValue]], Field(max_length=_MAX_TAGS, fail_fast=True)] | None = None
    triggers: Annotated[list[str], Field(max_length=_MAX_TAGS, fail_fast=True)] | None = None
    format: dict[str, JsonValue] | None = None


class StructuralTagFormat(StructuralTag):
    type: Literal["structural_tag"]


def _lark_of(tag: StructuralTag) -> str:
    try:
        return structural_tag_grammar(tag.model_dump())
    except InvalidRequest as error:
        raise PydanticCustomError("structural_tag", "{why}", {"why": error.message}) from error


def _in_grammar(given: Any) -> Any:
    return LarkFormat(type="grammar", grammar=_lark_of(given)) if isinstance(given, StructuralTagFormat) else given


ResponseFormat = TextFormat | JsonObjectFormat | JsonFormat | RegexFormat | LarkFormat
AnyFormat = Annotated[ResponseFormat, packed(_in_grammar, Annotated[ResponseFormat | StructuralTagFormat, Field(discriminator="type")])]


def _structural_tag(text: str) -> str:
    try:
        return _lark_of(StructuralTag.model_validate_json(text))
    except ValidationError as error:
        raise PydanticCustomError("structural_tag", "{why}", {"why": error.errors()[0]["msg"]}) from None


class StructuredOutputs(Body):
    """vLLM's way to say it; exactly one of them."""

    json_: JsonSchema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1, max_length=1024, fail_fast=True)
    grammar: str | None = None
    disable_additional_properties: bool | None = None
    """false: objects of a schema may have other properties too, as JSON Schema has it."""
    structural_tag: Annotated[str, packed(_structural_tag, JsonSchema)] | None = None
    """An object as of the response format of that name, or its JSON."""


class StreamOptions(Body):
    include_usage: bool | None = None
    """One more chunk at the end, with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""
    include_obfuscation: bool | None = None
    """Ignored: nothing is added to chunks."""


class RequestBody(Body):
    """Whatever the model computes."""

    model: ModelName = ""
    """Empty or null: the only model that is served."""
    user: str | None = None
    """Ignored."""
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    """Before the header `x-request-id`."""
    cache_salt: str | None = Field(default=None, max_length=256)
    """Cached prefixes are shared only among requests of the same salt."""
    priority: Annotated[int, Whole(-(1 << 31), (1 << 31) - 1)] | None = None
    """As vLLM's: below 0 is the class `interactive`, above 0 `batch`."""
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """`flex` is the class `batch`, `priority` is `interactive`."""
    request_class: Literal["interactive", "standard", "batch"] | None = None
    """Says how urgent it is, as the header `x-twostep-class` does. Goes before `service_tier` and `priority`."""
    ttft_ms: float | None = Field(default=None, gt=0, le=3_600_000)
    """The first token, or the vector, is promised within so many milliseconds, or the request refused at once; header
    `x-twostep-ttft-ms`."""
    timeout: float | None = Field(default=None, gt=0, le=_MAX_TIMEOUT_S)
    """Seconds after which the request ends with 504; header `x-twostep-timeout-ms`."""


class CommonBody(RequestBody, ForeignFields):
    """Whatever generates text."""

    stream: bool | None = None
    """Server-sent events, one for each piece, then `[DONE]`."""
    stream_options: StreamOptions | None = None
    n: Annotated[int, Whole(1, MAX_CHOICES)] | None = None
    """Answers to each prompt. The i-th is the same for the same seed, whatever n."""
    seed: Annotated[int, Whole(-(1 << 63), (1 << 63) - 1)] | None = None
    """Holds for each prompt: equal ones get equal answers. Without one every answer to every prompt has its own, made of one that the
    router draws and tells in the header `x-twostep-seed`; a request with this header repeats them."""
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = Field(
        default=None, validation_alias=AliasChoices("stop", "stop_sequences")
    )
    """The text ends before the first of these."""
    temperature: float | None = Field(default=None, ge=0.0, le=100.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    max_tokens: Annotated[int, Whole(1, MAX_TOKENS)] | None = None

    top_k: Annotated[int, Whole(-1, 1 << 31)] | None = None
    """0 and -1 switch it off."""
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100.0)
    min_tokens: Annotated[int, Whole(0, MAX_TOKENS)] | None = None
    """No stop token and no stop string ends the answer before so many tokens."""
    ignore_eos: bool | None = None
    speculate: bool | None = None
    """false: no token of the answer is drafted, whatever the workers' `--speculative-config`."""
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)
    skip_special_tokens: bool | None = None
    """false: the text shows special tokens too."""
    return_tokens_as_token_ids: bool | None = None
    """Log probabilities name tokens as `token_id:17`."""
    return_token_ids: bool | None = None
    """`token_ids` of each choice, and `prompt_token_ids`."""

    response_format: AnyFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = Field(default=None, min_length=1)
    """As `structured_outputs.regex`."""
    json_schema: JsonSchema | None = None
    """As `structured_outputs.json`."""

    tpot_ms: float | None = Field(default=None, gt=0, le=3_600_000)
    """Each further token, on average; header `x-twostep-tpot-ms`."""
    gap_ms: float | None = Field(default=None, gt=0, le=3_600_000)
    """The longest time between two tokens; header `x-twostep-gap-ms`."""
    return_phases: bool | None = None
    """Asks how long each phase took, which `twostep` in the body or the last chunk tells; header `x-twostep-phases: 1`."""

    logit_bias: (
        dict[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)], Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]] | None
    ) = Field(default=None, max_length=MAX_LOGIT_BIASES)
    """By token id: added to the model's logits before penalties and all else."""
    prompt_logprobs: Annotated[int, Whole(0, MAX_LOGPROBS)] | None = None
    """Log probabilities of the prompt's tokens, and of so many likeliest in each place; all of the prompt is computed for them."""

    @property
    def limit_field(self) -> str | None:
        """The field that says how long an answer may be; None: the client has not said it."""
        return None if self.max_tokens is None else "max_tokens"

    @property
    def grammar_fields(self) -> tuple[str, ...]:
        """Returns the names of the fields that say which form the answer has."""
        names = ("response_format", "structured_outputs", "regex", "json_schema")
        return tuple(self.names()[name] for name in names if getattr(self, name) is not None)

    @property
    def num_echoed_logprobs(self) -> int | None:
        """Returns how many of the likeliest are told with the prompt's tokens, as if those were the answer's; None: they are not."""
        return None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


MAX_TOOLS = 1024
_MAX_TOOL_CALLS = 1024
MAX_MESSAGES = 4096
# Of one message, and documents of a chat.
MAX_PARTS = 4096


class ContentPart(Body):
    type: Annotated[str, WithJsonSchema({"type": "string", "enum": ["text", "refusal"]})]
    """Others are refused: models here read text."""
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Body):
    name: str = Field(min_length=1)
    arguments: str = ""
    """A JSON object."""


class ToolCallBody(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class MessageBody(Body):
    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = Field(default=None, max_length=_MAX_TOOL_CALLS, fail_fast=True)
    """Only an assistant has them."""
    tool_call_id: str | None = None
    """Only a tool has it."""
    reasoning_content: str | None = None
    """An assistant's: what it thought before."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""


class FunctionSpec(Body):
    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME)
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    """A JSON Schema."""
    strict: bool | None = None
    """true: arguments are held to it also where the model is free to call or not; false: objects may have other properties too."""


class Tool(Body):
    type: str = Field(max_length=64)
    """`function`; tools that others would run, as `custom`, are left out."""
    function: FunctionSpec | None = None


_TOOL_HEAD = '{"type": "function", "function": '


def tool_text(function: FunctionSpec, namespace: str = "") -> ToolText:
    text = _TOOL_HEAD + json.dumps(function.model_dump(exclude_unset=True)) + "}"
    return ToolText(function.name, function.strict, text, namespace)


def function_text(tool: ToolText) -> str:
    """Returns the function of a body's tool alone, as JSON."""
    return tool.text[len(_TOOL_HEAD) : -1]


def _offered(tools: list[Tool]) -> Offered:
    functions, omitted = list[ToolText](), list[str]()
    for i, tool in enumerate(tools):
        if tool.type == "function" and tool.function is None:
            raise HttpError(400, f"tools[{i}].function is missing; describe the function", param=f"tools[{i}].function")
        if tool.type == "function" and tool.function is not None:
            functions.append(tool_text(tool.function))
        elif is_hosted(tool.type):
            omitted.append(tool.type)
        else:
            raise unknown_tool(f"tools[{i}]", tool.type, 'send {"type": "function", "function": {"name": ..., "parameters": {...}}}')
    return Offered(tuple(functions), tuple(omitted))


def _messages(messages: list[MessageBody]) -> bytes:
    return pb.Chat(messages=[_message(i, message) for i, message in enumerate(messages)]).SerializeToString()


class NamedFunction(Body):
    name: str = Field(min_length=1)


class AllowedTool(Body):
    type: str = Field(max_length=64)
    function: NamedFunction | None = None


class AllowedTools(Body):
    mode: str = Field(max_length=64)
    """`auto` or `required`."""
    tools: list[AllowedTool] = Field(max_length=MAX_TOOLS, fail_fast=True)


class ChatToolChoice(Body):
    type: str = Field(max_length=64)
    """`function` or `allowed_tools`."""
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


def _choice(given: str | ChatToolChoice) -> Choice:
    match given:
        case str():
            return Choice(given)
        case ChatToolChoice(type="function", function=NamedFunction(name=name)):
            return Choice("required", name)
        case ChatToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=mode, tools=tools)):
            return allowed_choice(mode, [None if tool.function is None else tool.function.name for tool in tools])
        case ChatToolChoice(type="function" | "allowed_tools" as kind):
            field = f"tool_choice.{kind}"
            raise HttpError(400, f"{field} is missing; name what may be called", param=field)
        case _:
            raise hosted_choice(given.type)


ToolMode = Literal["none", "auto", "required"]


class Reasoning(Body):
    effort: str | None = Field(default=None, max_length=32)
    """Goes to the chat template as `reasoning_effort`, for models that know it; `none`: as `enabled` false."""
    enabled: bool | None = None
    """As `enable_thinking` of a chat."""
    exclude: bool | None = None
    """true: as `include_reasoning` false of a chat."""
    max_tokens: Annotated[Any, Unsupported("no budget is kept here; bound the whole answer")] = None
    summary: str | None = None
    """Accepted and ignored: reasoning is always returned in full."""


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    """Goes to the chat template, as `enable_thinking` and `thinking`."""
    budget_tokens: int | None = None
    """Ignored: models here think as long as they do."""
    display: str | None = None
    """`omitted`: the answer does not tell what the model thought."""


class ChatPrompt(Body):
    """The part of a chat that becomes the prompt; /tokenize takes it too."""

    model: ModelName = ""
    messages: Annotated[
        bytes, packed(_messages, Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)])
    ]
    tools: Annotated[Offered, packed(_offered, Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)])] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The last message is the beginning of the answer; `add_generation_prompt` must be false then."""
    chat_template_kwargs: JsonObject | None = None
    """Further variables of the model's chat template."""
    reasoning_effort: str | None = Field(default=None, max_length=32)
    """Goes to the chat template, for models that know it; `none`: as `enable_thinking` false."""
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = None
    """Goes to the chat template, as `enable_thinking` and `thinking`, for models that know it."""
    thinking: Thinking | None = None
    documents: (
        Annotated[str, packed(json.dumps, Annotated[list[dict[str, JsonValue]], Field(max_length=MAX_PARTS, fail_fast=True)])] | None
    ) = None
    """Go to the chat template."""
    chat_template: Annotated[Any, Unsupported("templates are not taken from clients; the model's own is used", unless="")] = None
    add_special_tokens: Annotated[Any, Unsupported("the chat template writes them", unless=False)] = None

    @property
    def offered(self) -> Offered:
        return self.tools or Offered()

    @property
    def opening(self) -> bytes:
        """A chat of the messages before `messages`, serialized: what follows is appended to it."""
        return b""

    def variables(self) -> list[str]:
        """Returns the template's variables that the fields give, in JSON objects."""
        extra = []
        effort, thinks = self.reasoning_effort, self.enable_thinking
        if self.reasoning is not None:
            effort = self.reasoning.effort if effort is None else effort
            thinks = self.reasoning.enabled if thinks is None else thinks
        if self.thinking is not None and thinks is None:
            thinks = self.thinking.type != "disabled"
        if effort == "none" and thinks is None:
            thinks = False
        if effort is not None:
            extra.append(json.dumps({"reasoning_effort": effort}))
        if thinks is not None:
            extra.append(json.dumps({"enable_thinking": thinks, "thinking": thinks}))
        if self.documents is not None:
            extra.append(f'{{"documents": {self.documents}}}')
        return extra

    def prompt(self) -> pb.Chat:
        """Raises HttpError 400."""
        if self.continue_final_message and self.add_generation_prompt:
            raise HttpError(
                400, "continue_final_message and add_generation_prompt exclude each other; set one of them", param="continue_final_message"
            )
        variables = [*self.variables(), self.chat_template_kwargs or "{}"]
        if self.add_generation_prompt is not None and not self.continue_final_message:
            variables.append(json.dumps({"add_generation_prompt": self.add_generation_prompt}))
        # Of two members of the same name the later one counts.
        members = ", ".join(each[1:-1] for each in variables if each != "{}")
        chat = pb.Chat.FromString(self.opening + self.messages)
        chat.tools.extend(tool.text for tool in self.offered.functions)
        chat.template_kwargs = f"{{{members}}}" if members else ""
        chat.continue_final_message = bool(self.continue_final_message)
        return chat


class Prediction(Body):
    type: str | None = Field(default=None, max_length=64)
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


class ChatBody(CommonBody, ChatPrompt, ForeignChatFields):
    max_completion_tokens: Annotated[int, Whole(1, MAX_TOKENS)] | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Whole(0, MAX_LOGPROBS)] | None = None
    tool_choice: Annotated[Choice, packed(_choice, ToolMode | ChatToolChoice)] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    """false: what the model thought is left out of the answer."""
    prediction: Prediction | None = None
    """A hint at the answer, which it cannot change; ignored."""

    @property
    def limit_field(self) -> str | None:
        return super().limit_field if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def grammar_fields(self) -> tuple[str, ...]:
        return (*super().grammar_fields, *(["tools"] if self.tools else []))

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

    def tool_use(self, format: ToolCallFormat | None) -> ToolUse:
        """`format`: the model's. Raises HttpError 400, InvalidRequest."""
        offered, choice = self.offered, self.tool_choice or Choice("")
        if not offered.functions and offered.omitted and choice.mode == "required":
            message = (
                f"tool_choice asks for a call, and the only tools are {', '.join(dict.fromkeys(offered.omitted))}, which are not run here; "
                "send functions, or leave tool_choice out"
            )
            raise HttpError(400, message, param="tool_choice")
        asked = pb.ToolUse(tool_choice=choice.mode, function=choice.function, single=self.parallel_tool_calls is False)
        return ToolUse.of(asked, offered.functions, format, allowed=choice.allowed)

    @property
    def tells_reasoning(self) -> bool:
        excluded = self.reasoning is not None and bool(self.reasoning.exclude)
        omitted = self.thinking is not None and self.thinking.display == "omitted"
        return self.include_reasoning is not False and not excluded and not omitted


def adapt_roles(chat: pb.Chat, template: str | None) -> None:
    """Changes the roles that the template does not know. Newer clients say "developer" for "system", which few templates know. `template`:
    the chat template's source."""
    if "developer" not in (template or ""):
        for message in chat.messages:
            if message.role == "developer":
                message.role = "system"


def _message(index: int, message: MessageBody) -> pb.ChatMessage:
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


MAX_PROMPTS = 2048
# To all prompts together.
MAX_ANSWERS = 4096
# What OpenAI's API has always cut such answers to.
DEFAULT_MAX_TOKENS = 16


_MIXED = "a list is of texts, of token ids, or of lists of token ids, and not of several of these"
_KINDS = "give a text, a list of texts, the token ids of one prompt, or a list of such lists"
_NO_ID = "a token id is a whole number from 0 up to the vocabulary's size"
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}}
_PROMPTS = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
_PROMPT = {"anyOf": [{"type": "string"}, _PROMPTS | {"items": {"type": "string"}}, _IDS, _PROMPTS | {"items": _IDS}]}


def _prompt(given: Any, info: ValidationInfo) -> str | list[str] | IdArray | list[IdArray]:
    """Reads a prompt, or what is to be embedded: what it is meant to be, its first item says. Raises HttpError 400."""
    name = info.field_name or "prompt"
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise wrong_value(name, _KINDS, given)
    if not given:
        raise wrong_value(name, f"the list is empty; {_KINDS}", given)
    kind = type(given[0])
    if kind not in (str, list, int, float, bool):
        raise wrong_value(f"{name}[0]", _KINDS, given[0])
    if kind not in (str, list):
        return _ids(given, name)
    if len(given) > MAX_PROMPTS:
        raise wrong_value(name, f"there are {len(given)} of them; send at most {MAX_PROMPTS} at a time", given)
    for i, item in enumerate(given):
        if type(item) is not kind:
            raise wrong_value(f"{name}[{i}]", _MIXED, item)
        if kind is list and not item:
            raise wrong_value(f"{name}[{i}]", "it has no token ids; give at least one", item)
    return given if kind is str else [_ids(item, f"{name}[{i}]") for i, item in enumerate(given)]


def _ids(given: list[Any], path: str) -> IdArray:
    # All at once: there may be a million.
    if float in set(map(type, given)):
        given = [without_point(each) for each in given]
    if set(map(type, given)) == {int} and min(given) >= 0 and max(given) <= MAX_TOKEN_ID:
        return ids_of(given)
    at, wrong = next((i, each) for i, each in enumerate(given) if type(each) is not int or not 0 <= each <= MAX_TOKEN_ID)
    raise wrong_value(f"{path}[{at}]", _MIXED if isinstance(wrong, str | list) else _NO_ID, wrong)


class CompletionBody(CommonBody):
    prompt: Annotated[str | list[str] | IdArray | list[IdArray], PlainValidator(_prompt), WithJsonSchema(_PROMPT)]
    """A text, several, the token ids of one, or of several. Choice i of prompt p has the index p * n + i."""
    logprobs: Annotated[int, Whole(0, MAX_LOGPROBS)] | None = None
    max_tokens: Annotated[int, Whole(0, MAX_TOKENS)] | None = None
    """0: only the prompt is computed."""
    echo: bool | None = None
    """The text begins with the prompt's, and so do the log probabilities, if they are asked for."""
    best_of: Annotated[int, Whole(1, MAX_TOKENS)] | None = None
    """Refused if above n."""
    add_special_tokens: bool | None = None
    """false: the tokenizer adds nothing to the prompt, such as a token that begins a text."""

    suffix: Annotated[Any, Unsupported("nothing is inserted between two texts here; leave it out", unless="")] = None
    prompt_embeds: Annotated[Any, Unsupported("send text or token ids", unless=[])] = None

    @property
    def token_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_echoed_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    def prompts(self) -> list[str | IdArray]:
        """Raises HttpError 400 for what cannot be done with them."""
        n = self.n or 1
        if self.best_of is not None and self.best_of > n:
            raise HttpError(400, f"best_of is {self.best_of} and n is {n}; answers are not ranked here: leave best_of out", param="best_of")
        if isinstance(self.prompt, list) and len(self.prompt) * n > MAX_ANSWERS:
            raise HttpError(
                400, f"n is {n} and there are {len(self.prompt)} prompts; ask for at most {MAX_ANSWERS} answers at a time", param="n"
            )
        return list(self.prompt) if isinstance(self.prompt, list) else [self.prompt]


class EmbeddingBody(RequestBody, ForeignEmbeddingFields):
    input: Annotated[str | list[str] | IdArray | list[IdArray], PlainValidator(_prompt), WithJsonSchema(_PROMPT)]
    """A text, several, the token ids of one, or of several."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of float32, little-endian."""
    dimensions: Annotated[int, Whole(1, MAX_TOKENS)] | None = None
    """The vectors' first numbers alone, where the model's are trained to be cut."""
    truncate_prompt_tokens: Annotated[int, Whole(1, MAX_TOKENS)] | Annotated[int, Whole(-1, -1)] | None = None
    """Longer inputs are cut to so many tokens: of a text the first are kept, of token ids the last. -1: to the model's context."""
    normalize: bool | None = None
    """Says whether vectors are brought to a length of 1. If it is left out, the model's files say it, and as a rule they are."""
    add_special_tokens: bool | None = None
    """false: the tokenizer adds nothing to a text, such as a token that ends it."""
