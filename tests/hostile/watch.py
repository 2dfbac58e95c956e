"""Watches a router while it is attacked, from a process of its own: what the attacker computes delays no probe.

    python tests/hostile/watch.py '{"pid": ..., "host": ..., "http_port": ..., "grpc_port": ..., "api_key": ..., "model": ...}'

Writes a line of JSON for every sample, until its standard input ends:

    {"kind": "probe", "what": "http health", "at_s": ..., "wall_s": ..., "stall_s": ..., "problem": ""}
    {"kind": "memory", "at_s": ..., "bytes": ...}
    {"kind": "answer", "at_s": ..., "wall_s": ..., "text": ..., "problem": ""}

`wall_s` is what the caller saw. `stall_s` leaves out the time for which the router's main thread or this process was ready to run and
had no core (Linux's schedstat): on a busy machine that wait is the machine's and not the router's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import psutil
from grpc_health.v1 import health_pb2

PERIOD_S = 0.05
# A probe that takes longer has failed, as Kubernetes sees it; it is given longer here, to tell how long the stall was.
_DEADLINE_S = 60.0


class Watch:
    def __init__(self, args: dict[str, Any]) -> None:
        self._args = args
        self._router = psutil.Process(args["pid"])
        self._schedstats = [Path(f"/proc/{pid}/task/{pid}/schedstat") for pid in (args["pid"], psutil.Process().pid)]

    async def run(self) -> None:
        ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        headers = {"Authorization": f"Bearer {self._args['api_key']}"}
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=_DEADLINE_S)) as session,
            grpc.aio.insecure_channel(f"{self._args['host']}:{self._args['grpc_port']}") as channel,
        ):
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )

            async def new_connection() -> str:
                reader, writer = await asyncio.open_connection(self._args["host"], self._args["http_port"])
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    head = await reader.readline()
                finally:
                    writer.close()
                return "" if b" 200 " in head else f"answered {head!r}"

            async def kept_connection() -> str:
                async with session.get(self._url("/v1/models")) as response:
                    await response.read()
                    return "" if response.status == 200 else f"answered {response.status}"

            async def grpc_health() -> str:
                answer = await check(health_pb2.HealthCheckRequest(service="readiness"), timeout=_DEADLINE_S)
                return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "is not ready"

            watching = [
                asyncio.create_task(self._probe("HTTP probe", new_connection)),
                asyncio.create_task(self._probe("HTTP, connection kept", kept_connection)),
                asyncio.create_task(self._probe("gRPC probe", grpc_health)),
                asyncio.create_task(self._memory()),
                asyncio.create_task(self._answers(session)),
            ]
            await ended
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    def _url(self, path: str) -> str:
        return f"http://{self._args['host']}:{self._args['http_port']}{path}"

    def _without_core_s(self) -> float:
        """Returns how long the router's main thread and this process together have waited for a core so far."""
        return sum(int(each.read_text().split()[1]) for each in self._schedstats) / 1e9

    async def _probe(self, what: str, ask: Callable[[], Awaitable[str]]) -> None:
        while True:
            waited, begun = self._without_core_s(), time.monotonic()
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    problem = await ask()
            except (OSError, TimeoutError, aiohttp.ClientError, grpc.RpcError) as error:
                problem = type(error).__name__ + f": {error}"[:200]
            wall = time.monotonic() - begun
            stall = max(0.0, wall - (self._without_core_s() - waited))
            _tell(kind="probe", what=what, at_s=begun, wall_s=wall, stall_s=stall, problem=problem)
            await asyncio.sleep(max(0.0, PERIOD_S - wall))

    async def _memory(self) -> None:
        while True:
            _tell(kind="memory", at_s=time.monotonic(), bytes=self._router.memory_info().rss)
            await asyncio.sleep(PERIOD_S)

    async def _answers(self, session: aiohttp.ClientSession) -> None:
        """An ordinary client, who asks the same again and again: it gets an answer each time, and always the same one."""
        body = {"model": self._args["model"], "prompt": "The quick brown", "max_tokens": 12, "temperature": 0}
        while True:
            text, problem = "", ""
            begun = time.monotonic()
            try:
                async with session.post(self._url("/v1/completions"), json=body) as response:
                    answer = await response.json()
                    if response.status == 200:
                        text = answer["choices"][0]["text"]
                    else:
                        problem = f"{response.status}: {answer}"[:400]
            except (OSError, TimeoutError, aiohttp.ClientError) as error:
                problem = type(error).__name__ + f": {error}"[:200]
            _tell(kind="answer", at_s=begun, wall_s=time.monotonic() - begun, text=text, problem=problem)
            await asyncio.sleep(PERIOD_S)


def _tell(**sample: Any) -> None:
    sys.stdout.write(json.dumps(sample) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(Watch(json.loads(sys.argv[1])).run())
