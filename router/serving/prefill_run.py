"""The prefill worker's part of an attempt: one Prefill.Run call, which lives as long as the worker's lease.

accept    Run up to Accepted, with the ticket for the decode worker      refused: WorkerRefused
follow    FirstToken, Done; whatever else ends the call is a loss, which the attempt is told of
close     cancels the call, and with it all that the prefill worker holds
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import grpc
import grpc.aio

from router.request.job import Job
from router.serving.losses import WorkerRefused, cancelled_by_peer, gone, refusal
from router.workers.pool import PrefillLink
from twostep.errors import InternalError, Unavailable
from twostep.rpc.v1 import kv_pb2, prefill_pb2

log = logging.getLogger(__name__)

_ACCEPT_TIMEOUT_S = 10.0


class RunSink(Protocol):
    """Called in the event loop, must return at once and never raise."""

    def on_first_token(self, first: prefill_pb2.FirstToken) -> None: ...

    def on_prefill_done(self, done: prefill_pb2.PrefillDone) -> None:
        """The lease is over, and it was committed."""
        ...

    def on_prefill_lost(self, code: str, why: str) -> None:
        """Nothing more comes, and what the worker held is gone. `code`: a grpc status code's name."""
        ...


class PrefillRun:
    def __init__(self, link: PrefillLink, sink: RunSink) -> None:
        self.link = link
        # Nothing more comes.
        self.over = asyncio.Event()
        self._sink = sink
        self._call: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent] | None = None

    async def accept(self, request: prefill_pb2.PrefillRequest, job: Job) -> kv_pb2.Ticket:
        """Raises WorkerRefused, or what is wrong with the request."""
        link = self.link
        try:
            call = self._call = link.stub.Run(request, timeout=job.remaining_s(), metadata=job.metadata)
            async with asyncio.timeout(min(_ACCEPT_TIMEOUT_S, job.remaining_s())):
                event = await call.read()
        except TimeoutError:
            raise WorkerRefused(link.life, Unavailable(f"prefill worker {link.record.worker_id} does not answer")) from None
        except grpc.aio.AioRpcError as error:
            raise refusal(link, error) from error
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            if not cancelled_by_peer(error):
                raise
            raise WorkerRefused(link.life, gone(link)) from error
        if not isinstance(event, prefill_pb2.PrefillEvent) or not event.HasField("accepted"):
            raise WorkerRefused(link.life, InternalError(f"prefill worker {link.record.worker_id} began without a ticket"))
        link.touch()
        return event.accepted.ticket

    async def follow(self) -> None:
        """Reads the Run stream to its end; it stays open as long as the prefill worker holds the lease."""
        call = self._call
        assert call is not None, "it is followed once it is accepted"
        try:
            while isinstance(event := await call.read(), prefill_pb2.PrefillEvent):
                self.link.touch()
                kind = event.WhichOneof("event")
                if kind == "first_token":
                    self._sink.on_first_token(event.first_token)
                elif kind == "done":
                    self._sink.on_prefill_done(event.done)
                    self.over.set()
                    if event.done.state not in (kv_pb2.LEASE_STATE_COMMITTED, kv_pb2.LEASE_STATE_RELEASED):
                        self._lost("ABORTED", f"its lease ended as {kv_pb2.LeaseState.Name(event.done.state)}")
                    return
            self._lost("UNAVAILABLE", "it closed the call without an end")
        except grpc.aio.AioRpcError as error:
            self._lost(error.code().name, error.details() or "it gave no reason")
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            if not cancelled_by_peer(error):
                raise
            self._lost("UNAVAILABLE", "its connection was closed")
        finally:
            self.over.set()

    def _lost(self, code: str, why: str) -> None:
        self.over.set()
        self._sink.on_prefill_lost(code, why)

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
