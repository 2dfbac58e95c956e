"""The cost of serving in a decode step: the engine alone, then the same engine behind its edge, with hand-overs arriving all the time.

    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_served_step.py                          # Llama-3.1-8B's shape, 256 streams, two GPUs
    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_served_step.py --transport cuda_ipc ray --prompt 512 --most 650     # cards of 80 GB
    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_served_step.py --tiny --transport ray   # a dry run on the CPU
    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_served_step.py --transport local        # both workers in this process, one GPU

Served: a prefill and a decode worker as production runs them (served_step_workers.py), each with an engine in a process of its own, on the
second and the first GPU; over ray, KV goes through host memory. A process of its own plays the router and keeps `--streams` requests going,
each with a prompt of `--prompt` tokens and up to `--most` new ones: every prompt's KV comes while the others decode. Alone: the same number
of sequences with the same contexts, replaced without any KV, stepped by EngineLoop on the first GPU, which is free again afterwards.

Steps are compared by the time between consecutive ones: when they ended in the engine, when they were given to the connection at the edge,
when they came to the router. What they took, and how long the device stood still before them, says whether the device or the host is late.

With `--transport local` or `local_ipc` both workers share this process with the engine, and the prefill worker's runner computes nothing
but holds KV: `local` copies it out of host memory, `local_ipc` from pool to pool on one GPU. Two workers share one interpreter, which is
more work for it than a decode worker has.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from served_step_load import SECRET, Clock, ServedStepLoad
from served_step_workers import ServedStepWorkers, play

from decode_worker.edge import DecodeEdge
from kv_transfer.cuda_ipc.transport import CudaIpcTransport
from kv_transfer.local.transport import LocalHub, LocalTransport
from kv_transfer.transport import KvTransport
from kv_transfer.transports import Transports
from prefill_worker.edge import PrefillEdge
from twostep.engine.batch import Batch, InFlight, KvShape, LayerMark, LayerRange, Runner, Sampled
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.types import EngineRequest, StepOutput
from twostep.lab.bench.shapes import LLAMA_8B, TINY_LLAMA
from twostep.local.redis_server import server_argv, server_binary, socket_path
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.kv_cache import KvCache
from twostep.rpc import event_loop
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser
from twostep.worker.config import WorkerConfig
from twostep.worker.edge import EdgeParts
from twostep.worker.engine_loop import EngineLoop, LoopSink
from twostep.worker.engine_port import EngineEvents
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import ServedModel, layout_of
from twostep.worker.worker import Worker

_ALONE = "--alone"
BLOCK_SIZE = 16


class BlankRunner:
    """A prefill worker's runner that computes nothing: its blocks hold small numbers, its tokens are all 1."""

    generates = True
    reach = 0
    overlaps = reads_shared_once = False
    marks_layers = False

    def __init__(self, cache: KvCache, vocab_size: int, max_model_len: int) -> None:
        self.kv_shape, self.vocab_size, self.max_model_len = cache.shape, vocab_size, max_model_len
        self._cache = cache
        cache.tensor.uniform_(0.0078, 0.03)  # attention over it stays finite
        if cache.tensor.is_cuda:
            torch.cuda.synchronize()
            return  # over cuda_ipc nobody asks the runner for its blocks
        self._rows: npt.NDArray[np.uint8] = cache.tensor.view(cache.shape.num_blocks, -1).view(torch.uint8).numpy()

    def launch(self, batch: Batch) -> InFlight:
        return Done(len(batch.sample_rows))

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        columns = slice(None) if layers is None else self.kv_shape.bytes_of(layers)
        np.take(self._rows[:, columns], np.asarray(block_ids), axis=0, out=out, mode="clip")  # raise would copy twice

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        self._cache.write_blocks(block_ids, data, layers)

    def new_host_blocks(self, count: int) -> npt.NDArray[np.uint8]:
        return np.empty((count, self.kv_shape.block_bytes), np.uint8)

    def pin_host(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        return lambda: None


@dataclass(frozen=True, slots=True)
class Done:
    num_rows: int
    layer_marks: Sequence[LayerMark] = ()

    def result(self) -> Sampled:
        return Sampled(token_ids=[1] * self.num_rows, logprobs=[None] * self.num_rows, top_logprobs=[()] * self.num_rows)


# ---- alone ----------------------------------------------------------------------------------------------------------------------


async def alone(runner: Runner, load: ServedStepLoad, config: EngineConfig) -> dict[str, float]:
    """Sequences of the same contexts, replaced as they end, no edge and no KV."""
    engine = Engine(runner, config)
    clock = Clock(int(load.streams * 0.9))
    requests, names = load.requests(), itertools.count()
    rng = np.random.default_rng(load.seed)

    def begin() -> None:
        name = f"alone-{next(names)}"
        num_tokens, num_new = next(requests)
        prompt = rng.integers(0, runner.vocab_size, num_tokens).tolist()
        params = SamplingParams(max_tokens=num_new + 1, temperature=0.0, ignore_eos=True)
        engine.reserve(EngineRequest(seq_id=name, token_ids=prompt, num_prompt_tokens=num_tokens, sampling=params))
        engine.commit(name, [1])

    def on_step(output: StepOutput) -> None:
        clock.tick(len(output.tokens))
        for token in output.tokens:
            if token.finish_reason is not None:
                begin()

    failures: list[Exception] = []
    loop = EngineLoop(engine, LoopSink(EngineEvents(on_step=on_step, on_layers=lambda _: None, on_failure=failures.append)))
    for _ in range(load.streams):
        begin()
    loop.start()
    await asyncio.sleep(load.seconds / 3)
    await loop.stop()
    if failures:
        raise failures[0]
    return clock.report()


# ---- served ---------------------------------------------------------------------------------------------------------------------


async def served(runner: ModelRunner, load: ServedStepLoad, transport_name: str) -> dict[str, Any]:
    clock = Clock(int(load.streams * 0.9))
    hub = LocalHub()
    per_prompt = -(-(load.prompt + load.most) // BLOCK_SIZE)
    shape = runner.kv_shape
    blank_shape = KvShape(
        num_blocks=per_prompt * 16,
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
    )
    in_place = transport_name == "local_ipc"
    blank_cache = KvCache(blank_shape, str(runner.kv_cache.tensor.device) if in_place else "cpu")
    blank = BlankRunner(blank_cache, runner.vocab_size, runner.max_model_len)

    class TimedEdge(DecodeEdge):
        def on_step(self, output: StepOutput) -> None:
            clock.tick(len(output.tokens))
            super().on_step(output)

    def transport(parts: EdgeParts) -> KvTransport:
        if in_place:
            serves = parts.config.role == "prefill"
            return CudaIpcTransport(blank_cache if serves else runner.kv_cache, serves=serves)
        store = blank if parts.config.role == "prefill" else runner
        budget = blank_shape.num_blocks * shape.block_bytes
        return LocalTransport(store, shape.block_bytes, hub, worker_id=parts.worker_id, epoch=parts.epoch, budget_bytes=budget)

    with tempfile.TemporaryDirectory(prefix="ts-") as name:
        directory = Path(name)
        # Not uvloop's children: see kv_transfer/ray/child.py.
        redis = await asyncio.to_thread(subprocess.Popen, server_argv(server_binary(), directory), stdout=subprocess.DEVNULL)
        try:
            url = f"unix://{socket_path(directory)}"
            prefill = _worker("prefill", url, blank, load, lambda parts: PrefillEdge(parts, Transports([transport(parts)])))
            decode = _worker("decode", url, runner, load, lambda parts: TimedEdge(parts, Transports([transport(parts)])))
            await prefill.start()
            await decode.start()
            router = await asyncio.to_thread(play, prefill.address, decode.address, load, runner.vocab_size, directory)
            await asyncio.gather(prefill.stop(1.0), decode.stop(1.0))
        finally:
            redis.kill()
            await asyncio.to_thread(redis.wait)
    return router | {"engine": clock.report()}


def _worker(role: str, url: str, runner: Runner, load: ServedStepLoad, make_edge: Any) -> Worker:
    config = WorkerConfig(
        role=role,
        worker_id=role,
        redis_url=url,
        max_num_seqs=load.streams,
        max_num_batched_tokens=max(load.prompt * 8, load.streams),
        max_waiting=2 * load.streams,
    )
    model = ServedModel(name="m", runner=runner, layout=layout_of(runner.kv_shape, "benchmark"), eos_token_ids=frozenset())
    return Worker(config, LocalEngine(config, model), SECRET, make_edge, time.time_ns() // 1000)


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--most", type=int, default=900, help="new tokens of a request")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each served part; alone, a third of it")
    parser.add_argument("--transport", nargs="+", choices=("cuda_ipc", "ray", "local", "local_ipc"), default=["cuda_ipc"])
    parser.add_argument("--rounds", type=int, default=1, help="alone and served, in turns")
    parser.add_argument("--engine-process", choices=("on", "off"), default="on", help="of the workers, where they are processes")
    parser.add_argument("--start-timeout", type=float, default=150.0, help="seconds that workers may take to be ready")
    parser.add_argument(_ALONE, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    load = ServedStepLoad(args.streams, args.prompt, args.most, args.seconds)
    # The contexts of all streams at once are half of this; those that are reserved may need all of it.
    num_blocks = (load.streams + 8) * -(-(load.prompt + load.most + 2) // BLOCK_SIZE)
    with tempfile.TemporaryDirectory(prefix="ts-") as name:
        model = Path(name) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY_LLAMA if args.tiny else LLAMA_8B))
        config = EngineConfig(max_num_batched_tokens=max(2048, load.streams), max_num_seqs=load.streams)
        if args.alone:
            print(json.dumps(event_loop.run(alone(_runner(args, model, num_blocks), load, config))))
            return
        together = [transport for transport in args.transport if transport.startswith("local")]
        runner = _runner(args, model, num_blocks) if together else None
        lines: list[tuple[str, dict[str, float]]] = []
        for number in range(args.rounds):
            bare = event_loop.run(alone(runner, load, config)) if runner is not None else _alone_apart()
            lines.append(("alone", bare))
            print(f"alone: {_line(bare)}", flush=True)
            for transport in args.transport:
                if runner is not None and transport in together:
                    got = event_loop.run(served(runner, load, transport))
                else:
                    flags = ServedStepWorkers(model, num_blocks, transport, args.engine_process, "cpu" if args.tiny else "cuda")
                    got = flags.measure(load, Path(name) / f"{number}-{transport}", args.start_timeout)
                for place in ("engine", "edge", "router"):
                    lines.append((f"{transport}, {place}", got[place]))
                    print(f"{lines[-1][0]}: {_line(got[place])}", flush=True)
                print(f"    {got['hand_overs_per_s']:.1f} hand-overs/s, {got['gb_per_s']:.2f} GB/s, {got['failed']} failed", flush=True)
                print(f"    steps took p50 {got['took_p50_ms']:.2f}, p99 {got['took_p99_ms']:.2f} ms", end="; ", flush=True)
                print(f"planned after the end of the one before: {100 * got['late_share']:.1f} %", end=", ", flush=True)
                print(f"by {got['late_p99_ms']:.2f} ms at p99; {got['most_at_once']} hand-overs at once at most", flush=True)
    print(f"{'':20}{'steps':>7}{'sequences':>11}{'p50 ms':>9}{'over alone':>12}{'p99 - p50':>11}{'longest':>9}")
    for what, r in lines:
        over = f"{100 * (r['p50_ms'] / lines[0][1]['p50_ms'] - 1):+.1f} %"
        print(
            f"{what:20}{r['steps']:7.0f}{r['tokens']:11.1f}{r['p50_ms']:9.2f}{over:>12}{r['p99_ms'] - r['p50_ms']:11.2f}{r['max_ms']:9.2f}"
        )


def _runner(args: argparse.Namespace, model: Path, num_blocks: int) -> ModelRunner:
    runner = ModelRunner(
        model,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        device="cpu" if args.tiny else "cuda",
        load_format="dummy",
        max_model_len=4096,
        max_num_seqs=args.streams,
    )
    if not args.tiny:
        # Numbers as prompts leave them: over zeros a GPU needs less power, and is faster.
        runner.kv_cache.tensor.normal_()
    gc.collect()
    gc.freeze()  # as a worker does
    return runner


def _alone_apart() -> dict[str, float]:
    """In a process of its own, which leaves the GPU's memory to the workers after it."""
    words = [sys.executable, "-P", str(Path(__file__).resolve()), *sys.argv[1:], _ALONE]
    report: dict[str, float] = json.loads(subprocess.run(words, stdout=subprocess.PIPE, timeout=240, check=True).stdout.splitlines()[-1])
    return report


def _line(r: dict[str, float]) -> str:
    return (
        f"{r['steps']:6.0f} steps of {r['tokens']:.0f} tokens: p50 {r['p50_ms']:.2f} ms, p99 {r['p99_ms']:.2f} ms, "
        f"p99 - p50 {r['p99_ms'] - r['p50_ms']:.2f} ms, longest {r['max_ms']:.2f} ms"
    )


if __name__ == "__main__":
    main()
