"""Measures a request's way to its workers, from its arrival to the accepted Run, with a real router and real workers whose runner is fake.

    python benchmarks/router_route.py                        this tree
    python benchmarks/router_route.py . ../before            trees beside each other, each with processes of its own, asked in turns

Kinds of system: `kept`, one worker that computes the prompt and keeps the sequence, its engine in a process of its own, as an idle system
on a GPU does; `pair`, a prefill and a decode worker. Every request is a prompt that nobody has, and its answer one token, so that no KV
moves. Idle: one request after the other. At a rate: they come at random instants, whatever became of those before. `route` is by the
router's own clock (Phases.route_s), `first` is from the client's sending to its first piece; both are p50, with p90 behind. `processors`
is the time that all the system's processes but Redis took, per request, in the background too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from router_helper import ROOT, cpu_s
from router_place import RigFiles, encode_request
from router_rig import RigClient, busy, free_port, open_client, until

from twostep.local.redis_server import server_argv, server_binary, socket_path
from twostep.rpc import event_loop
from twostep.rpc.v1 import inference_pb2
from twostep.settings.reading import FlagParser

_START_S = 60.0
_WORKER = "route_worker.py"  # the tree's own
_FAKE = ("--runner", "fake", "--num-blocks", "8192")
_ROUTER = ("-m", "router", "--port", "-1")
_KINDS = {
    "kept": (_ROUTER, ("-m", "decode_worker", "--kv-transfer", "none", "--engine-process", "on", *_FAKE)),
    "pair": (
        _ROUTER,
        (_WORKER, "prefill", "--fixed-roles", *_FAKE),
        (_WORKER, "decode", "--fixed-roles", "--no-local-prefill", *_FAKE),
    ),
}


@dataclass(eq=False)
class System:
    """One tree's router and workers."""

    name: str
    client: RigClient
    prompts: Prompts
    processes: Sequence[int]
    route: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    cpu_s: float = 0.0  # of its processes, while it was asked

    async def ask(self, length: int) -> None:
        request = self.prompts.request(length)
        before = self._cpu_s()
        stream = await self.client.ask(request)
        self.cpu_s += self._cpu_s() - before
        self.route.append(stream.responses()[-1].end.phases.route_s)
        self.first.append(stream.first_at - stream.sent_at)

    def tell(self, what: str, *, alone: bool) -> None:
        """`alone`: one request after the other, so that the processes' time is theirs."""
        processors = f"  processors {1e3 * self.cpu_s / len(self.route):5.2f} ms" if alone else ""
        print(
            f"{what}  {self.name:14}  route {_ms(self.route)}  first {_ms(self.first)}{processors}  ({len(self.route)} requests)",
            flush=True,
        )
        self.clear()

    def clear(self) -> None:
        self.route, self.first, self.cpu_s = [], [], 0.0

    def _cpu_s(self) -> float:
        return sum(map(cpu_s, self.processes))


class Prompts:
    """Prompts of so many tokens, as ids or as texts, cut out of this project's documentation behind a beginning that is new each time."""

    def __init__(self, place: RigFiles, *, as_ids: bool) -> None:
        self._tokenizer = place.tokenizer()
        self._ids = place.answer()
        self._as_ids = as_ids

    def request(self, length: int) -> bytes:
        start = secrets.token_hex(8)
        head = self._tokenizer.encode(start).ids
        at, num = random.randrange(len(self._ids)), length - len(head)
        ids = [self._ids[i % len(self._ids)] for i in range(at, at + num)]
        if self._as_ids:
            return encode_request([*head, *ids], num_tokens=1)
        sampling = inference_pb2.SamplingParams(max_tokens=1, temperature=0.0)
        return inference_pb2.GenerateRequest(text=start + self._tokenizer.decode(ids), sampling=sampling).SerializeToString()


@asynccontextmanager
async def system(tree: Path, directory: Path, kind: str, *, as_ids: bool) -> AsyncIterator[System]:
    place = RigFiles(directory)
    place.fill(None)
    # Modules of the tree, not of this one.
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))}
    children: list[subprocess.Popen[bytes]] = []

    def start(argv: Sequence[str]) -> None:
        children.append(subprocess.Popen(argv, cwd=directory, env=environ, stdout=subprocess.DEVNULL))

    try:
        start(server_argv(server_binary(), directory))
        await until(socket_path(directory).exists)
        port = free_port()
        for words in _KINDS[kind]:
            given = [str(tree / "benchmarks" / word) if word == _WORKER else word for word in words]
            argv = [sys.executable, "-P", *given, "--host", "127.0.0.1", "--health-port", "-1", "--metrics-port", "-1"]
            argv += ["--model", str(place.model), "--served-model-name", "m", "--redis-url", place.redis_url]
            argv += ["--secret-file", str(place.secret), "--log-level", "error"]
            argv += ["--grpc-port", str(port if "router" in words else free_port())]
            start(argv)
        async with open_client(port) as client:
            one = System(f"{tree.name} {kind}", client, Prompts(place, as_ids=as_ids), [])
            give_up = time.monotonic() + _START_S
            while True:
                try:
                    await one.ask(16)
                    break
                except grpc.aio.AioRpcError:
                    if time.monotonic() > give_up or any(child.poll() is not None for child in children):
                        raise
                    await asyncio.sleep(0.2)
            one.processes = [*(child.pid for child in children[1:]), *(pid for child in children[1:] for pid in _children_of(child.pid))]
            yield one
    finally:
        # Redis last, so that nothing is said of it.
        for child in reversed(children):
            child.terminate()
            child.wait(20)


async def idle(systems: Sequence[System], length: int, rounds: int) -> None:
    for one in systems:
        for _ in range(5):
            await one.ask(length)
        one.clear()
    for _ in range(rounds):
        for one in systems:
            await one.ask(length)
    for one in systems:
        one.tell(f"{length:5} tokens, idle", alone=True)


async def loaded(systems: Sequence[System], length: int, rate: float, seconds: float) -> None:
    """In turns of a second or two, so that the machine is the same to all."""
    turn_s = 2.0
    for _ in range(max(1, round(seconds / turn_s))):
        for one in systems:
            due, asked = time.monotonic(), []
            end = due + turn_s
            while (due := due + random.expovariate(rate)) < end:
                await asyncio.sleep(due - time.monotonic())
                asked.append(asyncio.create_task(one.ask(length)))
            await asyncio.gather(*asked)
    for one in systems:
        one.tell(f"{length:5} tokens, {rate:g}/s", alone=False)


def _children_of(pid: int) -> Sequence[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):6.2f} ms ({1e3 * sorted(seconds)[int(0.9 * len(seconds))]:.2f})"


async def main(arguments: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        systems = []
        for kind in arguments.kinds:
            for tree in arguments.trees or [ROOT]:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                systems.append(await stack.enter_async_context(system(tree, directory, kind, as_ids=not arguments.texts)))
        print(busy())
        for length in arguments.lengths:
            await idle(systems, length, arguments.rounds)
            if arguments.rate:
                await loaded(systems, length, arguments.rate, arguments.seconds)
        print(busy())


if __name__ == "__main__":
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=lambda text: Path(text).resolve(), nargs="*", help="directories of source trees; without: this one")
    parser.add_argument("--kinds", choices=_KINDS, nargs="*", default=["kept"], help="of systems, all beside each other")
    parser.add_argument("--texts", action="store_true", help="prompts are texts, not token ids")
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 512, 2600], help="of prompts, in tokens")
    parser.add_argument("--rounds", type=int, default=100, help="requests of each length to each, one after the other")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second, then; 0: none")
    parser.add_argument("--seconds", type=float, default=10.0, help="of that, for each")
    event_loop.run(main(parser.parse_args()))
