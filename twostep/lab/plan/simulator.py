"""A deployment under a list of requests, event by event, on a clock of its own: what each request's client would see.

 1. A request arrives and is placed (`placing.py`): a decode worker reserves, or refuses, and another is asked; when all are full it
    waits, first in, first out.
 2. Its prompt is queued on the prefill worker, which computes it in steps (`virtual_engine.py`).
 3. The step that ends the prompt gives the first token.
 4. KV travels (`deployment.HandOver`), the prefill worker's blocks are free, and the sequence joins the decode worker's next planned step.
 5. Each step gives every one of its sequences a token, until the request has all of its own.

Nothing here reads a clock or draws a number: the same deployment and requests give the same times.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from twostep.errors import InvalidRequest
from twostep.lab.plan.deployment import Deployment
from twostep.lab.plan.placing import Placement, shortest_ttft
from twostep.lab.plan.virtual_engine import VirtualEngine
from twostep.lab.plan.virtual_sequence import VirtualSequence
from twostep.lab.plan.workload import Request


@dataclass(frozen=True, slots=True)
class Served:
    """A request and when each of its tokens was at the client, in seconds since the start."""

    request: Request
    token_times: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUse:
    """What a worker did. `busy` is the share of the time until the last token; `decodes` how many sequences decoded in its steps, on
    average over the time they took; `peak_blocks` the most KV blocks that were owned at once."""

    role: str
    busy: float
    decodes: float
    peak_decodes: int
    peak_blocks: int
    num_steps: int
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`served` in order of their ends. `stopped`: whoever watched had seen enough, and the rest is missing."""

    served: Sequence[Served]
    workers: Sequence[WorkerUse]
    seconds: float
    peak_waiting: int  # requests that no worker had room for
    stopped: bool


def simulate(
    deployment: Deployment,
    requests: Sequence[Request],
    *,
    placement: Placement = shortest_ttft,
    watch: Callable[[Served], bool] | None = None,
) -> Run:
    """Serves `requests`, which are in the order of arrival, to the end, or until `watch`, called with each that is done, returns True.

    Raises InvalidRequest for a request that an empty worker could not hold."""
    return _Simulation(deployment, placement, watch).run(requests)


class _Simulation:
    def __init__(self, deployment: Deployment, placement: Placement, watch: Callable[[Served], bool] | None) -> None:
        self._deployment = deployment
        self._placement = placement
        self._watch = watch
        prefill = deployment.prefill
        self._prefill = [VirtualEngine(prefill) for _ in range(deployment.num_prefill)] if prefill is not None else []
        self._decode = [VirtualEngine(deployment.decode_spec) for _ in range(deployment.num_decode)]
        self._link_free_at = [0.0] * deployment.num_decode
        # (time, order, what to do, with what): the order breaks ties, first come first.
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._num_events = 0
        self._unplaced: deque[Request] = deque()
        self._peak_waiting = 0
        # Of a sequence on a prefill worker: its decode worker, and its reservation there.
        self._ways: dict[int, tuple[VirtualEngine, int, VirtualSequence]] = {}
        self._num_placed = 0
        self._served: list[Served] = []
        self._stopped = False

    def run(self, requests: Sequence[Request]) -> Run:
        for engine in (*self._prefill[:1], *self._decode[:1]):
            for request in requests:
                if not engine.fits(request):
                    raise InvalidRequest(
                        f"{request.num_prompt} + {request.num_output} tokens do not fit a worker's {engine.spec.num_blocks} KV blocks of "
                        f"{engine.spec.block_size}; give the workers more memory, or shorter prompts"
                    )
        arrivals = iter(requests)
        self._next_arrival(arrivals)
        now = 0.0
        while self._events and not self._stopped:
            now, _, act, argument = heapq.heappop(self._events)
            act(now, argument)
        assert self._stopped or len(self._served) == len(requests), "requests were lost"
        return Run(
            served=self._served,
            workers=[
                *(_use("prefill", engine, now) for engine in self._prefill),
                *(_use("decode" if self._prefill else "aggregated", engine, now) for engine in self._decode),
            ],
            seconds=now,
            peak_waiting=self._peak_waiting,
            stopped=self._stopped,
        )

    def _at(self, time: float, act: Callable[[float, Any], None], argument: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, act, argument))

    # ---- 1: placing -------------------------------------------------------------------------------------------------

    def _next_arrival(self, arrivals: Any) -> None:
        request = next(arrivals, None)
        if request is not None:
            self._at(request.arrival_s, self._arrive, (request, arrivals))

    def _arrive(self, now: float, argument: Any) -> None:
        request, arrivals = argument
        self._next_arrival(arrivals)
        if self._unplaced or not self._place(request, now):
            self._unplaced.append(request)
            self._peak_waiting = max(self._peak_waiting, len(self._unplaced))

    def _place_waiting(self, now: float) -> None:
        while self._unplaced and self._place(self._unplaced[0], now):
            self._unplaced.popleft()

    def _place(self, request: Request, now: float) -> bool:
        full: set[int] = set()
        while (choice := self._placement(request, now, self._prefill, self._decode, full)) is not None:
            engine = self._decode[choice.decode]
            sequence = VirtualSequence(request=request, key=self._num_placed)
            if choice.prefill is None:
                placed = engine.submit(sequence)
                if placed:
                    self._pump(engine, now)
            else:
                placed = self._place_pair(choice.prefill, choice.decode, sequence, now)
            if placed:
                self._num_placed += 1
                return True
            full.add(choice.decode)
        return False

    def _place_pair(self, prefill: int, decode: int, sequence: VirtualSequence, now: float) -> bool:
        engine, source = self._decode[decode], self._prefill[prefill]
        prompt = VirtualSequence(request=sequence.request, key=sequence.key, hold=True, times=sequence.times)
        if not engine.reserve(sequence):
            return False
        if not source.submit(prompt):
            engine.cancel(sequence)
            return False
        self._ways[sequence.key] = (engine, decode, sequence)
        self._pump(source, now)
        return True

    # ---- 2 to 5: steps ----------------------------------------------------------------------------------------------

    def _pump(self, engine: VirtualEngine, now: float) -> None:
        """The engine's thread looks for work, if it waits for some: it plans nothing while it waits for a step."""
        if engine.idle:
            self._go_on(now, engine)

    def _go_on(self, now: float, engine: VirtualEngine) -> None:
        if engine.idle and engine.launch(now) is None:
            return
        ahead_s = engine.launches_ahead_s
        if ahead_s is not None and ahead_s <= now:
            engine.launch(now)
        elif ahead_s is not None:
            self._at(ahead_s, self._launch_ahead, engine)
        self._at(engine.oldest_end_s, self._settle, engine)

    def _launch_ahead(self, now: float, engine: VirtualEngine) -> None:
        engine.launch(now)

    def _settle(self, now: float, engine: VirtualEngine) -> None:
        step = engine.settle()
        for sequence in step.ended:
            if sequence.hold:
                self._publish(now, engine, sequence)
            else:
                self._done(sequence)
        self._go_on(now, engine)
        if step.ended and self._unplaced:
            self._place_waiting(now)

    def _publish(self, now: float, source: VirtualEngine, prompt: VirtualSequence) -> None:
        engine, decode, sequence = self._ways.pop(prompt.key)
        if sequence.request.num_output == 1:
            source.release(prompt)
            engine.cancel(sequence)
            self._done(sequence)
            return
        hand_over, request = self._deployment.hand_over, sequence.request
        if request.hand_over_s is not None:
            there = now + request.hand_over_s  # whatever it waited for the link is in it
        else:
            self._link_free_at[decode] = max(now, self._link_free_at[decode]) + hand_over.exposed_s(request.num_prompt)
            there = self._link_free_at[decode] + hand_over.latency_s
        self._at(there, self._commit, (source, prompt, engine, sequence))

    def _commit(self, now: float, argument: Any) -> None:
        source, prompt, engine, sequence = argument
        source.release(prompt)
        engine.commit(sequence)
        self._pump(source, now)
        self._pump(engine, now)

    def _done(self, sequence: VirtualSequence) -> None:
        edge = self._deployment.edge_s if sequence.request.edge_s is None else sequence.request.edge_s
        served = Served(sequence.request, [time + edge for time in sequence.times] if edge else sequence.times)
        self._served.append(served)
        if self._watch is not None and self._watch(served):
            self._stopped = True


def _use(role: str, engine: VirtualEngine, seconds: float) -> WorkerUse:
    return WorkerUse(
        role=role,
        busy=engine.busy_s / seconds if seconds else 0.0,
        decodes=engine.sequence_s / engine.busy_s if engine.busy_s else 0.0,
        peak_decodes=engine.most_decodes,
        peak_blocks=engine.most_blocks,
        num_steps=engine.num_steps,
        num_preemptions=engine.num_preemptions,
    )
