"""Schemas, expressions and tools that take long to read or compile, and much memory; and one caller's many, beside another's one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import psutil
from attack import CHAT, TEXT, Attack, Target, post, session_of, some
from grpc import aio

from twostep.rpc.v1 import inference_pb2 as pb
from twostep.rpc.v1 import inference_pb2_grpc

_MESSAGES = [{"role": "user", "content": "hi"}]
_WORKERS_MAY_GROW = 512 << 20
_STATUSES = {"INVALID_ARGUMENT": 400, "RESOURCE_EXHAUSTED": 429}


def doubled(depth: int) -> dict[str, Any]:
    """Definitions that are each twice the next one: 2 ** depth paths."""
    defs: dict[str, Any] = {f"l{i}": {"allOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**defs, f"l{depth}": {"type": "object", "properties": {"a": {"type": "string"}}}}, "$ref": "#/$defs/l0"}


def chained(depth: int) -> dict[str, Any]:
    """Definitions that are each the next one and more: no path twice."""
    defs = {f"l{i}": {"allOf": [{"$ref": f"#/$defs/l{i + 1}"}], "properties": {f"p{i % 7}": {}}} for i in range(depth)}
    return {"$defs": {**defs, f"l{depth}": {"type": "object"}}, "$ref": "#/$defs/l0"}


def fanned(size: int) -> dict[str, Any]:
    """Properties that all refer to one of many parts."""
    parts: dict[str, Any] = {f"p{i}": {"properties": {f"a{i}": {}}} for i in range(size)}
    big = {"allOf": [{"$ref": f"#/$defs/p{i}"} for i in range(size)]}
    return {"$defs": {**parts, "big": big}, "properties": {f"q{i}": {"$ref": "#/$defs/big", "properties": {"b": {}}} for i in range(size)}}


SCHEMAS: Sequence[dict[str, Any]] = (
    *map(doubled, (14, 18, 25, 1000)),
    *map(chained, (1300, 3000)),
    *map(fanned, (300, 1500)),
    {"type": "integer", "multipleOf": 999_983},
    {"allOf": [{"type": "string", "pattern": f".*a{'b' * i}.{{30}}.*"} for i in range(40)]},
    {"type": "object", "properties": {f"property_{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i % 50 + 1}}}$"} for i in range(3000)}},
    {"enum": [f"value {i * 7919}" for i in range(12_000)]},
)
REGEXES = (r"(.*a){20}", r"(a|b)*a(a|b){60}", r"((a{50}){50}){50}", r"\p{L}{1900}", r"(.*x.{12}){12}")
LARKS = (
    "start: " + " | ".join(f"r{i}" for i in range(2000)) + "\n" + "\n".join(f'r{i}: "w{i}" /[a-z]+/' for i in range(2000)),
    "start: " + "(" * 400 + '"a"' + ")*" * 400,
    "start: A\nA: /(?s:.*)/ & ~/(?s:.*)hello(?s:.*)/ & /[a-z ]{10,800}/\n",
)


def tool(schema: Any, *, strict: bool = True) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}


def _format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


async def _ask(http: aiohttp.ClientSession, target: Target, path: str, **body: Any) -> int:
    status, _ = await post(http, path, {"model": target.model, "max_tokens": 2} | body)
    return status


async def _deep_schemas(target: Target) -> str:
    """Schemas of every kind wherever a request may have one, over HTTP and gRPC."""
    statuses = []
    async with session_of(target) as http:
        for schema in SCHEMAS:
            statuses += await asyncio.gather(
                _ask(http, target, CHAT, messages=_MESSAGES, response_format=_format(schema)),
                _ask(http, target, CHAT, messages=_MESSAGES, tools=[tool(schema)]),
                _ask(http, target, CHAT, messages=_MESSAGES, tools=[tool(schema)], tool_choice="required"),
                _ask(http, target, TEXT, prompt="x", structured_outputs={"json": schema}),
            )
    metadata = (("authorization", f"Bearer {target.api_key}"),)
    async with aio.insecure_channel(target.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for schema in SCHEMAS:
            sampling = pb.SamplingParams(max_tokens=2, grammar=pb.Grammar(json_schema=json.dumps(schema)))
            statuses.append(await _grpc_status(stub.Generate(pb.GenerateRequest(text="x", sampling=sampling), metadata=metadata)))
    return some(statuses, 200, 400, 429)


async def _grpc_status(call: Any) -> int:
    """Returns the HTTP status of a call's end."""
    try:
        async for _ in call:
            pass
    except aio.AioRpcError:
        return _STATUSES.get((await call.code()).name, 500)
    return 200


async def _expressions(target: Target) -> str:
    async with session_of(target) as http:
        asked = [{"regex": regex} for regex in REGEXES] + [{"grammar": lark} for lark in LARKS]
        statuses = await asyncio.gather(*(_ask(http, target, TEXT, prompt="x", structured_outputs=each) for each in asked))
    return some(statuses, 200, 400, 429)


async def _after_one(target: Target, path: str, much: Sequence[dict[str, Any]], little: dict[str, Any], *, most: int) -> str:
    """Sends the attacker's all at once, and a neighbour's when they are under way: at most so many of the first come before it."""
    async with session_of(target) as http, session_of(target, target.neighbour_key) as neighbour:
        asking = [asyncio.create_task(_ask(http, target, path, **body)) for body in much]
        await asyncio.sleep(0.3)
        before, begun = sum(task.done() for task in asking), time.monotonic()
        status = await _ask(neighbour, target, path, **little)
        took_s, done = time.monotonic() - begun, sum(task.done() for task in asking) - before
        assert status == 200, status
        # The others need not be waited for: what they take of the processor is the attacker's own.
        statuses = [task.result() for task in asking if task.done()]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    assert done <= most, f"{done} of {len(much)} came before a neighbour's, which took {took_s:.2f} s"
    return f"{some(statuses, 200, 400, 429)}; a neighbour's took {took_s:.2f} s"


async def _many_grammars(target: Target) -> str:
    def body(schema: Any) -> dict[str, Any]:
        return {"prompt": "x", "structured_outputs": {"json": schema}}

    new = time.time_ns() % 10**9
    much = [body({"type": "integer", "multipleOf": 999_983 + 2 * i}) for i in range(8)]
    return await _after_one(target, TEXT, much, body({"type": "object", "properties": {f"n{new}": {"type": "integer"}}}), most=3)


async def _many_known_grammars(target: Target) -> str:
    """Grammars that the router knows as good, and that workers have to compile again each time."""

    def body(number: int) -> dict[str, Any]:
        return {"prompt": "x", "structured_outputs": {"json": {"type": "integer", "multipleOf": number}}}

    much = [body(60_013 + 2 * i) for i in range(8)]
    async with session_of(target) as http:
        statuses = [await _ask(http, target, TEXT, **each) for each in much]
    assert set(statuses) == {200}, statuses
    new = {"prompt": "x", "structured_outputs": {"regex": f"[0-9]+{time.time_ns()}"}}
    return await _after_one(target, TEXT, much * 3, new, most=12)


async def _many_renders(target: Target) -> str:
    # Short enough by their own texts, so that all of them are rendered.
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": "<"} for i in range(2000)]
    return await _after_one(target, "/tokenize", [{"messages": turns}] * 40, {"messages": turns[:120]}, most=10)


async def _many_bodies(target: Target) -> str:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1500} for _ in range(8)]
    few = [{"role": "user", "content": [{"type": "text", "text": ""}] * 800}]
    # Processes start with the first bodies that need them, for each caller two at most. How long a start takes is no matter of turns.
    async with session_of(target) as http, session_of(target, target.neighbour_key) as neighbour:
        await asyncio.gather(*(_ask(each, target, "/tokenize", messages=few) for each in (http, http, neighbour, neighbour)))
    return await _after_one(target, "/tokenize", [{"messages": parts}] * 40, {"messages": few}, most=10)


async def _letters(target: Target) -> str:
    """Expressions of a few characters whose automata are megabytes, and answers that go far in them."""
    workers = _processes(target)
    before = sum(worker.memory_info().rss for worker in workers)
    async with session_of(target) as http:

        async def ask(i: int) -> int:
            regex = rf"{['', 'a', 'b'][i % 3]}\p{{L}}{{1900}}{i}"
            return await _ask(http, target, TEXT, prompt="x", structured_outputs={"regex": regex}, max_tokens=300, temperature=1.0, seed=i)

        statuses = []
        for start in range(0, 48, 6):
            statuses += await asyncio.gather(*map(ask, range(start, start + 6)))
    grown = sum(worker.memory_info().rss for worker in workers) - before
    assert grown < _WORKERS_MAY_GROW, f"the workers took {grown >> 20} MB"
    return f"{some(statuses, 200, 400, 429)}; the workers took {grown / 2**20:.0f} MB more"


def _processes(target: Target) -> list[psutil.Process]:
    """Returns the workers' processes, and those that they have started."""
    ports = {int(address.rpartition(":")[2]) for address in target.workers}
    listening = {each.pid for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN and each.laddr.port in ports}
    found = [psutil.Process(pid) for pid in listening if pid is not None]
    return [*found, *(child for each in found for child in each.children(recursive=True))]


ATTACKS = (
    Attack("grammars: schemas that refer to each other in many ways", _deep_schemas),
    Attack("grammars: expressions that take long", _expressions, short=True),
    Attack("grammars: one caller's many, and another's", _many_grammars),
    Attack("grammars: one caller's slow ones again, and another's", _many_known_grammars),
    Attack("grammars: letters of all alphabets", _letters),
    Attack("turns: one caller's long chats, and another's", _many_renders, short=True),
    Attack("turns: one caller's large bodies, and another's", _many_bodies, short=True),
)
