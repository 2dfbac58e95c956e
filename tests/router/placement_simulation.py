"""Routers, workers and heartbeats on a simulated clock, to see what placement does with views that are late.

Every router has its own meter of each worker, reads records twice a second, and knows at once only what it does itself. Workers describe
themselves once a second, prefixes included. Prefill workers are first in, first out, by the cost curve; decode workers hold a
sequence for an answer's length of steps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from router.placing.placement import Candidate, NoPlacement, Placement, PlacementRequest, Snapshot
from router.workers.load_meter import LoadMeter
from twostep.cluster.records import LayoutRecord, WorkerLoad, WorkerRecord
from twostep.step_curve import StepCurve

Place = Callable[[Snapshot, PlacementRequest], Placement | NoPlacement]

GPU = StepCurve(fixed_s=4.0e-3, per_row_s=20e-6, knee=200, per_pair_s=2e-11, per_sequence_s=4e-6, per_context_s=3e-8)
LAYOUT = LayoutRecord(model_fingerprint="m", dtype="bfloat16", block_size=16, num_layers=32, num_kv_heads=8, head_dim=128)


@dataclass(frozen=True, kw_only=True)
class World:
    """`hot`: the most common prefix's share is 1 / rank ** hot; `num_prefixes` of `prefix_tokens`, each prompt with `own_tokens` more."""

    num_prefill: int = 6
    num_decode: int = 3
    num_routers: int = 4
    rate: float = 60.0
    seconds: float = 30.0
    num_prefixes: int = 24
    hot: float = 1.0
    prefix_tokens: int = 2048
    own_tokens: int = 512
    answer_tokens: int = 128
    cached_prefixes: int = 8  # that a prefill worker has room for
    curves: tuple[StepCurve, ...] = (GPU,)  # of the prefill workers, in turn
    seed: int = 1


@dataclass
class SimulatedWorker:
    record: WorkerRecord
    capacity: int = 0
    free_at: float = 0.0
    busy_s: float = 0.0
    num_requests: int = 0
    queued_tokens: int = 0
    num_seqs: int = 0
    context_tokens: int = 0
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    told: WorkerRecord | None = None
    told_cached: frozenset[int] = frozenset()

    def beat(self) -> None:
        load = WorkerLoad(
            num_running=self.num_seqs,
            num_free_blocks=100_000,
            num_queued_tokens=self.queued_tokens,
            num_context_tokens=self.context_tokens,
        )
        self.told = dataclasses.replace(self.record, load=load)
        self.told_cached = frozenset(self.cached)

    def touch(self, prefix: int) -> None:
        self.cached[prefix] = None
        self.cached.move_to_end(prefix)
        while len(self.cached) > self.capacity:
            self.cached.popitem(last=False)


class SimulatedRouter:
    def __init__(self, workers: list[SimulatedWorker]) -> None:
        self.meters = {worker.record.worker_id: LoadMeter(0.0) for worker in workers}
        self.attempts = dict.fromkeys(self.meters, 0)
        self.seen: dict[str, WorkerRecord] = {}

    def poll(self, workers: list[SimulatedWorker], now: float) -> None:
        for worker in workers:
            assert worker.told is not None
            name = worker.record.worker_id
            self.seen[name] = worker.told
            self.meters[name].observe(worker.told.load, self.attempts[name], now)

    def candidate(self, worker: SimulatedWorker, prefix: int, prefix_tokens: int, now: float) -> Candidate:
        name = worker.record.worker_id
        return Candidate(
            record=self.seen[name],
            cached_tokens=prefix_tokens if prefix in worker.told_cached else 0,
            queued_tokens=self.meters[name].queued_tokens,
            recent_tokens=self.meters[name].recent_tokens(now),
            num_attempts=self.attempts[name],
            mean=self.meters[name].mean,
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    ttfts: list[float]
    hit_rate: float  # of prompt tokens
    prefill_busy: list[float]
    prefill_requests: list[int]
    decode_requests: list[int]
    peak_seqs: list[int]

    def ttft(self, share: float) -> float:
        return sorted(self.ttfts)[int(share * (len(self.ttfts) - 1))]

    @property
    def spread(self) -> float:
        """Of the prefill workers' busy time: the largest over the mean."""
        return max(self.prefill_busy) * len(self.prefill_busy) / sum(self.prefill_busy)


def simulate(world: World, place: Place) -> Outcome:
    rng = random.Random(world.seed)
    prefill = [_worker("prefill", i, world) for i in range(world.num_prefill)]
    decode = [_worker("decode", i, world) for i in range(world.num_decode)]
    both = [*prefill, *decode]
    by_name = {worker.record.worker_id: worker for worker in both}
    routers = [SimulatedRouter(both) for _ in range(world.num_routers)]
    for worker in both:
        worker.beat()
    for router in routers:
        router.poll(both, 0.0)
    weights = [1.0 / (rank + 1) ** world.hot for rank in range(world.num_prefixes)]
    events: list[tuple[float, int, Callable[[float], None]]] = []
    order = itertools.count()

    def at(when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(events, (when, next(order), what))

    def every(period: float, first: float, what: Callable[[float], None]) -> None:
        def again(now: float) -> None:
            what(now)
            at(now + period, again)

        at(first, again)

    ttfts: list[float] = []
    tokens, hits = 0, 0
    peaks = [0] * world.num_decode

    def arrive(now: float) -> None:
        nonlocal tokens, hits
        at(now + rng.expovariate(world.rate), arrive)
        router, prefix = rng.choice(routers), rng.choices(range(world.num_prefixes), weights)[0]
        num_tokens = world.prefix_tokens + world.own_tokens
        snapshot = Snapshot(
            prefill=[router.candidate(w, prefix, world.prefix_tokens, now) for w in prefill],
            decode=[router.candidate(w, prefix, 0, now) for w in decode],
        )
        placed = place(snapshot, PlacementRequest(request_id=f"r{next(order)}", num_tokens=num_tokens, max_new_tokens=world.answer_tokens))
        assert isinstance(placed, Placement)
        assert placed.prefill is not None
        p, d = by_name[placed.prefill.worker_id], by_name[placed.decode.worker_id]
        # What it holds when the prompt's turn comes is decided now: nothing else is in its way but more of the same.
        cached = world.prefix_tokens if prefix in p.cached else 0
        p.touch(prefix)
        tokens += num_tokens
        hits += cached
        seconds = p.record.curve.prefill_s(num_tokens, cached, p.record.step_tokens) if p.record.curve else 0.0
        p.free_at = max(now, p.free_at) + seconds
        p.busy_s += seconds
        p.num_requests += 1
        p.queued_tokens += num_tokens - cached
        meter = router.meters[p.record.worker_id]
        own = num_tokens - (world.prefix_tokens if prefix in p.told_cached else 0)
        meter.queue(own, now)
        router.attempts[d.record.worker_id] += 1
        ttfts.append(p.free_at - now)
        d.num_requests += 1
        d.num_seqs += 1
        d.context_tokens += num_tokens
        peaks[decode.index(d)] = max(peaks[decode.index(d)], d.num_seqs)

        def first_token(then: float) -> None:
            p.queued_tokens -= num_tokens - cached
            meter.queue(-own, then)
            at(then + world.answer_tokens * GPU.decode_step_s(d.num_seqs, d.context_tokens), ended)

        def ended(_: float) -> None:
            d.num_seqs -= 1
            d.context_tokens -= num_tokens
            router.attempts[d.record.worker_id] -= 1

        at(p.free_at, first_token)

    at(0.0, arrive)
    for worker in both:
        every(1.0, rng.random(), lambda _, worker=worker: worker.beat())  # type: ignore[misc]
    for router in routers:
        every(0.5, rng.random() / 2, lambda now, router=router: router.poll(both, now))  # type: ignore[misc]
    while events and events[0][0] < world.seconds:
        now, _, what = heapq.heappop(events)
        what(now)
    return Outcome(
        ttfts=ttfts,
        hit_rate=hits / tokens,
        prefill_busy=[w.busy_s for w in prefill],
        prefill_requests=[w.num_requests for w in prefill],
        decode_requests=[w.num_requests for w in decode],
        peak_seqs=peaks,
    )


def affinity(snapshot: Snapshot, demand: PlacementRequest) -> Placement:
    """What to compare with: the longest cached prefix, whatever the load; among equals the shortest queue that records tell of."""
    p = min(snapshot.prefill, key=lambda c: (-c.cached_tokens, c.record.load.num_queued_tokens, c.record.worker_id))
    d = min(snapshot.decode, key=lambda c: (c.record.load.num_running, c.record.worker_id))
    return Placement(prefill=p.record, decode=d.record, cost=0.0, reason="affinity")


def by_lot(snapshot: Snapshot, demand: PlacementRequest) -> Placement:
    """What to compare with: no view at all."""
    number = int.from_bytes(hashlib.blake2b(demand.request_id.encode(), digest_size=8).digest(), "little")
    p = snapshot.prefill[number % len(snapshot.prefill)]
    d = snapshot.decode[number // 1000 % len(snapshot.decode)]
    return Placement(prefill=p.record, decode=d.record, cost=0.0, reason="by lot")


def _worker(role: str, index: int, world: World) -> SimulatedWorker:
    record = WorkerRecord(
        worker_id=f"{role}-{index}",
        role=role,
        address="127.0.0.1:1",
        epoch=1,
        model="m",
        layout=LAYOUT,
        hash_unit=64,
        secret_check="s",
        num_blocks=1_000_000,
        max_num_seqs=512,
        max_model_len=131_072,
        transports=("cuda_ipc",),
        curve=world.curves[index % len(world.curves)] if role == "prefill" else GPU,
        step_tokens=8192 if role == "prefill" else 2048,
    )
    return SimulatedWorker(record=record, capacity=world.cached_prefixes if role == "prefill" else 0)
