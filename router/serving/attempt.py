"""One attempt of a request: one sequence, from its first reservation until nothing of it is left on any worker.

On a pair of workers, where `prefill` is one, or on the decode worker alone:

begin     pair: Decode.Reserve, then Prefill.Run up to Accepted (router.serving.prefill_run). Alone: Decode.Reserve with prefill_here.
          Refused: WorkerRefused, try another placement
finish    pair: Decode.Attach with the ticket; tokens from both sides, put in order, go to the output. Alone: all of them come from the
          decode worker. Returns after the last one. AttemptFailed if a worker is lost before that
close     whatever the workers may still hold is cancelled, in the background
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc
import grpc.aio

from router.request.cleanup import Cleanup
from router.request.job import Job
from router.request.output import Output
from router.request.report import Report
from router.serving.losses import AttemptFailed, WorkerRefused, cancelled_by_peer, client_error, gone, refusal, retryable
from router.serving.prefill_run import PrefillRun
from router.workers.pool import DecodeLink, PrefillLink, WorkerLink
from router.workers.prefix_index import WorkerLife
from twostep.errors import TwostepError, Unavailable
from twostep.rpc.convert import class_to_proto, sampling_to_proto
from twostep.rpc.v1 import decode_pb2, inference_pb2, kv_pb2, prefill_pb2

log = logging.getLogger(__name__)

_UNARY_TIMEOUT_S = 5.0
_STREAM_TIMEOUT_S = 1.0
_BREAK_SPREADS_S = 0.1
# How long the prefill worker's closing figures may hold up the end of an answer.
_DONE_TIMEOUT_S = 1.0
# After the prefill side is lost, how long the decode worker has to say whether it got the KV before.
_VERDICT_TIMEOUT_S = 5.0
# Decode tokens may overtake the first token, which comes another way. Beyond these bounds it will never come.
_MAX_EARLY_TOKENS = 256
_MAX_EARLY_S = 2.0


class Attempt:
    def __init__(
        self,
        job: Job,
        number: int,
        *,
        prefill: PrefillLink | None,
        decode: DecodeLink,
        output: Output,
        report: Report,
        cleanup: Cleanup,
        on_computed: Callable[[], None],
    ) -> None:
        """`prefill` None: the decode worker computes the prompt itself. `on_computed`: it has left that worker's queue."""
        self._job = job
        self._id = (job.request_id, number)
        self._decode = decode
        self._run = None if prefill is None else PrefillRun(prefill, self)
        # Whose queue the prompt is in until its first token has come.
        self._computing: WorkerLink = prefill or decode
        self._output, self._report = output, report
        self._cleanup = cleanup
        self._on_computed = on_computed
        # Both workers get them: put into protobuf's own array once, which then is copied as it is.
        self._token_ids = inference_pb2.TokenIds(ids=job.prompt).ids
        self._token_ids.extend(output.token_ids)
        self._first_position = output.next_position
        self._queued_tokens = 0
        self._early: dict[int, prefill_pb2.Token] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._accepted_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._on_decode = False
        self._reserved = False
        # The decode worker has the prompt's KV, and decodes.
        self._committed = False
        # The first of the decode worker's tokens that has not come. Of a pair, the prefill worker gives the one before.
        self._next_decode_position = self._first_position + (prefill is not None)
        for link in {self._computing, decode}:
            link.tenants.add(self)

    # ---- the three steps ------------------------------------------------------------------------------------------------

    async def begin(self, cached_tokens: int) -> None:
        """`cached_tokens`: what the worker that computes the prompt is thought to have of it, for the count of its queue. Raises
        WorkerRefused, or what is wrong with the request."""
        prefill = None if self._run is None else self._run.link
        # First of all: with prefill_here tokens may come before the answer to Reserve.
        self._report.begin_attempt("" if prefill is None else prefill.record.worker_id, self._decode.record.worker_id)
        self._queued_tokens = max(1, len(self._token_ids) - cached_tokens)
        self._computing.queue(self._queued_tokens, self._job.request_class)
        num_decode_cached = await self._reserve()
        if self._run is not None:
            await self._accept(self._run, num_decode_cached)
        self._accepted_at = self._accepted_at or time.monotonic()

    async def _reserve(self) -> int:
        """Returns how many of the prompt's tokens are on the decode worker already."""
        decode = self._decode
        if not await decode.stream.wait_open(min(_STREAM_TIMEOUT_S, self._job.remaining_s())):
            raise WorkerRefused(decode.life, Unavailable(f"decode worker {decode.record.worker_id} does not take a token stream"))
        request = decode_pb2.ReserveRequest(
            request_id=self._job.request_id,
            attempt=self._id[1],
            router_id=decode.stream.router_id,
            token_ids=self._token_ids,
            num_prompt_tokens=len(self._job.prompt),
            sampling=sampling_to_proto(self._job.sampling),
            tenant=self._job.tenant,
            cache_salt=self._job.cache_salt,
            request_class=class_to_proto(self._job.request_class),
            prefill_here=self._run is None,
            tpot_ms=None if self._job.tpot_s is None else 1e3 * self._job.tpot_s,
        )
        decode.stream.add(self._id, self)
        self._on_decode = True
        timeout = min(_UNARY_TIMEOUT_S, self._job.remaining_s())
        try:
            response = await decode.stub.Reserve(request, timeout=timeout, metadata=self._job.metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._on_decode = False
            raise refusal(decode, error) from error
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            if not cancelled_by_peer(error):
                raise
            raise WorkerRefused(decode.life, gone(decode)) from error
        if response.epoch != decode.life.epoch:
            # A new life listens at the old address, and the registry has not told yet.
            raise WorkerRefused(decode.life, gone(decode))
        self._reserved = True
        return response.num_cached_tokens

    async def _accept(self, run: PrefillRun, num_decode_cached: int) -> None:
        request = prefill_pb2.PrefillRequest(
            request_id=self._job.request_id,
            attempt=self._id[1],
            token_ids=self._token_ids,
            num_prompt_tokens=len(self._job.prompt),
            sampling=sampling_to_proto(self._job.sampling),
            tenant=self._job.tenant,
            cache_salt=self._job.cache_salt,
            num_decode_cached_tokens=num_decode_cached,
            request_class=class_to_proto(self._job.request_class),
        )
        ticket = await run.accept(request, self._job)
        self._accepted_at = time.monotonic()
        self._tasks = [asyncio.create_task(self._attach(ticket)), asyncio.create_task(run.follow())]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def finish(self) -> None:
        await self._ended
        if self._committed and self._run is not None:
            try:
                async with asyncio.timeout(_DONE_TIMEOUT_S):
                    await self._run.over.wait()
            except TimeoutError:
                log.info("request %s: prefill worker %s still holds its lease", self._job.request_id, self._run.link.record.worker_id)

    def close(self) -> None:
        """Once, whatever happened before."""
        self._unqueue()
        for link in {self._computing, self._decode}:
            link.tenants.discard(self)
        if self._run is not None:
            self._run.close()
            # Each knows the other: left so, all that both hold would stay until a full garbage collection.
            self._run = None
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
        if event.HasField("token"):
            token = event.token
            self._note_decode_token(token)
            self._report.on_decode_token()
            self._on_token(token)
            return
        kind = event.WhichOneof("event")
        if kind == "first_token":
            self._committed = True
            self._note_decode_token(event.first_token.token)
            self._report.on_computed_here()
            self.on_first_token(event.first_token)
        elif kind == "committed":
            self._committed = True
            self._report.on_committed(event.committed)
        elif kind == "failed":
            self._on_decode = False
            failed = event.failed
            message = f"decode worker {self._decode.record.worker_id}: {failed.message}"
            # Before the commit a transfer fails because of its source, unless the decode worker is itself at fault or full.
            at_source = not self._committed and failed.code not in ("RESOURCE_EXHAUSTED", "INTERNAL", "NOT_FOUND")
            blame = self._computing if at_source else self._decode
            self._fail(blame, failed.code, message, retryable=failed.retryable)

    def _note_decode_token(self, token: prefill_pb2.Token) -> None:
        if token.finish_reason:
            self._on_decode = False
        if token.position == self._next_decode_position:
            self._next_decode_position += 1

    def position(self) -> decode_pb2.StreamPosition:
        return decode_pb2.StreamPosition(
            request_id=self._job.request_id,
            attempt=self._id[1],
            next_position=self._next_decode_position,
            committed=self._committed,
            reserving=not self._reserved,
        )

    def on_worker_lost(self, life: WorkerLife, error: TwostepError) -> None:
        if self._run is not None and life == self._run.link.life:
            self.on_prefill_lost("UNAVAILABLE", error.message)
        else:
            self._fail(self._decode, "UNAVAILABLE", error.message, retryable=True)

    def on_first_token(self, first: prefill_pb2.FirstToken) -> None:
        self._unqueue()
        self._on_computed()
        # It may have overtaken the answer to Reserve.
        self._report.on_first_token(first, self._accepted_at or time.monotonic())
        self._on_token(first.token)

    def on_prefill_done(self, done: prefill_pb2.PrefillDone) -> None:
        self._report.on_prefill_done(done)

    def on_prefill_lost(self, code: str, why: str) -> None:
        """Before the first token it is over at once. After it, the decode worker may have all it needs: it has the word, for a while."""
        if self._run is None:
            return
        self._run.over.set()
        if self._committed or self._ended.done():
            return
        message = f"prefill worker {self._run.link.record.worker_id}: {why}"
        if self._output.next_position > self._first_position:
            asyncio.get_running_loop().call_later(_VERDICT_TIMEOUT_S, self._no_verdict, message)
        else:
            self._fail(self._computing, code, message, retryable=retryable(code))

    def _no_verdict(self, message: str) -> None:
        if not self._committed:
            self._fail(self._computing, "UNAVAILABLE", message, retryable=True)

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
            if not cancelled_by_peer(error):
                raise
            self._fail(self._decode, "UNAVAILABLE", gone(self._decode).message, retryable=True)
        except grpc.aio.AioRpcError as error:
            message = f"decode worker {self._decode.record.worker_id}: {error.details()}"
            self._fail(self._decode, error.code().name, message, retryable=retryable(error.code().name))

    def _fail(self, link: WorkerLink, code: str, message: str, *, retryable: bool) -> None:
        if not self._ended.done():
            self._ended.set_exception(AttemptFailed(link.life, client_error(code, message), retryable=retryable))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A bug in a task must not leave the request waiting for what will never come."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("request %s", self._job.request_id, exc_info=error)
            self._fail(
                self._computing, "INTERNAL", f"internal error; look for request {self._job.request_id} in the router's log", retryable=False
            )

    def _unqueue(self) -> None:
        self._computing.queue(-self._queued_tokens, self._job.request_class)
        self._queued_tokens = 0
