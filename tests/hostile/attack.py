"""What an attack is, and the running system that it is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A `twostep up` with API keys: one router, one prefill and one decode worker, Redis, all on loopback.

    `api_key` is an ordinary key; attacks that come from somebody without one do not show it. `workers` are host:port of the workers' gRPC,
    `secret_file` is the deployment's: no attack may use it, but to tell what is right.
    """

    host: str
    http_port: int
    grpc_port: int
    admin_port: int
    api_key: str
    model: str
    model_dir: Path
    redis_url: str
    workers: Sequence[str]
    secret_file: Path

    @property
    def http_url(self) -> str:
        return f"http://{self.host}:{self.http_port}"

    @property
    def grpc_target(self) -> str:
        return f"{self.host}:{self.grpc_port}"


@dataclass(frozen=True, slots=True)
class Attack:
    """`run` attacks for some seconds at most, frees what it holds, and returns in a few words what it was answered.

    It raises AssertionError where that is not the answer due. Whoever calls it watches the router meanwhile: its probes, its other clients,
    and its memory. `short`: belongs to the short form, which every change must pass: a second or two.
    """

    name: str
    run: Callable[[Target], Awaitable[str]]
    short: bool = False
