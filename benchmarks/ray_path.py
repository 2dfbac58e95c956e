"""KV from one pool to another over Ray: a source and a reader, processes of their own, each with its agent, on one Ray.

    PYTHONPATH=. python -P benchmarks/ray_path.py                                   two pools in host memory
    PYTHONPATH=. python -P benchmarks/ray_path.py --tree ../old --tree . --rounds 9     two versions in turn, in one run
    PYTHONPATH=. python -P benchmarks/ray_path.py --device cuda --step-ms 0 56      pools on the first and the last GPU

Llama-3.1-8B's shape, bf16: 2600 tokens are 163 blocks of 2 MiB, 342 MB, cut as a prefill worker cuts them. Medians and worst in ms:

    N MB         one chunk by itself: `publish`, then `fetch`
    step S ms    a whole hand-over whose layers become final evenly over S ms; from the last one `published` to the source, `in place` for
                 the reader. Its bytes are compared with the source's
    processors   user and system time of all processes, Ray's too, meanwhile: what a busy machine disturbs least
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from local_ray import LocalRay

from kv_transfer.chunking import ChunkPlan
from kv_transfer.ray.transport import RayTransport
from kv_transfer.transport import ChunkInfo
from twostep.engine.batch import KvShape, LayerRange
from twostep.model.step.kv_cache import KvCache
from twostep.rpc import event_loop
from twostep.settings.reading import FlagParser

NUM_BLOCKS, NUM_LAYERS = 163, 32
SHAPE = KvShape(num_blocks=2 * NUM_BLOCKS, block_size=16, num_layers=NUM_LAYERS, num_kv_heads=8, head_dim=128, dtype="bfloat16")
# Every other block, from the end: what a pool gives out is scattered.
BLOCKS = range(2 * NUM_BLOCKS - 1, 0, -2)
# Blocks and layers of a chunk by itself: a short prompt's, one of a hand-over's last, one of those before.
ALONE = {"1 MB": (8, 2), "5 MB": (82, 1), "21 MB": (163, 2)}
FETCHES_AT_ONCE = 16
# Where else Python looks, but for trees of this project.
PACKAGES = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and not (Path(path) / "kv_transfer").is_dir()]
TIMEOUT_S = 60.0


async def transport(role: str, args: argparse.Namespace) -> tuple[RayTransport, KvCache]:
    device = args.device if args.device == "cpu" else f"cuda:{0 if role == 'source' else torch.cuda.device_count() - 1}"
    if device != "cpu":
        torch.cuda.set_device(device)
    cache = KvCache(SHAPE, device)
    made = RayTransport(
        cache, SHAPE.block_bytes, worker_id=role, epoch=1, ray_address=args.ray, run_dir=Path(args.directory) / role, num_layers=NUM_LAYERS,
        pin=cache.pin_host, on_gpu=device != "cpu", budget_bytes=1 << 30,
    )  # fmt: skip
    await made.start()
    for _ in range(int(TIMEOUT_S / 0.05)):
        if made.ready:
            return made, cache
        await asyncio.sleep(0.05)
    raise SystemExit(f"no KV agent: {made.why_not_ready}")


def digest(cache: KvCache) -> int:
    """Words of all blocks in the order of BLOCKS, each with a weight of its own place."""
    words = cache.tensor[list(BLOCKS)].view(torch.int64).flatten()
    return int((words * (torch.arange(len(words), device=words.device) | 1)).sum())


def settle(cache: KvCache) -> None:
    """Returns once what this thread has written is there: the transport reads and writes on streams of its own."""
    if cache.tensor.is_cuda:
        torch.cuda.synchronize(cache.tensor.device)


async def source(args: argparse.Namespace, peer: Peer) -> None:
    ray, cache = await transport("source", args)
    words = cache.tensor.view(torch.int64)
    words.copy_(torch.randint(-(2**62), 2**62, words.shape, generator=torch.Generator().manual_seed(5)))
    settle(cache)
    await peer.say(endpoint=ray.endpoint)

    async def publish(lease: str, index: int, blocks: list[int], layers: LayerRange | None) -> ChunkInfo:
        return await ray.publish(lease, index, 0, blocks, layers=layers, ttl_s=TIMEOUT_S, deadline=time.monotonic() + TIMEOUT_S)

    while (asked := await peer.hear()).get("run"):
        lease, step_s = asked["lease"], asked.get("step_s", 0.0)
        if "alone" in asked:
            num_blocks, num_layers = ALONE[asked["alone"]]
            began = time.monotonic()
            info = await publish(lease, 0, list(BLOCKS[:num_blocks]), LayerRange(0, num_layers))
            await peer.say(chunk=asdict(info), publish=time.monotonic() - began)
        else:
            words[BLOCKS[0], 0] = torch.randint(-(2**62), 2**62, words[0, 0].shape, generator=torch.Generator().manual_seed(asked["run"]))
            settle(cache)
            plan = ChunkPlan(
                first_block=0, num_blocks=NUM_BLOCKS, block_bytes=SHAPE.block_bytes, num_layers=NUM_LAYERS, step_blocks=NUM_BLOCKS
            )
            began = time.monotonic()

            async def announce(index: int, first: int, count: int, layers: LayerRange | None, lease: str = lease) -> None:
                info = await publish(lease, index, list(BLOCKS[first : first + count]), layers)
                await peer.say(chunk=asdict(info) | {"first_block": first})

            tasks = []
            for layer in range(1, NUM_LAYERS + 1):
                await asyncio.sleep(began + step_s * layer / NUM_LAYERS - time.monotonic())
                final = NUM_BLOCKS if layer == NUM_LAYERS else 0
                for c in plan.take(final, step_blocks=NUM_BLOCKS, step_layers=layer):
                    tasks.append(asyncio.create_task(announce(c.index, c.first_block, c.num_blocks, c.layers)))
            final_at = time.monotonic()
            await asyncio.gather(*tasks)
            await peer.say(final_at=final_at, published_at=time.monotonic(), num_chunks=plan.num_chunks)
        await peer.hear()
        await peer.say(digest=digest(cache))
        await ray.drop(lease)
    await ray.close()


async def reader(args: argparse.Namespace, peer: Peer) -> None:
    ray, cache = await transport("reader", args)
    endpoint = (await peer.hear())["endpoint"]
    await ray.probe(endpoint, deadline=time.monotonic() + TIMEOUT_S)
    gate = asyncio.Semaphore(FETCHES_AT_ONCE)

    async def fetch(lease: str, chunk: dict[str, Any]) -> None:
        info = ChunkInfo(**{**chunk, "source_blocks": (), "generations": ()})
        blocks = list(BLOCKS[info.first_block : info.first_block + info.num_blocks])
        async with gate:
            await ray.fetch(endpoint, lease, info, blocks, deadline=time.monotonic() + TIMEOUT_S)

    print(json.dumps({"ready": True}), flush=True)
    number = 0
    # One case each time the parent names one.
    while name := (await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)).strip():
        number += 1
        lease = f"lease/{number}"
        if name in ALONE:
            await peer.say(run=number, lease=lease, alone=name)
            told = await peer.hear()
            began = time.monotonic()
            await fetch(lease, told["chunk"])
            taken = {"publish": told["publish"], "fetch": time.monotonic() - began}
        else:
            await peer.say(run=number, lease=lease, step_s=float(name.split()[1]) / 1e3)
            tasks = []
            while "final_at" not in (told := await peer.hear()):
                tasks.append(asyncio.create_task(fetch(lease, told["chunk"])))
            await asyncio.gather(*tasks)
            taken = {"published": told["published_at"] - told["final_at"], "in place": time.monotonic() - told["final_at"]}
            assert len(tasks) == told["num_chunks"]
        print(json.dumps(taken), flush=True)
        # The parent has looked at its clocks.
        sys.stdin.readline()
        await peer.say(done=True)
        source_has = (await peer.hear())["digest"]
        assert name in ALONE or digest(cache) == source_has, "the reader's blocks are not the source's"
        cache.tensor.zero_()
        settle(cache)
        print(json.dumps({"ready": True}), flush=True)
    await peer.say(run=0)
    await ray.close()


class Peer:
    """Lines of JSON from and to the other process."""

    def __init__(self, stream: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self._reader, self._writer = stream

    async def say(self, **words: object) -> None:
        self._writer.write(json.dumps(words).encode() + b"\n")
        await self._writer.drain()

    async def hear(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(await self._reader.readline() or b"{}")
        return told


async def serve(args: argparse.Namespace) -> None:
    peer = Peer(await asyncio.open_connection(sock=socket.socket(fileno=args.socket)))
    await (source if args.role == "source" else reader)(args, peer)


class Version:
    """One tree's source and reader, and a Ray of their own: its workers, which agents are, take their code from its environment."""

    def __init__(self, tree: Path, args: argparse.Namespace, directory: Path) -> None:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(tree.resolve()), *PACKAGES])
        ray = self._ray = LocalRay(object_store_bytes=3 << 30)
        ray.start()
        ends = socket.socketpair()
        env = {**os.environ, **ray.environment, "PYTHONUNBUFFERED": "1"}
        directory.mkdir()
        flags = ["--ray", ray.address, "--directory", str(directory), "--device", args.device, "--step-ms", *map(str, args.step_ms)]
        self.taken: defaultdict[str, list[float]] = defaultdict(list)
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).resolve()), "--role", role, "--socket", str(end.fileno()), *flags],
                cwd=tree, env=env, pass_fds=[end.fileno()], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for role, end in zip(("source", "reader"), ends, strict=True)
        ]  # fmt: skip
        for end in ends:
            end.close()
        self._gives_up = threading.Timer(args.deadline, self._kill)
        self._gives_up.daemon = True
        self._gives_up.start()

    def hear_ready(self) -> None:
        self._hear()

    def run(self, case: str, *, counts: bool) -> None:
        stdin = self._processes[1].stdin
        assert stdin is not None
        before = processor_seconds()
        stdin.write(case + "\n")
        stdin.flush()
        taken = self._hear() | {"processors": processor_seconds() - before}
        stdin.write("\n")
        stdin.flush()
        self._hear()
        for name, seconds in taken.items() if counts else ():
            self.taken[f"{case} {name}"].append(1e3 * seconds)

    def close(self) -> None:
        for process in reversed(self._processes):
            assert process.stdin is not None
            with suppress(subprocess.TimeoutExpired, BrokenPipeError):
                process.stdin.close()
                process.wait(30)
        self._gives_up.cancel()
        self._kill()
        self._ray.stop()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _hear(self) -> dict[str, Any]:
        stdout = self._processes[1].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise SystemExit("the reader ended")
        told: dict[str, Any] = json.loads(line)
        return told


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", help="a checkout whose kv_transfer is measured; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[0.0, 400.0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds after which a version's processes are killed")
    for internal in ("--role", "--ray", "--directory"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        event_loop.run(serve(args))
        return
    trees = args.tree or [Path(__file__).parents[1]]
    print(f"one copy of {NUM_BLOCKS * SHAPE.block_bytes / 1e6:.0f} MB by one thread {copy_ms():.1f} ms")
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp"))
        versions: list[Version] = []
        for i, tree in enumerate(trees):
            versions.append(Version(tree, args, Path(directory) / str(i)))
            stack.callback(versions[-1].close)
            versions[-1].hear_ready()
        for number in range(args.rounds + 1):
            for case in (*ALONE, *(f"step {step_ms:g} ms" for step_ms in args.step_ms)):
                for version in versions:
                    version.run(case, counts=number > 0)
    for name in versions[0].taken:
        cells = [f"{statistics.median(v.taken[name]):8.1f} ({max(v.taken[name]):6.1f})" for v in versions]
        # Processors' time has steps of 10 ms: little is nothing.
        ratio = statistics.median(versions[-1].taken[name]) / max(0.1, statistics.median(versions[0].taken[name]))
        print(f"{name:28}" + "".join(cells) + (f"   x {ratio:.2f}" if len(versions) > 1 else ""))


def processor_seconds() -> float:
    """Returns what this process's descendants have used so far. Those that end take theirs along: none should meanwhile."""
    return sum(sum(process.cpu_times()[:2]) for process in psutil.Process().children(recursive=True))


def copy_ms() -> float:
    """Returns the least that all of it can take: one reading and one writing."""
    a, b = (np.ones(NUM_BLOCKS * SHAPE.block_bytes, np.uint8) for _ in range(2))
    taken: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(b, a)
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


if __name__ == "__main__":
    main()
