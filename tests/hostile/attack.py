"""An attack, and the running system that it is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A `twostep up` with API keys: one router, one prefill and one decode worker, Redis, all on loopback.

    `api_key` is an ordinary key; attacks that come from somebody without one do not show it. `neighbour_key` is another's, whose requests
    no attack may delay for long. `workers` are host:port of the workers' gRPC,
    `secret_file` is the deployment's: no attack may use it, but to tell what is right. `num_requests` and `seed` are for what is drawn.
    """

    host: str
    http_port: int
    grpc_port: int
    admin_port: int
    api_key: str
    neighbour_key: str
    model: str
    model_dir: Path
    redis_url: str
    workers: Sequence[str]
    secret_file: Path
    num_requests: int = 0
    seed: int = 0

    @property
    def http_url(self) -> str:
        return f"http://{self.host}:{self.http_port}"

    @property
    def grpc_target(self) -> str:
        return f"{self.host}:{self.grpc_port}"


@dataclass(frozen=True, slots=True)
class Attack:
    """`run` attacks for some seconds at most, frees what it holds, and returns in a few words what it was answered.

    It raises AssertionError where that is not the answer due. Its caller watches the router meanwhile: its probes, its other clients,
    and its memory. `short`: belongs to the short form, which every change must pass: a second or two. `control`: the name of an attack
    that is none, but as much load: where that ran before, no stall may be much longer than with it.
    """

    name: str
    run: Callable[[Target], Awaitable[str]]
    short: bool = False
    control: str = ""


def session_of(target: Target, key: str = "", *, limit: int = 100) -> aiohttp.ClientSession:
    """An ordinary client with the attacker's key, or another. `limit`: of its connections; 0: none."""
    headers, connector = {"Authorization": f"Bearer {key or target.api_key}"}, aiohttp.TCPConnector(limit=limit)
    return aiohttp.ClientSession(target.http_url, headers=headers, timeout=aiohttp.ClientTimeout(120), connector=connector)


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
    """The answer's status and its JSON."""
    async with http.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def upload(http: aiohttp.ClientSession, content: bytes) -> tuple[int, str]:
    """Status, and the id of a file of a batch's requests."""
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", content, filename="a.jsonl")
    async with http.post("/v1/files", data=form) as answer:
        return answer.status, str((await answer.json()).get("id"))


def some(statuses: Sequence[int], *allowed: int) -> str:
    """Says which they are; all are to be among those allowed."""
    assert set(statuses) <= set(allowed), statuses
    return f"answered with {sorted(set(statuses))}"
