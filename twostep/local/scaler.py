"""Asks the autoscaler as KEDA does: the external scaler's metric for each role. Which workers should go first stands in Redis,
where Kubernetes would be told by marks on their pods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import grpc
import grpc.aio
import redis.exceptions

from twostep.cluster.connection import connect
from twostep.cluster.records import WorkerRecord, worker_key
from twostep.cluster.scaling import DECISION_KEY, MAX_DECISION_BYTES, ScalingRecord
from twostep.cluster.signed import DECISIONS, RECORDS, Signer
from twostep.errors import InvalidRequest, Unauthenticated
from twostep.local.scaling import ROLES
from twostep.rpc.channel import channel_options
from twostep.rpc.keda import externalscaler_pb2, externalscaler_pb2_grpc

_TIMEOUT_S = 2.0
# Rounding of a binary fraction is no worker.
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedWorkers:
    """Workers to be had that were started in each role, and of each role, whichever they were started in (empty: that is not known); worker
    ids that should go first; why, in a line."""

    replicas: Mapping[str, int]
    workers: Mapping[str, int] = field(default_factory=dict)
    victims: tuple[str, ...] = ()
    reason: str = ""


class ScalerClient:
    """Needs a running event loop. `address` of the autoscaler's gRPC port on this machine."""

    def __init__(self, address: str, redis_url: str, secret: bytes) -> None:
        self._channel = grpc.aio.insecure_channel(address, [*channel_options(), ("grpc.enable_http_proxy", 0)])
        self._stub: externalscaler_pb2_grpc.ExternalScalerAsyncStub = externalscaler_pb2_grpc.ExternalScalerStub(self._channel)
        self._redis = connect(redis_url)
        self._of_records, self._of_decisions = Signer(secret, RECORDS), Signer(secret, DECISIONS)
        self.trouble = ""
        """Why there was no answer the last time; empty: there was one."""

    async def wanted(self) -> WantedWorkers | None:
        """None: it does not answer, or has nothing to say that is recent. What there is stays then."""
        try:
            replicas = {role: await self._metric(role) for role in ROLES}
        except grpc.RpcError as error:
            self.trouble = error.details() or error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
            return None
        self.trouble = ""
        record = await self._decision()
        if record is None:
            return WantedWorkers(replicas=replicas)
        return WantedWorkers(replicas=replicas, workers=record.wanted, victims=record.victims, reason=record.reason)

    async def roles(self, worker_ids: Sequence[str]) -> dict[str, str]:
        """In which role each of them serves now. Those are missing that nobody knows, such as one that starts."""
        found: dict[str, str] = {}
        try:
            for raw in await self._redis.mget([worker_key(worker_id) for worker_id in worker_ids]):
                if raw is not None:
                    record = WorkerRecord.from_json(self._of_records.read_object(cast(bytes, raw)))
                    found[record.worker_id] = record.role
        except (redis.exceptions.RedisError, OSError, InvalidRequest, Unauthenticated):
            # What has changed is said a second later.
            return {}
        return found

    async def close(self) -> None:
        await self._channel.close()
        await self._redis.aclose()

    async def _metric(self, role: str) -> int:
        ref = externalscaler_pb2.ScaledObjectRef(name=role, namespace="local", scalerMetadata={"role": role})
        request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=ref)
        response = await self._stub.GetMetrics(request, timeout=_TIMEOUT_S)
        (value,) = response.metricValues
        return math.ceil((value.metricValueFloat or value.metricValue) - _EPSILON)

    async def _decision(self) -> ScalingRecord | None:
        try:
            raw = await self._redis.getrange(DECISION_KEY, 0, MAX_DECISION_BYTES)
            return ScalingRecord.from_redis(cast(bytes, raw), self._of_decisions)
        except (redis.exceptions.RedisError, OSError, InvalidRequest):
            return None
