"""The load of gpu_served_step.py: its requests, the router's part that keeps them going as a process, and how steps are counted."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from twostep.keys.secret import DeploymentSecret
from twostep.rpc import event_loop
from twostep.rpc.call_signing import channel_to_worker
from twostep.rpc.convert import sampling_to_proto
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, prefill_pb2, prefill_pb2_grpc
from twostep.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ServedStepLoad:
    """`streams` requests at once, each of `prompt` tokens and `least` to `most` new ones."""

    streams: int
    prompt: int
    most: int
    seconds: float
    seed: int = 0

    def requests(self) -> Iterator[tuple[int, int]]:
        """Prompt length and new tokens of one request after another. The first ones begin as if they had been running for a while, so
        that contexts are spread from the start as they stay."""
        rng = random.Random(self.seed)
        for _ in range(self.streams):
            done = rng.randint(0, self.most - 2)
            yield self.prompt + done, self.most - done
        while True:
            yield self.prompt, self.most


@dataclass
class Clock:
    """When the outputs of full steps came."""

    least_tokens: int
    times: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def tick(self, num_tokens: int, at: float | None = None) -> None:
        """`at`: by a clock of the caller's own, always the same one."""
        now = time.perf_counter() if at is None else at
        if num_tokens < self.least_tokens:
            self.times.clear()  # filling up, or emptying
            return
        if self.times:
            self.gaps.append(now - self.times[-1])
            self.counts.append(num_tokens)
        self.times.append(now)

    def report(self) -> dict[str, float]:
        gaps = sorted(self.gaps)
        if len(gaps) < 20:
            return {"steps": len(gaps), "p50_ms": float("nan"), "p99_ms": float("nan"), "max_ms": float("nan"), "tokens": 0.0}
        return {
            "steps": len(gaps),
            "p50_ms": statistics.median(gaps) * 1e3,
            "p99_ms": gaps[int(len(gaps) * 0.99)] * 1e3,
            "max_ms": gaps[-1] * 1e3,
            "tokens": statistics.fmean(self.counts),
        }


# Secret of the workers of gpu_served_step.
SECRET = DeploymentSecret(b"sixteen bytes or more")


# Share of the time after which steps are counted: until then the batch fills up, as fast as prompts are computed.
_SETTLED = 0.4
_ROUNDED_S = 1e-5


class Player:
    """The router's part: one stream from decode, `streams` requests at once. Steps are timed by when they ended in the engine and when they
    were given to the connection, both as the worker says, and by when they came."""

    def __init__(self, prefill: str, decode: str, load: ServedStepLoad, vocab: int) -> None:
        self._load, self._vocab = load, vocab
        self._addresses = prefill, decode
        self._ended: dict[str, asyncio.Future[None]] = {}
        self._requests, self._names = load.requests(), itertools.count()
        self._rng = np.random.default_rng(load.seed)
        self._failed = 0
        self._begin()

    def _begin(self) -> None:
        """Counts from now on."""
        self._least = int(self._load.streams * 0.9)
        self._engine, self._edge, self._router = (Clock(self._least) for _ in range(3))
        # Of full steps, by what the engine says: what they took, and how long the device had none before them.
        self._took: list[float] = []
        self._without: list[float] = []
        self._last: decode_pb2.StepRecord | None = None
        self._hand_overs = self._bytes = self._most_at_once = 0
        self._began = time.perf_counter()

    async def play(self) -> dict[str, Any]:
        prefill, decode = (channel_to_worker(address, SECRET, caller="player") for address in self._addresses)
        async with prefill as to_prefill, decode as to_decode:
            self._prefill, self._decode = prefill_pb2_grpc.PrefillStub(to_prefill), decode_pb2_grpc.DecodeStub(to_decode)
            stream = self._decode.Stream(decode_pb2.StreamRequest(router_id="r"))
            await stream.initial_metadata()
            reader = asyncio.create_task(self._read(stream))
            asyncio.get_running_loop().call_later(_SETTLED * self._load.seconds, self._begin)
            tasks = [asyncio.create_task(self._keep_one()) for _ in range(self._load.streams)]
            # None of them ends by itself.
            ended, _ = await asyncio.wait({*tasks, reader}, timeout=self._load.seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
                raise RuntimeError("the decode worker has closed its stream")
            for task in (*tasks, reader):
                task.cancel()
            await asyncio.gather(*tasks, reader, return_exceptions=True)
            seconds = time.perf_counter() - self._began
        return {
            "engine": self._engine.report(),
            "edge": self._edge.report(),
            "router": self._router.report(),
            "took_p50_ms": _at(self._took, 0.5) * 1e3,
            "took_p99_ms": _at(self._took, 0.99) * 1e3,
            "late_share": sum(seconds > 0.0 for seconds in self._without) / max(1, len(self._without)),
            "late_p99_ms": _at(self._without, 0.99) * 1e3,
            "most_at_once": self._most_at_once,
            "hand_overs_per_s": self._hand_overs / seconds,
            "gb_per_s": self._bytes / seconds / 1e9,
            "failed": self._failed,
        }

    async def _keep_one(self) -> None:
        while True:
            await self._one(f"q{next(self._names)}")

    async def _one(self, name: str) -> None:
        num_tokens, num_new = next(self._requests)
        prompt = self._rng.integers(0, self._vocab, num_tokens).tolist()
        params = SamplingParams(max_tokens=num_new + 1, temperature=0.0, ignore_eos=True)
        request = {
            "request_id": name,
            "attempt": 1,
            "token_ids": prompt,
            "num_prompt_tokens": len(prompt),
            "sampling": sampling_to_proto(params),
            "tenant": "t",
        }
        ended = self._ended[name] = asyncio.get_running_loop().create_future()
        await self._decode.Reserve(decode_pb2.ReserveRequest(router_id="r", **request), timeout=60)
        async for event in self._prefill.Run(prefill_pb2.PrefillRequest(**request), timeout=600):
            if event.HasField("accepted"):
                await self._decode.Attach(decode_pb2.AttachRequest(request_id=name, attempt=1, ticket=event.accepted.ticket), timeout=60)
        await ended

    async def _read(self, stream: Any) -> None:
        async for message in stream:
            num_tokens, before = 0, self._hand_overs
            for event in message.events:
                if event.HasField("token"):
                    num_tokens += 1
                    if event.token.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED:
                        self._ended.pop(event.request_id).set_result(None)
                elif event.HasField("committed"):
                    self._hand_overs += 1
                    self._bytes += event.committed.bytes
                else:
                    self._failed += 1
                    print(event.failed.message, file=sys.stderr)
                    self._ended.pop(event.request_id).set_result(None)
            self._most_at_once = max(self._most_at_once, self._hand_overs - before)
            for step in message.steps:
                self._engine.tick(step.decodes, step.ended_s)
                self._note(step)
            if num_tokens:
                self._edge.tick(num_tokens, message.sent_s)
                self._router.tick(num_tokens)

    def _note(self, step: decode_pb2.StepRecord) -> None:
        """A step that is planned after the end of the one before begins late: the device stood still at least until then."""
        last, self._last = self._last, step
        if last is not None and step.step == last.step + 1 and step.decodes >= self._least:
            self._took.append(step.duration_s)
            # What is less is the difference of two roundings.
            without = step.ended_s - last.ended_s - step.duration_s
            self._without.append(without if without > _ROUNDED_S else 0.0)


def _at(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)] if values else float("nan")


def main() -> None:
    prefill, decode, result, *numbers, seconds = sys.argv[1:]
    streams, prompt, most, vocab = map(int, numbers)
    load = ServedStepLoad(streams, prompt, most, float(seconds))
    Path(result).write_text(json.dumps(event_loop.run(Player(prefill, decode, load, vocab).play())))


if __name__ == "__main__":
    main()
