"""Answers that come to much, clients that do not read them, and files without number."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
from attack import CHAT, TEXT, Attack, Target, post, session_of, some, upload

# Longer than a neighbour's answer takes beside them.
_STREAMS_S = 20.0
_MESSAGES = [{"role": "user", "content": "Say hello."}]


async def _drained(answer: aiohttp.ClientResponse) -> int:
    """Bytes of it, none of which is kept."""
    return sum([len(piece) async for piece in answer.content.iter_chunked(1 << 16)])


async def _many_logprobs(target: Target) -> str:
    """A small body whose answer is megabytes."""
    body = {"messages": _MESSAGES, "n": 32, "max_tokens": 200, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    async with session_of(target) as http, http.post(CHAT, json=body) as answer:
        num_bytes = await _drained(answer)
        return f"{some([answer.status], 200, 429, 503)}, {num_bytes >> 10} KiB"


async def _many_streams(target: Target) -> str:
    """As many streams as a client may like, with all log probabilities, read slowly."""
    body = {"messages": _MESSAGES, "max_tokens": 120, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20}

    async def one(http: aiohttp.ClientSession) -> int:
        try:
            async with asyncio.timeout(_STREAMS_S), http.post(CHAT, json=body) as answer:
                async for _ in answer.content.iter_chunked(8 << 10):
                    await asyncio.sleep(0.02)
                return answer.status
        except TimeoutError:
            return 200

    async with session_of(target, limit=0) as http:
        return some(await asyncio.gather(*(one(http) for _ in range(200))), 200, 429)


async def _too_much(target: Target) -> str:
    """An answer that could come to gigabytes is refused before it begins."""
    async with session_of(target) as http:
        async with http.get("/v1/models") as models:
            tokens = max(1, (await models.json())["data"][0]["max_model_len"] // 2)
        prompts = min(32, (512 << 20) // (128 * tokens * 176) + 1)
        if 128 * prompts * tokens * 176 < 256 << 20:
            return "the model's context is too small for it"
        status, told = await post(http, TEXT, {"prompt": ["a"] * prompts, "n": 128, "max_tokens": tokens, "logprobs": 20})
    assert status == 400, (status, told)
    return f"400: {told['error']['message'][:60]}"


async def _stuck(target: Target, path: str, body: dict[str, Any]) -> socket.socket:
    """Asks, and never reads."""
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {target.host}\r\nAuthorization: Bearer {target.api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (target.host, target.http_port))
    await loop.sock_sendall(sock, head.encode() + raw)
    return sock


async def _readers_that_do_not(target: Target) -> str:
    """Whole answers, streams and texts of token ids that nobody takes."""
    logprobs = {"ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    asked = (
        (CHAT, {"messages": _MESSAGES, "n": 4, "max_tokens": 200, **logprobs}),
        (CHAT, {"messages": _MESSAGES, "n": 4, "max_tokens": 200, "stream": True, **logprobs}),
        ("/detokenize", {"tokens": [50] * (1 << 17)}),
    )
    socks = await asyncio.gather(*(_stuck(target, path, body) for path, body in asked for _ in range(4)))
    try:
        await asyncio.sleep(3.0)
    finally:
        for sock in socks:
            sock.close()
    return f"{len(socks)} held for 3 s"


async def _many_choices(target: Target) -> str:
    """A client asks for as many answers at once as it may, and goes away."""
    statuses = []
    body = {"messages": _MESSAGES, "n": 128, "max_tokens": 200, "ignore_eos": True, "stream": True}
    for _ in range(3):
        async with session_of(target) as http, http.post(CHAT, json=body) as answer:
            statuses.append(answer.status)
            await answer.content.readany()
            answer.close()
    return f"{statuses}"


async def _long_token_lists(target: Target) -> str:
    async with session_of(target) as http:
        statuses = [(await post(http, "/detokenize", {"tokens": [50] * num_ids}))[0] for num_ids in (1 << 17, 1 << 20)]
    assert statuses == [200, 400], statuses
    return f"{statuses}"


async def _long_names(target: Target) -> str:
    """Long names of fields and models, which errors would quote."""
    name = "x" * (2 << 20)
    async with session_of(target) as http:
        bodies = ({"messages": _MESSAGES, "model": name}, {"messages": [{"role": "user", "content": 1, name: 1}]})
        answers = [await post(http, CHAT, body) for body in bodies]
    longest = max(len(json.dumps(told)) for _, told in answers)
    assert longest < 10_000, longest
    return f"{some([status for status, _ in answers], 400, 404)}, {longest} bytes at most"


async def _lines_of_lists(target: Target) -> str:
    """A batch of lines that are nothing but lists of lists."""
    line = b'{"custom_id": "%s", "method": "POST", "url": "%s", "body": {"messages": [%s]}}\n'
    content = b"".join(line % (name, CHAT.encode(), b",".join([b"[[],[]]"] * (1 << 20))) for name in (b"a", b"b"))
    async with session_of(target) as http:
        status, file_id = await upload(http, content)
        if status != 200:
            return some([status], 404, 429)
        try:
            _, batch = await post(http, "/v1/batches", {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"})
            for _ in range(100):
                await asyncio.sleep(0.1)
                async with http.get(f"/v1/batches/{batch['id']}") as answer:
                    batch = await answer.json()
                if batch["status"] == "failed":
                    return str(batch["errors"]["data"][0]["code"])
            raise AssertionError(batch["status"])
        finally:
            await http.delete(f"/v1/files/{file_id}")


ATTACKS = (
    Attack("a chat whose whole answer is megabytes of log probabilities", _many_logprobs),
    Attack("200 streams of log probabilities of one key, read slowly", _many_streams),
    Attack("completions that could come to gigabytes", _too_much, short=True),
    Attack("clients that do not read whole answers, streams, texts", _readers_that_do_not),
    Attack("128 answers at once, and their client goes", _many_choices),
    Attack("long lists of token ids", _long_token_lists, short=True),
    Attack("long names that errors would quote", _long_names, short=True),
    Attack("a batch whose lines are lists of lists", _lines_of_lists),
)
