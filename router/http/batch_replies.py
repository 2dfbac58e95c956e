"""What files and batches look like, for their description and for what clients send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from router.batches.records import COMPLETION_WINDOWS
from router.http.fields import Body
from router.http.replies import Reply

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
MIN_LIFE_S, MAX_LIFE_S = 3600, 2_592_000
MAX_METADATA = 16
assert set(COMPLETION_WINDOWS) == {"24h"}, "the type below says so too"


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_LIFE_S, le=MAX_LIFE_S)


class FileForm(Body):
    purpose: Literal["batch"]


def _few(entries: Any) -> Any:
    # Before each is looked at: a message for each of a million that are wrong would take minutes.
    if isinstance(entries, dict) and len(entries) > MAX_METADATA:
        raise PydanticCustomError(
            "too_long", "it should have at most {most} entries, not {num}", {"most": MAX_METADATA, "num": len(entries)}
        )
    return entries


Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=MAX_METADATA),
    BeforeValidator(_few),
]


class BatchBody(Body):
    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    """A file of purpose `batch`: one request a line."""
    endpoint: Endpoint
    completion_window: Literal["24h"]
    """What is not answered by then is not answered at all."""
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchQuery(Body):
    after: str | None = None
    """The last id of the page before."""
    limit: int | None = Field(default=None, ge=1, le=100)


class FileQuery(Body):
    after: str | None = None
    """The last id of the page before."""
    limit: int | None = Field(default=None, ge=1, le=10_000)
    order: Literal["asc", "desc"] | None = None
    purpose: str | None = None


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
    endpoint: Endpoint
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
