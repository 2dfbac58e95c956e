"""Answers KEDA as an external scaler with one ScaledObject for each role.

    triggers:
      - type: external-push        # or external
        metricType: AverageValue
        metadata: {scalerAddress: ..., role: prefill}

The metric is the number of pods that the role's Deployment is to have, its target 1 for each pod, so that the HorizontalPodAutoscaler comes
to that number (twostep/autoscaler/hpa.py: with which tolerance). Every replica answers from the last decision. If that is too old the
answer is UNAVAILABLE, for which KEDA keeps the pods that there are, or takes the ScaledObject's `fallback`: a number made up would be
worse.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from twostep.autoscaler.hpa import metric
from twostep.autoscaler.model import ROLES, Role
from twostep.cluster.scaling import ScalingRecord
from twostep.errors import InvalidRequest, ResourceExhausted, Unavailable
from twostep.rpc.keda import externalscaler_pb2, externalscaler_pb2_grpc

TARGET = 1
# KEDA puts the trigger's place in front of a metric's name, and takes it away again in newer versions.
_PLACE = re.compile(r"s\d+-")

_Context = grpc.aio.ServicerContext[object, object]
_Ref = externalscaler_pb2.ScaledObjectRef
_Active = externalscaler_pb2.IsActiveResponse


def metric_name(role: Role) -> str:
    return f"twostep-{role}-replicas"


def role_of(ref: _Ref) -> Role:
    """Returns the role that the trigger's metadata names. Raises InvalidRequest."""
    given = ref.scalerMetadata.get("role", "")
    for role in ROLES:
        if given == role:
            return role
    said = f"is {given!r:.60}" if given else "is missing"
    raise InvalidRequest(f"role {said} in the metadata of the trigger of ScaledObject {ref.name!r:.80}; give {' or '.join(ROLES)}")


class DecisionBoard:
    """Holds the decision that this replica answers from: its own if it leads, else the leader's as last read. `stale_s`: age from which a
    decision is no answer. `clock` in seconds, does not go back."""

    def __init__(self, *, stale_s: float, max_listeners: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.stale_s = stale_s
        self._max_listeners = max_listeners
        self._clock = clock
        self._record: ScalingRecord | None = None
        self._made_at = 0.0  # by the board's clock
        self._listeners: set[asyncio.Event] = set()
        self._closed = False

    @property
    def record(self) -> ScalingRecord | None:
        """However old."""
        return self._record

    @property
    def age_s(self) -> float | None:
        """None: there has been no decision."""
        return None if self._record is None else max(0.0, self._clock() - self._made_at)

    @property
    def fresh(self) -> bool:
        age_s = self.age_s
        return age_s is not None and age_s < self.stale_s

    def show(self, record: ScalingRecord, age_s: float) -> None:
        """Shows the decision that was made `age_s` ago. An older decision than the one shown changes nothing, unless the one shown is stale
        and this one is not: Redis may have lost everything, and a leader that saw nothing may have begun with small tokens again."""
        if self._record is not None and record.order < self._record.order and (self.fresh or age_s >= self.stale_s):
            return
        if self._record is None or record.order != self._record.order:
            self._made_at = self._clock() - max(0.0, age_s)
        changed = self._record is None or record != self._record
        self._record = record
        if changed:
            self._tell()

    def answer(self) -> ScalingRecord:
        """Raises Unavailable: there is no decision, or it is too old to be true."""
        if self._record is None:
            raise Unavailable("nothing has been decided yet; keep what there is")
        if not self.fresh:
            raise Unavailable(f"the last decision is {self.age_s:.0f} s old: no autoscaler leads, or Redis is away; keep what there is")
        return self._record

    def close(self) -> None:
        """Listeners end."""
        self._closed = True
        self._tell()

    async def changes(self) -> AsyncIterator[ScalingRecord]:
        """The decision now, if it may answer, and each later one that differs from the one before; who is slow misses some. Raises
        ResourceExhausted: too many listen."""
        if len(self._listeners) >= self._max_listeners:
            raise ResourceExhausted(f"{self._max_listeners} callers listen to this autoscaler already; use IsActive", retry_after_s=5.0)
        told = asyncio.Event()
        told.set()
        self._listeners.add(told)
        try:
            while True:
                await told.wait()
                told.clear()
                if self._closed:
                    return
                if self._record is not None and self.fresh:
                    yield self._record
        finally:
            self._listeners.discard(told)

    def _tell(self) -> None:
        for told in self._listeners:
            told.set()


class ExternalScaler(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Raises TwostepError, which the server's guard makes a status of."""

    def __init__(self, board: DecisionBoard, *, hpa_tolerance: float) -> None:
        self._board = board
        self._tolerance = hpa_tolerance

    async def IsActive(self, request: _Ref, context: _Context) -> _Active:
        role = role_of(request)
        return _Active(result=self._board.answer().replicas[role] > 0)

    async def StreamIsActive(self, request: _Ref, context: _Context) -> AsyncIterator[_Active]:
        role = role_of(request)
        told: bool | None = None
        async for record in self._board.changes():
            active = record.replicas[role] > 0
            if active != told:
                told = active
                yield _Active(result=active)

    async def GetMetricSpec(self, request: _Ref, context: _Context) -> externalscaler_pb2.GetMetricSpecResponse:
        spec = externalscaler_pb2.MetricSpec(metricName=metric_name(role_of(request)), targetSize=TARGET, targetSizeFloat=float(TARGET))
        return externalscaler_pb2.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: externalscaler_pb2.GetMetricsRequest, context: _Context) -> externalscaler_pb2.GetMetricsResponse:
        role = role_of(request.scaledObjectRef)
        known = metric_name(role)
        if request.metricName and _PLACE.sub("", request.metricName, count=1) != known:
            raise InvalidRequest(f"metric {request.metricName!r:.80} is not one of role {role}; its only one is {known}")
        record = self._board.answer()
        value = metric(record.asked.get(role, record.replicas[role]), record.pods[role], self._tolerance)
        # Old versions of KEDA read the whole number alone, newer ones the other if it is above 0.
        answer = externalscaler_pb2.MetricValue(metricName=known, metricValue=math.ceil(value), metricValueFloat=value)
        return externalscaler_pb2.GetMetricsResponse(metricValues=[answer])
