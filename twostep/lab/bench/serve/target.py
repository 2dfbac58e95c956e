"""A router under load, over gRPC. Prompts are token ids.

The raw stub, not the SDK: nothing may be repeated behind the figures' back, and a core has to keep up with 20,000 tokens/s.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from twostep.client._channel import key_metadata
from twostep.errors import DeadlineExceeded, InvalidRequest, SetupError, TwostepError, Unavailable
from twostep.lab.bench.serve.quoting import Quotations, questions
from twostep.lab.bench.serve.record import REFUSED, RequestRecord
from twostep.rpc.channel import error_from_rpc, open_channel
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.rpc.v1 import inference_pb2_grpc as pb_grpc
from twostep.settings.tls import PLAINTEXT, TlsFiles

_CLASSES = {
    "": pb.REQUEST_CLASS_UNSPECIFIED,
    "interactive": pb.REQUEST_CLASS_INTERACTIVE,
    "standard": pb.REQUEST_CLASS_STANDARD,
    "batch": pb.REQUEST_CLASS_BATCH,
}
_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_CONTENT_FILTER: "content_filter"}
_KINDS = {grpc.StatusCode.RESOURCE_EXHAUSTED: REFUSED, grpc.StatusCode.DEADLINE_EXCEEDED: "timeout"}
_PHASES = tuple(field.name for field in pb.Phases.DESCRIPTOR.fields)
# The bench asks for the longest so many of each answer; any further one above its bound is longer than none of these.
_NUM_GAPS = 16
_GAP_FIELDS = tuple(field.name for field in pb.Gap.DESCRIPTOR.fields)
_RETRY_AFTER = "x-twostep-retry-after-ms"
_OPEN_TIMEOUT_S = 10.0
_MAX_MESSAGE_BYTES = 64 << 20
# A model is asked for the ids of these: ordinary text in any vocabulary.
_SAMPLE = " ".join(a + b for a in "abcdefghijklmnopqrstuvwxyz" for b in "aeioulnrst") + " 0 1 2 3 4 5 6 7 8 9 , . ; : ! ?"

Clock = Callable[[], float]  # seconds since the run's start


class RequestFailed(Exception):
    """A request was not answered, or not to its end. Few kinds: they are counted."""

    def __init__(self, kind: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.retry_after_s = kind, message, retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModel:
    """The model that a target serves."""

    model: str
    max_model_len: int
    alphabet: Sequence[int]  # ids that prompts may be made of
    quotations: Quotations | None = None  # of the text, if there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    targets: tuple[str, ...]  # host:port of routers; requests go to them in turn
    model: str = ""
    api_key: str = field(default="", repr=False)  # shown with every call; empty: none
    tls: TlsFiles = PLAINTEXT
    timeout_s: float = 600.0
    temperature: float = 0.0
    vocab_size: int = 0
    """0: the router is asked for ids of ordinary text. Else ids are drawn from 256 to this, where few vocabularies have special ones."""
    request_class: str = ""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    gap_ms: float | None = None
    tenant: str = ""
    text: str = field(default="", repr=False)  # whose passages are asked for; empty: none


class RouterTarget:
    """Any number of requests at once, on one event loop. Nothing is ever repeated: what fails is counted."""

    def __init__(self, options: TargetOptions) -> None:
        """Raises InvalidRequest for a vocabulary or a key that cannot be; warns of a key that would go unencrypted."""
        if options.vocab_size and options.vocab_size < 512:
            raise InvalidRequest(f"a vocabulary of {options.vocab_size}: give at least 512, or leave it out")
        self._options = options
        self._metadata = key_metadata(options.api_key, options.targets, tls=options.tls.enabled)
        # Every run has a cache salt of its own: nothing of an earlier one is hit, though prompts repeat from run to run.
        self._salts: dict[str, str] = {}
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[Any] = []
        self._next = 0

    async def open(self) -> TargetModel:
        """Connects. Raises TwostepError, saying what to do, if no router answers."""
        options = self._options
        for address in options.targets:
            channel = open_channel(address, tls=options.tls, max_message_bytes=_MAX_MESSAGE_BYTES)
            self._channels.append(channel)
            self._stubs.append(pb_grpc.InferenceStub(channel))
        for address, stub in zip(options.targets, self._stubs, strict=True):
            try:
                models = (await stub.ListModels(pb.ListModelsRequest(), metadata=self._metadata, timeout=_OPEN_TIMEOUT_S)).models
            except grpc.RpcError as failure:
                raise _not_opened(address, failure) from failure
        found = [m for m in models if options.model in ("", m.name)]
        if not found or (not options.model and len(found) > 1):
            names = ", ".join(m.name for m in models)
            raise SetupError(f"--model {options.model!r} does not say which to load; served there: {names or 'nothing yet'}")
        alphabet: Sequence[int] = range(256, options.vocab_size) if options.vocab_size else await self._ordinary_ids()
        quotations = await self._quotations(found[0].max_model_len) if options.text else None
        return TargetModel(model=found[0].name, max_model_len=found[0].max_model_len, alphabet=alphabet, quotations=quotations)

    async def _ordinary_ids(self) -> list[int]:
        return sorted(set(await self._tokenized(pb.TokenizeRequest(model=self._options.model, text=_SAMPLE))))

    async def _quotations(self, max_model_len: int) -> Quotations:
        """Has the router put each question through the model's chat template, once for all runs."""
        ids: dict[str, Sequence[int]] = {}
        for said in questions(self._options.text, max_model_len):
            chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=said)])
            ids[said] = await self._tokenized(pb.TokenizeRequest(model=self._options.model, chat=chat))
        return Quotations.of(ids, max_model_len)

    async def _tokenized(self, request: pb.TokenizeRequest) -> Sequence[int]:
        try:
            response = await self._stubs[0].Tokenize(request, metadata=self._metadata, timeout=_OPEN_TIMEOUT_S)
        except grpc.RpcError as failure:
            raise error_from_rpc(failure) from failure
        return list(response.token_ids)

    def prepare(self, prompt: array[int], output_tokens: int, run: str) -> pb.GenerateRequest:
        """Everything about a request that can be done before its time. Requests of different `run` share no cached prefixes."""
        o = self._options
        request = pb.GenerateRequest(
            model=o.model,
            cache_salt=self._salts.setdefault(run, secrets.token_hex(8)),
            sampling=pb.SamplingParams(max_tokens=output_tokens, temperature=o.temperature, ignore_eos=True),
            request_class=_CLASSES[o.request_class],
            ttft_ms=o.ttft_ms,
            tpot_ms=o.tpot_ms,
            gap_ms=o.gap_ms,
            tenant=o.tenant,
            num_gaps=_NUM_GAPS,
        )
        request.token_ids.ids.extend(prompt)
        return request

    async def ask(self, prepared: pb.GenerateRequest, record: RequestRecord, clock: Clock, *, keep: bool) -> array[int]:
        """Sends it and notes every message's arrival in the record, and what the router says of itself at the end. Returns the answer's
        ids, none unless `keep`. Raises RequestFailed."""
        stub = self._stubs[self._next % len(self._stubs)]
        self._next += 1
        times, counts = record.times_s, record.num_tokens
        ids: array[int] = array("I")
        end: pb.End | None = None
        record.sent_s = clock()
        call = stub.Generate(prepared, metadata=self._metadata, timeout=self._options.timeout_s)
        try:
            async for response in call:
                piece = response.piece.token_ids
                if piece:
                    times.append(clock())
                    counts.append(len(piece))
                    if keep:
                        ids.extend(piece)
                elif response.HasField("end"):
                    end = response.end
        except grpc.RpcError as failure:
            raise _failed(failure) from failure
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            record.ended_s = clock()
        if end is None:
            raise RequestFailed("broken", "the stream ended without an end")
        record.finish_reason = _FINISH.get(end.finish_reason, str(end.finish_reason))
        record.prompt_tokens = end.usage.prompt_tokens or record.prompt_tokens
        record.cached_tokens = end.usage.cached_tokens
        record.phases = {name: getattr(end.phases, name) for name in _PHASES}
        record.gaps = [{name: getattr(gap, name) for name in _GAP_FIELDS} for gap in end.gaps]
        return ids

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def _not_opened(address: str, failure: grpc.RpcError) -> TwostepError:
    """Returns why there is nothing to load at `address`: no server, or what the server there says."""
    error = error_from_rpc(failure)
    if isinstance(error, Unavailable | DeadlineExceeded):
        return SetupError(f"no router answers at {address} ({error.message}); start one with `twostep up`, or give --target")
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
        return SetupError(f"what answers at {address} is no router ({error.message}); give a router's gRPC port as --target")
    return type(error)(f"the router at {address} answered: {error.message}")


def _failed(failure: grpc.RpcError) -> RequestFailed:
    code: grpc.StatusCode = failure.code()
    retry_after_s = None
    trailing: Any = failure.trailing_metadata() or ()
    for name, value in trailing:
        if name == _RETRY_AFTER:
            try:
                retry_after_s = float(value) / 1e3
            except ValueError:
                pass  # whatever else it says, it is a refusal
    return RequestFailed(_KINDS.get(code, code.name.lower()), failure.details() or "", retry_after_s)
