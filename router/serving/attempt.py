"""One attempt of a request: one sequence, from its first reservation until nothing of it is left on any worker.

On a pair of workers, or on the decode worker alone:

begin     pair: Decode.Reserve and, beside it or after it, Prefill.Run up to Accepted. Alone: Decode.Reserve with prefill_here.
          Raises WorkerRefused: try another placement
finish    pair: Decode.Attach with the ticket; tokens from both sides, put in order, go to the output. Alone: all of them come from the
          decode worker. Returns after the last one. Raises AttemptFailed if a worker is lost before that
close     whatever the workers may still hold is cancelled, in the background

Prefill.Run stays open as long as the prefill worker holds its lease: cancelling the call frees everything there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio

from router.request.cleanup import Cleanup
from router.request.job import RequestJob
from router.request.output import Output
from router.request.report import RequestReport
from router.serving.worker_calls import (
    ACCEPT_TIMEOUT_S,
    RETRYABLE,
    AttemptFailed,
    CallFailed,
    WorkerRefused,
    call_errors,
    client_error,
    refusal_of,
)
from router.workers.pool import DecodeLink, WorkerLink
from router.workers.prefix_index import WorkerLife
from twostep.errors import InternalError, TwostepError, Unavailable
from twostep.rpc.convert import class_to_proto, sampling_to_proto
from twostep.rpc.v1 import decode_pb2, inference_pb2, kv_pb2, prefill_pb2

log = logging.getLogger(__name__)

_UNARY_TIMEOUT_S = 5.0
_STREAM_TIMEOUT_S = 1.0
_BREAK_SPREADS_S = 0.1
# How long the prefill worker's closing figures may hold up the end of an answer.
_DONE_TIMEOUT_S = 1.0
# The end of a lease reaches the router from both workers. How much later than the decode worker the one that computes may tell of it.
_SOURCE_SPREADS_S = 0.25
# After the prefill side is lost, how long the decode worker has to say whether it got the KV before.
_VERDICT_TIMEOUT_S = 5.0
# Decode tokens may overtake the first token, which comes another way. Beyond these bounds it will never come.
_MAX_EARLY_TOKENS = 256
_MAX_EARLY_S = 2.0


class Attempt:
    def __init__(
        self,
        job: RequestJob,
        number: int,
        *,
        prefill: WorkerLink | None,
        decode: DecodeLink,
        output: Output,
        report: RequestReport,
        cleanup: Cleanup,
        on_computed: Callable[[], None],
    ) -> None:
        """`prefill` None: the decode worker computes the prompt itself. `on_computed`: it has left that worker's queue."""
        self._job = job
        self._id = (job.request_id, number)
        self._prefill = prefill
        self._decode = decode
        # The prompt is in its queue until the first token has come.
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
        # The prefill worker's, while it is kept from the client, and what ends that at the latest.
        self._first: prefill_pb2.FirstToken | None = None
        self._giving: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._accepted_at = 0.0
        self._tasks: list[asyncio.Task[Any]] = []
        self._run: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent] | None = None
        # Nothing more comes from the prefill worker.
        self._run_over = asyncio.Event()
        self._next_prompt_position = 0
        self._on_decode = False
        self._reserved = False
        # The decode worker has the prompt's KV, and decodes.
        self._committed = False
        # The first of the decode worker's tokens that has not come. Of a pair, the prefill worker gives the one before.
        self._next_decode_position = self._first_position + (prefill is not None)
        for link in {self._computing, decode}:
            link.users.add(self)

    # ---- the three steps ------------------------------------------------------------------------------------------------

    async def begin(self, cached_tokens: int, decode_cached_tokens: int | None = None) -> None:
        """`cached_tokens`: what the worker that computes the prompt is thought to have of it, for the count of its queue.
        `decode_cached_tokens`: what the decode worker of a pair is thought to have, and Run begins beside Reserve; None: after it. Raises
        WorkerRefused, or what is wrong with the request."""
        prefill = self._prefill
        self._queued_tokens = max(1, len(self._token_ids) - cached_tokens)
        self._computing.queue(self._queued_tokens, self._job.request_class)
        accepting = None
        if prefill is not None and decode_cached_tokens is not None and self._decode.stream.open:
            accepting = asyncio.create_task(self._accept(prefill, decode_cached_tokens))
            # What became of it is nobody's business once the decode worker has refused.
            accepting.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._tasks.append(accepting)
        num_decode_cached = await self._reserve()
        if prefill is not None:
            # Not followed before both have accepted: no token leaves of an attempt that may yet be refused.
            ticket = await (self._accept(prefill, num_decode_cached) if accepting is None else accepting)
            self._accepted_at = time.monotonic()
            for work in (self._attach(ticket), self._follow()):
                task = asyncio.create_task(work)
                task.add_done_callback(self._task_ended)
                self._tasks.append(task)
        self._accepted_at = self._accepted_at or time.monotonic()

    async def finish(self) -> None:
        await self._ended
        if self._committed and self._prefill is not None:
            try:
                async with asyncio.timeout(_DONE_TIMEOUT_S):
                    await self._run_over.wait()
            except TimeoutError:
                log.info("request %s: prefill worker %s still holds its lease", self._job.request_id, self._prefill.record.worker_id)

    def close(self) -> None:
        """Ends it on both workers. Called once, whatever happened before."""
        if self._giving is not None:
            self._giving.cancel()
        self._unqueue()
        for link in {self._computing, self._decode}:
            link.users.discard(self)
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
            self._ended.exception()  # seen, in case finish() was never reached

    # ---- calls to the workers -------------------------------------------------------------------------------------------

    async def _reserve(self) -> int:
        """Returns how many of the prompt's tokens are on the decode worker already."""
        decode = self._decode
        if not await decode.stream.wait_open(min(_STREAM_TIMEOUT_S, self._job.remaining_s())):
            raise WorkerRefused(decode.life, Unavailable(f"decode worker {decode.record.worker_id} does not take a token stream"))
        targets = self._job.targets
        request = decode_pb2.ReserveRequest(
            router_id=decode.stream.router_id,
            prefill_here=self._prefill is None,
            tpot_ms=None if targets.tpot_s is None else 1e3 * targets.tpot_s,
            gap_ms=None if targets.gap_s is None else 1e3 * targets.gap_s,
            **self._for_both(computes=self._prefill is None),
        )
        decode.stream.add(self._id, self)
        self._on_decode = True
        timeout = min(_UNARY_TIMEOUT_S, self._job.remaining_s())
        try:
            with call_errors():
                response = await decode.reservations.ask(request, timeout=timeout, metadata=self._job.metadata)
        except CallFailed as error:
            if error.code == "RESOURCE_EXHAUSTED":
                self._on_decode = False
            raise refusal_of(decode, error) from error
        if response.epoch != decode.life.epoch:
            # A new life listens at the old address, and the registry has not noticed yet.
            raise WorkerRefused(decode.life, Unavailable(f"decode worker {decode.record.worker_id} is gone"))
        self._reserved = True
        return response.num_cached_tokens

    def _for_both(self, *, computes: bool) -> dict[str, Any]:
        """Returns the fields that the requests to both workers have. `computes`: this one the prompt."""
        job = self._job
        sampling = sampling_to_proto(job.sampling)
        if not computes or self._output.next_prompt_position >= len(job.prompt):
            sampling.ClearField("prompt_logprobs")
        return {
            "request_id": job.request_id,
            "attempt": self._id[1],
            "token_ids": self._token_ids,
            "num_prompt_tokens": len(job.prompt),
            "sampling": sampling,
            "tenant": job.tenant,
            "cache_salt": job.cache_salt,
            "request_class": class_to_proto(job.request_class),
        }

    async def _accept(self, prefill: WorkerLink, num_decode_cached: int) -> kv_pb2.Ticket:
        worker_id = prefill.record.worker_id
        request = prefill_pb2.PrefillRequest(num_decode_cached_tokens=num_decode_cached, **self._for_both(computes=True))
        try:
            with call_errors():
                self._run = prefill.prefill.Run(request, timeout=self._job.remaining_s(), metadata=self._job.metadata)
                async with asyncio.timeout(min(ACCEPT_TIMEOUT_S, self._job.remaining_s())):
                    event = await self._run.read()
        except TimeoutError:
            raise WorkerRefused(prefill.life, Unavailable(f"prefill worker {worker_id} does not answer")) from None
        except CallFailed as error:
            raise refusal_of(prefill, error) from error
        if not isinstance(event, prefill_pb2.PrefillEvent) or not event.HasField("accepted"):
            raise WorkerRefused(prefill.life, InternalError(f"prefill worker {worker_id} began without a ticket"))
        prefill.touch()
        return event.accepted.ticket

    async def _follow(self) -> None:
        """Reads the Run stream to its end."""
        call, prefill = self._run, self._prefill
        assert call is not None, "it is followed once it is accepted"
        assert prefill is not None, "and accepted by a prefill worker"
        try:
            with call_errors():
                while isinstance(event := await call.read(), prefill_pb2.PrefillEvent):
                    prefill.touch()
                    kind = event.WhichOneof("event")
                    if kind == "first_token":
                        self._hold_first_token(event.first_token)
                    elif kind == "prompt_logprobs":
                        self._output.push_prompt(event.prompt_logprobs)
                    elif kind == "done":
                        self._report.on_prefill_done(event.done)
                        if event.done.state not in (kv_pb2.LEASE_STATE_COMMITTED, kv_pb2.LEASE_STATE_RELEASED):
                            self._on_prefill_lost("ABORTED", f"its lease ended as {kv_pb2.LeaseState.Name(event.done.state)}")
                        return
            self._on_prefill_lost("UNAVAILABLE", "it closed the call without an end")
        except CallFailed as error:
            self._on_prefill_lost(error.code, error.details)
        finally:
            self._run_over.set()

    async def _attach(self, ticket: kv_pb2.Ticket) -> None:
        """Hands the ticket to the decode worker. It is repeated, which is safe, if the connection broke under it and came back: the
        reservation outlives that."""
        request = decode_pb2.AttachRequest(request_id=self._job.request_id, attempt=self._id[1], ticket=ticket)
        stream = self._decode.stream
        num_opened: int | None = None
        while True:
            repeated, num_opened = num_opened is not None, stream.num_opened
            timeout = min(_UNARY_TIMEOUT_S, self._job.remaining_s())
            try:
                with call_errors():
                    await self._decode.decode.Attach(request, timeout=timeout, metadata=self._job.metadata)
                return
            except CallFailed as error:
                if error.code == "NOT_FOUND" and repeated:
                    return  # the first one had arrived and it is over already; the stream says how
                broke = error.code == "UNAVAILABLE" and isinstance(error.__cause__, grpc.aio.AioRpcError)
                if broke:
                    # All calls of a connection break together, but one learns of it after the other.
                    await asyncio.sleep(_BREAK_SPREADS_S)
                # Of an open stream that did not break, it was the worker that said so.
                if not broke or (stream.open and stream.num_opened == num_opened):
                    message = f"decode worker {self._decode.record.worker_id}: {error.details}"
                    self._fail(self._decode, error.code, message, retryable=error.code in RETRYABLE)
                    return
                # If it does not come back, the stream's loss ends the attempt.
                await stream.wait_open(self._job.remaining_s())

    # ---- what arrives ---------------------------------------------------------------------------------------------------

    def on_event(self, event: decode_pb2.DecodeEvent) -> None:
        """See router.workers.decode_stream.EventSink."""
        if event.HasField("token"):
            token = event.token
            self._note_decode_token(token)
            self._report.on_decode_token(token.position, self._decode.stream.steps)
            self._on_token(token)
            return
        kind = event.WhichOneof("event")
        if kind == "first_token":
            self._committed = True
            self._note_decode_token(event.first_token.token)
            self._report.on_computed_here(self._decode.stream.steps)
            self._on_first_token(event.first_token)
            self._give_first_token()
        elif kind == "prompt_logprobs":
            part = event.prompt_logprobs
            self._next_prompt_position = part.position + len(part.logprobs)
            self._output.push_prompt(part)
        elif kind == "committed":
            self._committed = True
            self._report.on_committed(event.committed)
            self._give_first_token()
        elif kind == "failed":
            self._on_decode = False
            failed = event.failed
            message = f"decode worker {self._decode.record.worker_id}: {failed.message}"
            # Before the commit a transfer fails because of its source, unless the decode worker is itself at fault or full.
            at_source = not self._committed and failed.code not in ("RESOURCE_EXHAUSTED", "INTERNAL", "NOT_FOUND")
            link = self._computing if at_source else self._decode
            fail = partial(self._fail, link, failed.code, message, retryable=failed.retryable)
            answered = self._first is not None or self._output.next_position > self._first_position
            if at_source and self._prefill is not None and not answered:
                # A first token that ends the request ends its lease too, and may come after the word of that: then nothing failed.
                asyncio.get_running_loop().call_later(_SOURCE_SPREADS_S, fail)
            else:
                fail()

    def position(self) -> decode_pb2.StreamPosition:
        """See router.workers.decode_stream.EventSink."""
        return decode_pb2.StreamPosition(
            request_id=self._job.request_id,
            attempt=self._id[1],
            next_position=self._next_decode_position,
            committed=self._committed,
            reserving=not self._reserved,
            next_prompt_position=self._next_prompt_position,
        )

    def on_worker_lost(self, life: WorkerLife, error: TwostepError) -> None:
        """See router.workers.pool.LinkUser."""
        if self._prefill is not None and life == self._prefill.life:
            self._on_prefill_lost("UNAVAILABLE", error.message)
        else:
            self._fail(self._decode, "UNAVAILABLE", error.message, retryable=True)

    def _note_decode_token(self, token: prefill_pb2.Token) -> None:
        if token.finish_reason:
            self._on_decode = False
        if token.position == self._next_decode_position:
            self._next_decode_position += 1

    def _hold_first_token(self, first: prefill_pb2.FirstToken) -> None:
        """Keeps it until the decode worker has the KV, where a gap was promised and the time to the first token has room: the hand-over is
        no part of the first gap then."""
        self._on_first_token(first)
        goes_on = not (self._committed or self._first_position or first.token.finish_reason)
        if goes_on and (hold_s := self._job.first_token_may_wait_s()) > 0:
            self._giving = asyncio.get_running_loop().call_later(hold_s, self._give_first_token)
        else:
            self._give_first_token()

    def _on_first_token(self, first: prefill_pb2.FirstToken) -> None:
        self._unqueue()
        self._on_computed()
        self._first = first

    def _give_first_token(self) -> None:
        if self._giving is not None:
            self._giving.cancel()
        first, self._first = self._first, None
        if first is not None and not self._ended.done():
            # It may have overtaken the answer to Reserve.
            self._report.on_first_token(first, self._accepted_at or time.monotonic())
            self._on_token(first.token)

    def _on_prefill_lost(self, code: str, why: str) -> None:
        """Decides whether the attempt is over. Before the first token it is over at once. After it, the decode worker may have all it
        needs: it has the word, for a while."""
        self._run_over.set()
        self._give_first_token()
        if self._committed or self._ended.done():
            return
        message = f"prefill worker {self._computing.record.worker_id}: {why}"
        if self._output.next_position > self._first_position:
            asyncio.get_running_loop().call_later(_VERDICT_TIMEOUT_S, self._no_verdict, message)
        else:
            self._fail(self._computing, code, message, retryable=code in RETRYABLE)

    def _no_verdict(self, message: str) -> None:
        if not self._committed:
            self._fail(self._computing, "UNAVAILABLE", message, retryable=True)

    def _on_token(self, token: prefill_pb2.Token) -> None:
        position, expected = token.position, self._output.next_position
        if self._ended.done() or position < expected:
            return
        if position > expected and self._first is not None:
            self._give_first_token()
            expected = self._output.next_position
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

    def _fail(self, link: WorkerLink, code: str, message: str, *, retryable: bool) -> None:
        if not self._ended.done():
            self._ended.set_exception(AttemptFailed(link.life, client_error(code, message), retryable=retryable))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Fails the attempt where one of its tasks ended with an error: a bug in a task must not leave the request waiting for what will
        never come."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("request %s", self._job.request_id, exc_info=error)
            message = f"internal error; look for request {self._job.request_id} in the router's log"
            self._fail(self._computing, "INTERNAL", message, retryable=False)

    def _unqueue(self) -> None:
        if self._queued_tokens:
            self._computing.queue(-self._queued_tokens, self._job.request_class)
            self._queued_tokens = 0
