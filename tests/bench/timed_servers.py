"""A router that sends tokens when the test says, and notes when it did."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from twostep.rpc.v1 import inference_pb2 as pb

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripted_server import ScriptedInference, serving

__all__ = ["Schedule", "TimedInference", "serving"]


@dataclass
class Schedule:
    """Seconds to wait before each token; the last is that before all later ones."""

    waits_s: Sequence[float]
    sent: list[list[float]] = field(default_factory=list)
    """time.perf_counter() just before each token of each request was written."""

    async def tokens(self, count: int) -> AsyncIterator[int]:
        times: list[float] = []
        self.sent.append(times)
        for i in range(count):
            await asyncio.sleep(self.waits_s[min(i, len(self.waits_s) - 1)])
            times.append(time.perf_counter())
            yield i


class TimedInference(ScriptedInference):
    """Answers with tokens 1000, 1001, ... on schedule. `refuse_every`: each so-manieth request is refused, with a delay to wait. `key`:
    what every call has to show."""

    def __init__(self, schedule: Schedule, *, refuse_every: int = 0, break_after: int = 0, key: str = "") -> None:
        super().__init__()
        self.schedule, self.refuse_every, self.break_after, self.key = schedule, refuse_every, break_after, key

    async def let_in(self, context: Any) -> None:
        shown = dict(context.invocation_metadata()).get("authorization")
        if self.key and shown is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no API key was given")
        if self.key and shown != f"Bearer {self.key}":
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this API key may not")

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        await self.let_in(context)
        self.requests.append(request)
        if self.refuse_every and len(self.requests) % self.refuse_every == 0:
            context.set_trailing_metadata((("x-twostep-retry-after-ms", "1500"),))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no worker has room; try again")
        count = request.sampling.max_tokens
        async for i in self.schedule.tokens(count):
            if self.break_after and i == self.break_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the decode worker was lost")
            yield pb.GenerateResponse(piece=pb.Piece(text="x", token_ids=[1000 + i], position=i))
        prompt = len(request.token_ids.ids)
        yield pb.GenerateResponse(
            end=pb.End(
                finish_reason=pb.FINISH_REASON_LENGTH,
                usage=pb.Usage(prompt_tokens=prompt, completion_tokens=count, cached_tokens=prompt // 2),
                phases=pb.Phases(route_s=0.001, queue_s=0.002, prefill_s=0.25, ttft_s=0.253, total_s=1.0),
            )
        )

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        await self.let_in(context)
        return pb.ListModelsResponse(models=[pb.Model(name="timed", max_model_len=8192, prefill_workers=1, decode_workers=1)])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        await self.let_in(context)
        if request.HasField("chat"):
            said = "".join(f"<{message.role}>{message.content}" for message in request.chat.messages)
            request = pb.TokenizeRequest(text=f"{said}<assistant>")
        return await super().Tokenize(request, context)
