"""What the endpoints answer, for their description: answers themselves are written piece by piece, and tests hold them to this."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions"]
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


class UsageReply(Reply):
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


class TopLogprobReply(Reply):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprobReply):
    top_logprobs: list[TopLogprobReply]


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


class CommonReply(Reply):
    """Of whole answers and of events alike."""

    id: str
    created: int
    model: str
    service_tier: str | None = None
    system_fingerprint: str
    twostep: Timed | None = None


class WholeReply(CommonReply):
    usage: UsageReply


class Event(CommonReply):
    usage: UsageReply | None = None


class ChatCompletion(WholeReply):
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


class TextCompletion(WholeReply):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class TextChunkChoice(SaidText):
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class TextChunk(Event):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


class ModelReply(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Reply):
    object: Literal["list"]
    data: list[ModelReply]


class StatusReply(Reply):
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


class FileReply(Reply):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(Reply):
    object: Literal["list"]
    data: list[FileReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Reply):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class InputError(Reply):
    code: str
    message: str
    line: int | None
    param: str | None


class InputErrors(Reply):
    object: Literal["list"]
    data: list[InputError]


class RequestCounts(Reply):
    total: int
    completed: int
    failed: int


class CachedDetails(Reply):
    cached_tokens: int


class ReasoningDetails(Reply):
    reasoning_tokens: int


class BatchUsage(Reply):
    input_tokens: int
    input_tokens_details: CachedDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class BatchReply(Reply):
    id: str
    object: Literal["batch"]
    endpoint: BatchEndpoint
    model: str
    errors: InputErrors | None
    input_file_id: str
    completion_window: str
    status: Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(Reply):
    object: Literal["list"]
    data: list[BatchReply]
    first_id: str | None
    last_id: str | None
    has_more: bool
