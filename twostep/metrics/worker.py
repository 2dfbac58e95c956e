"""Declares the metrics of what a worker's edge holds: the same figures as its Stats call gives, asked for once a second."""

from __future__ import annotations

from typing import Protocol

from twostep.metrics.family import Family, gauge
from twostep.metrics.registry import MetricsRegistry

_ROLE = ["role"]

READY = gauge("twostep_worker_ready", "1: the worker takes new work.", _ROLE)
LEASES = gauge("twostep_kv_leases", "prefill: leases that hold something. decode: reservations without a ticket.", _ROLE)
OLDEST_LEASE = gauge(
    "twostep_kv_oldest_lease_seconds",
    "Age of the oldest hand-over under way, 0 if there is none. prefill: of a lease. decode: of a sequence whose KV is still to come.",
    _ROLE,
)
SEQUENCES = gauge("twostep_worker_sequences", "decode: sequences of all states. prefill: running calls of routers.", _ROLE)
STREAMS = gauge("twostep_worker_streams", "Token streams open to routers (decode workers).", _ROLE)
GRAPHS = gauge("twostep_worker_graph_bytes", "Memory that captured steps (CUDA graphs) took of each of its GPUs at the start.", _ROLE)
TRANSPORT_READY = gauge("twostep_kv_transport_ready", "1: the KV transport works on this worker now.", ["role", "transport"])
STORED = gauge("twostep_kv_stored_bytes", "KV published and not dropped yet, in the KV agent and the pool.", ["role", "transport"])
OBJECTS = gauge("twostep_kv_stored_objects", "Published chunks that are not dropped yet.", ["role", "transport"])
ENGINE_MEMORY = gauge(
    "twostep_engine_process_resident_memory_bytes",
    "Of the process that the worker's engine has to itself (--engine-process); missing where it has none. process_* are the worker's own.",
    _ROLE,
)

_FAMILIES = (READY, LEASES, OLDEST_LEASE, SEQUENCES, STREAMS, GRAPHS, TRANSPORT_READY, STORED, OBJECTS, ENGINE_MEMORY)


class HeldByTransport(Protocol):
    """As in worker_pb2.TransportStats."""

    @property
    def name(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def num_objects(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...


class WorkerMetrics:
    """set() whenever the figures are known."""

    def __init__(self, registry: MetricsRegistry, *, role: str) -> None:
        self._role = role
        self._gauges = {family: registry.gauge(family) for family in _FAMILIES}

    def serve(self, role: str) -> None:
        """The worker has this role from now on: nothing is said of the one before."""
        self._role = role
        for metric in self._gauges.values():
            metric.clear()

    def set(
        self, *, ready: bool, num_leases: int, oldest_lease_s: float, num_sequences: int, num_streams: int, graph_bytes: int = 0
    ) -> None:
        self._set(READY, ready)
        self._set(LEASES, num_leases)
        self._set(OLDEST_LEASE, oldest_lease_s)
        self._set(SEQUENCES, num_sequences)
        self._set(STREAMS, num_streams)
        self._set(GRAPHS, graph_bytes)

    def set_engine_memory(self, num_bytes: int) -> None:
        self._set(ENGINE_MEMORY, num_bytes)

    def set_transport(self, held: HeldByTransport) -> None:
        self._set(TRANSPORT_READY, held.ready, held.name)
        self._set(STORED, held.stored_bytes, held.name)
        self._set(OBJECTS, held.num_objects, held.name)

    def _set(self, family: Family, value: float, *labels: str) -> None:
        self._gauges[family].labels(self._role, *labels).set(value)
