"""Calls to workers: what they end with, and what that means for a request: another worker, another attempt, or the client's error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

from router.workers.pool import WorkerLink
from router.workers.prefix_index import WorkerLife
from router.workers.reservations import ReserveRefused
from twostep.errors import InternalError, TwostepError, Unavailable, error_from_grpc

# How long a worker has to say that it takes a prompt.
ACCEPT_TIMEOUT_S = 10.0
# Another placement, or the same one later, may succeed. NOT_FOUND and FAILED_PRECONDITION speak of reservation, ticket and flags here.
RETRYABLE = frozenset(
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


class CallFailed(Exception):
    """A call to a worker ended with an error. `code`: a gRPC status code's name."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


@contextmanager
def call_errors() -> Iterator[None]:
    """Turns whatever ends a call into CallFailed. Closing a channel ends the calls on it with CancelledError, and those begun later with
    UsageError; the first must not be taken for the cancellation of the task that waits."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise CallFailed(error.code().name, error.details() or "the peer gave no reason") from error
    except ReserveRefused as error:
        raise CallFailed(error.code, error.message) from error
    except (grpc.aio.UsageError, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise CallFailed("UNAVAILABLE", "its connection was closed") from error


def refusal_of(link: WorkerLink, error: CallFailed) -> Exception:
    """Returns the error for a worker's answer to Reserve or Run that is no acceptance. What is wrong with the request itself goes to the
    client. A worker that does not take this router's signature is none of this deployment's, whatever its record says: others are."""
    code, message = error.code, f"{link.record.role} worker {link.record.worker_id}: {error.details}"
    if code in RETRYABLE or code == "UNAUTHENTICATED":
        full = code == "RESOURCE_EXHAUSTED"
        return WorkerRefused(link.life, Unavailable(message), full=full, declined=full or code == "FAILED_PRECONDITION")
    return client_error(code, message)


def client_error(code: str, message: str) -> TwostepError:
    """Returns the error as the client should see it: what workers check of each other (tickets, leases) is no fault of the client's."""
    return InternalError(message) if code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND") else error_from_grpc(code, message)
