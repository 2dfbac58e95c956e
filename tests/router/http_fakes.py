"""Clients of the HTTP front: OpenAI's, and one that hides nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from openai import AsyncOpenAI, OpenAI
from router_fakes import Cluster, Hook

MESSAGES: list[Any] = [{"role": "user", "content": "the capital of France"}]
RENDERED = "<|im_start|>user\nthe capital of France<|im_end|>\n<|im_start|>assistant\n"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def url(cluster: Cluster) -> str:
    return f"http://127.0.0.1:{cluster.router.http_port}"


@asynccontextmanager
async def open_client(cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url(cluster)}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def blocking_client(cluster: Cluster) -> OpenAI:
    return OpenAI(base_url=f"{url(cluster)}/v1", api_key="unused", max_retries=0, timeout=120)


@asynccontextmanager
async def open_http(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url(cluster), timeout=aiohttp.ClientTimeout(120)) as session:
        yield session


def when(gate: asyncio.Event) -> Hook:
    async def hook(_request: Any, _context: Any) -> None:
        await gate.wait()

    return hook


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, **fields}


async def raw_events(answer: aiohttp.ClientResponse) -> list[Any]:
    """Data of all events, in order; comments are left out."""
    return events_of(await answer.read())


def events_of(raw: bytes) -> list[Any]:
    found: list[Any] = []
    for event in raw.decode("ascii").split("\n\n"):
        if event.startswith("data: "):
            data = event.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        else:
            assert not event or event.startswith(":"), event
    return found
