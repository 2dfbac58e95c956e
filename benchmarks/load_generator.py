"""How much the load generator itself takes: 500 streams of a server that does nothing but send, in a process of its own.

    python benchmarks/load_generator.py                 over gRPC and over HTTP: tokens/s and CPU time of this process for each token

The server's pace is settable; what counts is CPU time, which other work on the machine does not change much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import uvloop

from twostep.lab.bench.serve import lengths
from twostep.lab.bench.serve.grpc_target import GrpcOptions, GrpcTarget
from twostep.lab.bench.serve.load import Load, Users
from twostep.lab.bench.serve.runner import Extent, Progress
from twostep.lab.bench.serve.summary import summarize
from twostep.lab.bench.serve.target import Target
from twostep.lab.bench.serve.workloads import RandomPrompts
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.rpc.v1 import inference_pb2_grpc as pb_grpc

EVENT = b"data: " + json.dumps({"id": "c", "choices": [{"index": 0, "text": " x", "finish_reason": None}]}).encode()


class Sender(pb_grpc.InferenceServicer):
    """Every stream one token each `interval_s`."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        count = request.sampling.max_tokens
        for i in range(count):
            await asyncio.sleep(self.interval_s)
            yield pb.GenerateResponse(piece=pb.Piece(text=" x", token_ids=[i], position=i))
        yield pb.GenerateResponse(end=pb.End(finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(completion_tokens=count)))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=list(request.text.encode()), max_model_len=8192)

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="sender", max_model_len=8192)])


async def serve(interval_s: float) -> None:
    from aiohttp import web  # noqa: PLC0415 - the extra [bench]

    async def answer(request: web.Request) -> web.StreamResponse:
        count = (await request.json())["max_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(count):
            await asyncio.sleep(interval_s)
            await response.write(EVENT + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "sender"}]})

    server = grpc.aio.server()
    pb_grpc.add_InferenceServicer_to_server(Sender(interval_s), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(port, runner.addresses[0][1], flush=True)
    await server.wait_for_termination()


async def measure(name: str, target: Target, args: argparse.Namespace) -> None:
    served = await target.open()
    load = Load(
        workload=RandomPrompts(prompt=lengths.Fixed(args.prompt_tokens), output=lengths.Fixed(args.output_tokens)),
        arrivals=Users(args.streams),
        extent=Extent(duration_s=args.seconds, warmup_s=2.0),
        seed="0",
    )
    result, windows = await load.put_on(target, served, name, Progress())
    await target.close()
    summary = summarize(result.records, windows)
    tokens = sum(r.output_tokens for r in result.records)
    cpu = result.cpu_s / tokens
    print(
        f"{name}: {summary.throughput.output_tokens_per_s:,.0f} tokens/s in {summary.throughput.mean_concurrency:.0f} streams, "
        f"{result.cpu_share:.0%} of a core, {cpu * 1e6:.1f} µs of CPU a token: a core's limit is {1 / cpu:,.0f} tokens/s; "
        f"event loop late by {result.loop_lag_s.p50 * 1e3:.1f} ms (p99 {result.loop_lag_s.p99 * 1e3:.1f}); {dict(summary.errors)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--tokens-per-second", type=float, default=20_000, help="the server's pace over all streams")
    parser.add_argument("--prompt-tokens", type=int, default=2600)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--serve", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve(args.serve))
        return
    interval = args.streams / args.tokens_per_second
    with subprocess.Popen([sys.executable, __file__, "--serve", f"{interval}"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        grpc_port, http_port = server.stdout.readline().split()
        try:
            uvloop.run(measure("gRPC", GrpcTarget(GrpcOptions(targets=(f"127.0.0.1:{grpc_port}",))), args))
            from twostep.lab.bench.serve.openai_target import OpenAIOptions, OpenAITarget  # noqa: PLC0415 - the extra [bench]

            uvloop.run(measure("HTTP", OpenAITarget(OpenAIOptions(url=f"http://127.0.0.1:{http_port}")), args))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
