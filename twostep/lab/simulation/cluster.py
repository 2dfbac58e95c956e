"""A fleet of simulated workers under a trace, event by event.

 1. A request arrives: the decode worker with the fewest sequences and room for it reserves, the prefill worker that would begin it
    soonest queues its prompt. Without room, or without workers, it waits, first in, first out.
 2. The step that completes the prompt gives the first token; after the hand-over it decodes.
 3. It ends, or its worker goes: then its prompt and what it has so far are computed again elsewhere.

Deployments are told how many pods they shall have (`scale`) and workers to change roles (`switch`); a pod is paid from when it is made
until it is gone. A lost worker says nothing: routers keep sending until its record has expired, its Deployment makes another at once.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from twostep.autoscaler.model import ROLES, Role
from twostep.cluster.records import HEARTBEAT_TTL_S
from twostep.lab.simulation.decode_side import DecodeSide, Ended
from twostep.lab.simulation.hardware import Hardware
from twostep.lab.simulation.outcome import Ledger
from twostep.lab.simulation.prefill_side import PrefillSide, Prompt
from twostep.lab.simulation.traces import Loss, Requests
from twostep.lab.simulation.worker import SimWorker

# How often ends of answers are looked for, and whether drains are over.
_TICK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """`max_waiting` requests wait in the routers, each for `max_wait_s`; more, and longer, are refused."""

    hardware: Hardware
    cold_start_s: float = 90.0
    drain_s: float = 30.0
    switch_s: float = 0.1
    detect_s: float = HEARTBEAT_TTL_S
    max_waiting: int = 1024
    max_wait_s: float = 30.0


class Cluster:
    def __init__(self, config: ClusterConfig, requests: Requests, ledger: Ledger, *, seed: int = 0) -> None:
        self.config = config
        self.ledger = ledger
        self.workers: dict[int, SimWorker] = {}
        self.replicas: dict[Role, int] = {"prefill": 0, "decode": 0}
        self._hardware = config.hardware
        self._requests = requests
        self._done = array("i", bytes(4 * len(requests)))  # tokens that its client has
        self._rng = random.Random(f"losses/{seed}")
        self._waiting: deque[tuple[float, int]] = deque()
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._num_events = 0
        self._num_workers = 0
        # Where routers send: the lost ones are there until that is known.
        self._prefills: list[tuple[SimWorker, PrefillSide]] = []
        self._decodes: list[DecodeSide] = []

    # ---- the clock --------------------------------------------------------------------------------------------------

    def at(self, second: float, act: Callable[[float, Any], None], argument: Any = None) -> None:
        self._num_events += 1
        heappush(self._events, (second, self._num_events, act, argument))

    def run(self, until: float) -> None:
        """All arrivals and events before `until`. The loop is the hot place of the simulation."""
        arrivals, events = self._requests.arrivals, self._events
        index, num = 0, len(arrivals)
        self.at(0.0, self._tick)
        arrival = arrivals[0] if num else until
        while True:
            second = events[0][0] if events else until
            if arrival <= second and arrival < until:
                self._arrive(index, arrival)
                index += 1
                arrival = arrivals[index] if index < num else until
            elif second < until:
                second, _, act, argument = heappop(events)
                act(second, argument)
            else:
                break

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_unfinished(self) -> int:
        """That arrived, and neither ended nor were refused."""
        inside = 0
        for worker in self.workers.values():
            match worker.side:
                case PrefillSide() as side:
                    inside += side.num_prompts
                case DecodeSide() as side:
                    inside += side.num_running
        return len(self._waiting) + inside

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _arrive(self, request: int, now: float) -> None:
        requests = self._requests
        self.ledger.arrived(requests.prompts[request], requests.cached[request])
        if self._waiting or not self._place(request, now):
            self._wait(request, now)

    def _wait(self, request: int, now: float) -> None:
        if len(self._waiting) >= self.config.max_waiting:
            self.ledger.refused(request)
        else:
            self._waiting.append((now, request))

    def _place_waiting(self, now: float) -> None:
        while self._waiting:
            since, request = self._waiting[0]
            if now - since > self.config.max_wait_s:
                self.ledger.refused(request)
            elif not self._place(request, now):
                return
            self._waiting.popleft()

    def _place(self, request: int, now: float) -> bool:
        if not self._prefills:
            return False
        requests = self._requests
        num_tokens = requests.prompts[request] + requests.outputs[request]
        seat: DecodeSide | None = None
        fewest = 1 << 30
        for decode in self._decodes:
            if (num := decode.num_seqs) < fewest and decode.has_room(num_tokens):
                seat, fewest = decode, num
        if seat is None:
            return False
        seat.reserve(num_tokens)
        source, side = self._prefills[0]
        soonest = side.predicted_s(now)
        for pair in self._prefills[1:]:
            if (begin := pair[1].predicted_s(now)) < soonest:
                source, side = pair
                soonest = begin
        length = requests.prompts[request] + self._done[request]
        side.add(Prompt(request, length, requests.cached[request], seat), now)
        if not side.running and source.alive:
            self._start(now, source, side)
        return True

    def _start(self, now: float, worker: SimWorker, side: PrefillSide) -> None:
        end = side.start(now)
        if end is None:
            side.rest()
        else:
            self.at(end, self._settle, (worker, side))

    def _settle(self, now: float, argument: tuple[SimWorker, PrefillSide]) -> None:
        worker, side = argument
        if not worker.alive or worker.side is not side:
            return
        for prompt in side.settle():
            self._hand_over(now, prompt)
        self._start(now, worker, side)

    def _hand_over(self, now: float, prompt: Prompt) -> None:
        request, hardware = prompt.request, self._hardware
        requests = self._requests
        if self._done[request] == 0:
            self.ledger.first_token(request, now + hardware.edge_s)
        self._done[request] += 1
        seat = prompt.seat
        num_left = requests.outputs[request] - self._done[request]
        if num_left <= 0:
            seat.cancel(requests.prompts[request] + requests.outputs[request])
            self._end(request, now)
        elif seat.closed:
            self._again(request, now)
        else:
            self._ended(seat.advance(now))
            delay = hardware.hand_over_s + prompt.length * hardware.token_hand_over_s
            seat.join(request, prompt.length + 1, num_left, delay)

    def _again(self, request: int, now: float) -> None:
        """Its worker is gone: it is placed anew with the tokens so far."""
        if not self._place(request, now):
            self._waiting.appendleft((now, request))

    def _ended(self, ended: Sequence[Ended]) -> None:
        for one in ended:
            self._end(one.request, one.at_s)

    def _end(self, request: int, now: float) -> None:
        self._done[request] = self._requests.outputs[request]
        self.ledger.ended(request, now + self._hardware.edge_s)

    def _tick(self, now: float, _: Any) -> None:
        for worker in list(self.workers.values()):
            side = worker.side
            if isinstance(side, DecodeSide):
                self._ended(side.advance(now))
            if worker.draining and worker.alive and (worker.empty or now >= worker.drain_until):
                self._drained(now, worker)
        if self._waiting:
            self._place_waiting(now)
        self.at(now + _TICK_S, self._tick)

    # ---- workers ----------------------------------------------------------------------------------------------------

    def start_with(self, replicas: Mapping[Role, int]) -> None:
        """A fleet that is up already."""
        for role in ROLES:
            self.replicas[role] = replicas[role]
            for _ in range(replicas[role]):
                self._ready(0.0, self._create(role, 0.0, cold_start_s=None))

    def plan_losses(self, losses: Sequence[Loss]) -> None:
        for loss in losses:
            self.at(loss.at_s, self._lose, loss.role)

    def scale(self, role: Role, replicas: int, now: float, *, victims: Sequence[str] = ()) -> None:
        """The Deployment of `role` shall have so many pods. As ReplicaSets do, those that are not ready go first, then by deletion cost
        (`victims`, the first first), then the youngest."""
        self.replicas[role] = replicas
        owned = [w for w in self.workers.values() if w.owner == role and w.alive and not w.terminating]
        for _ in range(replicas - len(owned)):
            self._create(role, now, cold_start_s=self.config.cold_start_s)
        rank = {worker_id: place for place, worker_id in enumerate(victims)}
        owned.sort(key=lambda w: (w.side is not None, rank.get(w.worker_id, len(rank)), -w.created_at))
        for worker in owned[: max(0, len(owned) - replicas)]:
            if worker.side is None and worker.switch_to is None:
                self._remove(now, worker)
            else:
                worker.drain(now + self.config.drain_s)
                self._list_workers()

    def switch(self, worker_id: str, to: Role, now: float, *, drain_s: float) -> bool:
        """False: it cannot now."""
        worker = next((w for w in self.workers.values() if w.worker_id == worker_id), None)
        if worker is None or not worker.serving or worker.role == to:
            return False
        worker.drain(now + drain_s, to=to)
        self._list_workers()
        return True

    def _create(self, role: Role, now: float, *, cold_start_s: float | None) -> SimWorker:
        self._num_workers += 1
        worker = SimWorker(number=self._num_workers, owner=role, role=role, created_at=now)
        self.workers[worker.number] = worker
        if cold_start_s is not None:
            self.at(now + cold_start_s, self._ready, worker)
        return worker

    def _ready(self, now: float, worker: SimWorker) -> None:
        if worker.alive and not worker.terminating:
            worker.begin(self._hardware, now)
            self._list_workers()
            self._place_waiting(now)

    def _drained(self, now: float, worker: SimWorker) -> None:
        self._move_on(now, worker)
        if worker.switch_to is None:
            self._remove(now, worker)
        else:
            worker.role, worker.side = worker.switch_to, None
            worker.draining = False
            self.at(now + self.config.switch_s, self._ready, worker)

    def _lose(self, now: float, role: Role) -> None:
        there = [w for w in self.workers.values() if w.serving and w.role == role]
        if not there:
            return
        worker = self._rng.choice(there)
        if isinstance(worker.side, DecodeSide):
            self._ended(worker.side.advance(now))
            worker.side.frozen = True
        worker.alive = False
        self.ledger.lost(now, role)
        self.ledger.paid(worker.owner, now - worker.created_at)
        self._create(worker.owner, now, cold_start_s=self.config.cold_start_s)
        self.at(now + self.config.detect_s, self._notice, worker)

    def _notice(self, now: float, worker: SimWorker) -> None:
        self._move_on(now, worker)
        del self.workers[worker.number]
        self._list_workers()

    def _move_on(self, now: float, worker: SimWorker) -> None:
        """What is still there goes on elsewhere."""
        side, worker.side = worker.side, None
        self._list_workers()
        again: Collection[int] = ()
        if isinstance(side, PrefillSide):
            left = side.abandon()
            for prompt in left:
                prompt.seat.cancel(self._requests.prompts[prompt.request] + self._requests.outputs[prompt.request])
            again = [prompt.request for prompt in left]
        elif isinstance(side, DecodeSide):
            for one in (moved := side.abandon()):
                self._done[one.request] += one.num_tokens
            again = [one.request for one in moved]
        for request in again:
            self._again(request, now)

    def _remove(self, now: float, worker: SimWorker) -> None:
        worker.alive = False
        self.ledger.paid(worker.owner, now - worker.created_at)
        del self.workers[worker.number]
        self._list_workers()

    def pay(self, now: float) -> None:
        """At the end: what the pods that are there have cost."""
        for worker in self.workers.values():
            if worker.alive:
                self.ledger.paid(worker.owner, now - worker.created_at)

    def _list_workers(self) -> None:
        there = [w for w in self.workers.values() if not w.draining]
        self._prefills = [(w, w.side) for w in there if isinstance(w.side, PrefillSide)]
        self._decodes = [w.side for w in there if isinstance(w.side, DecodeSide)]
