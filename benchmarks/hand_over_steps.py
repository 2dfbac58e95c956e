"""Measures how late an engine launches its steps while hand-overs come in: the device's time without a step, without a device.

    PYTHONPATH=.:benchmarks python -P benchmarks/hand_over_steps.py [--streams 256] [--step-ms 18] [--pull-ms 0.3] [--seconds 20] [--runs 3]
    PYTHONPATH=.:benchmarks python -P benchmarks/hand_over_steps.py --against ../another-tree

An engine's process as a decode worker on a GPU has it, with its link, its event loop and cuda_ipc's batches and lanes, and as its edge the
process that measures: it keeps `--streams` sequences going, whose prompts come from a prefill worker that computes up to eight at a time.
Of the device there is only the time: a step takes `--step-ms` from when it is launched or the one before it ends, and each chunk that is
pulled makes the step that runs longer by `--pull-ms`. A launch gives the interpreter away as often as torch does.

    late      from a step's end to when the next one was queued, where that is later
    gap       between consecutive ends of steps, on the device and as the engine's thread sees them
    host      process time of the engine's process per hand-over beyond what its steps take without any, by thread
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kv_transfer import remote
from kv_transfer.checksums import chunk_sums
from kv_transfer.cuda_ipc.transport import CudaIpcTransport
from kv_transfer.pool_transport import CopyingTransport
from kv_transfer.transport import ChunkInfo
from kv_transfer.transports import TransportParts, Transports
from twostep.engine.batch import Batch, Sampled
from twostep.engine.fake import FakeRunner
from twostep.engine.types import EngineRequest, StepOutput
from twostep.model.step.kv_cache import KvCache
from twostep.process.startup import NoProgress
from twostep.rpc import event_loop
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser
from twostep.step_curve import StepCurve
from twostep.worker import engine_process
from twostep.worker.config import WorkerConfig
from twostep.worker.engine_child import EngineChild
from twostep.worker.engine_port import EngineEvents
from twostep.worker.link import Link
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import ServedModel, layout_of
from twostep.worker.remote_engine import RemoteEngine
from twostep.worker.step_record import ended

BLOCK_SIZE = 16
_LAYERS = 4
_CHUNKS = ((0, 2), (2, 1), (3, 1))
# How often a launch gives the interpreter away, and a pull.
_LAUNCH_CALLS, _PULL_CALLS = 24, 12
_PULL_S = 0.0005
# Through host memory: of each of a prompt's chunks, and of each of their pieces.
_COPY_THREADS, _NUM_COPIES, _PIECES, _PIECE_CALLS = 8, 8, 2, 14
_PIECE_CPU_S, _PIECE_S, _AGENT_S = 0.0001, 0.0002, 0.001
_PREFILL_MOST = 8
# From commit to the source's confirmation.
_CONFIRM_S = 0.0015
_SETTLED_S = 3.0


def give_away(times: int) -> None:
    """As a call of torch does."""
    for _ in range(times):
        time.sleep(0)


# ---- the engine's process ---------------------------------------------------------------------------------------------------------


class Device(FakeRunner):
    """Only the time of a device; when steps were queued and ended on it."""

    overlaps = True

    def __init__(self, step_s: float, pull_s: float, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=4096, num_layers=_LAYERS, dtype="bfloat16")
        self.device_step_s, self.device_pull_s = step_s, pull_s
        self._lock = threading.Lock()
        self._steps: list[Running] = []
        self.done: list[tuple[float, float, int, float]] = []  # how late, when it ended, of how many rows, when that was seen

    def launch(self, batch: Batch) -> Running:
        give_away(_LAUNCH_CALLS)
        with self._lock:
            now = time.monotonic()
            before = self._steps[-1].ends if self._steps else now
            step = Running(self, len(batch.sampling), late=max(0.0, now - before), ends=max(now, before) + self.device_step_s)
            self._steps = [*self._steps[-1:], step]
        return step

    def pulled(self) -> None:
        with self._lock:
            now = time.monotonic()
            for step in self._steps:
                if step.ends > now:
                    step.ends += self.device_pull_s


class Running:
    layer_marks = ()

    def __init__(self, device: Device, num_rows: int, *, late: float, ends: float) -> None:
        self.device, self.num_rows, self.late, self.ends = device, num_rows, late, ends

    def result(self) -> Sampled:
        while (left := self.ends - time.monotonic()) > 0:
            time.sleep(left)
        now = time.monotonic()
        self.device.done.append((self.late, self.ends, self.num_rows, now))
        return Sampled(token_ids=[7] * self.num_rows, logprobs=[None] * self.num_rows, top_logprobs=[()] * self.num_rows, ready_at=now)


class Pulls(CudaIpcTransport):
    """Copies nothing."""

    def __init__(self, cache: KvCache, device: Device) -> None:
        super().__init__(cache)
        self._pulls_of = device

    def _pull(self, source: object, part: slice, sources: list[int], targets: list[int], counts: list[int]) -> list[int]:
        np.zeros(2 * len(sources), np.int32)[: len(sources)] = sources
        np.zeros(2 * len(sources), np.int32)[: len(sources)] = targets
        give_away(_PULL_CALLS)
        for _ in counts:
            self._pulls_of.pulled()
        time.sleep(_PULL_S)
        chunk_sums(np.zeros(len(sources), np.uint64), counts)
        return [0] * len(counts)


class Copies(CopyingTransport):
    """Copies nothing, as through host memory: each chunk piece by piece, in eight threads that share the way to the device."""

    name = "ray"
    endpoint, ready, why_not_ready, max_lease_bytes = "ray", True, "", 0

    def __init__(self, device: Device) -> None:
        super().__init__(device, device.kv_shape.block_bytes, _LAYERS, num_threads=_COPY_THREADS, sweep_s=1.0)
        self._device = device
        self._way = threading.Lock()

    async def start(self) -> None:
        self._threads.start()

    async def close(self) -> None:
        await self._threads.close()

    async def _sweep(self) -> None: ...

    async def _publish(self, *_: object, **__: object) -> int:
        raise NotImplementedError("it only reads")

    @asynccontextmanager
    async def _fetched(self, endpoint: str, lease_id: str, chunk: ChunkInfo, *, deadline: float) -> AsyncIterator[Any]:
        await asyncio.sleep(_AGENT_S)
        yield chunk

    def _write_verified(self, chunk: ChunkInfo, block_ids: Sequence[int], data: Any) -> None:
        for _ in range(_PIECES):
            until = time.thread_time() + _PIECE_CPU_S
            while time.thread_time() < until:
                pass
            give_away(_PIECE_CALLS)
            with self._way:
                time.sleep(_PIECE_S)
        self._device.pulled()


def serve() -> int:
    """The engine's process, by its arguments and the environment's."""
    step_s, pull_s, num_blocks, transport = json.loads(os.environ["HAND_OVER_STEPS"])
    device = Device(step_s, pull_s, num_blocks)
    cache = KvCache(device.kv_shape)

    def load_model(config: WorkerConfig, progress: object) -> ServedModel:
        curve = StepCurve(fixed_s=step_s / 2, per_row_s=step_s / 1024, per_sequence_s=step_s / 1024, per_context_s=0.0)
        layout = layout_of(device.kv_shape, "benchmark")
        return ServedModel(name="m", runner=device, layout=layout, eos_token_ids=frozenset(), curve=curve)

    def make_transports(parts: TransportParts) -> Transports:
        made: Any = Copies(device) if transport == "ray" else Pulls(cache, device)
        return Transports([made])

    engine_process.load_model = load_model  # type: ignore[attr-defined, assignment]
    remote.make_transports = make_transports  # type: ignore[attr-defined]

    def planes(engine: LocalEngine, link: Link) -> engine_process.Plane:
        plane = remote.RemoteKv(engine, link).plane

        async def report() -> tuple[Any, ...]:
            steps, device.done = device.done, []
            times = {thread.name.rstrip("0123456789_-"): 0.0 for thread in threading.enumerate()}
            for thread in threading.enumerate():
                if thread.ident is not None:
                    times[thread.name.rstrip("0123456789_-")] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            return tuple(steps), tuple(times.items())

        return plane._replace(calls={**plane.calls, "report": report})

    return engine_process.main(planes)


# ---- its edge ---------------------------------------------------------------------------------------------------------------------


class HandOverEdge:
    """Keeps `streams` sequences going."""

    def __init__(self, engine: RemoteEngine, args: argparse.Namespace) -> None:
        self._engine, self._args = engine, args
        self._rng = np.random.default_rng(0)
        self._ended: dict[str, asyncio.Future[None]] = {}
        self._to_prefill: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()
        self.num_hand_overs = self.num_begun = 0
        self.endpoint = ""

    async def measure(self) -> dict[str, float]:
        events = EngineEvents(on_step=self._on_step, on_layers=lambda _: None, on_failure=lambda error: sys.exit(str(error)))
        self._engine.start(events)
        [state] = await self._engine.call("kv.start", self._engine.config, "w", 1)
        self.endpoint = state.endpoint
        names = itertools.count()
        args = self._args
        tasks = [asyncio.create_task(self._prefill())]
        done = 0
        for number in range(args.streams):
            if number % args.together == 0:
                done = int(self._rng.integers(0, args.most - 2))
            tasks.append(asyncio.create_task(self._keep_one(names, args.prompt + done, args.most - done)))
        await asyncio.sleep(_SETTLED_S)
        _, before = await self._engine.call("report")
        began, self.num_hand_overs = time.monotonic(), 0
        await asyncio.sleep(args.seconds)
        steps, after = await self._engine.call("report")
        seconds = time.monotonic() - began
        for task in tasks:
            task.cancel()
        ended, _ = await asyncio.wait(tasks)
        for task in ended:
            if not task.cancelled():
                task.result()
        await self._engine.stop()
        return self._report(steps, dict(before), dict(after), seconds)

    def _report(self, steps: Sequence[Any], before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
        full = [step for step in steps if step[2] >= 0.9 * self._args.streams]
        late = sorted(step[0] for step in full)
        gaps = sorted(b[1] - a[1] for a, b in itertools.pairwise(full))
        seen = sorted(b[3] - a[3] for a, b in itertools.pairwise(full))
        found = {
            "steps": len(full),
            "hand_overs_per_s": self.num_hand_overs / seconds,
            "late_mean_ms": statistics.fmean(late) * 1e3,
            "late_p90_ms": late[int(0.9 * len(late))] * 1e3,
            "late_p99_ms": late[int(0.99 * len(late))] * 1e3,
            "late_max_ms": late[-1] * 1e3,
            "gap_p50_ms": statistics.median(gaps) * 1e3,
            "gap_p99-p50_ms": (gaps[int(0.99 * len(gaps))] - statistics.median(gaps)) * 1e3,
        }
        found["seen_gap_p99-p50_ms"] = (seen[int(0.99 * len(seen))] - statistics.median(seen)) * 1e3
        for name, spent in after.items():
            found[f"cpu {name} ms/s"] = (spent - before.get(name, 0.0)) / seconds * 1e3
        return found

    def _on_step(self, output: StepOutput) -> None:
        for seq_id in ended(output):
            if not (waited := self._ended.pop(seq_id)).done():
                waited.set_result(None)

    async def _keep_one(self, names: Any, num_tokens: int, num_new: int) -> None:
        while True:
            await self._one(f"a-request-{next(names)}/1", num_tokens, num_new)
            num_tokens, num_new = self._args.prompt, self._args.most

    async def _one(self, name: str, num_tokens: int, num_new: int) -> None:
        prompt = self._rng.integers(0, 1000, num_tokens).tolist()
        params = SamplingParams(max_tokens=num_new + 1, temperature=0.0, ignore_eos=True)
        request = EngineRequest(seq_id=name, token_ids=prompt, num_prompt_tokens=num_tokens, sampling=params, prefix_key=b"key")
        ended = self._ended[name] = asyncio.get_running_loop().create_future()
        reserved = await self._engine.reserve(request)
        computed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._to_prefill.put_nowait(computed)
        await computed
        chunks = _CHUNKS if self._args.transport == "cuda_ipc" else _NUM_COPIES * ((0, _LAYERS),)
        await asyncio.gather(*(self._fetch(name, tuple(reserved.block_ids), *chunk) for chunk in enumerate(chunks)))
        self._engine.commit(name, [7], confirmed=False)
        await asyncio.sleep(_CONFIRM_S)
        self._engine.confirm(name)
        self.num_hand_overs += 1
        await ended

    async def _fetch(self, name: str, blocks: tuple[int, ...], index: int, layers: tuple[int, int]) -> None:
        num_bytes = len(blocks) * self._engine.facts.shape.layer_bytes * layers[1]
        chunk = ChunkInfo(
            index=index, first_block=0, num_blocks=len(blocks), num_bytes=num_bytes, checksum=0, first_layer=layers[0],
            num_layers=layers[1], source_blocks=blocks, generations=blocks,
        )  # fmt: skip
        deadline = time.monotonic() + 30.0
        await self._engine.call(
            "kv.fetch", self._args.transport, self.endpoint, name, chunk, blocks, deadline, deadline=deadline, settle=True
        )

    async def _prefill(self) -> None:
        """As many prompts a step as fit its budget, handed over at once."""
        while True:
            step = [await self._to_prefill.get()]
            while len(step) < _PREFILL_MOST and not self._to_prefill.empty():
                step.append(self._to_prefill.get_nowait())
            self.num_begun += len(step)
            # The first ones are there at once.
            await asyncio.sleep(self._args.prefill_ms / 1e3 * len(step) if self.num_begun > self._args.streams else 0.0)
            for computed in step:
                if not computed.done():
                    computed.set_result(None)


def main() -> None:
    args = parse_args()
    if not args.child:
        compare(args)
        return
    num_blocks = (args.streams + 8) * -(-(args.prompt + args.most + 2) // BLOCK_SIZE)
    os.environ["HAND_OVER_STEPS"] = json.dumps([args.step_ms / 1e3, args.pull_ms / 1e3, num_blocks, args.transport])
    config = WorkerConfig(role="decode", runner="fake", max_num_seqs=args.streams, max_num_batched_tokens=2048, log_level="warning")
    engine = RemoteEngine.launch(config, EngineChild.start("hand_over_steps"), NoProgress())
    print(json.dumps(event_loop.run(HandOverEdge(engine, args).measure())))


def compare(args: argparse.Namespace) -> None:
    here = Path(__file__).parent
    trees = {"this": here.parent.resolve()} | ({"against": args.against.resolve()} if args.against else {})
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    options = [
        f"--{key.replace('_', '-')}={getattr(args, key)}"
        for key in ("streams", "prompt", "most", "together", "step_ms", "pull_ms", "prefill_ms", "seconds", "transport")
    ]
    for _ in range(args.runs):
        for name, tree in trees.items():
            environment = os.environ | {"PYTHONPATH": f"{tree}:{here}", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-P", __file__, "--child", *options]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            figures[name].append(json.loads(done.stdout.splitlines()[-1]))
    for key in figures["this"][0]:
        print(f"{key:28}" + "".join(f"{name:>10} {statistics.median(each[key] for each in some):9.3f}" for name, some in figures.items()))


def parse_args() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("cuda_ipc", "ray"), default="cuda_ipc", help="as which one KV comes in")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--most", type=int, default=900, help="new tokens of a request")
    parser.add_argument("--together", type=int, default=1, help="sequences that begin and end with each other")
    parser.add_argument("--step-ms", type=float, default=18.2)
    parser.add_argument("--prefill-ms", type=float, default=22.0, help="of a prompt")
    parser.add_argument("--pull-ms", type=float, default=0.25, help="by which a chunk makes a step longer")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another tree, to be measured in turns with this one")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].isdigit():
        sys.exit(serve())
    main()
