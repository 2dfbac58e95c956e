# ruff: noqa: F811  # fixtures of another file
"""Stored answers of /v1/responses: conversations that go on with them, whose they are, and what becomes of requests without Redis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from http_fakes import open_client, served, told
from router_fakes import Cluster
from test_http_dialects import EVERYTHING, OPENAI_TOOLS, RESPONSES, hermes, hermes_dir, stream  # noqa: F401
from test_http_tools import answer_with, prompt_of

from router.http import response_store
from twostep.keys.api_key_file import put_in_file, remove_from_file
from twostep.keys.api_keys import make_key

USER: list[Any] = [{"role": "user", "content": "hi"}]
RESULTS = [{"type": "function_call_output", "call_id": "?", "output": text} for text in ("rain", "noon")]


async def ask(http: aiohttp.ClientSession, *, status: int = 200, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"input": "hi", "max_output_tokens": 200, **fields}
    return await told(http, RESPONSES, body, status, headers=headers or {})


async def test_a_conversation_by_its_last_answer(hermes: Cluster) -> None:
    """Each turn sends what is new, and its prompt is that of all items so far; instructions are of their own turn alone."""
    answer_with(hermes, EVERYTHING)
    async with served(hermes) as http:
        first = await ask(http, tools=OPENAI_TOOLS, instructions="Be short.")
        assert first["store"] is True
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        results = [{**result, "call_id": call["call_id"]} for call, result in zip(calls, RESULTS, strict=True)]
        answer_with(hermes, "It rains.")
        second = await ask(http, tools=OPENAI_TOOLS, input=results, previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        third_input = [{"role": "user", "content": "Really?"}]
        third = await ask(http, tools=OPENAI_TOOLS, input=third_input, previous_response_id=second["id"])
        prompt = prompt_of(hermes)
        everything = [*USER, *first["output"], *results, *second["output"], *third_input]
        await ask(http, tools=OPENAI_TOOLS, input=everything, store=False)
        assert prompt_of(hermes) == prompt
        assert "Be short." not in prompt
        # Another branch, in a stream, whose last event says what is stored.
        events = await stream(http, RESPONSES, input=third_input, previous_response_id=second["id"], tools=OPENAI_TOOLS)
        assert prompt_of(hermes) == prompt
        streamed = events[-1]["response"]
        assert await told(http, f"{RESPONSES}/{streamed['id']}") == streamed
        counted = await told(
            http, f"{RESPONSES}/input_tokens", {"input": third_input, "previous_response_id": second["id"], "tools": OPENAI_TOOLS}
        )
        assert counted == {"object": "response.input_tokens", "input_tokens": third["usage"]["input_tokens"]}


async def test_items_by_reference(hermes: Cluster) -> None:
    """The Vercel AI SDK's second turn refers to items of the first."""
    answer_with(hermes, EVERYTHING)
    async with served(hermes) as http:
        first = await ask(http, tools=OPENAI_TOOLS)
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        results = [{**result, "call_id": call["call_id"]} for call, result in zip(calls, RESULTS, strict=True)]
        answer_with(hermes, "It rains.")
        await ask(http, tools=OPENAI_TOOLS, input=[*USER, *first["output"], *results], store=False)
        wanted = prompt_of(hermes)
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        second = await ask(http, tools=OPENAI_TOOLS, input=[*USER, *references, *results])
        assert prompt_of(hermes) == wanted
        await ask(http, tools=OPENAI_TOOLS, input=[*USER, *({"id": each["id"]} for each in references), *results])
        assert prompt_of(hermes) == wanted
        # Items of a request have ids too, which say nothing of what was a reference in it.
        items = (await told(http, f"{RESPONSES}/{second['id']}/input_items?order=asc"))["data"]
        await ask(http, tools=OPENAI_TOOLS, input=[{"type": "item_reference", "id": item["id"]} for item in items])
        assert prompt_of(hermes) == wanted
        for item_id in ("msg_1", first["output"][0]["id"][:-1] + "99", f"msg_{'0' * 32}_0", "x" * 200):
            await ask(http, input=[{"type": "item_reference", "id": item_id}], status=404)


async def test_stored_answers_are_read_and_deleted(hermes: Cluster) -> None:
    answer_with(hermes, EVERYTHING)
    many = [{"role": "user", "content": f"{i}"} for i in range(5)]
    async with served(hermes) as http, open_client(hermes) as client:
        made = await client.responses.create(model="m", input=many, tools=OPENAI_TOOLS, max_output_tokens=200)
        found = await client.responses.retrieve(made.id)
        assert found == made
        items = [item async for item in client.responses.input_items.list(made.id, limit=2, order="asc")]
        assert [item.content[0].text for item in items] == [f"{i}" for i in range(5)]
        backwards = [item.id async for item in client.responses.input_items.list(made.id)]
        assert backwards == [item.id for item in reversed(items)]
        path = f"{RESPONSES}/{made.id}"
        await told(http, f"{path}?stream=true", status=400)
        await told(http, f"{path}/input_items?after=x", status=400)
        await told(http, f"{path}/cancel", status=400, method="POST")
        assert await told(http, path, method="DELETE") == {"id": made.id, "object": "response", "deleted": True}
        for method, where in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel")):
            await told(http, where, status=404, method=method)
        gone = await ask(http, previous_response_id=made.id, status=400)
        assert (gone["error"]["code"], gone["error"]["param"]) == ("previous_response_not_found", "previous_response_id")


async def test_a_deleted_turn_ends_the_conversation_after_it(hermes: Cluster) -> None:
    answer_with(hermes, "Hello.")
    async with served(hermes) as http:
        first = await ask(http)
        second = await ask(http, previous_response_id=first["id"])
        await told(http, f"{RESPONSES}/{first['id']}", method="DELETE")
        gone = await ask(http, previous_response_id=second["id"], status=400)
        assert gone["error"]["code"] == "previous_response_not_found"


async def test_nothing_is_stored_that_the_client_does_not_want_stored(hermes: Cluster) -> None:
    answer_with(hermes, "Hello.")
    async with served(hermes) as http:
        made = await ask(http, store=False)
        assert made["store"] is False
        assert (await stream(http, RESPONSES, store=False))[-1]["response"]["store"] is False
        await told(http, f"{RESPONSES}/{made['id']}", status=404)
        await ask(http, input=[{"type": "item_reference", "id": made["output"][0]["id"]}], status=404)


async def test_the_operator_turns_storage_off(hermes: Cluster) -> None:
    answer_with(hermes, "Hello.")
    async with served(hermes, response_ttl=0.0) as http:
        for store in (None, True):
            made = await ask(http, store=store)
            assert made["store"] is False
        await told(http, f"{RESPONSES}/{made['id']}", status=404)
        error = (await ask(http, previous_response_id=made["id"], status=400))["error"]
        assert error["param"] == "previous_response_id"
        await ask(http, input=[{"type": "item_reference", "id": made["output"][0]["id"]}], status=400)


async def test_an_answer_is_its_keys_alone(hermes: Cluster, tmp_path: Path) -> None:
    """Another key, and another tenant of a gateway's key, find nothing; with the key all that it has stored is deleted."""
    answer_with(hermes, "Hello.")
    path = tmp_path / "keys.jsonl"
    (her_key, ann), (his_key, bob) = make_key(name="ann"), make_key(name="bob", speaks_for_tenants=True)
    for each in (ann, bob):
        put_in_file(path, each)
    hers, his = {"authorization": f"Bearer {her_key}"}, {"authorization": f"Bearer {his_key}"}
    async with served(hermes, api_keys_file=path) as http:
        made = await ask(http, headers=hers)
        where = f"{RESPONSES}/{made['id']}"
        await told(http, where, headers=hers)
        for method in ("GET", "DELETE"):
            await told(http, where, status=404, headers=his, method=method)
        await ask(http, headers=his, previous_response_id=made["id"], status=400)
        await ask(http, headers=his, input=[{"type": "item_reference", "id": made["output"][0]["id"]}], status=404)
        of_tenant = await ask(http, headers={**his, "x-twostep-tenant": "one"})
        await told(http, f"{RESPONSES}/{of_tenant['id']}", headers={**his, "x-twostep-tenant": "one"})
        await told(http, f"{RESPONSES}/{of_tenant['id']}", headers={**his, "x-twostep-tenant": "two"}, status=404)
        await told(http, f"{RESPONSES}/{of_tenant['id']}", headers=his, status=404)
        await told(http, where, headers=hers)
        remove_from_file(path, ann.id)
        await hermes.router.access.refresh()
        await told(http, where, status=401, headers=hers)
        # The key is missing at a second look too: a file that is being written is empty for a moment.
        await hermes.router.access.refresh()
        assert hermes.router.responses is not None
        await hermes.router.responses.purge()
        keys = await hermes.redis.keys("twostep:v1:responses:*")
        assert not [key for key in keys if ann.id in str(key)]
        assert [key for key in keys if bob.id in str(key)]


async def test_a_forged_record_is_no_answer(hermes: Cluster) -> None:
    answer_with(hermes, "Hello.")
    async with served(hermes) as http:
        made, other = await ask(http), await ask(http, input="Who are you?")
        keys = {key.decode() if isinstance(key, bytes) else key for key in await hermes.redis.keys("twostep:v1:responses:value:*")}
        mine, others = (next(key for key in keys if each["id"].removeprefix("resp_") in key) for each in (made, other))
        value = await hermes.redis.get(mine)
        for forged in (value.replace(b"Hello.", b"I say."), b"{}", b"", await hermes.redis.get(others)):
            await hermes.redis.set(mine, forged)
            await told(http, f"{RESPONSES}/{made['id']}", status=404)


async def test_what_is_too_large_or_has_no_room_is_answered_without_being_stored(hermes: Cluster) -> None:
    answer_with(hermes, "Hello.")
    async with served(hermes, response_bytes=1024) as http:
        assert (await ask(http))["store"] is False
        assert (await stream(http, RESPONSES))[-1]["response"]["store"] is False


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_without_redis(hermes: Cluster, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain request is answered; one that needs a stored answer is told to come again."""
    answer_with(hermes, "Hello.")
    async with served(hermes) as http:
        made = await ask(http)
        assert made["store"] is True
        getattr(hermes.redis_server, how)()
        if how == "freeze":
            await ask(http, previous_response_id=made["id"], timeout=0.1, status=504)
        monkeypatch.setattr(response_store, "WAIT_S", 0.1)
        for _ in range(2):
            assert (await ask(http))["store"] is False
            assert (await stream(http, RESPONSES))[-1]["response"]["store"] is False
            assert "input" in (await ask(http, previous_response_id=made["id"], status=503))["error"]["message"]
            await told(http, f"{RESPONSES}/{made['id']}", status=503)
        if how == "freeze":
            hermes.redis_server.thaw()
