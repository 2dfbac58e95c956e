"""What a hand-over over Ray exposes behind a prefill: publishing while the step runs, and fetching, on the H200s of one host.

    PYTHONPATH=. python benchmarks/gpu_ray_hand_over.py            # Llama-3.1-8B's shape, prefill on GPU 0, decode pool on GPU 1
    PYTHONPATH=. python benchmarks/gpu_ray_hand_over.py --tiny     # a dry run on the CPU: a fake model that marks its layers

The engine computes a real prompt (random weights) in one step; both ends of the `ray` transport live in this process, each with its KV
agent, joined to a Ray of their own. Every round's KV is compared, bit for bit, with its source. Columns, medians in ms:

    step            launch to result
    exposed         from the step's result to the last chunk published, and to the last chunk in place on the reader
    before          chunks that were published before the step's result

"whole": chunks of all layers, published when the step is over. "layers": rectangles, published as the step's layers are done. First come
the machine's limits: the copy rate of pinned memory, and rectangles of scattered blocks, alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from local_ray import LocalRay

from kv_transfer.chunking import ChunkPlan, ChunkRange, ChunkSizes
from kv_transfer.ray.transport import RayTransport
from kv_transfer.transport import ChunkInfo
from twostep.engine.batch import Batch, InFlight, LayerRange, Sampled
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.fake import FakeRunner
from twostep.engine.types import EngineRequest, LayerProgress, StepOutput
from twostep.lab.bench.shapes import LLAMA_8B
from twostep.sampling_params import SamplingParams
from twostep.worker.engine_loop import EngineLoop

BLOCK_SIZE = 16
DEADLINE_S = 60.0


@dataclass
class TimedStep:
    inner: InFlight
    launched_at: float
    done_at: float = 0.0

    @property
    def layer_marks(self) -> Any:
        return self.inner.layer_marks

    def result(self) -> Sampled:
        sampled = self.inner.result()
        self.done_at = time.perf_counter()
        return sampled


class TimedRunner:
    """A runner that remembers when its last step was launched and done."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.last: TimedStep | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch) -> TimedStep:
        started = time.perf_counter()
        self.last = TimedStep(self._runner.launch(batch), started)
        return self.last


@dataclass
class Round:
    """One prompt on its way."""

    name: str
    plan: ChunkPlan | None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    final_blocks: int = 0
    step_blocks: int = 0
    step_layers: int = 0
    published: list[float] = field(default_factory=list)
    fetched: list[float] = field(default_factory=list)


class Bench:
    def __init__(self, runner: Any, sink: Any, source: RayTransport, reader: RayTransport, num_tokens: int, at_once: int) -> None:
        self.runner, self.sink = TimedRunner(runner), sink
        self.source, self.reader = source, reader
        self.num_tokens, self.at_once = num_tokens, at_once
        self.num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.engine = Engine(self.runner, EngineConfig(max_num_batched_tokens=num_tokens + 64, max_num_seqs=8, enable_prefix_caching=False))
        self.failures: list[Exception] = []
        self.loop = EngineLoop(self.engine, self.on_step, self.failures.append, self.on_layers)
        self.round: Round | None = None
        self._names = 0
        self._rng = np.random.default_rng(0)

    def on_layers(self, progress: Sequence[LayerProgress]) -> None:
        for each in progress:
            if self.round is not None and each.seq_id == self.round.name:
                self.round.step_blocks = -(-each.num_computed_tokens // BLOCK_SIZE)
                self.round.step_layers = each.num_layers
                self.round.changed.set()

    def on_step(self, output: StepOutput) -> None:
        assert self.round is not None
        assert not output.failures, output.failures
        if any(token.seq_id == self.round.name for token in output.tokens):
            self.round.final_blocks = self.num_blocks
            self.round.ended.set()
            self.round.changed.set()

    async def prompt(self, plan: ChunkPlan | None, fetch: bool) -> Round:
        self._names += 1
        this = self.round = Round(f"r{self._names}", plan)
        ids = self._rng.integers(0, self.runner.vocab_size, self.num_tokens).tolist()
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        self.engine.submit(EngineRequest(seq_id=this.name, token_ids=ids, num_prompt_tokens=len(ids), sampling=params), hold=True)
        if plan is not None:
            await self._hand_over(this, plan, fetch)
        await this.ended.wait()
        if plan is not None and fetch:
            await asyncio.to_thread(self._compare, this.name)
        self.engine.release(this.name)
        return this

    async def _hand_over(self, this: Round, plan: ChunkPlan, fetch: bool) -> None:
        publishing, fetching = asyncio.Semaphore(self.at_once), asyncio.Semaphore(self.at_once)
        target = self._target()

        async def move(chunk: ChunkRange, blocks: Sequence[int]) -> None:
            span = slice(chunk.first_block, chunk.stop_block)
            async with publishing:
                info: ChunkInfo = await self.source.publish(
                    this.name,
                    chunk.index,
                    chunk.first_block,
                    blocks[span],
                    layers=chunk.layers,
                    ttl_s=DEADLINE_S,
                    deadline=time.monotonic() + DEADLINE_S,
                )
            this.published.append(time.perf_counter())
            if fetch:
                async with fetching:
                    await self.reader.fetch(self.source.endpoint, this.name, info, target[span], deadline=time.monotonic() + DEADLINE_S)
                this.fetched.append(time.perf_counter())

        async with asyncio.TaskGroup() as tasks:
            while not plan.done:
                await this.changed.wait()
                this.changed.clear()
                ready = plan.take(this.final_blocks, step_blocks=this.step_blocks, step_layers=this.step_layers)
                blocks = self.engine.block_ids(this.name)
                for chunk in ready:
                    tasks.create_task(move(chunk, blocks))
        await self.source.drop(this.name)

    def _target(self) -> list[int]:
        """Other places on the other side, scattered."""
        ids: list[int] = np.random.default_rng(5).permutation(self.sink.shape.num_blocks)[: self.num_blocks].tolist()
        return ids

    def _compare(self, name: str) -> None:
        sent, came = self.sink.fresh(self.num_blocks), self.sink.fresh(self.num_blocks)
        self.runner.read_blocks(self.engine.block_ids(name), sent)
        self.sink.read_blocks(self._target(), came)
        assert np.array_equal(sent, came), "other bytes arrived than were sent"
        came[...] = 0
        self.sink.write_blocks(self._target(), came)

    def plan(self, layers: bool, chunk_bytes: int) -> ChunkPlan:
        shape = self.runner.kv_shape
        return ChunkPlan(
            first_block=0,
            num_blocks=self.num_blocks,
            block_bytes=shape.block_bytes,
            num_layers=shape.num_layers if layers else 1,
            sizes=ChunkSizes.of(chunk_bytes),
        )

    async def row(self, label: str, make_plan: Callable[[], ChunkPlan | None], rounds: int, fetch: bool) -> None:
        steps, published, fetched, before, counts = [], [], [], [], 0
        for n in range(rounds + 1):
            this = await self.prompt(make_plan(), fetch)
            last = self.runner.last
            assert last is not None
            if n == 0:
                continue  # warm-up
            steps.append((last.done_at - last.launched_at) * 1e3)
            if this.published:
                counts = len(this.published)
                before.append(sum(at < last.done_at for at in this.published))
                published.append((max(this.published) - last.done_at) * 1e3)
            if this.fetched:
                fetched.append((max(this.fetched) - last.done_at) * 1e3)
        parts = [f"{label:<34} step {statistics.median(steps):7.2f}"]
        if published:
            parts.append(f"chunks {counts:3d}, {statistics.median(before):5.1f} before")
            parts.append(f"published {statistics.median(published):7.2f} (worst {max(published):.2f})")
        if fetched:
            parts.append(f"fetched {statistics.median(fetched):7.2f} (worst {max(fetched):.2f})")
        print("   ".join(parts), flush=True)


class Sink:
    """The reader's pool: a KvCache on the other GPU, or a fake one."""

    def __init__(self, store: Any, shape: Any) -> None:
        self._store, self.shape = store, shape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def fresh(self, num_blocks: int) -> npt.NDArray[np.uint8]:
        return np.empty((num_blocks, self.shape.block_bytes), np.uint8)


def timed(work: Callable[[], object], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def limits(cache: Any, device: str, num_blocks: int, layer_counts: Sequence[int]) -> None:
    """What copies alone reach: pinned memory, and rectangles of scattered blocks to and from pinned and plain memory."""
    import torch  # noqa: PLC0415

    shape = cache.shape
    size = 256 << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)

    def copy(to: Any, source: Any) -> Callable[[], None]:
        def work() -> None:
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return work

    print(
        f"pinned copy: to host {size / timed(copy(host, there)) / 1e9:.1f} GB/s, to device {size / timed(copy(there, host)) / 1e9:.1f} GB/s"
    )
    del there
    mapped = np.empty(num_blocks * shape.block_bytes, np.uint8)
    mapped[:] = 1
    started = time.perf_counter()
    unpin = cache.pin_host(mapped)
    print(f"pinning {mapped.nbytes / 1e6:.0f} MB took {(time.perf_counter() - started) * 1e3:.1f} ms")
    plain = np.ones_like(mapped)
    scattered = np.random.default_rng(3).permutation(shape.num_blocks)[:num_blocks].tolist()
    row_of = list(range(num_blocks))
    with ThreadPoolExecutor(4) as threads:
        for num_layers in layer_counts:
            layers = LayerRange(0, num_layers)
            num_bytes = num_blocks * num_layers * shape.layer_bytes
            line = f"{num_layers:3d} layers x {num_blocks} blocks, {num_bytes / 1e6:6.1f} MB:"
            for kind, ids, memory in (("scattered", scattered, mapped), ("in a row", row_of, mapped), ("not pinned", scattered, plain)):
                part = memory[:num_bytes].reshape(num_blocks, -1)
                reading = timed(lambda: cache.read_blocks(ids, part, layers))  # noqa: B023
                writing = timed(lambda: cache.write_blocks(ids, part, layers))  # noqa: B023
                line += f"  {kind} {num_bytes / reading / 1e9:5.1f} out {num_bytes / writing / 1e9:5.1f} in GB/s"
            if num_layers <= shape.num_layers // 4:
                each = [mapped[i * num_bytes : (i + 1) * num_bytes].reshape(num_blocks, -1) for i in range(4)]

                def four() -> None:
                    list(threads.map(lambda part: cache.read_blocks(scattered, part, layers), each))  # noqa: B023

                line += f"  4 threads {4 * num_bytes / timed(four) / 1e9:5.1f} out"
            print(line, flush=True)
    unpin()


def transport(ray: LocalRay, store: Any, name: str, arguments: argparse.Namespace, budget_bytes: int, shape: Any) -> RayTransport:
    return RayTransport(
        store,
        shape.block_bytes,
        worker_id=name,
        epoch=1,
        ray_address=ray.address,
        run_dir=ray.directory / name,
        num_layers=shape.num_layers,
        ring_bytes=arguments.ring << 20,
        budget_bytes=budget_bytes,
        pin=store.pin_host,
    )


async def measure(ray: LocalRay, runner: Any, sink: Sink, arguments: argparse.Namespace) -> None:
    shape = runner.kv_shape
    num_bytes = -(-arguments.tokens // BLOCK_SIZE) * shape.block_bytes
    source = transport(ray, runner, "p", arguments, 3 * num_bytes, shape)
    reader = transport(ray, sink, "d", arguments, num_bytes, shape)
    try:
        for side in (source, reader):
            await side.start()
        give_up = time.monotonic() + DEADLINE_S
        while not (source.ready and reader.ready):
            assert time.monotonic() < give_up, "Ray's KV agents did not start"
            await asyncio.sleep(0.05)
        bench = Bench(runner, sink, source, reader, arguments.tokens, arguments.at_once)
        bench.loop.start()
        try:
            mb = num_bytes / 1e6
            print(
                f"{arguments.tokens} tokens, {mb:.0f} MB of KV, ring {arguments.ring} MiB, {arguments.at_once} chunks at once", flush=True
            )
            rows: list[Callable[[], Awaitable[None]]] = [lambda: bench.row("nothing published", lambda: None, arguments.rounds, False)]
            for layers, fetch in ((False, False), (False, True), (True, False), (True, True)):
                for chunk_mib in arguments.chunk_mib:

                    def one(layers: bool = layers, fetch: bool = fetch, size: int = chunk_mib << 20) -> Awaitable[None]:
                        label = f"{'layers' if layers else 'whole'}, {size >> 20} MiB{', fetched' if fetch else ''}"
                        return bench.row(label, lambda: bench.plan(layers, size), arguments.rounds, fetch)

                    rows.append(one)
            for row in rows:
                await row()
        finally:
            await bench.loop.stop()
        if bench.failures:
            raise bench.failures[0]
    finally:
        for side in (source, reader):
            await side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a fake model on the CPU")
    parser.add_argument("--tokens", type=int, default=2600)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[8])
    parser.add_argument("--at-once", type=int, default=8, help="chunks on their way out, and in, at once")
    parser.add_argument("--ring", type=int, default=256, help="MiB")
    arguments = parser.parse_args()
    num_blocks = 2 * -(-arguments.tokens // BLOCK_SIZE) + 8
    if arguments.tiny:
        options: dict[str, Any] = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "num_layers": 16, "num_kv_heads": 8, "head_dim": 64}
        runner: Any = FakeRunner(**options, step_s=0.1, marks_layers=True)
        sink = Sink(FakeRunner(**options), runner.kv_shape)
    else:
        runner, sink = on_gpus(num_blocks)
        limits(sink, str(sink.tensor.device), -(-arguments.tokens // BLOCK_SIZE), (1, 2, 4, 8, runner.kv_shape.num_layers))
    gc.collect()
    gc.freeze()  # as a worker does
    store_bytes = 6 * -(-arguments.tokens // BLOCK_SIZE) * runner.kv_shape.block_bytes + (256 << 20)
    with LocalRay(object_store_bytes=store_bytes) as ray:
        os.environ.update(ray.environment)
        asyncio.run(measure(ray, runner, sink, arguments))


def on_gpus(num_blocks: int) -> tuple[Any, Sink]:
    import torch  # noqa: PLC0415

    from twostep.model.runner.model_runner import ModelRunner  # noqa: PLC0415
    from twostep.model.step.kv_cache import KvCache  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(LLAMA_8B))
        runner = ModelRunner(name, num_blocks=num_blocks, block_size=BLOCK_SIZE, device="cuda:0", load_format="dummy", max_model_len=8192)
    other = f"cuda:{min(1, torch.cuda.device_count() - 1)}"
    print(f"{torch.cuda.get_device_name(0)}, decode pool on {other}", flush=True)
    return runner, Sink(KvCache(runner.kv_shape, other), runner.kv_shape)


if __name__ == "__main__":
    main()
