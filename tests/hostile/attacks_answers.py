"""Answers that come to much, clients that do not read them, and files without number."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import Any

import aiohttp
from attack import Attack, Target

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_MESSAGES = [{"role": "user", "content": "Say hello."}]


def _session(target: Target) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {target.api_key}"}
    return aiohttp.ClientSession(target.http_url, headers=headers, timeout=aiohttp.ClientTimeout(60))


async def _drained(answer: aiohttp.ClientResponse) -> int:
    """Bytes of it, none of which is kept."""
    return sum([len(piece) async for piece in answer.content.iter_chunked(1 << 16)])


async def _many_logprobs(target: Target) -> str:
    """A small body whose answer is megabytes."""
    async with _session(target) as http:
        body = {"messages": _MESSAGES, "n": 32, "max_tokens": 200, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
        async with http.post(_CHAT, json=body) as answer:
            num_bytes = await _drained(answer)
            assert answer.status in (200, 429, 503), answer.status
            return f"{answer.status}, {num_bytes >> 10} KiB"


async def _too_much(target: Target) -> str:
    """What could come to gigabytes is refused before it begins."""
    async with _session(target) as http, http.get("/v1/models") as models:
        context = (await models.json())["data"][0]["max_model_len"]
        tokens = max(1, context // 2)
        prompts = min(32, (512 << 20) // (128 * tokens * 176) + 1)
        body = {"prompt": ["a"] * prompts, "n": 128, "max_tokens": tokens, "logprobs": 20}
        if 128 * prompts * tokens * 176 < 256 << 20:
            return "the model's context is too small for it"
        async with http.post(_TEXT, json=body) as answer:
            told = await answer.json()
            assert answer.status == 400, (answer.status, told)
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
        (_CHAT, {"messages": _MESSAGES, "n": 4, "max_tokens": 200, **logprobs}),
        (_CHAT, {"messages": _MESSAGES, "n": 4, "max_tokens": 200, "stream": True, **logprobs}),
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
    """As many answers at once as one may ask for, of a client that goes away."""
    statuses = []
    for _ in range(3):
        async with _session(target) as http:
            body = {"messages": _MESSAGES, "n": 128, "max_tokens": 200, "ignore_eos": True, "stream": True}
            async with http.post(_CHAT, json=body) as answer:
                statuses.append(answer.status)
                await answer.content.readany()
                answer.close()
    return f"{statuses}"


async def _long_token_lists(target: Target) -> str:
    async with _session(target) as http:
        statuses = []
        for num_ids in (1 << 17, 1 << 20):
            async with http.post("/detokenize", data=json.dumps({"tokens": [50] * num_ids}), headers=_JSON) as answer:
                await _drained(answer)
                statuses.append(answer.status)
        assert statuses == [200, 400], statuses
        return f"{statuses}"


_JSON = {"Content-Type": "application/json"}


async def _long_names(target: Target) -> str:
    """Of fields and models, which errors would quote."""
    name = "x" * (2 << 20)
    async with _session(target) as http:
        longest = 0
        for body in ({"messages": _MESSAGES, "model": name}, {"messages": [{"role": "user", "content": 1, name: 1}]}):
            async with http.post(_CHAT, data=json.dumps(body), headers=_JSON) as answer:
                assert 400 <= answer.status < 500, answer.status
                longest = max(longest, await _drained(answer))
        assert longest < 10_000, longest
        return f"{longest} bytes at most"


async def _many_small_files(target: Target) -> str:
    """Where files are kept: a byte each."""
    async with _session(target) as http:
        kept: list[str] = []
        try:
            for _ in range(150):
                form = aiohttp.FormData({"purpose": "batch"})
                form.add_field("file", b"x", filename="a.jsonl")
                async with http.post("/v1/files", data=form) as answer:
                    if answer.status != 200:
                        assert answer.status in (404, 429), answer.status
                        return f"{len(kept)}, then {answer.status}"
                    kept.append((await answer.json())["id"])
        finally:
            for each in kept:
                async with http.delete(f"/v1/files/{each}") as answer:
                    await answer.read()
        return f"{len(kept)} kept and deleted"


async def _lines_of_lists(target: Target) -> str:
    """A batch of lines that are nothing but lists of lists."""
    line = b'{"custom_id": "%s", "method": "POST", "url": "%s", "body": {"messages": [%s]}}\n'
    content = b"".join(line % (os.urandom(4).hex().encode(), _CHAT.encode(), b",".join([b"[[],[]]"] * (1 << 20))) for _ in range(2))
    async with _session(target) as http:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", content, filename="a.jsonl")
        async with http.post("/v1/files", data=form) as answer:
            if answer.status != 200:
                assert answer.status in (404, 429), answer.status
                return f"{answer.status}"
            file_id = (await answer.json())["id"]
        try:
            async with http.post("/v1/batches", json={"input_file_id": file_id, "endpoint": _CHAT, "completion_window": "24h"}) as answer:
                batch = await answer.json()
            for _ in range(100):
                await asyncio.sleep(0.1)
                async with http.get(f"/v1/batches/{batch['id']}") as answer:
                    batch = await answer.json()
                if batch["status"] == "failed":
                    return str(batch["errors"]["data"][0]["code"])
            raise AssertionError(batch["status"])
        finally:
            async with http.delete(f"/v1/files/{file_id}") as answer:
                await answer.read()


ATTACKS = (
    Attack("a chat whose whole answer is megabytes of log probabilities", _many_logprobs),
    Attack("completions that could come to gigabytes", _too_much, short=True),
    Attack("clients that do not read whole answers, streams, texts", _readers_that_do_not),
    Attack("128 answers at once, and their client goes", _many_choices),
    Attack("long lists of token ids", _long_token_lists, short=True),
    Attack("long names that errors would quote", _long_names, short=True),
    Attack("files of a byte each", _many_small_files, short=True),
    Attack("a batch whose lines are lists of lists", _lines_of_lists),
)
