"""The two roles of a worker: the services of each, and where the edge that serves them comes from.

A worker of either role is the same process around the same engine; what differs is its edge (twostep/worker/edge.py). So that it can
change its role, both edges must be there, and nothing here may import either package: the package `{role}_worker` has a module `edge` with

    def make_edge(parts: EdgeParts, run_dir: Path) -> Edge

`run_dir` is private to the process, for sockets. Raises SetupError where what the configuration asks for cannot be.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twostep.errors import SetupError, Unavailable
from twostep.rpc.server import GrpcServer
from twostep.rpc.v1 import decode_pb2_grpc, kv_pb2_grpc, prefill_pb2_grpc
from twostep.worker.config import WorkerConfig
from twostep.worker.edge import Edge, EdgeParts

# Full name of a service, and what adds it to a server.
_SERVICES: Mapping[str, Mapping[str, Callable[..., None]]] = {
    "prefill": {
        "twostep.v1.Prefill": prefill_pb2_grpc.add_PrefillServicer_to_server,
        "twostep.v1.Kv": kv_pb2_grpc.add_KvServicer_to_server,
    },
    "decode": {"twostep.v1.Decode": decode_pb2_grpc.add_DecodeServicer_to_server},
}
ROLES = tuple(_SERVICES)
SERVICE_NAMES = tuple(name for services in _SERVICES.values() for name in services)


class RoleConflict(Exception):
    """Another change of the worker is under way, or came in between: a switch, a stop. Says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChange:
    """Describes a switch that is over: the role and its epoch, how long the drain took, and how long all that came after it."""

    role: str
    epoch: int
    drain_s: float = 0.0
    switch_s: float = 0.0


def edges_of_packages(run_dir: Path) -> Callable[[EdgeParts], Edge]:
    """Makes the edge of `parts.config.role`. Both packages are loaded now: a change of roles is no time for a failing import."""
    makers: dict[str, Callable[[EdgeParts, Path], Edge]] = {
        role: importlib.import_module(f"{role}_worker.edge").make_edge for role in ROLES
    }
    return lambda parts: makers[parts.config.role](parts, run_dir)


def config_in_role(config: WorkerConfig, role: str) -> WorkerConfig:
    """Returns this worker's configuration in the other role, or in its own. Raises SetupError where it cannot take the role."""
    if role == config.role:
        return config
    if role == "prefill" and config.kv_transfer == "none":
        raise SetupError("a prefill worker hands its KV over, and this worker has --kv-transfer none; restart it with auto, say")
    budget = config.other_step_tokens or config.max_num_batched_tokens
    return replace(config, role=role, max_num_batched_tokens=budget, other_step_tokens=config.max_num_batched_tokens)


def check_services(role: str, services: Mapping[str, object]) -> None:
    """Raises SetupError if an edge has others than its role's."""
    if services.keys() != _SERVICES[role].keys():
        raise SetupError(
            f"a {role} worker serves {', '.join(_SERVICES[role])}, and its edge {', '.join(services)}: this process was not made to serve "
            "both roles; use its own command"
        )


class Switchboard:
    """The services of both roles, on the server from the start: gRPC takes none later. Calls go to the edge that serves; where there is
    none for them, the answer is UNAVAILABLE with the reason, as of a worker that is gone."""

    def __init__(self) -> None:
        self._slots = {name: _Slot() for services in _SERVICES.values() for name in services}

    def add_to(self, server: GrpcServer) -> None:
        for services in _SERVICES.values():
            for name, add in services.items():
                server.add(self._slots[name], add, name)

    def connect(self, services: Mapping[str, object], reason: str) -> None:
        """These answer from now on; the other role's calls are refused with `reason`."""
        for name, slot in self._slots.items():
            slot.servicer, slot.reason = services.get(name), reason

    def disconnect(self, reason: str) -> None:
        """Nothing answers from now on; calls that run go on."""
        for slot in self._slots.values():
            slot.servicer, slot.reason = None, reason


class _Slot:
    """One service: looks to gRPC like a servicer that has whatever method is asked for."""

    servicer: Any = None
    reason = "this worker is starting; use another one"

    def __getattr__(self, method: str) -> Callable[[Any, Any], Any]:
        return functools.partial(self._call, method)

    def _call(self, method: str, request: Any, context: Any) -> Any:
        """Returns what the servicer's method returns: something to await, or a stream. Raises Unavailable, which the server's guard passes
        on."""
        if self.servicer is None:
            raise Unavailable(self.reason)
        return getattr(self.servicer, method)(request, context)
