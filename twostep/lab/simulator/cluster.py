"""A simulated cluster under a list of requests, event by event, on a clock of its own: what each request's client would see.

 1. A request arrives and is placed: a decode worker reserves, or refuses, and another is asked; when all are full it waits, first in,
    first out.
 2. Its prompt is queued on the prefill worker, which computes it in steps (`engine.py`).
 3. The step that ends the prompt gives the first token.
 4. KV travels (`HandOverCost`), the prefill worker's blocks are free, and the sequence joins the decode worker's next planned step.
 5. Each step gives every one of its sequences a token, until the request has all of its own.
 6. If one of its workers is closed meanwhile, prompt and tokens so far are computed again elsewhere.

`twostep plan` serves a deployment's requests with it, `twostep.lab.simulation` adds pods that come, go and change roles, tests of the
router hand in its own placement. Nothing here reads a clock or draws a number: the same cluster and requests give the same times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

from twostep.lab.simulator.engine import EngineSpec, SimulatedEngine, SimulatedSequence
from twostep.step_curve import chunk_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """`arrival_s` counts from the start; of the prompt, the first `num_cached` tokens need not be computed."""

    arrival_s: float
    num_prompt: int
    num_output: int
    num_cached: int = 0

    @property
    def num_uncached(self) -> int:
        """Tokens to compute: one at least, for its logits."""
        return max(1, self.num_prompt - self.num_cached)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverCost:
    """From a prompt's last step to its sequence's place in the decode worker's next one: `latency_s`, and what the step did not hide of
    the bytes at `bytes_per_s`, one hand-over after the other into each decode worker. `hidden` is the share of the tokens' bytes that
    travels while the prompt is still being computed; a sequence's state, of `state_bytes`, is there when that has ended."""

    latency_s: float = 0.003
    bytes_per_s: float = 50e9
    kv_token_bytes: float = 0.0
    state_bytes: float = 0.0
    hidden: float = 0.0

    def exposed_s(self, num_tokens: int) -> float:
        """Time on the link after the prompt's last step."""
        return (num_tokens * self.kv_token_bytes * (1 - self.hidden) + self.state_bytes) / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDeployment:
    """`num_prefill` prefill and `num_decode` decode workers; without prefill workers the decode workers compute prompts themselves, in
    chunks of what their step budget leaves (`twostep up --aggregated`). With `both_roles` each worker may compute any prompt and decode
    anything, and its role says what it is for. `edge_s` is what router, network and both workers' edges add to the time of each token, in
    the median, and `edge_tail_s` how much more in the 99th percentile."""

    num_prefill: int
    num_decode: int
    decode: EngineSpec
    prefill: EngineSpec | None = None
    hand_over: HandOverCost = field(default_factory=HandOverCost)
    edge_s: float = 0.0
    edge_tail_s: float = 0.0
    both_roles: bool = False

    def __post_init__(self) -> None:
        assert self.num_prefill >= 0
        assert self.num_decode >= 1
        assert self.num_prefill == 0 or self.prefill is not None

    @property
    def aggregated(self) -> bool:
        return self.num_prefill == 0

    def spec_of(self, role: str) -> EngineSpec:
        """Decode workers that compute prompts launch steps as early as prefill workers do, since launching one with prompts takes as long
        there. Workers of both roles have one curve, the decode worker's: it knows steps of either kind."""
        if self.prefill is None:
            return self.decode
        if not (self.aggregated or self.both_roles):
            return self.prefill if role == "prefill" else self.decode
        tokens = self.prefill.step_tokens if role == "prefill" else self.decode.step_tokens
        return replace(self.decode, step_tokens=tokens, ahead_s=self.prefill.ahead_s)

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def name(self) -> str:
        if self.aggregated:
            return f"{self.num_decode} aggregated, budget {self.decode.step_tokens}"
        return f"{self.num_prefill} prefill + {self.num_decode} decode{', both roles' if self.both_roles else ''}"

    def sized(self, num_prefill: int, num_decode: int) -> SimulatedDeployment:
        return replace(self, num_prefill=num_prefill, num_decode=num_decode)


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """`running`: who has something to do here, or is to decode here. A router knows of `num_attempts` that are to decode here, and of
    `queued_tokens` of prompts that it has sent here and whose first token has not come. From `lost_at` on it computes nothing; once it is
    `closed` it is no part of the cluster."""

    role: str
    engine: SimulatedEngine
    num_attempts: int = 0
    queued_tokens: int = 0
    link_free_at: float = 0.0
    running: dict[ServingRequest, None] = field(default_factory=dict)
    lost_at: float = math.inf
    closed: bool = False

    @property
    def alive(self) -> bool:
        return self.lost_at == math.inf


@dataclass(slots=True, eq=False)
class ServingRequest:
    """A request on its way. `source` and `prompt` are where its prompt is computed, None where it decodes; `sequence` is what decodes on
    `worker`. `queued`: tokens of its prompt, until its first token. `times` are those of the tokens that its client has from workers
    before these."""

    request: SimulatedRequest
    times: list[float] = field(default_factory=list)
    since: float = 0.0  # when it began to wait for a place
    source: SimulatedWorker | None = None
    prompt: SimulatedSequence | None = None
    worker: SimulatedWorker | None = None
    sequence: SimulatedSequence | None = None
    queued: int = 0


class ClusterObserver:
    """Is called when something becomes of a request. Times are those at the workers: the deployment's `edge_s` comes on top."""

    def arrived(self, request: SimulatedRequest) -> None: ...

    def first_token(self, request: SimulatedRequest, at_s: float) -> None:
        """From a prefill worker."""

    def ended(self, request: SimulatedRequest, token_times: Sequence[float]) -> None: ...

    def refused(self, request: SimulatedRequest) -> None:
        """It waited too long, or too many did."""


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """Indices. `prefill` None: the decode worker computes the prompt itself. `num_cached`: what the worker that computes the prompt has of
    it; None: as the request says. `too_late`: even there it would miss what it was promised, so that a router refuses it."""

    prefill: int | None
    decode: int
    num_cached: int | None = None
    too_late: bool = False


# Decides where a request goes, at a time, of workers that may compute its prompt and those that may decode, some of which (by number) have
# just refused it. None: it waits in the router's queue until one has room.
PlacementRule = Callable[
    [SimulatedRequest, float, Sequence[SimulatedWorker], Sequence[SimulatedWorker], Collection[int]], PlacementChoice | None
]


def shortest_ttft(
    request: SimulatedRequest,
    now: float,
    prefill: Sequence[SimulatedWorker],
    decode: Sequence[SimulatedWorker],
    full: Collection[int],
) -> PlacementChoice | None:
    """The prefill worker whose first token would be there soonest, and the decode worker whose next step would be shortest with it. Without
    prefill workers, the decode worker whose first token would be there soonest."""
    open_ = [i for i in range(len(decode)) if i not in full] if full else range(len(decode))
    if not open_:
        return None
    num_uncached = request.num_uncached
    pairs = chunk_pairs(num_uncached, request.num_prompt - num_uncached)

    def ttft(worker: SimulatedWorker) -> float:
        """Seconds until the first token: what is left of the launched steps, the prompts queued here, and this one, in full steps beside
        those that decode here now."""
        engine = worker.engine
        curve, decodes = engine.spec.prompt_curve, engine.num_decoding
        num_tokens = engine.queued_tokens + num_uncached
        num_steps = -(-num_tokens // max(1, engine.spec.step_tokens - decodes))
        rows = max(0.0, num_tokens + num_steps * (decodes - curve.knee))
        each = curve.fixed_s + curve.per_sequence_s * decodes + curve.per_context_s * engine.context
        queue = num_steps * each + curve.per_row_s * rows + curve.per_pair_s * (engine.queued_pairs + pairs)
        return queue + max(0.0, engine.free_at_s - now)

    if not prefill:
        return PlacementChoice(None, min(open_, key=lambda i: (ttft(decode[i]), decode[i].engine.num_seqs)))
    first = min(range(len(prefill)), key=lambda i: ttft(prefill[i])) if len(prefill) > 1 else 0
    return PlacementChoice(first, min(open_, key=lambda i: (decode[i].engine.num_seqs, decode[i].engine.context)))


Act = Callable[[float, Any], None]


class SimulatedCluster:
    """`requests` are in the order of arrival. At most `max_waiting` wait for a place, each for `max_wait_s`; more, and longer, are
    refused; so is whoever would come too late, unless its answer has begun."""

    def __init__(
        self,
        deployment: SimulatedDeployment,
        requests: Iterable[SimulatedRequest],
        observer: ClusterObserver,
        *,
        placement: PlacementRule = shortest_ttft,
        max_waiting: float = math.inf,
        max_wait_s: float = math.inf,
    ) -> None:
        self.deployment = deployment
        self.prefill: list[SimulatedWorker] = []  # those that the router sends to
        self.decode: list[SimulatedWorker] = []
        self.stopped = False
        self._arrivals: Iterator[SimulatedRequest] = iter(requests)
        self._observer = observer
        self._placement = placement
        self._max_waiting, self._max_wait_s = max_waiting, max_wait_s
        self._waiting: deque[ServingRequest] = deque()
        # (time, order, what to do, with what): the order breaks ties, first come first.
        self._events: list[tuple[float, int, Act, Any]] = []
        self._num_events = 0

    def add_worker(self, role: str) -> SimulatedWorker:
        """One that the router knows and sends to at once."""
        worker = SimulatedWorker(role, SimulatedEngine(self.deployment.spec_of(role)))
        for side in ("prefill", "decode"):
            if role == side or self.deployment.both_roles:
                (self.prefill if side == "prefill" else self.decode).append(worker)
        return worker

    # ---- the clock --------------------------------------------------------------------------------------------------

    def at(self, time: float, act: Act, argument: Any = None) -> None:
        self._num_events += 1
        heappush(self._events, (time, self._num_events, act, argument))

    def run(self, until: float = math.inf) -> float:
        """Whatever happens before `until`, unless an observer sets `stopped`. Returns the time of the last event."""
        self._next_arrival()
        events, now = self._events, 0.0
        while events and events[0][0] < until and not self.stopped:
            now, _, act, argument = heappop(events)
            act(now, argument)
        return now

    # ---- 1: placing -------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def place_waiting(self, now: float) -> None:
        while self._waiting and self._place(self._waiting[0], now):
            self._waiting.popleft()

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self.at(request.arrival_s, self._arrive, request)

    def _arrive(self, now: float, request: SimulatedRequest) -> None:
        self._next_arrival()
        self._observer.arrived(request)
        serving = ServingRequest(request)
        if not self._waiting and self._place(serving, now):
            return
        if len(self._waiting) >= self._max_waiting:
            self._observer.refused(request)
        else:
            self._wait(serving, now)

    def _wait(self, serving: ServingRequest, now: float, *, first: bool = False) -> None:
        serving.since = now
        if first:
            self._waiting.appendleft(serving)
        else:
            self._waiting.append(serving)
        if self._max_wait_s < math.inf:
            self.at(now + self._max_wait_s, self._give_up, serving)

    def _give_up(self, now: float, serving: ServingRequest) -> None:
        if now >= serving.since + self._max_wait_s and serving in self._waiting:
            self._waiting.remove(serving)
            self._observer.refused(serving.request)
            self.place_waiting(now)

    def _place(self, serving: ServingRequest, now: float) -> bool:
        """Returns whether it waits no more: it has its workers, or was refused."""
        if not self.prefill and not self.deployment.aggregated:
            return False
        full: set[int] = set()
        while (choice := self._placement(serving.request, now, self.prefill, self.decode, full)) is not None:
            if choice.too_late and not serving.times:
                self._observer.refused(serving.request)
                return True
            source = None if choice.prefill is None else self.prefill[choice.prefill]
            if self._begin(serving, source, self.decode[choice.decode], choice.num_cached, now):
                return True
            full.add(choice.decode)
        return False

    def _begin(
        self, serving: ServingRequest, source: SimulatedWorker | None, worker: SimulatedWorker, cached: int | None, now: float
    ) -> bool:
        """Reserves and queues the prompt, with the tokens that there are already. False: there is no room."""
        request, num_done = serving.request, len(serving.times)
        length = request.num_prompt + num_done
        uncached = max(1, length - (request.num_cached if cached is None else cached))
        sequence = SimulatedSequence(num_prompt=length, num_output=request.num_output - num_done, num_uncached=uncached, owner=serving)
        prompt = None
        if source is None:
            if not worker.engine.submit(sequence):
                return False
        else:
            if not worker.engine.reserve(sequence):
                return False
            prompt = SimulatedSequence(num_prompt=length, num_output=1, num_uncached=uncached, hold=True, owner=serving)
            if not source.engine.submit(prompt):
                worker.engine.cancel(sequence)
                return False
            source.running[serving] = None
        worker.running[serving] = None
        worker.num_attempts += 1
        serving.queued = uncached
        (source or worker).queued_tokens += uncached
        serving.source, serving.prompt, serving.worker, serving.sequence = source, prompt, worker, sequence
        self._pump(source or worker, now)
        return True

    # ---- 2 to 5: steps ----------------------------------------------------------------------------------------------

    def _pump(self, worker: SimulatedWorker, now: float) -> None:
        """The engine's thread looks for work, if it waits for some: it plans nothing while it waits for a step."""
        if worker.engine.idle and worker.alive:
            self._go_on(now, worker)

    def _go_on(self, now: float, worker: SimulatedWorker) -> None:
        engine = worker.engine
        if engine.idle and not engine.launch(now):
            return
        ahead_s = engine.launches_ahead_s
        if ahead_s is not None and ahead_s <= now:
            engine.launch(now)
        elif ahead_s is not None:
            self.at(ahead_s, self._launch_ahead, worker)
        self.at(engine.oldest_end_s, self._settle, worker)

    def _launch_ahead(self, now: float, worker: SimulatedWorker) -> None:
        if worker.alive:
            worker.engine.launch(now)

    def _settle(self, now: float, worker: SimulatedWorker) -> None:
        if not worker.alive:
            return
        step = worker.engine.settle()
        for sequence in step.prompts:
            if sequence.times and sequence.times[0] <= now:
                self._computed(worker, sequence.owner)
        for sequence in step.ended:
            if sequence.hold:
                self._publish(now, sequence.owner)
            else:
                self._end(sequence.owner, now)
        self._go_on(now, worker)
        if step.ended and self._waiting:
            self.place_waiting(now)

    def _computed(self, worker: SimulatedWorker, serving: ServingRequest) -> None:
        """Its first token came: the router takes its prompt for computed."""
        worker.queued_tokens -= serving.queued
        serving.queued = 0

    def _publish(self, now: float, serving: ServingRequest) -> None:
        """The prompt's step is over: the client gets a token, and its KV travels."""
        source, prompt, worker, sequence = serving.source, serving.prompt, serving.worker, serving.sequence
        assert source is not None
        assert prompt is not None
        assert worker is not None
        assert sequence is not None
        del source.running[serving]
        if not serving.times:
            self._observer.first_token(serving.request, now)
        serving.times += prompt.times
        self.left(source, now)
        if sequence.num_output == 1:
            source.engine.release(prompt)
            worker.engine.cancel(sequence)
            self._end(serving, now)
            return
        hand_over = self.deployment.hand_over
        worker.link_free_at = max(now, worker.link_free_at) + hand_over.exposed_s(sequence.num_prompt)
        self.at(worker.link_free_at + hand_over.latency_s, self._commit, (serving, source, prompt))

    def _commit(self, now: float, argument: tuple[ServingRequest, SimulatedWorker, SimulatedSequence]) -> None:
        serving, source, prompt = argument
        worker, sequence = serving.worker, serving.sequence
        assert worker is not None
        assert sequence is not None
        source.engine.release(prompt)
        self._pump(source, now)
        if len(serving.times) == 1:
            # Where a gap was promised, the client gets the first token when the sequence can go on.
            serving.times[0] = max(serving.times[0], min(now, serving.times[0] + worker.engine.spec.gap_s))
        if worker.closed:
            self._place_again(serving, now)
        else:
            serving.source = serving.prompt = None
            worker.engine.commit(sequence, now)
            self._pump(worker, now)

    def _end(self, serving: ServingRequest, now: float) -> None:
        worker, sequence = serving.worker, serving.sequence
        assert worker is not None
        assert sequence is not None
        if serving in worker.running:
            del worker.running[serving]
            worker.num_attempts -= 1
        self._observer.ended(serving.request, serving.times + sequence.times)
        self.left(worker, now)

    # ---- 6: workers that go -----------------------------------------------------------------------------------------

    def left(self, worker: SimulatedWorker, now: float) -> None:
        """Called when a worker has one request less."""

    def hide(self, worker: SimulatedWorker) -> None:
        """The router sends nothing more to it."""
        for workers in (self.prefill, self.decode):
            if worker in workers:
                workers.remove(worker)

    def close(self, worker: SimulatedWorker, now: float) -> None:
        """The worker is no more. What it had goes on elsewhere: what is being handed over, when its prompt's step or its way is over."""
        self.hide(worker)
        worker.lost_at, worker.closed = min(now, worker.lost_at), True
        again = []
        for serving in worker.running:
            if serving.source is worker:
                assert serving.worker is not None
                assert serving.sequence is not None
                if not serving.worker.closed:
                    serving.worker.engine.cancel(serving.sequence)
                    del serving.worker.running[serving]
                    serving.worker.num_attempts -= 1
            elif serving.source is not None:
                continue
            else:
                assert serving.sequence is not None
                serving.times += worker.engine.times_until(serving.sequence, worker.lost_at)
            again.append(serving)
        worker.running.clear()
        for serving in again:
            self._place_again(serving, now)

    def _place_again(self, serving: ServingRequest, now: float) -> None:
        serving.source = serving.prompt = serving.worker = serving.sequence = None
        if not self._place(serving, now):
            self._wait(serving, now, first=True)
