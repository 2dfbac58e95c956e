"""Serves requests whatever protocol their clients speak: grpc/ and http/ are its two fronts. The life of a Generate request:

    1. name it (the client's id or a new one; sent back at once), find the model, read prompt and parameters    prompt.py
    2. wait for a place among the requests served at once, by class, share and deadline        queues.py, fair_queue.py
    3. place it on a prefill and a decode worker, again if one is lost                       dispatch.py, placement.py, attempt.py
    4. tokens come from the prefill worker's call (the first) and the decode worker's shared stream (the others), each
       position once and in order, into this request's bounded buffer                        decode_stream.py, output.py
    5. this call takes what is there, makes text of it, looks for stop strings, and writes one piece             answer.py
    6. after the last token the end: why, how many tokens, how long each phase took, how the KV travelled        report.py

Of an embedding there are steps 1 to 3, on one prefill worker, and then its vector (embedding.py).

A client that has the beginning of an answer, from a router that is gone, sends it along: step 1 brings text and stop strings to where it
is, and steps 3 to 5 go on from there, as they do after a lost worker.

Whatever ends the call early (the client, a deadline, a stop string, a client too slow) cancels step 3, and that frees
what both workers hold.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from router.access.account import Identity
from router.config import RouterConfig
from router.prompting.prompt import Prompt, PromptReader, ReadPrompt
from router.request.answer import AnswerReader, Finish
from router.request.job import Metadata, RequestJob
from router.request.memory_budget import MemoryBudget
from router.request.output import Output
from router.request.report import RequestReport, name_request, recorded
from router.request.targets import Reason, Targets, class_of, tenant_of
from router.request.tool_calls import CallTaker, Write
from router.request.vector import VectorOutput
from router.serving.dispatch import Dispatcher, time_is_up
from router.serving.hold_back import HeldAnswer, HoldBack
from router.serving.loop_share import LoopShare, cost_of
from router.status.request_book import RequestBook
from router.waiting.demand_meter import DemandMeter
from router.waiting.fair_queue import OutputLengths, QueueEntry
from router.waiting.queues import Admission
from router.workers.pool import WorkerPool
from twostep.checkpoint.embedding_format import EmbeddingFormat
from twostep.errors import InternalError, InvalidRequest, UnknownModel
from twostep.hold_back import HeldRequest, class_name
from twostep.metrics.router import RouterMetrics
from twostep.pooling import PoolingParams
from twostep.process.tracing import Tracer
from twostep.rpc.v1 import inference_pb2, prefill_pb2
from twostep.sampling_params import SamplingParams

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_SALT_CHARS = 256
# Of an embedding: nothing is sampled.
_UNSAMPLED = SamplingParams(max_tokens=1, temperature=0.0)
# As a rule a request has left for its workers by then.
_ON_ITS_WAY_S = 0.002


class Asker(Protocol):
    """One client's call, which came at `received` (time.monotonic()). `metadata` goes along with every call to a worker: the caller's trace
    context."""

    @property
    def received(self) -> float: ...

    @property
    def identity(self) -> Identity: ...

    @property
    def metadata(self) -> Metadata: ...

    def remaining_s(self) -> float:
        """Returns the time until the client's own deadline; infinite without."""
        ...


class Caller(Asker, Protocol):
    """A call for an answer."""

    async def begin(self, request_id: str, seed: int) -> None:
        """Gets the request's name and its seed, before anything else is known."""
        ...

    def accepted(self, prompt: Sequence[int]) -> None:
        """Gets the prompt's token ids, as Prompt.client_ids has them, before the first piece."""
        ...

    async def write_prompt(self, part: inference_pb2.PromptLogprobs) -> None:
        """Sends log probabilities of the prompt, if they are asked for, all of them before the first piece."""
        ...

    @property
    def write(self) -> Callable[[inference_pb2.GenerateResponse], Awaitable[None]]:
        """Sends the next piece. Waits while the client has enough to read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """`values`: the vector, float32, little-endian."""

    values: bytes
    num_prompt_tokens: int
    num_cached_tokens: int


class Inference:
    def __init__(
        self,
        config: RouterConfig,
        *,
        fingerprint: str,
        max_model_len: int,
        prompts: PromptReader,
        admission: Admission,
        dispatcher: Dispatcher,
        pool: WorkerPool,
        metrics: RouterMetrics,
        tracer: Tracer | None,
        hold_back: HoldBack | None,
        embedding: EmbeddingFormat,
        demand: DemandMeter,
        book: RequestBook,
    ) -> None:
        """`fingerprint` identifies the model, its configuration and its tokenizer. `max_model_len` is the model's own; workers may have
        less. `embedding`: how its vectors are made."""
        self._config = config
        self.model_names = config.served_model_name or (config.model.resolve().name,)
        self.fingerprint = fingerprint
        self._max_model_len = max_model_len
        self._demand = demand
        self._book = book
        self._tracer = tracer
        self._hold_back = hold_back
        self.embedding = embedding
        self._metrics = metrics
        self.prompts = prompts
        self._admission = admission
        self._dispatcher = dispatcher
        self._pool = pool
        self._outputs: set[Output] = set()
        # Of what answers hold that their clients have not taken: streams that are behind, and answers that are kept until they are whole.
        self.memory = MemoryBudget()
        self._lengths = OutputLengths()
        self._loop_share = LoopShare()
        self._last_pool_tokens = max_model_len

    # ---- what is asked ------------------------------------------------------------------------------------------------

    async def generate(self, request: inference_pb2.GenerateRequest, caller: Caller, read_prompt: ReadPrompt) -> inference_pb2.End:
        """Pieces go to `caller`; the end is returned once everything that the request held is free. `read_prompt`: of several
        answers to one prompt, the first reads it. Raises TwostepError."""
        caller.identity.complete(request)
        with (
            recorded(
                self._metrics,
                request,
                caller.metadata,
                self._tracer,
                received=caller.received,
                model=self.model_name,
                on_end=self._ended,
            ) as report,
            caller.identity.answering(),
        ):
            self._book.begin(report)
            return await self._generate(request, caller, report, read_prompt)

    def _ended(self, report: RequestReport, refused: Reason | None, cancelled: bool) -> None:
        self._demand.ended(report, refused, cancelled)
        self._book.ended(report)

    async def embed(self, request: inference_pb2.GenerateRequest, asker: Asker, read_prompt: ReadPrompt, params: PoolingParams) -> Embedded:
        """`request`: all of it but the prompt; nothing is sampled. Its vector is returned once everything that it held is free. Raises
        TwostepError."""
        asker.identity.complete(request)
        with (
            recorded(
                self._metrics,
                request,
                asker.metadata,
                self._tracer,
                received=asker.received,
                model=self.model_name,
                on_end=self._ended,
                embeds=True,
            ) as report,
            asker.identity.answering(),
        ):
            self._book.begin(report)
            name = self._named(request, report)
            self._check_terms(request)
            asker.identity.check_solvent()
            async with self._in_time(asker, report):
                prompt = await read_prompt()
            with asker.identity.spending(len(prompt.ids)) as spending:
                job = report.job = RequestJob(
                    prompt=prompt.ids, sampling=_UNSAMPLED, pooling=params, **self._terms(request, name, asker, report)
                )
                report.offered = True
                self._demand.arrived(job)
                try:
                    states = await self._pooled(job, report)
                finally:
                    spending.placed = report.placed
        return Embedded(values=states.values, num_prompt_tokens=len(job.prompt), num_cached_tokens=report.cached_tokens)

    def pooling(self, *, dimensions: int | None, normalize: bool | None) -> PoolingParams:
        """Returns what is asked of a vector, where that is left open as the model has it. Raises InvalidRequest for a length that it has
        not."""
        if dimensions is not None:
            self.embedding.check_dimensions(dimensions)
        return PoolingParams(
            kind=self.embedding.pooling,
            dimensions=dimensions or 0,
            normalize=self.embedding.normalize if normalize is None else normalize,
        )

    async def _pooled(self, job: RequestJob, report: RequestReport) -> prefill_pb2.PooledStates:
        entry, came = QueueEntry.of(job, ageing_s=self._config.ageing), time.monotonic()
        slot = self._admission.slot(entry, lambda: len(job.prompt) if report.placed else 0)
        output = VectorOutput()
        try:
            async with asyncio.timeout(job.remaining_s()), slot, self._serving(job, entry, output, report):
                report.waited_s += time.monotonic() - came
                return await output.take()
        except TimeoutError as error:
            raise time_is_up(placed=report.placed) from error

    async def tokenize(self, request: inference_pb2.TokenizeRequest, caller: str) -> inference_pb2.TokenizeResponse:
        self.check_model(request.model)
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("the input is missing; set text or chat")
        prompts = self.prompts
        ids = await (prompts.text_ids(request.text, caller) if kind == "text" else prompts.chat_ids(request.chat, caller))
        return inference_pb2.TokenizeResponse(token_ids=ids, max_model_len=self.max_model_len)

    def models(self) -> inference_pb2.ListModelsResponse:
        roles = [record.role for record in self._pool.records() if record.ready and not record.draining]
        models = [
            inference_pb2.Model(
                name=name,
                max_model_len=self.max_model_len,
                fingerprint=self.fingerprint,
                prefill_workers=roles.count("prefill"),
                decode_workers=roles.count("decode"),
            )
            for name in self.model_names
        ]
        return inference_pb2.ListModelsResponse(models=models)

    # ---- a Generate request -------------------------------------------------------------------------------------------

    async def _generate(
        self, request: inference_pb2.GenerateRequest, caller: Caller, report: RequestReport, read_prompt: ReadPrompt
    ) -> inference_pb2.End:
        request_id = request_id_of(request.request_id)
        name = self._named(request, report, request_id)
        if not request.sampling.HasField("seed"):
            request.sampling.seed = secrets.randbits(63)
        beginning = Beginning(caller, request_id, request.sampling.seed)
        try:
            self._check_terms(request)
            caller.identity.check_solvent()
            async with self._in_time(caller, report):
                prompt = await read_prompt()
                job = report.job = await self._job(request, prompt, name, caller, report)
            with caller.identity.spending(report.num_prompt_tokens) as spending:
                report.offered = True
                self._demand.arrived(job)
                caller.accepted(prompt.client_ids)
                answer = report.answer = prompt.answer(job.sampling)
                text = await self.prompts.resume(answer, job.resumed, job.sampling, caller.identity.share)
                parser, write = prompt.tools.parser(), caller.write
                calls = None if parser is None else CallTaker(parser, answer, caller.write)
                if calls is not None:
                    calls.resume(text)
                    write = calls
                try:
                    # What the client has may be all of it but the end.
                    finish = answer.finish or await self._stream(job, report, answer, caller, write, beginning)
                    if calls is not None:
                        finish = await calls.end(finish)
                finally:
                    spending.placed, spending.num_output = report.placed, report.num_output_tokens
            return report.end(answer, finish.reason, finish.stop_reason)
        finally:
            await beginning.over()

    async def _job(
        self, request: inference_pb2.GenerateRequest, prompt: Prompt, name: str, caller: Caller, report: RequestReport
    ) -> RequestJob:
        terms = self._terms(request, name, caller, report)
        sampling = self.prompts.sampling(
            request.sampling, len(prompt.ids), self.max_model_len, pool_tokens=self._pool_tokens(), unasked=prompt.unasked
        )
        if request.resume_token_ids:
            # Who has tokens has these.
            sampling = replace(sampling, prompt_logprobs=None)
        grammar = await self.prompts.grammar(request.sampling, prompt, caller.identity.share)
        most_tokens = max(1, sampling.max_tokens - len(request.resume_token_ids))
        return RequestJob(
            prompt=prompt.ids,
            num_added=prompt.num_added,
            sampling=sampling if grammar is None else replace(sampling, grammar=grammar),
            prompt_only=request.sampling.HasField("max_tokens") and not request.sampling.max_tokens,
            resumed=list(request.resume_token_ids),
            migrate=not request.no_migration,
            expected_tokens=self._lengths.expected(terms["tenant"], most_tokens),
            **terms,
        )

    # ---- of any request -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _in_time(self, asker: Asker, report: RequestReport) -> AsyncIterator[None]:
        """Ends what goes on within it at the request's deadline. Raises Expired."""
        try:
            async with asyncio.timeout(self._deadline(asker, report) - time.monotonic()):
                yield
        except TimeoutError as error:
            raise time_is_up(placed=False) from error

    def _deadline(self, asker: Asker, report: RequestReport) -> float:
        return min(report.started + self._config.request_timeout, time.monotonic() + asker.remaining_s())

    def _named(self, request: inference_pb2.GenerateRequest, report: RequestReport, request_id: str = "") -> str:
        """Returns what the workers call it. Raises InvalidRequest."""
        request_id = request_id or request_id_of(request.request_id)
        name = _unique(request_id) if request.request_id else request_id
        name_request(report, name)
        return name

    def _check_terms(self, request: inference_pb2.GenerateRequest) -> None:
        self.check_model(request.model)
        if len(request.cache_salt) > _MAX_SALT_CHARS:
            raise InvalidRequest(f"cache_salt has {len(request.cache_salt)} characters; use at most {_MAX_SALT_CHARS}")

    def _terms(self, request: inference_pb2.GenerateRequest, name: str, asker: Asker, report: RequestReport) -> dict[str, Any]:
        """Returns the fields of RequestJob that do not hang on what is asked for. Raises InvalidRequest, PermissionDenied."""
        request_class = class_of(request)
        tenant = tenant_of(request, asker.identity.tenant) or asker.identity.fallback
        asker.identity.check_class(request_class)
        return {
            "request_id": name,
            "deadline": self._deadline(asker, report),
            "cache_salt": request.cache_salt,
            "metadata": report.metadata,
            "tenant": tenant,
            "request_class": request_class,
            "targets": Targets.of(request),
            "arrived": report.started,
        }

    async def _stream(
        self, job: RequestJob, report: RequestReport, answer: AnswerReader, caller: Caller, write: Write, beginning: Beginning
    ) -> Finish:
        """Writes the pieces with `write`. They are written here rather than yielded, so that cutting a client
        that does not read interrupts this coroutine, which then says why."""
        task = asyncio.current_task()
        assert task is not None, "every call runs in a task"
        holding = self.memory.hold(caller.identity.caller)
        output = Output(max_buffered=self._config.max_buffered_tokens, on_cut=task.cancel, holding=holding, resumed=job.resumed)
        entry = QueueEntry.of(job, ageing_s=self._config.ageing)
        slot = self._admission.slot(entry, lambda: len(job.prompt) + output.next_position if report.placed else 0)
        held = None if self._hold_back is None else self._held_answer(self._hold_back, job, report, caller, write)
        came = time.monotonic()
        try:
            async with asyncio.timeout(job.remaining_s()), slot, holding, self._serving(job, entry, output, report):
                report.waited_s += time.monotonic() - came
                if job.sampling.prompt_logprobs is not None and len(job.prompt) == 1:
                    await beginning.send()
                    await caller.write_prompt(inference_pb2.PromptLogprobs(position=1))  # there are none, and the client is told
                while True:
                    batch = await output.take()
                    await self._loop_share.take(caller.identity.caller, cost_of(len(batch.tokens), job.sampling.logprobs or 0))
                    if not beginning.is_sent:
                        await beginning.send()
                    for part in batch.prompt:
                        await caller.write_prompt(part)
                    if job.prompt_only and batch.tokens:
                        return Finish(inference_pb2.FINISH_REASON_LENGTH)
                    response = answer.response(batch.tokens)
                    ended = answer.finish is not None and (batch.last or answer.stopped_by_text)
                    if held is not None:
                        if not await held.push(response, last=ended):
                            return Finish(inference_pb2.FINISH_REASON_CONTENT_FILTER)
                    elif response is not None:
                        report.on_piece(response.piece)
                        await write(response)
                    if ended and answer.finish is not None:
                        return answer.finish
                    if batch.last:
                        raise InternalError("the answer ended without its last token; look in the router's log")
        except TimeoutError as error:
            raise time_is_up(placed=report.placed) from error
        except asyncio.CancelledError:
            if output.cut is None or task.uncancel() > 0:
                raise
            log.warning("request %s: %s", job.request_id, output.cut)
            raise output.cut from None
        finally:
            if report.placed:
                self._lengths.observe(job.tenant, output.next_position)

    def _held_answer(self, hold_back: HoldBack, job: RequestJob, report: RequestReport, caller: Caller, write: Write) -> HeldAnswer:
        """Returns the answer's way through the operator's hook; what passes is written as other answers are."""

        async def allowed(response: inference_pb2.GenerateResponse) -> None:
            report.on_piece(response.piece)
            await write(response)

        request = HeldRequest(
            request_id=job.request_id,
            model=self.model_name,
            tenant=job.tenant,
            key_id=caller.identity.key_id,
            request_class=class_name(job.request_class),
        )
        return hold_back.begin(request, allowed, sent=self.prompts.text_of(job.prompt, job.resumed), position=len(job.resumed))

    @asynccontextmanager
    async def _serving(
        self, job: RequestJob, entry: QueueEntry, output: Output | VectorOutput, report: RequestReport
    ) -> AsyncIterator[None]:
        """Keeps dispatch under way beside this call; leaving frees what it holds."""
        dispatch = asyncio.create_task(self._dispatcher.serve(job, entry, output, report))
        # Whatever ends it, the client's call must not wait for more.
        dispatch.add_done_callback(lambda _: output.fail(InternalError("the request ended without an answer; repeat it")))
        if isinstance(output, Output):
            self._outputs.add(output)
        try:
            yield
        finally:
            if isinstance(output, Output):
                self._outputs.discard(output)
            dispatch.cancel()
            await asyncio.wait((dispatch,))

    async def cut_stuck_clients(self) -> None:
        """Looks once a second for clients that take nothing; runs until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            for output in list(self._outputs):
                output.cut_if_stuck(self._config.client_write_timeout)

    # ---- small things ---------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """Returns the name that answers carry, whichever of the names was asked for."""
        return self.model_names[0]

    def check_model(self, name: str) -> None:
        if name and name not in self.model_names:
            raise UnknownModel(f"model {name[:64]!r} is not served here; ask for {self.model_name!r}, or leave the name empty")

    @property
    def max_model_len(self) -> int:
        """The model's context, or less if no pair of live workers has so much, nor a decode worker that computes prompts."""
        records = self._pool.records()
        longest_prefill = max((r.max_model_len for r in records if r.hands_over), default=self._max_model_len)
        decode = [r.max_model_len if r.local_prefill else min(r.max_model_len, longest_prefill) for r in records if r.takes_over]
        return min(self._max_model_len, max(decode, default=longest_prefill))

    @property
    def max_input_len(self) -> int:
        """Returns how long what is embedded may be: the model's context, or less if its files say so or no live prefill worker has so
        much."""
        most = min(self._max_model_len, self.embedding.max_tokens or self._max_model_len)
        return min(most, max((r.max_model_len for r in self._pool.records() if r.hands_over), default=most))

    @property
    def most_tokens(self) -> int:
        """Returns the most tokens of an answer whose request does not bound it."""
        return self.prompts.most_unasked(self.max_model_len)

    def _pool_tokens(self) -> int:
        """Returns the most that a decode worker's pool holds of one request. Without workers: as it was when there were some."""
        pools = [r.layout.num_tokens_in(r.num_blocks) for r in self._pool.records() if r.takes_over]
        self._last_pool_tokens = max(pools, default=self._last_pool_tokens)
        return self._last_pool_tokens


class Beginning:
    """Tells a client the name and the seed of its request, before anything else: clients that want to go on elsewhere need them, however
    early the call breaks. Not at once, since sending takes as long as a good part of the way to the workers: in the time that the request
    spends there."""

    def __init__(self, caller: Caller, request_id: str, seed: int) -> None:
        self._due = asyncio.Event()
        self._task = asyncio.create_task(self._send(caller, request_id, seed))

    @property
    def is_sent(self) -> bool:
        return self._task.done()

    async def send(self) -> None:
        """Raises what sending raises."""
        self._due.set()
        await asyncio.shield(self._task)

    async def over(self) -> None:
        """Returns once it is told, or cannot be: grpc cannot end a call that is still being sent its metadata."""
        self._due.set()
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.exception()  # of a client that is gone: the next write fails as well

    async def _send(self, caller: Caller, request_id: str, seed: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_ON_ITS_WAY_S):
                await self._due.wait()
        await caller.begin(request_id, seed)


def request_id_of(given: str) -> str:
    """Returns a new one where none is given. Raises InvalidRequest."""
    if given and not _REQUEST_ID.fullmatch(given):
        raise InvalidRequest(
            f"request_id {given[:140]!r} is not 1 to 128 of the characters A-Z a-z 0-9 . _ : -; change it or leave it empty"
        )
    return given or uuid.uuid4().hex


def _unique(name: str) -> str:
    """Returns the workers' name for one call. Clients may use a name twice, at once (two clients, a repeated call) or later; to workers it
    names blocks, leases and tokens, of which a second holder would get or cancel the first one's. `~` occurs in no client's name."""
    return f"{name}~{uuid.uuid4().hex[:16]}"
