"""What bodies of requests have in common: sampling, structured output, and this system's own fields. Their names are OpenAI's, then vLLM's.

Unknown fields are ignored, as vLLM does, so that clients of newer APIs keep working. What is known, changes the answer, and is not done
here is refused with its name in `param`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    GetPydanticSchema,
    JsonValue,
    StringConstraints,
    ValidationError,
)
from pydantic_core import core_schema

from router.http.errors import HttpError
from twostep.sampling_params import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

MAX_CHOICES = 128
MAX_TOKENS = (1 << 31) - 1
_MAX_TIMEOUT_S = 86_400.0
# Of a message about a value: enough to recognize it by.
_MAX_SHOWN = 80

MAX_TOKEN_ID = (1 << 31) - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_STRING_CHARS)]


class Misfit(NamedTuple):
    """Where a value is that does not fit, and what would: ("prompt", 0), "a token id is a whole number"."""

    path: tuple[int | str, ...]
    message: str
    value: Any


class Body(BaseModel):
    """Types are taken at their word: "5" is no number. Lists fail at the first item that is wrong (`fail_fast`): a message for each of a
    million takes minutes and gigabytes."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, protected_namespaces=(), use_attribute_docstrings=True)

    @classmethod
    def misfit(cls, field: str, value: Any) -> Misfit | None:
        """What is wrong with the value of a field that may be of several types. None: the first message of its types says it."""
        return None


def packed(pack: Callable[[Any], object], kind: Any) -> GetPydanticSchema:
    """Returns what says of a field that it is read as `kind`, and kept as `pack` makes of it. Bodies of many values are read in another
    process (router/http/body_parser.py): to make as many objects again here would hold up the event loop."""
    return GetPydanticSchema(lambda _, handler: core_schema.no_info_after_validator_function(pack, handler.generate_schema(kind)))


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def ids_of(values: list[int]) -> IdArray:
    return array("i", values)


if TYPE_CHECKING:
    IdArray = array[int]
else:
    IdArray = array
JsonObject = Annotated[str, packed(_text_of, dict[str, JsonValue])]
JsonSchema = Annotated[str, packed(_text_of, dict[str, JsonValue] | str)]


class Refused:
    """A field that would change the answer, and what to do instead. null is harmless, and so is `unless`."""

    def __init__(self, instead: str, *, unless: Any = None) -> None:
        self._instead, self._unless = instead, unless

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None] if self._unless is None else [None, self._unless], "description": f"Not supported: {self._instead}."}

    def _check(self, value: Any, info: core_schema.ValidationInfo[Any]) -> Any:
        if value is not None and (value != self._unless or isinstance(value, bool) != isinstance(self._unless, bool)):
            name = info.field_name
            raise HttpError(400, f"{name} is not supported here; {self._instead}", param=name, code="unsupported_parameter")
        return value


class JsonSchemaFormat(Body):
    name: str = Field(default="schema", max_length=64)
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    """A JSON Schema; the answer is a document that it describes."""
    strict: bool | None = None
    """Output is always held to the schema."""


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


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonFormat | RegexFormat | LarkFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's way to say it; exactly one of them."""

    json_: JsonSchema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1, max_length=1024, fail_fast=True)
    grammar: str | None = None
    structural_tag: Any | None = None
    """Refused."""


class StreamOptions(Body):
    include_usage: bool | None = None
    """One more chunk at the end, with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""
    include_obfuscation: bool | None = None
    """Ignored: nothing is added to chunks."""


class CommonBody(Body):
    """Whatever generates text."""

    model: str = ""
    """Empty: the only model that is served."""
    stream: bool | None = None
    """Server-sent events, one for each piece, then `[DONE]`."""
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    """Answers to each prompt. The i-th is the same for the same seed, whatever n."""
    seed: int | None = Field(default=None, ge=-(1 << 63), le=(1 << 63) - 1)
    """Of each prompt: equal ones get equal answers. Without one every answer to every prompt has its own, made of one that the router draws
    and tells in the header `x-twostep-seed`; a request with this header repeats them."""
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    """The text ends before the first of these."""
    temperature: float | None = Field(default=None, ge=0.0, le=100.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    user: str | None = None
    """Ignored."""

    top_k: int | None = Field(default=None, ge=-1, le=1 << 31)
    """0 and -1 switch it off."""
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100.0)
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    """No stop token and no stop string ends the answer before so many tokens."""
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)
    skip_special_tokens: bool | None = None
    """false: the text shows special tokens too."""
    return_tokens_as_token_ids: bool | None = None
    """Log probabilities name tokens as `token_id:17`."""
    return_token_ids: bool | None = None
    """`token_ids` of each choice, and `prompt_token_ids`."""
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    """Before the header `x-request-id`."""
    cache_salt: str | None = Field(default=None, max_length=256)
    """Cached prefixes are shared only among requests of the same salt."""
    priority: int | None = Field(default=None, ge=-(1 << 31), le=(1 << 31) - 1)
    """As vLLM's: below 0 is the class `interactive`, above 0 `batch`."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, min_length=1, max_length=1024, fail_fast=True)
    guided_grammar: str | None = None

    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """`flex` is the class `batch`, `priority` is `interactive`."""
    request_class: Literal["interactive", "standard", "batch"] | None = None
    """How urgent it is; the header `x-twostep-class` says the same. Before `service_tier` and `priority`."""
    ttft_ms: float | None = Field(default=None, gt=0, le=3_600_000)
    """The first token is promised within so many milliseconds, or the request refused at once; header `x-twostep-ttft-ms`."""
    tpot_ms: float | None = Field(default=None, gt=0, le=3_600_000)
    """Each further token, on average; header `x-twostep-tpot-ms`."""
    timeout: float | None = Field(default=None, gt=0, le=_MAX_TIMEOUT_S)
    """Seconds after which the request ends with 504; header `x-twostep-timeout-ms`."""
    return_phases: bool | None = None
    """How long each phase took, as `twostep` in the body or the last chunk; header `x-twostep-phases: 1`."""

    logit_bias: Annotated[Any, Refused("leave it out", unless={})] = None
    allowed_token_ids: Annotated[Any, Refused("use response_format or structured_outputs to hold the answer to a form", unless=[])] = None
    bad_words: Annotated[Any, Refused("leave it out", unless=[])] = None
    logits_processors: Annotated[Any, Refused("code is not taken from clients; leave it out", unless=[])] = None
    use_beam_search: Annotated[Any, Refused("beam search is not done here; sample with `n`", unless=False)] = None
    length_penalty: Annotated[Any, Refused("it is of beam search, which is not done here; leave it out", unless=1.0)] = None
    prompt_logprobs: Annotated[Any, Refused("log probabilities are of the answer's tokens only; leave it out")] = None
    include_stop_str_in_output: Annotated[Any, Refused("the text ends before the stop string: `stop_reason` tells it", unless=False)] = None
    truncate_prompt_tokens: Annotated[Any, Refused("shorten the prompt before sending it", unless=-1)] = None
    kv_transfer_params: Annotated[Any, Refused("the router pairs workers itself; leave it out", unless={})] = None

    @property
    def limit_field(self) -> str | None:
        """The field that says how long an answer may be; None: the client has not said it."""
        return None if self.max_tokens is None else "max_tokens"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


AnyBody = TypeVar("AnyBody", bound=BaseModel)


def parse_body(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Raises HttpError 400 that names the first field that is wrong."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _said(error, kind) from None


def _said(error: ValidationError, kind: type[BaseModel]) -> HttpError:
    """A union's message of each of its members is one too many: the body's own word of it, or else the one that got furthest."""
    errors = error.errors(include_url=False, include_context=False)
    first = max(errors, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    if first["type"] == "json_invalid":
        return HttpError(400, f"the body is not JSON: {first['msg']}", code="invalid_json")
    top = errors[0]["loc"][0] if errors[0]["loc"] else None
    # The first member of a union is a plain type: it has been given all of the value.
    if isinstance(top, str) and len(errors[0]["loc"]) == 2 and issubclass(kind, Body):
        misfit = kind.misfit(top, errors[0]["input"])
        if misfit is not None:
            param = path_of(misfit.path)
            return HttpError(400, f"{param}: {misfit.message} (it is {_shown(misfit.value)}); see /openapi.json", param=param)
    if first["loc"][:1] != (top,):
        first = errors[0]
    param = path_of(first["loc"])
    shown = _shown(first["input"])
    message = first["msg"][:1].lower() + first["msg"][1:]
    about = f" (it is {shown})" if first["type"] != "missing" else ""
    return HttpError(400, f"{param or 'the body'}: {message}{about}; see /openapi.json", param=param)


def _shown(value: Any) -> str:
    """The beginning of it as JSON: no more is written than is shown."""
    if isinstance(value, str):
        value = value[: _MAX_SHOWN + 1]
    text = ""
    for piece in json.JSONEncoder(default=str).iterencode(value):
        text += piece
        if len(text) > _MAX_SHOWN:
            return text[:_MAX_SHOWN] + "…"
    return text


def path_of(location: tuple[int | str, ...]) -> str | None:
    """`messages[0].content`; what pydantic adds of its own (names of types, of members of unions) is left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _TYPE_NAMES:
            shown = part if len(part) <= _MAX_SHOWN else part[:_MAX_SHOWN] + "…"
            path += f".{shown}" if path else shown
    return path or None


_TYPE_NAMES = frozenset({"str", "int", "float", "bool", "list", "dict", "none", "TextPart", "RefusalPart", "OtherPart"})
