"""Everything that a client can send, drawn at random and grown to its limit, and before it as many innocent requests, which show what load
alone does.

    python tests/hostile/hostile.py --only everything --requests 10000 --seed 7

Bodies are drawn from the router's own description of its endpoints (GET /openapi.json), messages of gRPC from their descriptors: of either
some fields, each with a value of its type, a wrong one now and then. A value's size is 10 to the power of a random number, up to what
a request may have; texts are words, tokens of chats, blanks, expressions, schemas and other programs.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
from attack import CHAT, TEXT, Attack, Target, session_of
from attacks_grammars import LARKS, REGEXES, SCHEMAS
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from grpc import aio

from twostep.rpc.v1 import inference_pb2 as pb
from twostep.rpc.v1 import inference_pb2_grpc

_AT_ONCE = 6
# Beyond what the router takes (16 MiB), now and then.
_MOST_DIGITS = 7.3
_MOST_ITEMS = 200_000
_MOST_BYTES = 17 << 20
_PATIENCE_S = 60.0
# What is bad for a neighbour at once is not drawn: files and batches outlive their attack.
_PATHS = (CHAT, TEXT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/tokenize", "/detokenize")
_PIECES = (
    *("a", "word ", " ", "\n", "\n ", "<|im_start|>", "<|im_", "é", "\u0301", "🙂"),
    *("0", "{", "[", "\\", '"', "{{ messages }}", "\x00", "(a|b)*"),
)
_WRONG: Sequence[Any] = (None, True, -1, 1.5, 1e308, 1 << 62, "", "x", [], {}, [[]], {"a": {}})
# Answers are short: it is the requests that are large.
_SHORT = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "min_tokens")


class Drawing:
    """Draws values. `room`: bytes that are left for one request."""

    def __init__(self, rng: random.Random, target: Target) -> None:
        self._rng, self._target = rng, target
        self.room = 0

    def size(self, most: float) -> int:
        """Returns a size of any order of magnitude, within the room that is left; it takes that."""
        size = int(min(10 ** self._rng.uniform(0, _MOST_DIGITS), most, max(1, self.room)))
        self.room -= size
        return size

    def text(self, most: float = _MOST_BYTES) -> str:
        if most > 1000 and self._rng.random() < 0.05:
            return self._rng.choice([*REGEXES, *LARKS, json.dumps(self._rng.choice(SCHEMAS))])
        size, piece = self.size(most), self._rng.choice(_PIECES)
        return piece * (size // len(json.dumps(piece)) + 1)

    def number(self, schema: dict[str, Any]) -> float:
        low, high = schema.get("minimum", 0), schema.get("maximum", 1 << 20)
        return self._rng.choice([low, high, 0, 1, min(high, low + 1)])

    def value(self, schema: dict[str, Any], parts: dict[str, Any], depth: int = 0) -> Any:
        """Draws a value of a JSON Schema whose definitions are `parts`."""
        rng = self._rng
        if "$ref" in schema:
            schema = parts[schema["$ref"].rpartition("/")[2]]
        if rng.random() < 0.005 or depth > 8:
            return rng.choice(_WRONG)
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return self.value(rng.choice(schema[key]), parts, depth + 1)
        if "const" in schema or "enum" in schema:
            return rng.choice(schema.get("enum") or [schema["const"]])
        kind = schema.get("type", "object")
        if isinstance(kind, list):
            kind = rng.choice(kind)
        match kind:
            case "string":
                return self.text(schema.get("maxLength", _MOST_BYTES) + 1)
            case "integer" | "number":
                found = self.number(schema)
                return int(found) if kind == "integer" else found
            case "boolean":
                return rng.random() < 0.5
            case "array":
                return self._items(schema, parts, depth)
            case "object" if "properties" in schema:
                return self.members(schema, parts, depth)
            case "object":
                return rng.choice([*SCHEMAS, {self.text(100): self.text(1000) for _ in range(self.size(50))}])
            case _:
                return None

    def _items(self, schema: dict[str, Any], parts: dict[str, Any], depth: int) -> list[Any]:
        """Draws a few, and repeats them."""
        size = self.size(min(schema.get("maxItems", _MOST_ITEMS) + 1, _MOST_ITEMS))
        drawn = [self.value(schema.get("items", {}), parts, depth + 1) for _ in range(min(size, 3))]
        if not drawn:
            return []
        each = len(json.dumps(drawn)) // len(drawn)
        size = max(1, min(size, self.room // each))
        self.room -= size * each
        return [drawn[i % len(drawn)] for i in range(size)]

    def members(self, schema: dict[str, Any], parts: dict[str, Any], depth: int = 0) -> dict[str, Any]:
        rng, found = self._rng, dict[str, Any]()
        for name, each in schema["properties"].items():
            if name == "model":
                continue
            if name in schema.get("required", ()) or rng.random() < 0.15:
                found[name] = rng.choice([1, 2, 3]) if name in _SHORT else self.value(each, parts, depth + 1)
        return found

    def fill(self, message: Message, depth: int = 0) -> None:
        """Draws some of a message's fields."""
        descriptor: Descriptor = message.DESCRIPTOR
        for each in descriptor.fields:
            if self._rng.random() < (0.7 if each.containing_oneof else 0.25) and depth < 6:
                self._fill_field(message, each, depth)

    def _fill_field(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.name in ("model", *_SHORT) or is_map:
            return
        if field.message_type is not None:
            inner = getattr(message, field.name)
            if not field.is_repeated:
                inner.SetInParent()
                self.fill(inner, depth + 1)
                return
            size, drawn = self.size(3000), inner.add()
            self.fill(drawn, depth + 1)
            for _ in range(min(size, self.room // max(10, drawn.ByteSize()))):
                inner.add().CopyFrom(drawn)
            return
        draw = self._scalar(field)
        if field.is_repeated:
            size, drawn = self.size(_MOST_ITEMS), draw()
            getattr(message, field.name).extend([drawn] * max(1, min(size, self.room // (len(str(drawn)) + 1))))
        else:
            setattr(message, field.name, draw())

    def _scalar(self, field: FieldDescriptor) -> Callable[[], Any]:
        rng = self._rng
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING:
                if field.type == FieldDescriptor.TYPE_BYTES:
                    return lambda: self.text().encode()
                return (lambda: rng.choice(["user", "assistant", "system"])) if field.name == "role" else self.text
            case FieldDescriptor.CPPTYPE_BOOL:
                return lambda: rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return lambda: rng.choice([0.0, 0.5, 1.0, -1.0, float("inf"), float("nan")])
            case FieldDescriptor.CPPTYPE_ENUM:
                return lambda: rng.choice([0, 1, 2])
            case _:
                return lambda: rng.choice([0, 1, 5, 300, (1 << 31) - 1])


async def _send_all(target: Target, one: Callable[[random.Random, aiohttp.ClientSession, Any], Any]) -> str:
    """Sends so many requests, some at once. Returns how they were answered."""
    found: Counter[int | str] = Counter()
    numbers = iter(range(target.num_requests))
    async with session_of(target) as http, aio.insecure_channel(target.grpc_target) as channel:

        async def send() -> None:
            for number in numbers:
                rng = random.Random(f"{target.seed} {number}")
                try:
                    async with asyncio.timeout(_PATIENCE_S):
                        found[await one(rng, http, inference_pb2_grpc.InferenceStub(channel))] += 1
                except TimeoutError:
                    found["late"] += 1
                except aiohttp.ClientError as error:
                    found[type(error).__name__] += 1
                except aio.AioRpcError as error:
                    assert error.code().name not in ("INTERNAL", "UNKNOWN", "UNAVAILABLE"), error  # noqa: PT017 - no test of pytest's
                    found[error.code().name] += 1

        await asyncio.gather(*(send() for _ in range(_AT_ONCE)))
    assert not any(isinstance(status, int) and status >= 500 and status != 503 for status in found), found
    return ", ".join(f"{count} × {status}" for status, count in found.most_common(6))


async def _innocent(target: Target) -> str:
    """Requests of the same kinds as an ordinary client's."""
    bodies: Sequence[tuple[str, dict[str, Any]]] = (
        (CHAT, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
        (TEXT, {"prompt": "hello", "max_tokens": 2}),
        ("/tokenize", {"prompt": "hello " * 100}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 2, "store": False}),
    )

    async def one(rng: random.Random, http: aiohttp.ClientSession, stub: Any) -> int | str:
        path, body = rng.choice(bodies)
        async with http.post(path, json=body) as answer:
            await answer.read()
            return answer.status

    return await _send_all(target, one)


async def _everything(target: Target) -> str:
    async with session_of(target) as http, http.get("/openapi.json") as answer:
        described = await answer.json()
    parts = described["components"]["schemas"]
    bodies = {path: described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"] for path in _PATHS}

    async def one(rng: random.Random, http: aiohttp.ClientSession, stub: Any) -> int | str:
        drawing = Drawing(rng, target)
        drawing.room = int(10 ** rng.uniform(1, _MOST_DIGITS))
        if rng.random() < 0.25:
            return await _grpc(rng, drawing, stub, (("authorization", f"Bearer {target.api_key}"),))
        path = rng.choice(_PATHS)
        data = await asyncio.to_thread(lambda: json.dumps(drawing.value(bodies[path], parts)).encode()[:_MOST_BYTES])
        async with http.post(path, data=data, headers={"content-type": "application/json"}) as answer:
            async for _ in answer.content.iter_any():
                pass
            return answer.status

    return await _send_all(target, one)


async def _grpc(rng: random.Random, drawing: Drawing, stub: Any, metadata: Any) -> str:
    kind = rng.choice([pb.GenerateRequest, pb.TokenizeRequest, pb.EmbedRequest])
    message = kind()
    await asyncio.to_thread(drawing.fill, message)
    if isinstance(message, pb.GenerateRequest):
        message.sampling.max_tokens = rng.choice([1, 2, 3])
        async for _ in stub.Generate(message, metadata=metadata):
            pass
    else:
        await (stub.Tokenize if isinstance(message, pb.TokenizeRequest) else stub.Embed)(message, metadata=metadata)
    return "OK"


_CONTROL = "everything: as many innocent requests"
ATTACKS = (
    Attack(_CONTROL, _innocent),
    Attack("everything: drawn at random and grown", _everything, control=_CONTROL),
)
