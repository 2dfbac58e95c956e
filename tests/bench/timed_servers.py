"""A Twostep router and an OpenAI-compatible server that send tokens when the test says, and note when they did."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from twostep.rpc.v1 import inference_pb2 as pb

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripted_server import ScriptedInference, serving

__all__ = ["Schedule", "TimedInference", "serving", "serving_http"]


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
    """Answers with tokens 1000, 1001, ... on schedule. `refuse_every`: each so-manieth request is refused, with a delay to wait."""

    def __init__(self, schedule: Schedule, *, refuse_every: int = 0, break_after: int = 0) -> None:
        super().__init__()
        self.schedule, self.refuse_every, self.break_after = schedule, refuse_every, break_after

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
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
        return pb.ListModelsResponse(models=[pb.Model(name="timed", max_model_len=8192, prefill_workers=1, decode_workers=1)])


@asynccontextmanager
async def serving_http(schedule: Schedule, bodies: list[dict[str, Any]], *, refuse_every: int = 0) -> AsyncIterator[str]:
    """The address of an OpenAI-compatible server, /v1 left out; request bodies are appended to `bodies`."""
    from aiohttp import web  # noqa: PLC0415 - the extra [bench]

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "timed", "max_model_len": 8192}]})

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        bodies.append(body)
        if refuse_every and len(bodies) % refuse_every == 0:
            return web.json_response({"error": {"message": "too many"}}, status=429, headers={"Retry-After": "2"})
        if body["max_tokens"] == 13:
            return web.Response(status=500, text="thirteen")
        chat = request.path.endswith("/chat/completions")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def say(event: object) -> None:
            await response.write(b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n")

        if chat:
            await say({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        async for i in schedule.tokens(body["max_tokens"]):
            last = i + 1 == body["max_tokens"]
            piece = {"delta": {"content": " x"}} if chat else {"text": " x"}
            await say({"choices": [piece | {"finish_reason": "length" if last else None}]})
        num_prompt = len(str(body.get("prompt") or body.get("messages")).split())
        usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"], "prompt_tokens_details": {"cached_tokens": 3}}
        await say({"choices": [], "usage": usage})
        await say(b"[DONE]")
        return response

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", answer), web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
