"""The gRPC front: protobuf in, a stream of protobuf out; where API keys are asked for, a call without one is refused before its message is
read."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio

from router.access.account import Identity
from router.access.control import Access
from router.grpc.answers import answer_several
from router.grpc.embeddings import embed_all
from router.prompting.prompt import Prompt
from router.request.job import Metadata
from router.request.targets import TENANT_HEADER
from router.serving.inference import Inference, request_id_of
from router.status.board import StatusBoard
from twostep.rpc.api_level import API_LEVEL, API_LEVEL_HEADER
from twostep.rpc.v1 import inference_pb2, inference_pb2_grpc, status_pb2, status_pb2_grpc

_FORWARDED = frozenset({"traceparent", "tracestate"})
# Names the caller that has the deployment's own key; no key's id has a space.
_SYSTEM = "the deployment"

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, inference: Inference, access: Access) -> None:
        self._inference = inference
        self._access = access

    async def Generate(self, request: inference_pb2.GenerateRequest, context: _Context) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Pieces are written rather than yielded, so that cutting a client that does not read interrupts the call, which then says why."""
        caller = GrpcCaller(context, self._access)
        with caller.identity.calling():
            prompts, share = self._inference.prompts, caller.identity.share
            tools = await prompts.tool_use(request.chat, share) if request.chat.HasField("tool_use") else None

            async def read_prompt() -> Prompt:
                prompt = await prompts.prompt(request, share)
                return prompt if tools is None else replace(prompt, tools=tools)

            if request.n > 1 or request.begun_answers:
                await answer_several(self._inference, request, caller, read_prompt)
                return
            end = await self._inference.generate(request, caller, read_prompt)
        # Everything is free by now but this call.
        yield inference_pb2.GenerateResponse(end=end)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: _Context) -> inference_pb2.EmbedResponse:
        caller = GrpcCaller(context, self._access)
        with caller.identity.calling():
            name = request_id_of(request.request_id)
            await context.send_initial_metadata((("x-request-id", name), (API_LEVEL_HEADER, str(API_LEVEL))))
            return await embed_all(self._inference, request, caller, name)

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: _Context) -> inference_pb2.TokenizeResponse:
        caller = GrpcCaller(context, self._access)
        with caller.identity.calling():
            return await self._inference.tokenize(request, caller.identity.share)

    async def ListModels(self, request: inference_pb2.ListModelsRequest, context: _Context) -> inference_pb2.ListModelsResponse:
        return self._inference.models()


class GrpcCaller:
    """See router.serving.inference.Caller."""

    def __init__(self, context: _Context, access: Access) -> None:
        """Raises Unauthenticated."""
        self._context = context
        self.received = time.monotonic()
        given = _plain_metadata(context.invocation_metadata())
        self.identity = _identify(access, given, peer=context.peer())
        self.metadata: Metadata = tuple((key, value) for key, value in given if key in _FORWARDED)
        self.write = context.write  # of every token: no step between

    def remaining_s(self) -> float:
        return self._context.time_remaining() or float("inf")

    def accepted(self, prompt: Sequence[int]) -> None:
        """Does nothing: the end's usage says how many there are."""

    async def write_prompt(self, part: inference_pb2.PromptLogprobs) -> None:
        await self.write(inference_pb2.GenerateResponse(prompt_logprobs=part))

    async def begin(self, request_id: str, seed: int) -> None:
        metadata = (("x-request-id", request_id), ("x-twostep-seed", str(seed)), (API_LEVEL_HEADER, str(API_LEVEL)))
        await self._context.send_initial_metadata(metadata)


class StatusService(status_pb2_grpc.StatusServicer):
    """Shows the deployment as this router sees it."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board

    async def GetStatus(self, request: status_pb2.StatusRequest, context: _Context) -> status_pb2.ClusterStatus:
        return self._board.status()


class KeyGate:
    """Refuses calls without a key, where keys are asked for."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def admit(self, _method: str, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """See twostep.rpc.guard.Admit. A key's calls are one caller's, whatever connections they come over. Raises Unauthenticated."""
        if not self._access.enabled:
            return ""
        return _identify(self._access, _plain_metadata(metadata)).key_id or _SYSTEM


def _plain_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    return tuple((key, value if isinstance(value, str) else value.decode("utf-8", "replace")) for key, value in metadata or ())


def _identify(access: Access, metadata: Metadata, *, peer: str = "") -> Identity:
    """`peer` as gRPC names it, with a port. Raises Unauthenticated. Of two values of one name, the last counts."""
    given = dict(metadata)
    return access.identify(given.get("authorization"), given.get(TENANT_HEADER), address=peer.rpartition(":")[0])
