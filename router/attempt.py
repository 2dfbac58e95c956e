"""One attempt of a request: one sequence on one pair of workers, from its reservation until nothing of it is left on either.

reserve   Decode.Reserve                 refused: WorkerRefused, try another pair
accept    Prefill.Run up to Accepted     refused: WorkerRefused, try another pair
finish    Decode.Attach with the ticket; tokens from both sides, put in order, go to the output; returns after the last one.
          AttemptFailed if a worker is lost before that
close     whatever the workers may still hold is cancelled, in the background
"""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import grpc.aio

from router.cleanup import Cleanup
from router.job import Job
from router.output import Output
from router.prefix_index import WorkerLife
from router.report import Report
from router.workers import DecodeLink, PrefillLink, WorkerLink
from twostep.errors import InternalError, TwostepError, Unavailable, error_from_grpc
from twostep.rpc.channel import error_from_rpc
from twostep.rpc.convert import class_to_proto, sampling_to_proto
from twostep.rpc.v1 import decode_pb2, kv_pb2, prefill_pb2

log = logging.getLogger(__name__)

_UNARY_TIMEOUT_S = 5.0
_ACCEPT_TIMEOUT_S = 10.0
_STREAM_TIMEOUT_S = 1.0
_BREAK_SPREADS_S = 0.1
# How long the prefill worker's closing figures may hold up the end of an answer.
_DONE_TIMEOUT_S = 1.0
# After the prefill side is lost, how long the decode worker has to say whether it got the KV before.
_VERDICT_TIMEOUT_S = 5.0
# Decode tokens may overtake the first token, which comes another way. Beyond these bounds it will never come.
_MAX_EARLY_TOKENS = 256
_MAX_EARLY_S = 2.0

# Another pair, or the same one later, may succeed. NOT_FOUND and FAILED_PRECONDITION speak of reservation and ticket here.
_RETRYABLE = frozenset(
    {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION"}
)


class WorkerRefused(Exception):
    """A worker did not take the attempt. `full`: it has no room; otherwise it is not there."""

    def __init__(self, life: WorkerLife, error: TwostepError, *, full: bool) -> None:
        super().__init__(error.message)
        self.life, self.error, self.full = life, error, full


class AttemptFailed(Exception):
    """It was under way and was lost; `life` is the worker it was lost by. Not retryable: `error` is the client's."""

    def __init__(self, life: WorkerLife, error: TwostepError, *, retryable: bool) -> None:
        super().__init__(error.message)
        self.life, self.error, self.retryable = life, error, retryable


class Attempt:
    def __init__(
        self,
        job: Job,
        number: int,
        *,
        prefill: PrefillLink,
        decode: DecodeLink,
        output: Output,
        report: Report,
        cleanup: Cleanup,
    ) -> None:
        self._job = job
        self._id = (job.request_id, number)
        self._prefill, self._decode = prefill, decode
        self._output, self._report = output, report
        self._cleanup = cleanup
        self._token_ids = [*job.prompt, *output.token_ids]
        self._first_position = output.next_position
        self._num_decode_cached = 0
        self._queued_tokens = 0
        self._early: dict[int, prefill_pb2.Token] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._prefill_over = asyncio.Event()
        self._accepted_at = 0.0
        self._run: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._on_decode = False
        self._reserved = False
        self._committed = False
        # The first of the decode worker's tokens that has not come; the prefill worker gives the one before.
        self._next_decode_position = self._first_position + 1
        decode.tenants.add(self)
        prefill.tenants.add(self)

    # ---- the four steps -------------------------------------------------------------------------------------------------

    async def reserve(self) -> None:
        if not await self._decode.stream.wait_open(min(_STREAM_TIMEOUT_S, self._job.remaining_s())):
            raise WorkerRefused(
                self._decode.life, Unavailable(f"decode worker {self._decode.record.worker_id} does not take a token stream"), full=False
            )
        request = decode_pb2.ReserveRequest(
            request_id=self._job.request_id,
            attempt=self._id[1],
            router_id=self._decode.stream.router_id,
            token_ids=self._token_ids,
            num_prompt_tokens=len(self._job.prompt),
            sampling=sampling_to_proto(self._job.sampling),
            tenant=self._job.tenant,
            cache_salt=self._job.cache_salt,
            request_class=class_to_proto(self._job.request_class),
        )
        self._decode.stream.add(self._id, self)
        self._on_decode = True
        timeout = min(_UNARY_TIMEOUT_S, self._job.remaining_s())
        try:
            response = await self._decode.stub.Reserve(request, timeout=timeout, metadata=self._job.metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._on_decode = False
            raise self._refusal(self._decode, error) from error
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            if not _cancelled_by_peer(error):
                raise
            raise WorkerRefused(self._decode.life, _gone(self._decode), full=False) from error
        if response.epoch != self._decode.life.epoch:
            # A new life listens at the old address, and the registry has not told yet.
            raise WorkerRefused(self._decode.life, _gone(self._decode), full=False)
        self._reserved = True
        self._num_decode_cached = response.num_cached_tokens

    async def accept(self, cached_tokens: int) -> None:
        """`cached_tokens`: what the prefill worker is thought to have of the prompt, for the count of its queue."""
        self._queued_tokens = max(1, len(self._token_ids) - cached_tokens)
        self._prefill.queued_tokens += self._queued_tokens
        request = prefill_pb2.PrefillRequest(
            request_id=self._job.request_id,
            attempt=self._id[1],
            token_ids=self._token_ids,
            num_prompt_tokens=len(self._job.prompt),
            sampling=sampling_to_proto(self._job.sampling),
            tenant=self._job.tenant,
            cache_salt=self._job.cache_salt,
            num_decode_cached_tokens=self._num_decode_cached,
            request_class=class_to_proto(self._job.request_class),
        )
        try:
            run = self._run = self._prefill.stub.Run(request, timeout=self._job.remaining_s(), metadata=self._job.metadata)
            async with asyncio.timeout(min(_ACCEPT_TIMEOUT_S, self._job.remaining_s())):
                event = await run.read()
        except TimeoutError:
            error = Unavailable(f"prefill worker {self._prefill.record.worker_id} does not answer")
            raise WorkerRefused(self._prefill.life, error, full=False) from None
        except grpc.aio.AioRpcError as error:
            raise self._refusal(self._prefill, error) from error
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            if not _cancelled_by_peer(error):
                raise
            raise WorkerRefused(self._prefill.life, _gone(self._prefill), full=False) from error
        if not isinstance(event, prefill_pb2.PrefillEvent) or not event.HasField("accepted"):
            raise WorkerRefused(
                self._prefill.life, InternalError(f"prefill worker {self._prefill.record.worker_id} began without a ticket"), full=False
            )
        self._prefill.touch()
        self._accepted_at = time.monotonic()
        self._tasks = [asyncio.create_task(self._attach(event.accepted.ticket)), asyncio.create_task(self._follow_prefill(run))]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def finish(self) -> None:
        await self._ended
        if self._committed:
            try:
                async with asyncio.timeout(_DONE_TIMEOUT_S):
                    await self._prefill_over.wait()
            except TimeoutError:
                log.info("request %s: prefill worker %s still holds its lease", self._job.request_id, self._prefill.record.worker_id)

    def close(self) -> None:
        """Once, whatever happened before."""
        self._unqueue()
        self._decode.tenants.discard(self)
        self._prefill.tenants.discard(self)
        if self._run is not None:
            self._run.cancel()
        for task in self._tasks:
            if not task.done():
                task.cancel()
                self._cleanup.watch(task)
        self._decode.stream.remove(self._id, cancel=self._on_decode)
        if not self._ended.done():
            self._ended.cancel()
        elif not self._ended.cancelled():
            self._ended.exception()  # nobody may be waiting for it any more

    # ---- what arrives ---------------------------------------------------------------------------------------------------

    def on_event(self, event: decode_pb2.DecodeEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "token":
            token = event.token
            if token.finish_reason:
                self._on_decode = False
            if token.position == self._next_decode_position:
                self._next_decode_position += 1
            self._report.on_decode_token()
            self._on_token(token)
        elif kind == "committed":
            self._committed = True
            self._report.on_committed(event.committed)
        elif kind == "failed":
            self._on_decode = False
            failed = event.failed
            message = f"decode worker {self._decode.record.worker_id}: {failed.message}"
            # Before the commit a transfer fails because of its source, unless the decode worker is itself at fault or full.
            at_source = not self._committed and failed.code not in ("RESOURCE_EXHAUSTED", "INTERNAL", "NOT_FOUND")
            blame = self._prefill if at_source else self._decode
            self._fail(blame, failed.code, message, retryable=failed.retryable)

    def position(self) -> decode_pb2.StreamPosition:
        return decode_pb2.StreamPosition(
            request_id=self._job.request_id,
            attempt=self._id[1],
            next_position=self._next_decode_position,
            committed=self._committed,
            reserving=not self._reserved,
        )

    def on_worker_lost(self, life: WorkerLife, error: TwostepError) -> None:
        if life == self._prefill.life:
            self._on_prefill_lost("UNAVAILABLE", error.message)
        else:
            self._fail(self._decode, "UNAVAILABLE", error.message, retryable=True)

    def _on_token(self, token: prefill_pb2.Token) -> None:
        position, expected = token.position, self._output.next_position
        if self._ended.done() or position < expected:
            return
        if position > expected:
            if not self._early:
                asyncio.get_running_loop().call_later(_MAX_EARLY_S, self._no_filling, expected)
            self._early[position] = token
            if len(self._early) > _MAX_EARLY_TOKENS:
                self._no_filling(expected)
            return
        self._push(token)
        while self._early and not self._ended.done():
            early = self._early.pop(self._output.next_position, None)
            if early is None:
                break
            self._push(early)

    def _no_filling(self, expected: int) -> None:
        if self._output.next_position == expected and self._early:
            self._fail(self._decode, "DATA_LOSS", f"token {expected} never came, {len(self._early)} later ones did", retryable=True)

    def _push(self, token: prefill_pb2.Token) -> None:
        self._output.push(token)
        if token.finish_reason and not self._ended.done():
            self._ended.set_result(None)

    async def _attach(self, ticket: kv_pb2.Ticket) -> None:
        """Repeated, which is safe, if the connection broke under it and came back: the reservation outlives that."""
        request = decode_pb2.AttachRequest(request_id=self._job.request_id, attempt=self._id[1], ticket=ticket)
        stream = self._decode.stream
        num_opened: int | None = None
        try:
            while True:
                repeated, num_opened = num_opened is not None, stream.num_opened
                try:
                    await self._decode.stub.Attach(
                        request, timeout=min(_UNARY_TIMEOUT_S, self._job.remaining_s()), metadata=self._job.metadata
                    )
                    return
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.NOT_FOUND and repeated:
                        return  # the first one had arrived and it is over already; the stream tells how
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    # All calls of a connection break together, but one learns of it after the other.
                    await asyncio.sleep(_BREAK_SPREADS_S)
                    if stream.open and stream.num_opened == num_opened:
                        raise  # it was the worker that said so
                    # If it does not come back, the stream's loss ends the attempt.
                    await stream.wait_open(self._job.remaining_s())
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            if not _cancelled_by_peer(error):
                raise
            self._fail(self._decode, "UNAVAILABLE", _gone(self._decode).message, retryable=True)
        except grpc.aio.AioRpcError as error:
            message = f"decode worker {self._decode.record.worker_id}: {error.details()}"
            self._fail(self._decode, error.code().name, message, retryable=error.code().name in _RETRYABLE)

    async def _follow_prefill(self, run: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]) -> None:
        """Reads the Run stream to its end; it stays open as long as the prefill worker holds the lease."""
        try:
            while isinstance(event := await run.read(), prefill_pb2.PrefillEvent):
                self._prefill.touch()
                kind = event.WhichOneof("event")
                if kind == "first_token":
                    self._unqueue()
                    self._report.on_first_token(event.first_token, self._accepted_at)
                    self._on_token(event.first_token.token)
                elif kind == "done":
                    self._report.on_prefill_done(event.done)
                    self._prefill_over.set()
                    if event.done.state not in (kv_pb2.LEASE_STATE_COMMITTED, kv_pb2.LEASE_STATE_RELEASED):
                        self._on_prefill_lost("ABORTED", f"its lease ended as {kv_pb2.LeaseState.Name(event.done.state)}")
                    return
            self._on_prefill_lost("UNAVAILABLE", "it closed the call without an end")
        except grpc.aio.AioRpcError as error:
            self._on_prefill_lost(error.code().name, error.details() or "it gave no reason")
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            if not _cancelled_by_peer(error):
                raise
            self._on_prefill_lost("UNAVAILABLE", "its connection was closed")
        finally:
            self._prefill_over.set()

    def _on_prefill_lost(self, code: str, why: str) -> None:
        """Before the first token it is over at once. After it, the decode worker may have all it needs: it has the word, for a while."""
        self._prefill_over.set()
        if self._committed or self._ended.done():
            return
        message = f"prefill worker {self._prefill.record.worker_id}: {why}"
        if self._output.next_position > self._first_position:
            asyncio.get_running_loop().call_later(_VERDICT_TIMEOUT_S, self._no_verdict, message)
        else:
            self._fail(self._prefill, code, message, retryable=code in _RETRYABLE)

    def _no_verdict(self, message: str) -> None:
        if not self._committed:
            self._fail(self._prefill, "UNAVAILABLE", message, retryable=True)

    def _fail(self, link: WorkerLink, code: str, message: str, *, retryable: bool) -> None:
        if not self._ended.done():
            self._ended.set_exception(AttemptFailed(link.life, _client_error(code, message), retryable=retryable))

    def _refusal(self, link: WorkerLink, error: grpc.aio.AioRpcError) -> Exception:
        """A worker's answer to Reserve or Run that is no acceptance. What is wrong with the request itself goes to the client."""
        ours = error_from_rpc(error)
        message = f"{link.record.role} worker {link.record.worker_id}: {ours.message}"
        code = error.code().name
        if code in _RETRYABLE:
            return WorkerRefused(link.life, Unavailable(message), full=code == "RESOURCE_EXHAUSTED")
        return _client_error(code, message)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A bug in a task must not leave the request waiting for what will never come."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("request %s", self._job.request_id, exc_info=error)
            self._fail(
                self._prefill, "INTERNAL", f"internal error; look for request {self._job.request_id} in the router's log", retryable=False
            )

    def _unqueue(self) -> None:
        self._prefill.queued_tokens -= self._queued_tokens
        self._queued_tokens = 0


def _gone(link: WorkerLink) -> TwostepError:
    return Unavailable(f"{link.record.role} worker {link.record.worker_id} is gone")


def _client_error(code: str, message: str) -> TwostepError:
    """As the client should see it: what workers check of each other (tickets, leases) is no fault of the client's."""
    return InternalError(message) if code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND") else error_from_grpc(code, message)


def _cancelled_by_peer(error: BaseException) -> bool:
    """Closing a channel ends the calls on it with CancelledError, and those begun later with UsageError. The first must be told
    apart from the cancellation of the task that waits."""
    task = asyncio.current_task()
    return not isinstance(error, asyncio.CancelledError) or task is None or task.cancelling() == 0
