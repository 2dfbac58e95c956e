"""Holds what a worker counts and serves it: the registry, the engine's and the edge's figures, `/metrics`; the load in its heartbeats."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from twostep.cluster.records import WorkerLoad
from twostep.engine.types import EngineStats, StepOutput
from twostep.metrics.engine import EngineMetrics
from twostep.metrics.process import package_version, register_process
from twostep.metrics.registry import MetricsRegistry
from twostep.metrics.server import MetricsServer
from twostep.metrics.worker import WorkerMetrics
from twostep.process.free_memory import resident_bytes
from twostep.process.start_tracing import start_tracer
from twostep.process.tracing import TRACES_FLUSH_S
from twostep.rpc.v1 import worker_pb2
from twostep.worker.config import WorkerConfig
from twostep.worker.edge import EdgeCounts
from twostep.worker.engine_port import EnginePort
from twostep.worker.gpu_meter import GpuMeter

log = logging.getLogger(__name__)

_SAMPLE_EVERY_S = 1.0
_SAMPLE_TIMEOUT_S = 5.0
# Seconds over which heartbeats tell rates.
_WINDOW_S = 10.0
# Heartbeats come once a second, a few more where a role changes: closer ones tell nothing new.
_LEAST_GAP_S = 0.25

Describe = Callable[[], worker_pb2.WorkerStats]
Fill = Callable[[worker_pb2.WorkerStats], Awaitable[None]]


class Counts(NamedTuple):
    """Since some moment: prompt tokens looked up in the prefix cache and those found there, tokens computed, and prompts' among them, and
    what the edge has done, as EdgeCounts."""

    queried_tokens: float = 0
    hit_tokens: float = 0
    tokens: float = 0
    prompt_tokens: float = 0
    fetched_bytes: float = 0
    kept: float = 0
    handed_over: float = 0
    taken_over: float = 0


class RateMeter:
    """observe() with every heartbeat. Instants are seconds of one clock that does not go back."""

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self._window_s = window_s
        # Sums that never fall, oldest first: one that is as old as the window, or older, and those since.
        self._seen: deque[tuple[float, Counts]] = deque()
        self._last: Counts | None = None

    def observe(self, counts: Counts, now: float) -> Counts:
        """Returns the counts a second, over the window or as much of it as has passed. Zeros at first. A number that has become less was
        reset, and counts from 0."""
        if self._last is None:
            self._last = counts
            self._seen.append((now, Counts()))
            return Counts()
        more = (new - old if new >= old else new for new, old in zip(counts, self._last, strict=True))
        total = Counts(*(sum(each) for each in zip(self._seen[-1][1], more, strict=True)))
        self._last = counts
        if len(self._seen) > 1 and now - self._seen[-2][0] < _LEAST_GAP_S:
            self._seen.pop()
        self._seen.append((now, total))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        since, before = self._seen[0]
        elapsed = now - since
        return Counts(*((new - old) / elapsed for new, old in zip(total, before, strict=True))) if elapsed > 0 else Counts()


class Telemetry:
    """start(), on_step() after every step, close()."""

    def __init__(
        self, config: WorkerConfig, engine: EnginePort, worker_id: str, gpu_ids: Sequence[str] = (), *, graph_bytes: int = 0
    ) -> None:
        """`gpu_ids`: UUIDs of the GPUs that it computes on. `graph_bytes`: what its CUDA graphs took of each. Raises SetupError for an
        --otlp-endpoint that is none."""
        self.registry = MetricsRegistry()
        # None: nothing is traced.
        self.tracer = start_tracer(config.otlp_endpoint, role=config.role, instance=worker_id, version=package_version())
        self._process = register_process(self.registry, config.role, self.tracer)
        self._engine = EngineMetrics(self.registry, role=config.role, stats=engine.stats)
        self._num_computed_tokens = self._num_prompt_tokens = 0
        self._rates = RateMeter()
        self._gpus, self._engine_pid = GpuMeter(gpu_ids), engine.pid
        self._graph_bytes = graph_bytes
        self._worker = WorkerMetrics(self.registry, role=config.role)
        self._server = MetricsServer.beside(self.registry, host=config.host, port=config.grpc_port, metrics_port=config.metrics_port)
        self._sampling: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """0: no metrics are served."""
        return 0 if self._server is None else self._server.port

    def on_step(self, output: StepOutput) -> None:
        self._num_computed_tokens += output.num_prefill_tokens + output.num_decode_tokens
        self._num_prompt_tokens += output.num_prefill_tokens
        self._engine.on_step(output)

    def load(self, stats: EngineStats, edge: EdgeCounts) -> WorkerLoad:
        """Returns the load that goes with every heartbeat: what routers place by, and rates over the heartbeats of the last seconds."""
        computed = (self._num_computed_tokens, self._num_prompt_tokens)
        counts = Counts(stats.num_queried_tokens, stats.num_hit_tokens, *computed, *edge)
        rates = self._rates.observe(counts, time.monotonic())
        return WorkerLoad(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_reserved=stats.num_reserved,
            num_held=stats.num_held,
            num_free_blocks=stats.num_available_blocks,
            num_queued_tokens=stats.num_queued_tokens,
            num_queued_batch_tokens=stats.num_queued_batch_tokens,
            max_step_s=stats.max_step_s,
            num_context_tokens=stats.num_context_tokens,
            gpus=self._gpus.loads,
            num_handing_over=stats.num_handing_over,
            tpot_s=stats.tpot_s,
            tokens_per_step=stats.tokens_per_step,
            **{f"{name}_per_s": rate for name, rate in rates._asdict().items()},
        )

    def start(self, describe: Describe, fill: Fill) -> None:
        """`describe` says who the worker is, `fill` adds what its edge holds. Raises SetupError if the port is taken."""
        self._gpus.start()
        if self._server is not None:
            self._server.start()
            self._sampling = asyncio.create_task(self._sample(describe, fill), name="metrics")

    def serve(self, role: str) -> None:
        """Notes that the worker has this role now: gauges are told of it, and what was counted stays counted for the role in which it
        happened."""
        for metrics in (self._process, self._engine, self._worker):
            metrics.serve(role)
        if self.tracer is not None:
            self.tracer.serve(role)

    async def close(self) -> None:
        """Idempotent."""
        self._gpus.close()
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.wait([self._sampling])
            self._sampling = None
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close, TRACES_FLUSH_S)

    async def _sample(self, describe: Describe, fill: Fill) -> None:
        complained = False
        while True:
            try:
                stats = describe()
                try:
                    async with asyncio.timeout(_SAMPLE_TIMEOUT_S):
                        await fill(stats)
                finally:
                    if self._engine_pid:
                        self._worker.set_engine_memory(resident_bytes(self._engine_pid))
                    # What the worker knows by itself is told, whatever a KV agent fails with.
                    self._worker.set(
                        ready=stats.ready,
                        num_leases=stats.num_leases,
                        oldest_lease_s=stats.oldest_lease_s,
                        num_sequences=stats.num_sequences,
                        num_streams=stats.num_streams,
                        graph_bytes=self._graph_bytes,
                    )
                    for held in stats.transports:
                        self._worker.set_transport(held)
                complained = False
            except Exception as error:  # noqa: BLE001 - whatever it is, the next second they are asked again
                log.log(logging.DEBUG if complained else logging.WARNING, "the worker's figures are not to be had now: %r", error)
                complained = True
            await asyncio.sleep(_SAMPLE_EVERY_S)
