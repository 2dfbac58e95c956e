"""Records of files and batches: how they look as JSON, and which way a batch may go. Pure.

    validating ──► in_progress ──► finalizing ──► completed
        │               │               ├───────► expired       after the completion window
        │               └─ cancelling ──┴───────► cancelled     cancelling is what clients see from their cancel on
        └───────────────┴──► failed       the input file is no batch, or lost

Ids begin with the time, so that their order is that of creation.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from twostep.errors import DataLoss

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
COMPLETION_WINDOWS = {"24h": 86_400}
MAX_ERRORS = 100


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})
# Finished work is kept in every case, so every end but "failed" goes through "finalizing".
NEXT: Mapping[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset({BatchStatus.IN_PROGRESS, BatchStatus.FAILED, BatchStatus.FINALIZING}),
    BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.FAILED}),
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}),
}


def new_id(prefix: str, unix_s: float) -> str:
    """`prefix` is "file-" or "batch_"."""
    return f"{prefix}{int(unix_s * 1000):012x}{secrets.token_hex(10)}"


def output_id(batch_id: str, epoch: int, kind: str, unix_s: float) -> str:
    """Returns the id of the output or error file that the run of `epoch` writes: which can be worked out to clear up behind it, but for the
    time."""
    digest = blake2b(f"{batch_id} {epoch} {kind}".encode(), digest_size=10, person=b"twostep output").hexdigest()
    return f"file-{int(unix_s * 1000):012x}{digest}"


def is_output_of(file_id: str, batch_id: str, epoch: int) -> bool:
    return any(output_id(batch_id, epoch, kind, 0)[17:] == file_id[17:] for kind in ("output", "error"))


def owner_of(tenant: str) -> str:
    """Returns the name of the folder of a tenant: what names may hold is the file system's business, not the tenant's."""
    return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16, person=b"twostep owner").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Times are Unix seconds; `expires` of None: it is kept."""

    id: str
    filename: str
    num_bytes: int
    created: int
    purpose: str
    expires: int | None = None

    def view(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created,
            "expires_at": self.expires,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A batch as its client asked for it; it never changes. `key_id` and `tenant` are whose work it is; `served` the model of the routers
    that may do it; `output_lives_s` how long its files are kept, if the client said."""

    id: str
    tenant: str
    key_id: str
    served: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created: int
    expires: int
    metadata: dict[str, str] | None = None
    output_lives_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """Why an input file is no batch. `line` counts from 1; None: it is about the file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCounts:
    """Counts the answers so far. `failed` ones have a line in the error file."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, ok: bool, usage: tuple[int, int, int, int]) -> AnswerCounts:
        given, cached, made, reasoned = usage
        return AnswerCounts(
            completed=self.completed + ok,
            failed=self.failed + (not ok),
            input_tokens=self.input_tokens + given,
            cached_tokens=self.cached_tokens + cached,
            output_tokens=self.output_tokens + made,
            reasoning_tokens=self.reasoning_tokens + reasoned,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """How far a batch is, as the run of `epoch` has it. Runs are numbered; what the highest says counts, so that one that was believed dead
    and is not changes nothing."""

    epoch: int
    status: BatchStatus = BatchStatus.VALIDATING
    total: int = 0
    tally: AnswerCounts = field(default_factory=AnswerCounts)
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    ended_at: int | None = None
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None

    def to(self, status: BatchStatus, now: int, **changes: Any) -> RunState:
        """Returns the record in its next state. A run that takes over may begin again with an earlier one."""
        assert status is self.status or status in NEXT.get(self.status, frozenset()), f"{self.status} does not become {status}"
        times: dict[str, Any] = {}
        if status is BatchStatus.IN_PROGRESS and self.in_progress_at is None:
            times["in_progress_at"] = now
        if status is BatchStatus.FINALIZING and self.finalizing_at is None:
            times["finalizing_at"] = now
        if status.final:
            times["ended_at"] = now
        return dataclasses.replace(self, status=status, **times, **changes)

    def taken_over(self, epoch: int) -> RunState:
        """Returns what a later run begins with: what was being finalized is looked through again first."""
        if self.status.final:
            return dataclasses.replace(self, epoch=epoch)
        status = BatchStatus.IN_PROGRESS if self.in_progress_at is not None else BatchStatus.VALIDATING
        return dataclasses.replace(self, epoch=epoch, status=status)


def view(asked: BatchRequest, state: RunState | None, cancelled: int | None) -> dict[str, Any]:
    """Returns OpenAI's batch object. `cancelled`: when a client asked for its end; a state of None: no run has begun with it."""
    state = state or RunState(epoch=0)
    status, tally = state.status, state.tally
    at = {f"{final}_at": state.ended_at if status is final else None for final in sorted(_FINAL)}
    cancelling = cancelled is not None and not status.final
    errors = None
    if state.errors:
        errors = {"object": "list", "data": [dataclasses.asdict(error) for error in state.errors]}
    return {
        "id": asked.id,
        "object": "batch",
        "endpoint": asked.endpoint,
        "model": asked.served,
        "errors": errors,
        "input_file_id": asked.input_file_id,
        "completion_window": asked.completion_window,
        "status": "cancelling" if cancelling else status.value,
        "output_file_id": state.output_file_id,
        "error_file_id": state.error_file_id,
        "created_at": asked.created,
        "in_progress_at": state.in_progress_at,
        "expires_at": asked.expires,
        "finalizing_at": state.finalizing_at,
        "cancelling_at": cancelled if cancelling or status is BatchStatus.CANCELLED else None,
        **at,
        "request_counts": {"total": state.total, "completed": tally.completed, "failed": tally.failed},
        "usage": {
            "input_tokens": tally.input_tokens,
            "input_tokens_details": {"cached_tokens": tally.cached_tokens},
            "output_tokens": tally.output_tokens,
            "output_tokens_details": {"reasoning_tokens": tally.reasoning_tokens},
            "total_tokens": tally.input_tokens + tally.output_tokens,
        },
        "metadata": asked.metadata,
    }


# ---- JSON ------------------------------------------------------------------------------------------------------------------

Record = TypeVar("Record", FileRecord, BatchRequest, RunState)


def to_json(record: FileRecord | BatchRequest | RunState) -> bytes:
    return json.dumps(dataclasses.asdict(record)).encode()


def from_json(kind: type[Record], raw: bytes) -> Record:
    """Raises DataLoss. Unknown fields are those of a newer router."""
    try:
        record: Record = _READERS[kind].validate_json(raw)
        return record
    except ValidationError as error:
        raise DataLoss("a record in the batch directory is damaged; restore it, or delete what it is about") from error


_READERS: Mapping[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (FileRecord, BatchRequest, RunState)}
