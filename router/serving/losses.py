"""How an attempt can go wrong, and who is to blame: what the workers' answers and silences mean for the request."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from router.workers.pool import WorkerLink
from router.workers.prefix_index import WorkerLife
from twostep.errors import InternalError, TwostepError, Unavailable, error_from_grpc
from twostep.rpc.channel import error_from_rpc

# Another placement, or the same one later, may succeed. NOT_FOUND and FAILED_PRECONDITION speak of reservation, ticket and flags here.
_RETRYABLE = frozenset(
    {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION"}
)


class WorkerRefused(Exception):
    """A worker did not take the attempt. `full`: it has no room. `declined`: it is there, and it is this way of serving the request that
    it does not take now; neither: it is not there."""

    def __init__(self, life: WorkerLife, error: TwostepError, *, full: bool = False, declined: bool = False) -> None:
        super().__init__(error.message)
        self.life, self.error, self.full, self.declined = life, error, full, declined


class AttemptFailed(Exception):
    """It was under way and was lost; `life` is the worker it was lost by. Not retryable: `error` is the client's."""

    def __init__(self, life: WorkerLife, error: TwostepError, *, retryable: bool) -> None:
        super().__init__(error.message)
        self.life, self.error, self.retryable = life, error, retryable


def retryable(code: str) -> bool:
    return code in _RETRYABLE


def gone(link: WorkerLink) -> TwostepError:
    return Unavailable(f"{link.record.role} worker {link.record.worker_id} is gone")


def refusal(link: WorkerLink, error: grpc.aio.AioRpcError) -> Exception:
    """A worker's answer to Reserve or Run that is no acceptance. What is wrong with the request itself goes to the client. A worker that
    does not take this router's signature is none of this deployment's, whatever its record says: others are."""
    message = f"{link.record.role} worker {link.record.worker_id}: {error_from_rpc(error).message}"
    code = error.code().name
    if retryable(code) or code == "UNAUTHENTICATED":
        full = code == "RESOURCE_EXHAUSTED"
        return WorkerRefused(link.life, Unavailable(message), full=full, declined=full or code == "FAILED_PRECONDITION")
    return client_error(code, message)


def client_error(code: str, message: str) -> TwostepError:
    """As the client should see it: what workers check of each other (tickets, leases) is no fault of the client's."""
    return InternalError(message) if code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND") else error_from_grpc(code, message)


def cancelled_by_peer(error: BaseException) -> bool:
    """Closing a channel ends the calls on it with CancelledError, and those begun later with UsageError. The first must be told
    apart from the cancellation of the task that waits."""
    task = asyncio.current_task()
    return not isinstance(error, asyncio.CancelledError) or task is None or task.cancelling() == 0
