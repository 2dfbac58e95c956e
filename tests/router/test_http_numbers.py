"""Every numeric field of every endpoint, as /openapi.json lists them: what counts as a number, and that a wrong one costs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from http_fakes import MESSAGES, served
from router_fakes import Cluster

# The least body of every endpoint that takes JSON.
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": "x"},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
# As JSON: texts and booleans are no numbers, and no field reaches this far.
WRONG = ('"1"', "true", "1e400", "NaN", "1" + "0" * 30, "{}")


def alternatives(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for each in schema.get("anyOf", schema.get("oneOf", ())):
        yield from alternatives(each, schemas)
    if "anyOf" not in schema and "oneOf" not in schema:
        yield schema


def numbers(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yields the numeric fields of a body: name, a template of the value as JSON, and an integer that the field may have. A prompt may be
    of numbers, but it may be a text too."""
    for body in alternatives(schema, schemas):
        for name, field in body.get("properties", {}).items():
            kinds = list(alternatives(field, schemas))
            for kind in [] if any(kind.get("type") == "string" for kind in kinds) else kinds:
                assert not {"ge", "le"} & set(kind), f"{name} has bounds that no reader of the description knows"
                items = kind.get("items", {})
                if kind.get("type") in ("integer", "number"):
                    yield name, "%s", max(1, kind.get("minimum", 1))
                elif items.get("type") in ("integer", "number"):
                    yield name, "[%s]", max(1, items.get("minimum", 1))


async def test_numbers_are_taken_by_one_rule_and_wrong_ones_cost_nothing(cluster: Cluster, tmp_path: Path) -> None:
    num_fields = 0
    async with served(cluster, batch_dir=tmp_path / "batches") as http:
        bodies, schemas = await described(http)
        assert set(bodies) == set(LEAST), "name the least body of each endpoint above"
        for path, schema in bodies.items():
            # Which the others have for 1 alone, and do not describe.
            alone = {("n", "%s", 1)} if path in ("/v1/responses", "/v1/messages") else set()
            for name, template, value in sorted({*numbers(schema, schemas), *alone}):
                num_fields += 1
                case = f"{path} {name}"
                integer = await status_of(http, path, name, template % value)
                assert integer in (200, 400, 404), case
                assert await status_of(http, path, name, template % f"{value}.0") == integer, case
                asked = num_asked(cluster)
                for wrong in WRONG:
                    assert await status_of(http, path, name, template % wrong) == 400, f"{case}: {wrong}"
                assert num_asked(cluster) == asked, case
    assert num_fields > 60


async def test_null_is_as_if_a_field_were_left_out(cluster: Cluster, tmp_path: Path) -> None:
    async with served(cluster, batch_dir=tmp_path / "batches") as http:
        bodies, schemas = await described(http)
        for path, schema in bodies.items():
            least = await status_of(http, path, "left_out", "null")
            for body in alternatives(schema, schemas):
                optional = sorted(set(body["properties"]) - set(body.get("required", ())) - set(LEAST[path]))
                nulls = ", ".join(f"{json.dumps(name)}: null" for name in optional)
                assert await status_of(http, path, "left_out", f"0, {nulls}") == least, path


async def described(http: aiohttp.ClientSession) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the schemas of all JSON bodies by path, and those that they refer to."""
    async with http.get("/openapi.json") as answer:
        document = await answer.json()
    media = "application/json"
    contents = {path: each.get("post", {}).get("requestBody", {}).get("content", {}) for path, each in document["paths"].items()}
    return {path: content[media]["schema"] for path, content in contents.items() if media in content}, document["components"]["schemas"]


async def status_of(http: aiohttp.ClientSession, path: str, name: str, value: str) -> int:
    """Sends the least body with the field, whose value is JSON as it is written. Returns the status of the answer."""
    members = [f"{json.dumps(other)}: {json.dumps(given)}" for other, given in LEAST[path].items() if other != name]
    raw = "{" + ", ".join([*members, f"{json.dumps(name)}: {value}"]) + "}"
    async with http.post(path, data=raw, headers={"content-type": "application/json"}) as answer:
        told = await answer.json()
        assert answer.status < 400 or told["error"]["message"]
        return answer.status


def num_asked(cluster: Cluster) -> int:
    return sum(len(worker.requests) for worker in cluster.workers)
