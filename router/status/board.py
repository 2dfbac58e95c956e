"""The router looks at itself once a second: what `GetStatus`, `twostep status` and the page show, and the last minutes of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict

from router.placing.load_ratio import RoleLoad, role_load
from router.status.alerts import AlertWatch
from router.status.scaling_watch import SeenDecision
from router.status.status import (
    WINDOW_S,
    CounterSample,
    Point,
    columns,
    point,
    refused_worker,
    router_load,
    sample_before,
    scaling_status,
    take_sample,
    waiting_requests,
    worker_status,
)
from router.workers.pool import WorkerPool
from router.workers.registry import Refusal
from twostep.errors import ResourceExhausted
from twostep.metrics.process import package_version
from twostep.metrics.router import RouterGauges, RouterMetrics
from twostep.rpc.v1 import status_pb2

_EVERY_S = 1.0
# Ten minutes: some hundred kilobytes.
HISTORY_POINTS = 600
# Each open page is one.
MAX_LISTENERS = 64
_MAX_REFUSED = 100


class StatusBoard:
    """run() until it is cancelled; close() before a drain, so that pages that are open do not hold it up."""

    def __init__(
        self,
        metrics: RouterMetrics,
        pool: WorkerPool,
        *,
        router_id: str,
        model: str,
        state: Callable[[], RouterGauges],
        ready: Callable[[], bool],
        draining: Callable[[], bool],
        refusals: Callable[[], Sequence[Refusal]],
        decision: Callable[[], SeenDecision | None],
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """The arguments say who the router is and what it knows of itself now: called on the event loop; all return at once. `on_look`
        is called once a second."""
        self._metrics, self._pool, self._router_id, self._model = metrics, pool, router_id, model
        self._state, self._ready, self._draining, self._refusals, self._decision = state, ready, draining, refusals, decision
        self._on_look = on_look
        self._started = time.monotonic()
        self._alerts = AlertWatch(metrics, self._started)
        self._samples: deque[CounterSample] = deque([take_sample(metrics, self._started)], maxlen=int(WINDOW_S / _EVERY_S) + 2)
        self._history: deque[Point] = deque(maxlen=HISTORY_POINTS)
        self.work = RoleLoad()  # as of the last second
        self._listeners: set[asyncio.Event] = set()
        self._event: bytes | None = None
        self._closed = False

    def status(self) -> status_pb2.ClusterStatus:
        """Returns the status of now; what is counted, as of the last second."""
        before, now = sample_before(self._samples, WINDOW_S), self._samples[-1]
        state = self._state()
        records = sorted(self._pool.records(), key=lambda record: (record.role, record.worker_id))
        decision = self._decision()
        return status_pb2.ClusterStatus(
            router_id=self._router_id,
            version=package_version(),
            model=self._model,
            uptime_s=time.monotonic() - self._started,
            ready=self._ready(),
            draining=self._draining(),
            registry_connected=state.registry_connected,
            workers=[worker_status(record) for record in records],
            load=router_load(before, now, state, self.work),
            refused=[refused_worker(refusal) for refusal in self._refusals()[:_MAX_REFUSED]],
            scaling=None if decision is None else scaling_status(decision, time.monotonic(), records),
            alerts=self._alerts.firing(time.monotonic()),
        )

    def status_json(self) -> dict[str, Any]:
        """Returns the status in Protobuf's JSON mapping with the proto's field names: unset optional fields are missing, 64-bit integers
        are strings."""
        found: dict[str, Any] = MessageToDict(self.status(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        return found

    def history_json(self) -> dict[str, Any]:
        """Returns by name a value for each second, the oldest first; null: nothing was there to be observed."""
        return {"every_s": _EVERY_S, "columns": columns(list(self._history))}

    async def run(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(_EVERY_S)

    def close(self) -> None:
        """Listeners get what there is now, and then their end."""
        self._closed = True
        self._notify()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields a JSON object a second: {"status": as status_json(), "point": the second in the history}. A listener that is too slow
        for that misses some. Raises ResourceExhausted: too many listen."""
        if len(self._listeners) >= MAX_LISTENERS:
            raise ResourceExhausted(
                f"{MAX_LISTENERS} pages listen to this router already; close one, or ask /ui/api/status now and then", retry_after_s=5.0
            )
        changed = asyncio.Event()
        changed.set()
        self._listeners.add(changed)
        try:
            while True:
                await changed.wait()
                changed.clear()
                yield self._latest()
                if self._closed:
                    return
        finally:
            self._listeners.discard(changed)

    def _look(self) -> None:
        now, state, records, decision = time.monotonic(), self._state(), self._pool.records(), self._decision()
        self._on_look()
        self._samples.append(take_sample(self._metrics, now))
        lengths = waiting_requests(sample_before(self._samples, WINDOW_S), self._samples[-1], state.num_waiting)
        self.work = role_load(self._pool.snapshot(), lengths)
        self._history.append(point(list(self._samples), state, self.work, records, time.time()))
        self._alerts.look(records, state, nobody_decides=decision is not None and decision.stale(now), at=now)
        self._notify()

    def _notify(self) -> None:
        self._event = None
        for changed in self._listeners:
            changed.set()

    def _latest(self) -> bytes:
        """Returns the latest event, made once a second, for all listeners together, if there are any."""
        if self._event is None:
            last = self._history[-1] if self._history else None
            self._event = json.dumps({"status": self.status_json(), "point": last}, separators=(",", ":")).encode()
        return self._event
