"""A real gRPC server whose answers the test writes down beforehand. Behaviour is chosen by the prompt."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from twostep.errors import ContextExceeded, ResourceExhausted, trailing_metadata
from twostep.rpc.api_level import API_LEVEL, API_LEVEL_HEADER
from twostep.rpc.health import READINESS, HealthBoard, HealthServicer
from twostep.rpc.server import server_options
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.rpc.v1 import inference_pb2_grpc as pb_grpc
from twostep.rpc.v1 import status_pb2, status_pb2_grpc

END = pb.End(
    finish_reason=pb.FINISH_REASON_STOP,
    usage=pb.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2),
    phases=pb.Phases(route_s=0.001, queue_s=0.002, prefill_s=0.01, ttft_s=0.013, total_s=0.05),
    transfer=pb.Transfer(transport="ray", bytes=4096, chunks=2, blocks_moved=3, blocks_reused=1, prefill_worker="p0", decode_worker="d0"),
    attempts=1,
)
# Questions of the examples in docs/sdk.md.
DOCUMENTED = {"What is 6 times 7?": "think", "A city, as JSON.": "form", "How is the weather in Bonn?": "call"}
CUT = pb.End(finish_reason=pb.FINISH_REASON_LENGTH)
WORDS = ("one ", "two ", "three")
_CALL = pb.ToolCallDelta(id="call-1", name="weather")
_ARGUMENTS = [pb.ToolCallDelta(arguments=part) for part in ('{"city":', ' "Bonn"}')]
CALL = [
    pb.GenerateResponse(piece=pb.Piece(text="I look.", token_ids=[1], tool_calls=[_CALL, _ARGUMENTS[0]])),
    pb.GenerateResponse(piece=pb.Piece(token_ids=[2], position=1, tool_calls=_ARGUMENTS[1:])),
    pb.GenerateResponse(end=pb.End(finish_reason=pb.FINISH_REASON_TOOL_CALLS)),
]
CALL_AS_TEXT = [pb.GenerateResponse(piece=pb.Piece(text="<call>", token_ids=[1])), pb.GenerateResponse(end=END)]


class ScriptedInference(pb_grpc.InferenceServicer):
    """Prompts: "ok" answers WORDS; "refuse-N" is refused N times first; "later-MS" is refused once, with a retry delay of MS milliseconds;
    "never" is refused, and is told that it is of no use;
    "break" breaks after two words; "crash" does so too, tells its seed and can go on;
    "reset" is cancelled there by nobody on the client's side; "stumble" breaks after each word;
    "call" calls a tool, as it is asked for; several answers ("n") are WORDS each, and "crash" breaks where one has ended and others have
    not; "late" says two words, too late; "cut" is cut off; "long" is too long; "endless" never stops; "silent" says nothing;
    "noend" ends without an End; "skip" leaves a position out; "think" reasons before it answers; "form" answers JSON; "down-N" is
    UNAVAILABLE N times first; "bare" shows escape sequences; anything else answers WORDS.

    `api_level` is told; `health` is what the server says of itself; `away`: every Generate is UNAVAILABLE. `key`: GetStatus wants it."""

    def __init__(self) -> None:
        self.health = HealthBoard()
        self.health.set(READINESS, True)
        self.away = False
        self.api_level = API_LEVEL
        self.key = ""
        self.checks = 0
        self.cluster = some_cluster()
        self.metadata: list[dict[str, str | bytes]] = []
        self.remaining_s: list[float] = []
        self.calls: Counter[str] = Counter()
        self.requests: list[pb.GenerateRequest] = []
        self.embeds: list[pb.EmbedRequest] = []
        self.cancelled: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        prompt = request.text or (request.chat.messages[-1].content if request.HasField("chat") else "ids")
        prompt = DOCUMENTED.get(prompt, prompt)
        self.calls[prompt] += 1
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining_s.append(context.time_remaining())
        if self.away or (prompt.startswith("down-") and self.calls[prompt] <= int(prompt[5:])):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this router drains; ask another")
        told = [("x-twostep-seed", "1234")] if prompt in ("crash", "reset", "stumble", "late") else []
        told += [(API_LEVEL_HEADER, str(self.api_level))] if self.api_level else []
        # From here on: whoever has seen the call counted, and cancels it, will see that counted too.
        try:
            await context.send_initial_metadata((("x-request-id", request.request_id or "made-by-router"), *told))
            if prompt.startswith("refuse-") and self.calls[prompt] <= int(prompt[7:]):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no worker has room; try again")
            if prompt.startswith("later-") and self.calls[prompt] == 1:
                behind = (("x-twostep-retry-after-ms", prompt[6:]),)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "come again later", behind)
            if prompt == "never":
                error = ResourceExhausted("nobody here keeps that", hopeless=True)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message, trailing_metadata(error))
            if prompt == "invalid":
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "temperature is -1; give a value from 0 to 100")
            if request.model not in ("", "scripted"):
                await context.abort(grpc.StatusCode.NOT_FOUND, f"model {request.model!r} is not served here; there is scripted")
            if prompt == "long":
                error = ContextExceeded("too long", prompt_tokens=600, max_model_len=512)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message, trailing_metadata(error))
            if prompt == "silent":
                await asyncio.sleep(60)
            if request.n > 1 and self.api_level:
                async for response in self._several(request, prompt, context):
                    yield response
                return
            if prompt == "call":
                for response in CALL if request.chat.HasField("tool_use") else CALL_AS_TEXT:
                    yield response
                return
            position = len(request.resume_token_ids)
            if prompt == "think":
                for word in ("let me ", "see"):
                    yield pb.GenerateResponse(piece=pb.Piece(reasoning=word, token_ids=[200 + position], position=position))
                    position += 1
                yield pb.GenerateResponse(piece=pb.Piece(text="42", token_ids=[300], position=position))
            if prompt == "form":
                yield pb.GenerateResponse(piece=pb.Piece(text='{"city": "Bonn", "people": 330000}', token_ids=[1], position=0))
            if prompt == "bare":
                yield pb.GenerateResponse(piece=pb.Piece(text="a\x1b[31mb\x07c\x9b2Jd", token_ids=[1], position=0))
            while prompt == "endless" or (position < len(WORDS) and prompt not in ("think", "form", "bare")):
                if prompt == "stumble" and position == len(request.resume_token_ids) + 1:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the router was lost")
                if prompt == "reset" and position == len(request.resume_token_ids) + 2:
                    await context.abort(grpc.StatusCode.CANCELLED, "")
                if prompt == "late" and position == 2:
                    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline was reached")
                if (prompt == "break" and position == 2) or (prompt == "crash" and position == len(request.resume_token_ids) + 2):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the decode worker was lost")
                yield pb.GenerateResponse(
                    piece=pb.Piece(
                        text=WORDS[position % 3],
                        token_ids=[100 + position],
                        position=position + (prompt == "skip"),
                        logprobs=[pb.TokenLogprobs(logprob=-0.5, top=[pb.TopLogprob(token_id=7, logprob=-0.25)])]
                        if request.sampling.HasField("logprobs")
                        else [],
                    )
                )
                self.sent[prompt] += 1
                position += 1
                await asyncio.sleep(0.002 if prompt == "endless" else 0)
            if prompt != "noend":
                yield pb.GenerateResponse(end=CUT if prompt == "cut" else END)
        except (asyncio.CancelledError, GeneratorExit):
            # grpc closes the generator instead of cancelling its task if the client left while a message was being written.
            self.cancelled[prompt] += 1
            raise

    async def _several(self, request: pb.GenerateRequest, prompt: str, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        begun = {answer.index: len(answer.token_ids) for answer in request.begun_answers} or dict.fromkeys(range(request.n), 0)
        for position, word in enumerate(WORDS):
            for index in (index for index, num_had in begun.items() if num_had <= position):
                if prompt == "crash" and index == 1 and position == 2 and not request.begun_answers:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the router was lost")
                piece = pb.Piece(text=word, token_ids=[100 * index + position], position=position)
                yield pb.GenerateResponse(index=index, piece=piece)
                if position == 2:
                    yield pb.GenerateResponse(index=index, end=END)

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        """A vector is what was given, character by character or id by id."""
        self.calls["embed"] += 1
        self.embeds.append(request)
        if self.calls["embed"] == 1 and request.inputs[0].text == "refuse once":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        given = [list(each.text.encode()) or list(each.token_ids.ids) for each in request.inputs]
        usage = pb.Usage(prompt_tokens=sum(map(len, given)), cached_tokens=1)
        return pb.EmbedResponse(embeddings=[pb.Embedding(values=each) for each in given], usage=usage)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self.calls["tokenize"] += 1
        if request.text == "refuse once" and self.calls["tokenize"] == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        return pb.TokenizeResponse(token_ids=list(request.text.encode()), max_model_len=512)

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(
            models=[pb.Model(name="scripted", max_model_len=512, fingerprint="f00d", prefill_workers=1, decode_workers=2)]
        )


class ScriptedStatus(status_pb2_grpc.StatusServicer):
    def __init__(self, servicer: ScriptedInference) -> None:
        self._servicer = servicer

    async def GetStatus(self, request: status_pb2.StatusRequest, context: Any) -> status_pb2.ClusterStatus:
        self._servicer.metadata.append(dict(context.invocation_metadata()))
        if self._servicer.key and self._servicer.metadata[-1].get("authorization") != f"Bearer {self._servicer.key}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no API key was given; send one")
        if self._servicer.away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this router drains; ask another")
        return self._servicer.cluster


class CountingHealth(HealthServicer):
    def __init__(self, servicer: ScriptedInference) -> None:
        super().__init__(servicer.health)
        self._servicer = servicer

    async def Check(self, request: Any, context: Any) -> Any:
        assert request.service == READINESS
        self._servicer.checks += 1
        return await super().Check(request, context)


def some_cluster() -> status_pb2.ClusterStatus:
    """A prefill worker and two decode workers, one of which drains, under load."""
    gib = 1 << 30
    return status_pb2.ClusterStatus(
        router_id="router-0",
        version="0.1.0",
        model="scripted",
        uptime_s=4000.0,
        ready=True,
        workers=[
            status_pb2.WorkerStatus(
                worker_id="prefill-0",
                role="prefill",
                address="10.0.0.1:50061",
                epoch=1,
                ready=True,
                transports=["cuda_ipc", "ray"],
                num_running=3,
                num_waiting=2,
                num_held=1,
                num_blocks=1000,
                num_free_blocks=750,
                num_queued_tokens=4096,
                queried_tokens_per_s=2000.0,
                hit_tokens_per_s=500.0,
                tokens_per_s=1500.0,
            ),
            status_pb2.WorkerStatus(
                worker_id="decode-0",
                role="decode",
                address="10.0.0.2:50071",
                epoch=1,
                ready=True,
                local_prefill=True,
                num_running=12,
                max_num_seqs=64,
                num_blocks=1000,
                num_free_blocks=400,
                num_context_tokens=9000,
                fetched_bytes_per_s=1.5 * gib,
                tokens_per_s=640.0,
                num_decoding=12,
                kept_per_s=0.5,
                taken_over_per_s=2.0,
            ),
            status_pb2.WorkerStatus(
                worker_id="decode-1", role="decode", address="10.0.0.3:50071", epoch=2, ready=True, draining=True, num_blocks=1000
            ),
        ],
        load=status_pb2.RouterLoad(
            window_s=10.0,
            num_running=15,
            num_waiting=2,
            num_streams=17,
            requests_per_s=4.5,
            prompt_tokens_per_s=2000.0,
            cached_tokens_per_s=500.0,
            generation_tokens_per_s=640.0,
            ttft_s=status_pb2.Percentiles(p50=0.12, p95=0.31, p99=0.45),
            tpot_s=status_pb2.Percentiles(p50=0.016, p95=0.02, p99=0.022),
            itl_s=status_pb2.Percentiles(p50=0.015, p95=0.021, p99=0.055),
            queue_s=status_pb2.Percentiles(p50=0.001, p95=0.05, p99=0.1),
            slo_attainment=0.985,
            handed_over_per_s=4.0,
            local_per_s=0.5,
            prefill_decode_load_ratio=1.25,
            prompt_work_s=1.5,
            answer_work_s=1.2,
        ),
    )


@asynccontextmanager
async def serving(servicer: ScriptedInference, port: int = 0) -> AsyncIterator[str]:
    """The server's address, on this event loop."""
    server = grpc.aio.server(options=server_options(4 << 20))
    pb_grpc.add_InferenceServicer_to_server(servicer, server)
    status_pb2_grpc.add_StatusServicer_to_server(ScriptedStatus(servicer), server)
    health_pb2_grpc.add_HealthServicer_to_server(CountingHealth(servicer), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextmanager
def serving_in_thread(servicer: ScriptedInference) -> Iterator[str]:
    """The server's address, on an event loop in a thread of its own, for tests of blocking code."""
    address: list[str] = []
    up, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with serving(servicer) as target:
            address.append(target)
            up.set()
            await stop.wait()
        # Tasks that gRPC has left of calls that were cut off.
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert up.wait(60)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
