"""Files of requests, and batches of them through OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from http_fakes import CHAT, MESSAGES
from openai import AsyncOpenAI
from openai.types import Batch

ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"messages": MESSAGES, "max_tokens": 4} if url == CHAT else {"prompt": "the capital", "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **given, **body}}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


async def submit(client: AsyncOpenAI, content: bytes, endpoint: Any = CHAT, **options: Any) -> Batch:
    file = await client.files.create(file=("requests.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


async def ended(client: AsyncOpenAI, batch_id: str, timeout_s: float = 120.0) -> Batch:
    give_up = time.monotonic() + timeout_s
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ENDED:
            return batch
        assert time.monotonic() < give_up, batch
        await asyncio.sleep(0.05)


async def answers(client: AsyncOpenAI, file_id: str | None) -> list[Any]:
    """Lines of an output or error file."""
    if file_id is None:
        return []
    return [json.loads(each) for each in (await client.files.content(file_id)).content.splitlines()]
