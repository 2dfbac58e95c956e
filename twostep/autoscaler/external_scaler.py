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

import math
import re
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from twostep.autoscaler.board import DecisionBoard
from twostep.autoscaler.hpa import metric
from twostep.autoscaler.model import ROLES, Role
from twostep.cluster.scaling import ScalingRecord
from twostep.errors import InvalidRequest
from twostep.rpc.keda import externalscaler_pb2, externalscaler_pb2_grpc

TARGET = 1
# KEDA puts the trigger's place in front of a metric's name, and takes it away again in newer versions.
_PLACE = re.compile(r"s\d+-")

_Context = grpc.aio.ServicerContext[object, object]


def metric_name(role: Role) -> str:
    return f"twostep-{role}-replicas"


def role_of(ref: externalscaler_pb2.ScaledObjectRef) -> Role:
    """Returns the role that the trigger's metadata names. Raises InvalidRequest."""
    given = ref.scalerMetadata.get("role", "")
    for role in ROLES:
        if given == role:
            return role
    said = f"is {given!r:.60}" if given else "is missing"
    raise InvalidRequest(f"role {said} in the metadata of the trigger of ScaledObject {ref.name!r:.80}; give {' or '.join(ROLES)}")


def value_of(record: ScalingRecord, role: Role, tolerance: float) -> float:
    """The metric."""
    return metric(record.asked.get(role, record.replicas[role]), record.pods[role], tolerance)


class ExternalScaler(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Raises TwostepError, which the server's guard makes a status of."""

    def __init__(self, board: DecisionBoard, *, hpa_tolerance: float) -> None:
        self._board = board
        self._tolerance = hpa_tolerance

    async def IsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: _Context
    ) -> externalscaler_pb2.IsActiveResponse:  # fmt: skip
        role = role_of(request)
        return externalscaler_pb2.IsActiveResponse(result=self._board.answer().replicas[role] > 0)

    async def StreamIsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: _Context
    ) -> AsyncIterator[externalscaler_pb2.IsActiveResponse]:
        role = role_of(request)
        told: bool | None = None
        async for record in self._board.changes():
            active = record.replicas[role] > 0
            if active != told:
                told = active
                yield externalscaler_pb2.IsActiveResponse(result=active)

    async def GetMetricSpec(
        self, request: externalscaler_pb2.ScaledObjectRef, context: _Context
    ) -> externalscaler_pb2.GetMetricSpecResponse:
        spec = externalscaler_pb2.MetricSpec(metricName=metric_name(role_of(request)), targetSize=TARGET, targetSizeFloat=float(TARGET))
        return externalscaler_pb2.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: externalscaler_pb2.GetMetricsRequest, context: _Context) -> externalscaler_pb2.GetMetricsResponse:
        role = role_of(request.scaledObjectRef)
        known = metric_name(role)
        if request.metricName and _PLACE.sub("", request.metricName, count=1) != known:
            raise InvalidRequest(f"metric {request.metricName!r:.80} is not one of role {role}; its only one is {known}")
        value = value_of(self._board.answer(), role, self._tolerance)
        # Old versions of KEDA read the whole number alone, newer ones the other if it is above 0.
        answer = externalscaler_pb2.MetricValue(metricName=known, metricValue=math.ceil(value), metricValueFloat=value)
        return externalscaler_pb2.GetMetricsResponse(metricValues=[answer])
