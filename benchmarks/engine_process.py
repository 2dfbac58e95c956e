"""Measures how late tokens come to a router where the engine has a thread of the worker's process, and where it has a process of its own.

    python benchmarks/engine_process.py [--streams 256] [--step-ms 12] [--seconds 10] [--runs 5]

A decode worker on the fake runner, as a process, and a router's stream as another one. Each request's prompt is computed by the worker,
and another one follows each that ends. Both forms take turns. What is told of each is the median over its runs: how long after a step's
end its tokens are given to the router's stream, by a clock that both processes share, and gaps between full steps at the router.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from served_step_load import SECRET, Clock, ServedStepLoad

from twostep.engine.types import StepOutput
from twostep.errors import TwostepError
from twostep.local.ports import free_ports
from twostep.local.redis_server import server_argv, server_binary, socket_path
from twostep.rpc import event_loop
from twostep.rpc.call_signing import channel_to_worker
from twostep.rpc.convert import sampling_to_proto
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, inference_pb2
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser

_VOCAB = 1000
_WORKER = "--worker"


class StreamReader:
    """One router's stream, `streams` requests at once."""

    def __init__(self, decode: Any, load: ServedStepLoad) -> None:
        self._decode, self._load = decode, load
        self._clock = Clock(int(load.streams * 0.9))
        self._ended: dict[str, asyncio.Future[None]] = {}
        self._requests, self._names = load.requests(), itertools.count()
        self._rng = np.random.default_rng(load.seed)

    async def play(self) -> dict[str, float]:
        stream = self._decode.Stream(decode_pb2.StreamRequest(router_id="r"))
        await stream.initial_metadata()
        tasks = [asyncio.create_task(self._read(stream)), *(asyncio.create_task(self._keep_one()) for _ in range(self._load.streams))]
        ended, _ = await asyncio.wait(tasks, timeout=self._load.seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self._clock.report()

    async def _keep_one(self) -> None:
        while True:
            name, (num_tokens, num_new) = f"q{next(self._names)}", next(self._requests)
            prompt = self._rng.integers(0, _VOCAB, num_tokens).tolist()
            params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
            ended = self._ended[name] = asyncio.get_running_loop().create_future()
            request = decode_pb2.ReserveRequest(
                router_id="r",
                request_id=name,
                attempt=1,
                token_ids=prompt,
                num_prompt_tokens=num_tokens,
                sampling=sampling_to_proto(params),
                tenant="t",
                prefill_here=True,
            )
            await self._decode.Reserve(request, timeout=60)
            await ended

    async def _read(self, stream: Any) -> None:
        async for message in stream:
            for event in message.events:
                if event.HasField("failed"):
                    raise RuntimeError(event.failed.message)
                token = event.token if event.HasField("token") else event.first_token.token
                if token.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED:
                    self._ended.pop(event.request_id).set_result(None)
            self._clock.tick(len(message.events))


async def measure(form: str, load: ServedStepLoad, step_ms: float, directory: Path, redis_url: str) -> dict[str, float]:
    port, health_port = free_ports(2)
    lateness = directory / f"{form}.json"
    command = [
        *(sys.executable, __file__, _WORKER, str(lateness), "--runner", "fake", "--kv-transfer", "none", "--engine-process", form),
        *("--grpc-port", str(port), "--health-port", str(health_port), "--metrics-port", "-1", "--log-level", "warning"),
        *("--worker-id", f"decode-{form}", "--redis-url", redis_url, "--secret-file", str(directory / "secret"), "--num-blocks", "65536"),
        *("--max-num-seqs", str(load.streams), "--max-num-batched-tokens", "8192", "--fake-step-ms", str(step_ms)),
        *("--max-waiting", str(2 * load.streams), "--drain-timeout", "0"),
    ]
    worker = await asyncio.to_thread(subprocess.Popen, command)
    report: dict[str, float] = {}
    try:
        give_up = time.monotonic() + 60
        while True:
            try:
                async with channel_to_worker(f"127.0.0.1:{port}", SECRET, caller="player") as channel:
                    report = await StreamReader(decode_pb2_grpc.DecodeStub(channel), load).play()
                    break
            except TwostepError:
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(0.1)
    finally:
        worker.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(worker.wait, 30)
        worker.kill()
    late = sorted(json.loads(lateness.read_text()))
    return report | {"late_p50_ms": late[len(late) // 2] * 1e3, "late_p99_ms": late[int(len(late) * 0.99)] * 1e3}


def serve(lateness: Path, flags: list[str]) -> int:
    """A decode worker that notes how late its steps are sent, and writes that down at its end."""
    from decode_worker import __main__ as decode_worker  # noqa: PLC0415
    from decode_worker.sequences import Sequences  # noqa: PLC0415

    told, on_step = list[float](), Sequences.on_step

    def timed(self: Sequences, output: StepOutput) -> None:
        on_step(self, output)
        if output.tokens:
            told.append(time.monotonic() - output.ended_at)

    Sequences.on_step = timed  # type: ignore[method-assign]
    code = decode_worker.main(flags)
    lateness.write_text(json.dumps(told))
    return code


def main() -> None:
    if sys.argv[1:2] == [_WORKER]:
        sys.exit(serve(Path(sys.argv[2]), sys.argv[3:]))
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=500)
    parser.add_argument("--most", type=int, default=400, help="new tokens of a request")
    parser.add_argument("--step-ms", type=float, default=12.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    load = ServedStepLoad(args.streams, args.prompt, args.most, args.seconds)
    found: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory(prefix="ts-") as name:
        directory = Path(name)
        (directory / "secret").write_bytes(SECRET.own)
        redis = subprocess.Popen(server_argv(server_binary(), directory), stdout=subprocess.DEVNULL)
        try:
            url = f"unix://{socket_path(directory)}"
            for _ in range(args.runs):
                for form, reports in found.items():
                    reports.append(event_loop.run(measure(form, load, args.step_ms, directory, url)))
                    print(form, json.dumps({k: round(v, 2) for k, v in reports[-1].items()}), flush=True)
        finally:
            redis.kill()
            redis.wait()
    for form, reports in found.items():
        middle = {key: statistics.median(report[key] for report in reports) for key in reports[0]}
        print(
            f"--engine-process {form}, medians of {args.runs} runs: given to the stream after p50 {middle['late_p50_ms']:.2f} ms, ", end=""
        )
        print(f"p99 {middle['late_p99_ms']:.2f}; gaps p50 {middle['p50_ms']:.2f}, p99 {middle['p99_ms']:.2f}")


if __name__ == "__main__":
    main()
