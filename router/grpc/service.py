"""The gRPC front: protobuf in, a stream of protobuf out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from router.access.control import Access
from router.grpc.service_access import identify, plain_metadata
from router.request.job import Metadata
from router.serving.inference import Inference
from twostep.rpc.v1 import inference_pb2, inference_pb2_grpc

_FORWARDED = frozenset({"traceparent", "tracestate"})

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, inference: Inference, access: Access) -> None:
        self._inference = inference
        self._access = access

    async def Generate(self, request: inference_pb2.GenerateRequest, context: _Context) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Pieces are written rather than yielded, so that cutting a client that does not read interrupts the call, which then says why."""
        caller = GrpcCaller(context, self._access)
        with caller.identity.calling():
            end = await self._inference.generate(request, caller)
        # Everything is free by now but this call.
        yield inference_pb2.GenerateResponse(end=end)

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: _Context) -> inference_pb2.TokenizeResponse:
        with GrpcCaller(context, self._access).identity.calling():
            return await self._inference.tokenize(request)

    async def ListModels(self, request: inference_pb2.ListModelsRequest, context: _Context) -> inference_pb2.ListModelsResponse:
        return self._inference.models()


class GrpcCaller:
    """See router.serving.inference.Caller."""

    def __init__(self, context: _Context, access: Access) -> None:
        """Raises Unauthenticated."""
        self._context = context
        self.received = time.monotonic()
        given = plain_metadata(context.invocation_metadata())
        self.identity = identify(access, given, peer=context.peer())
        self.metadata: Metadata = tuple((key, value) for key, value in given if key in _FORWARDED)
        self.write = context.write  # of every token: no step between

    def remaining_s(self) -> float:
        return self._context.time_remaining() or float("inf")

    def accepted(self, prompt: Sequence[int]) -> None:
        """The end's usage says how many there are."""

    async def begin(self, request_id: str, seed: int) -> None:
        await self._context.send_initial_metadata((("x-request-id", request_id), ("x-twostep-seed", str(seed))))
