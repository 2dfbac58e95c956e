"""Answers held to a form, from the official client's request to the workers and back; with a worker lost in the middle of one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from test_stream_logs import lose_first
from whole_system import WholeSystem, whole_system

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 12, "maxLength": 20},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 3, "maxItems": 5},
        "kind": {"enum": ["river", "sea"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}


@asynccontextmanager
async def asked(model_dir: Path, tmp_path: Path, **options: Any) -> AsyncIterator[tuple[WholeSystem, openai.AsyncOpenAI]]:
    async with whole_system(model_dir, tmp_path, port=0, **options) as system:
        base_url = f"http://127.0.0.1:{system.routers[0].http_port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
            yield system, client


def form(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


async def complete(client: openai.AsyncOpenAI, text: str, **options: Any) -> tuple[str, str]:
    """The answer's text and why it ended."""
    body: dict[str, Any] = {"max_tokens": options.pop("max_tokens", 400), "seed": 5, "temperature": 0}
    reply = await client.completions.create(model="m", prompt=text, **body, extra_body=options)
    return reply.choices[0].text, reply.choices[0].finish_reason


@pytest.mark.parametrize("aggregated", [False, True])
async def test_answers_are_valid_beside_others(fake_model_dir: Path, tmp_path: Path, aggregated: bool) -> None:
    async with asked(fake_model_dir, tmp_path, aggregated=aggregated) as (system, client):
        free = await complete(client, "rivers", max_tokens=30)
        answers = await asyncio.gather(
            *(complete(client, f"river {i}", response_format=form(SCHEMA)) for i in range(5)),
            complete(client, "any", response_format={"type": "json_object"}, max_tokens=25),
            complete(client, "match", structured_outputs={"regex": "[a-f]{3}-[0-9]{2,4}"}),
            complete(client, "rivers", max_tokens=30),
        )
        for text, reason in answers[:5]:
            assert reason == "stop"
            jsonschema.validate(json.loads(text), SCHEMA)
        assert answers[5][0].lstrip().startswith("{")
        assert re.fullmatch("[a-f]{3}-[0-9]{2,4}", answers[6][0])
        assert answers[7] == free
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            await complete(client, "no", response_format=form({"type": "array", "uniqueItems": True}))
        await system.settled()


async def test_a_lost_worker_leaves_no_trace_in_the_answer(fake_model_dir: Path, tmp_path: Path) -> None:
    """Another attempt goes on where the grammar was."""
    async with asked(fake_model_dir, tmp_path, num_decode=2) as (system, client):
        whole = await complete(client, "the sea", response_format=form(SCHEMA))
        asking = asyncio.create_task(complete(client, "the sea", response_format=form(SCHEMA)))
        await lose_first(system, asking)
        assert await asking == whole
        jsonschema.validate(json.loads(whole[0]), SCHEMA)
        await system.settled()
