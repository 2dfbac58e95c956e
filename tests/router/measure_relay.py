"""How many tokens one router process relays: `python -P tests/router/measure_relay.py --streams 64 --step-ms 10`.

Three processes: fake workers (all tokens of a step in one message, as a real decode worker sends them), the router, and this one
with its clients. Prints tokens a second, and tokens for each second of the router's own CPU time, which is what one core would do.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import psutil
from router_fakes import Cluster, FakeDecode, RedisServer, Reply, make_model_dir
from test_router_process import free_port, start, wait_health

from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import decode_pb2, inference_pb2, inference_pb2_grpc


class SteppingDecode(FakeDecode):
    """All running sequences advance together; one message a step."""

    step_s = 0.01

    async def _decode(self, attempt: Any, reserved: decode_pb2.ReserveRequest, script: Any) -> None:
        hand_over = self.exchange.of(attempt)
        first = await hand_over.first
        hand_over.committed.set()
        if not self.running:
            self._loop = asyncio.create_task(self._steps(reserved.router_id))
        self.running[attempt] = [first.position + 1, reserved.sampling]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.running: dict[Any, list[Any]] = {}

    async def _steps(self, router_id: str) -> None:
        due = time.monotonic()
        while True:
            events = []
            for attempt, state in list(self.running.items()):
                token = self.exchange.token(state[0], state[1])
                state[0] += 1
                events.append(decode_pb2.DecodeEvent(request_id=attempt[0], attempt=attempt[1], token=token))
                if token.finish_reason:
                    del self.running[attempt]
                    self.held.discard(attempt)
            if not events:
                return
            self._streams[router_id].put_nowait(decode_pb2.StepEvents(events=events))
            due += self.step_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))


def workers(model: Path, url: str, root: Path, step_s: float) -> None:
    async def run() -> None:
        cluster = Cluster(model, _Url(url), root)
        SteppingDecode.step_s = step_s
        await cluster.prefill()
        await cluster._start(SteppingDecode("d0", cluster.exchange, cluster.template))
        await cluster.beat_forever()

    asyncio.run(run())


async def one(stub: inference_pb2_grpc.InferenceAsyncStub, num_tokens: int) -> tuple[int, int, float]:
    reply = Reply()
    request = inference_pb2.GenerateRequest(text="the capital", sampling=inference_pb2.SamplingParams(max_tokens=num_tokens))
    async for response in stub.Generate(request, timeout=300):
        reply.add(response)
    assert reply.end is not None
    return len(reply.token_ids), len(reply.pieces), reply.end.phases.ttft_s


async def measure(streams: int, num_tokens: int, step_s: float) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model = make_model_dir(root / "model")
        (root / "redis").mkdir()
        context = multiprocessing.get_context("spawn")
        redis_server = RedisServer(root / "redis")
        fakes = context.Process(target=workers, args=(model, redis_server.url, root, step_s))
        fakes.start()
        cluster = Cluster(model, redis_server, root)
        port = free_port()
        router = await start(cluster, "--port", str(port), "--max-buffered-tokens", "100000")
        try:
            await wait_health(port + 1, "readiness", True)
            async with open_channel(f"127.0.0.1:{port}") as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                await asyncio.gather(*(one(stub, 20) for _ in range(8)))
                process = psutil.Process(router.pid)
                cpu, wall = process.cpu_times(), time.monotonic()
                results = await asyncio.gather(*(one(stub, num_tokens) for _ in range(streams)))
                after, seconds = process.cpu_times(), time.monotonic() - wall
            used = after.user + after.system - cpu.user - cpu.system
            tokens = sum(r[0] for r in results)
            print(f"{streams} streams x {num_tokens} tokens, a step every {step_s * 1e3:g} ms")
            print(
                f"{tokens / seconds:,.0f} tokens/s; the router used {used / seconds:.0%} of a core: {tokens / used:,.0f} tokens/s per core"
            )
            print(
                f"{tokens / sum(r[1] for r in results):.1f} tokens a piece, TTFT mean {sum(r[2] for r in results) / streams * 1e3:.1f} ms"
            )
        finally:
            router.terminate()
            await router.communicate()
            await cluster.redis.aclose()
            fakes.terminate()
            fakes.join()
            redis_server.kill()


class _Url(RedisServer):
    """A server that another process started."""

    def __init__(self, url: str) -> None:
        self.url = url


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=10.0)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.streams, arguments.tokens, arguments.step_ms / 1e3))
