"""What the endpoints answer, for their description: answers themselves are written piece by piece, and tests hold them to this."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ErrorDetail(Reply):
    message: str
    type: str
    param: str | None
    """The field that is to blame."""
    code: str | None


class Error(Reply):
    error: ErrorDetail


class PromptDetails(Reply):
    cached_tokens: int


class CompletionDetails(Reply):
    reasoning_tokens: int


class Usage(Reply):
    prompt_tokens: int
    """Once for each prompt, however many answers there are."""
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Timed(Reply):
    """Where the time went, if it was asked for."""

    phases: dict[str, float]
    """Seconds: route_s, queue_s, prefill_s, publish_s, fetch_s, first_decode_s, decode_s, ttft_s, visible_ttft_s, total_s."""
    transfer: dict[str, str | int]
    """How the KV cache travelled, and between which workers."""
    attempts: int
    choices: list[Timed] | None = None
    """Of each choice, where there are several."""


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Reply):
    name: str
    arguments: str


class CalledTool(Reply):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CalledTool] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or the stop token's id that ended the answer."""
    token_ids: list[int] | None = None


class Told(Reply):
    """Of whole answers and of events alike."""

    id: str
    created: int
    model: str
    service_tier: str | None = None
    system_fingerprint: str
    twostep: Timed | None = None


class Answer(Told):
    usage: Usage


class Event(Told):
    usage: Usage | None = None


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None


class FunctionDelta(Reply):
    name: str | None = None
    arguments: str | None = None


class ToolDelta(Reply):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Reply):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolDelta] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChunkChoice(Reply):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(Event):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None


class TextLogprobs(Reply):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class SaidText(Reply):
    index: int
    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class TextChoice(SaidText):
    finish_reason: FinishReason
    stop_reason: str | int | None


class TextCompletion(Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class TextChunkChoice(SaidText):
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class TextChunk(Event):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


class Model(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Reply):
    object: Literal["list"]
    data: list[Model]


class Status(Reply):
    status: str


class Version(Reply):
    version: str


class Tokenized(Reply):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """As text; null if they were not asked for."""


class Detokenized(Reply):
    prompt: str
