"""The plain values the SDK takes and returns. No protobuf in sight."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from types import UnionType
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args, get_origin, get_type_hints

from twostep.errors import AnswerCutOff

T = TypeVar("T")

FinishReason = Literal["stop", "length", "content_filter", "tool_calls"]
Compression = Literal["none", "gzip"]
RequestClass = Literal["interactive", "standard", "batch"]


class SamplingOptions(TypedDict, total=False):
    """Lists the sampler's options. One that is left out takes the model's own default, else the neutral value."""

    max_tokens: int
    """Tokens to generate at most."""
    temperature: float
    """0 is greedy."""
    top_k: int
    """0 is off."""
    top_p: float
    min_p: float
    seed: int
    """Repeats an answer: the noise depends on seed and position alone."""
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    stop: str | Sequence[str]
    """The answer ends before the first of these."""
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    speculate: bool
    """False: no token of the answer is drafted, whatever the workers' --speculative-config."""
    min_tokens: int
    """No stop token and no stop string ends the answer before so many tokens."""
    logprobs: int
    """0: of each token; n: also of the n likeliest at each position."""
    logit_bias: Mapping[int, float]
    """By token id: added to the model's logits before all else, -100 to 100."""
    prompt_logprobs: int
    """As logprobs, of the prompt's tokens; all of the prompt is computed for them. With max_tokens=0 they are all there is."""
    json_schema: str | Mapping[str, Any] | type[Any]
    """The answer is JSON that this schema allows: a mapping, JSON text, or a class with pydantic's `model_json_schema`. One at most of
    this one and the next four."""
    json_object: bool
    """The answer is some JSON object."""
    regex: str
    """The whole answer matches this."""
    response_format: type[Any] | Mapping[str, Any]
    """A class as pydantic makes them, whose instance `parsed` of the result is; or an entry as OpenAI's `response_format` takes it."""
    lark: str
    """The answer is a sentence of this grammar, in llguidance's dialect of Lark."""


class RequestOptions(SamplingOptions, total=False):
    """Lists the options of a request beside its prompt. All of them may be left out, and None is as good as left out."""

    n: int
    """So many answers, up to 128, each with noise of its own; they come in one stream, as `Piece.index` tells. 1 if left out."""
    model: str
    """Name of a served model; not needed if there is one only."""
    timeout: float | None
    """Seconds for the whole request, retries and what a lost router costs included. It goes along as the call's deadline."""
    request_id: str
    """Its name in the servers' logs and traces: up to 128 letters, digits and `._:-`. The router makes one if it is not given."""
    cache_salt: str
    """Requests share cached prefixes only with requests of the same salt."""
    migrate: bool
    """Servers begin the answer again elsewhere, after its last token, when a worker is lost. True if left out."""
    resume: bool
    """This client does so through another router when the router is lost; needs `migrate`. True if left out."""
    resume_token_ids: Sequence[int]
    """Tokens that an earlier stream of the same request brought (StreamBroken.token_ids; give its `seed` too)."""
    request_class: RequestClass
    """Says how urgent it is: interactive requests go first, batch ones fill the gaps. "standard" if left out."""
    ttft_ms: float | None
    """Sets the time within which the first token is needed. If that cannot be kept, the request is refused at once with ResourceExhausted,
    whose `retry_after_s` says when to come again; retries do (batch requests wait instead)."""
    tpot_ms: float | None
    """And each token after it, on average."""
    gap_ms: float | None
    """And the longest time between two tokens. Older routers do not know of it."""
    tenant: str
    """Whose share of the system it uses; where API keys or a front name the tenants, their word counts."""
    keep_special_tokens: bool
    """The text shows special tokens too, but the stop token that ends it."""
    traceparent: str
    """W3C trace context to go on with. Left out: OpenTelemetry's current span, if the program has loaded opentelemetry."""


class EmbedOptions(TypedDict, total=False):
    """Lists the options of a request for embeddings beside its inputs. Those that RequestOptions has too mean the same."""

    dimensions: int
    """The vectors' first numbers alone, where the model's are trained to be cut."""
    normalize: bool
    """Says whether vectors are brought to a length of 1. If it is left out, the model's files say it, and as a rule they are."""
    truncate_prompt_tokens: int
    """Longer inputs are cut to so many tokens: of a text the first are kept, of token ids the last. -1: to the model's context."""
    model: str
    timeout: float | None
    request_id: str
    cache_salt: str
    request_class: RequestClass
    ttft_ms: float | None
    """Sets the time within which each vector is needed."""
    tenant: str
    traceparent: str


class ChatOptions(RequestOptions, total=False):
    """Lists the options of a chat beside its messages."""

    tools: Sequence[Mapping[str, Any]]
    """Functions that the model may call, each as an entry of OpenAI's `tools`."""
    tool_choice: Literal["auto", "none", "required"] | Mapping[str, Any]
    """Says whether the model must call one, or which: {"type": "function", "function": {"name": ...}}. "auto" if left out: as it likes."""
    parallel_tool_calls: bool
    """False: one call at most."""
    tool_calls: Literal["parsed", "text"]
    """Calls come as `tool_calls` of pieces and result. "text": as a part of the answer's text, in the model's own notation."""
    template_kwargs: Mapping[str, Any]
    """Further variables of the model's chat template, such as `enable_thinking`."""
    continue_final_message: bool
    """The last message is the beginning of the answer, and the model goes on with it."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made. `arguments` is a JSON object, as the model wrote it, which may be cut off or no JSON at all."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; a mapping with the same keys, as OpenAI's API has it, does as well."""

    role: str
    content: str = ""
    name: str = ""
    tool_calls: Sequence[ToolCall] = ()
    """Lists the calls that the assistant made; only for an assistant's message."""
    tool_call_id: str = ""
    """Names the call that this message answers; only for a tool's message."""
    reasoning: str = ""
    """Holds what the assistant thought before it answered; only for an assistant's message."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own distribution, before penalties, temperature and cuts."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()
    rank: int = 0
    """How many tokens were likelier than this one of a prompt, plus 1."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """With an `id`, a call begins: the `index`-th of its answer, from 0. Without one, its arguments go on."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of an answer. Text may lag behind the ids: half a character or a possible stop string is held back."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """As long as token_ids if logprobs were asked for, else empty."""
    position: int = 0
    """Index of the first of token_ids in the answer, from 0."""
    reasoning: str = ""
    """Holds what the model thinks before it answers a chat, if it marks that; no part of `text`."""
    index: int = 0
    """Names the answer that it belongs to, of `n`."""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV the prefill worker took from its prefix cache."""
    reasoning_tokens: int = 0
    """Completion tokens that were reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Where the time went, in seconds, as the servers measured it."""

    route_s: float
    queue_s: float
    prefill_s: float
    publish_s: float
    fetch_s: float
    first_decode_s: float
    decode_s: float
    ttft_s: float
    total_s: float
    visible_ttft_s: float = 0.0
    """To the first token whose text is part of the answer and not of the reasoning. 0: there was none."""
    wait_s: float = 0.0
    """What of `route_s` was waiting in the router's queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How the KV cache travelled. All empty if the prefill worker's first token ended the answer."""

    transport: str
    """"none": the decode worker computed the prompt itself, and `prefill_worker` is empty."""
    bytes: int
    chunks: int
    blocks_moved: int
    blocks_reused: int
    """Blocks that the decode worker already held."""
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One whole answer of `n`."""

    index: int = 0
    text: str
    reasoning: str = ""
    """Holds what the model thought before it answered, if it marks that."""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: str
    """The stop string or stop token's id that ended the answer, if one asked for by name did."""
    usage: Usage
    phases: Phases
    transfer: Transfer
    attempts: int
    form: type[Any] | None = field(default=None, repr=False)
    """Is the class that `parsed` is an instance of."""

    @property
    def message(self) -> Message:
        """Returns the answer as a turn of the conversation."""
        return Message("assistant", self.text, tool_calls=self.tool_calls, reasoning=self.reasoning)

    @property
    def parsed(self) -> Any:
        """Returns what the class that was asked for makes of the text; None if none was, or the answer is nothing but calls. Raises
        AnswerCutOff for an answer that is not whole, and what the class raises for one that it does not take."""
        if self.form is None or (self.tool_calls and not self.text.strip()):
            return None
        if self.finish_reason not in ("stop", "tool_calls") or self.stop_reason:
            why = f"finish_reason {self.finish_reason!r}" + (f", stop_reason {self.stop_reason!r}" if self.stop_reason else "")
            raise AnswerCutOff(
                f"the answer was cut off after {len(self.token_ids)} tokens ({why}) and is no whole {self.form.__name__}; allow more "
                "max_tokens, or take out what stops it",
                text=self.text,
                reasoning=self.reasoning,
                token_ids=self.token_ids,
            )
        return self.form.model_validate_json(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Choice):
    """All of a request. Of several answers, its own fields are those of the first, but for `usage`, which is of all."""

    request_id: str
    resumes: int = 0
    """How often the stream broke and went on; phases, transfer and attempts are those of its last part."""
    choices: tuple[Choice, ...] = field(default=(), repr=False)
    """All answers, in the order of their indices."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One of each of the prompt's tokens if they were asked for, None of the first; empty where tokens were resumed after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """A vector for each input, in their order, and the tokens of all of them."""

    vectors: tuple[tuple[float, ...], ...] = field(repr=False)
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that is served, and by how many workers right now."""

    name: str
    max_model_len: int
    fingerprint: str
    prefill_workers: int
    decode_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A text or a conversation as the model sees it."""

    token_ids: tuple[int, ...]
    max_model_len: int

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterState:
    """Describes a router as a client sees it. One that is not well gets no new request while another is."""

    target: str
    well: bool
    num_open: int
    """Calls of this client that are under way there."""
    num_connections: int


def read_message(message: Any, kind: type[T]) -> T:
    """Returns a message of protobuf as a dataclass whose fields have the same names: what is repeated as a tuple, what is optional and not
    set as None."""
    return kind(**{name: _read(message, name, hint) for name, hint in _hints(cast(Any, kind)).items()})


def _read(message: Any, name: str, hint: Any) -> Any:
    if isinstance(hint, UnionType):
        (hint,) = set(get_args(hint)) - {type(None)}
        if not message.HasField(name):
            return None
    value = getattr(message, name)
    if get_origin(hint) is tuple:
        kind = get_args(hint)[0]
        return tuple(read_message(each, cast(Any, kind)) for each in value) if is_dataclass(kind) else tuple(value)
    return read_message(value, cast(Any, hint)) if is_dataclass(hint) else value


@functools.cache
def _hints(kind: type[Any]) -> Mapping[str, Any]:
    return get_type_hints(kind)
