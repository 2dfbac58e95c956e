"""`python fuzz_router.py DIR`: a router with scripted workers, in a process of its own.

Neither its random numbers nor its threads are in the way of who makes the cases. It says where it serves, then how it is for each line that
it reads, until there are no more."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import logging
import sys
from pathlib import Path
from typing import Any

# The scripted workers are the router tests'.
sys.path.append(str(Path(__file__).parent.parent))
sys.path.append(str(Path(__file__).parent.parent / "router"))

from router_fakes import EOS_ID, Cluster, RedisServer, make_model_dir

REQUEST_TIMEOUT_S = 4.0
_MAX_MODEL_LEN = 128


class Errors(logging.Handler):
    """Collects errors that the router logs, whatever the client was told."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


async def serve(folder: Path) -> None:
    errors = Errors()
    logging.getLogger().addHandler(errors)
    redis_folder = folder / "redis"
    redis_folder.mkdir()
    server = RedisServer(redis_folder)
    try:
        cluster = Cluster(make_model_dir(folder / "model"), server, folder)
        # Short answers, and a short context for those that go on: no case is to take long.
        cluster.exchange.answer = [*cluster.answer[:6], EOS_ID]
        cluster.template = dataclasses.replace(cluster.template, max_model_len=_MAX_MODEL_LEN)
        await cluster.prefill()
        await cluster.decode()
        async with cluster.serving(
            batch_dir=folder / "batches",
            request_timeout=REQUEST_TIMEOUT_S,
            redis_start_timeout=60.0,
            max_body_bytes=256 << 10,
            max_file_bytes=64 << 10,
            default_max_tokens=8,
        ):
            say({"http": cluster.router.http_port, "grpc": cluster.router.grpc_port})
            while await asyncio.to_thread(sys.stdin.readline):
                # Garbage that is to be collected is no leak.
                gc.collect()
                say(state(cluster) | {"errors": errors.take()})
        await cluster.close()
    finally:
        server.kill()


def state(cluster: Cluster) -> dict[str, Any]:
    """Returns what must be nothing once nobody asks for anything."""
    router, batches = cluster.router, cluster.router.batches
    assert batches is not None
    return {
        "batches": batches.num_running,
        "held": len(cluster.held()),
        "inflight": router.admission.num_inflight,
        "waiting": router.admission.num_waiting,
        "tasks": sorted(filter(None, map(ours, asyncio.all_tasks()))),
    }


def ours(task: asyncio.Task[Any]) -> str:
    """The name of a task that a request may have begun; empty for gRPC's own and this module's."""
    coroutine: Any = task.get_coro()
    code = getattr(coroutine, "cr_code", None)
    path = "" if code is None else code.co_filename
    wanted = ("/router/" in path and "/tests/" not in path) or "/aiohttp/web" in path
    return str(coroutine.__qualname__) if wanted else ""


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
