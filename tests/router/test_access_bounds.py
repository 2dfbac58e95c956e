"""What one client may take of a router: bodies, heads, connections, time, and what nobody reads."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import aiohttp
import pytest
from http_fakes import CHAT, TEXT, chat, open_http
from router_fakes import Cluster, until


async def served(cluster: Cluster) -> None:
    await cluster.prefill()
    await cluster.decode()


async def test_sizes_are_bounded_and_say_so_as_openai_does(cluster: Cluster) -> None:
    await served(cluster)
    async with cluster.serving(max_body_bytes=100_000), open_http(cluster) as http:
        body = chat(messages=[{"role": "user", "content": "x" * 100_000}])
        async with http.post(CHAT, json=body) as answer:
            assert answer.status == 413
            error = (await answer.json())["error"]
            assert error["type"] == "invalid_request_error"
            assert "--max-body-bytes" in error["message"]
        # Without saying how long it will be.
        async with http.post(
            CHAT, data=_chunks(b'{"messages": "' + b"x" * 200_000), headers={"Content-Type": "application/json"}
        ) as answer:
            assert answer.status == 413
        async with http.post(CHAT, json=chat(messages=[{"role": "user", "content": ""}] * 2500)) as answer:
            assert answer.status in (200, 400), "many, and not too many"
        async with http.post(CHAT, json=chat(max_tokens=1), headers={"x-long": "x" * 20_000}) as answer:
            assert answer.status == 400
            assert "Traceback" not in await answer.text()
        async with http.post(CHAT, json=chat(max_tokens=1)) as answer:
            assert answer.status == 200, "the router is none the worse"
    assert not cluster.held()


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    for i in range(0, len(data), 10_000):
        yield data[i : i + 10_000]


async def test_messages_are_bounded(cluster: Cluster) -> None:
    body = chat(messages=[{"role": "user", "content": "a"}] * 5000)
    async with cluster.serving(), open_http(cluster) as http, http.post(CHAT, json=body) as answer:
        assert answer.status == 400
        assert "at most 4096" in (await answer.json())["error"]["message"]


@asynccontextmanager
async def raw(cluster: Cluster, data: bytes = b"") -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
    writer.write(data)
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.close()


def head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


async def test_a_body_that_does_not_come_is_not_waited_for(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.bodies._BODY_S", 0.2)
    await served(cluster)
    async with cluster.serving(), raw(cluster, head(CHAT, 1000) + b'{"messages": ') as (reader, _):
        async with asyncio.timeout(60):
            answer = await reader.readuntil(b"}}")
        status, _, body = answer.partition(b"\r\n\r\n")
        assert b" 408 " in status
        error = json.loads(body)["error"]
        assert error["type"] == "invalid_request_error"
        assert "did not come" in error["message"]


async def test_idle_connections_make_room_for_new_ones(cluster: Cluster) -> None:
    """More come and say nothing, or half a head, than there is room for: who asks is answered all the same."""
    await served(cluster)
    async with cluster.serving(max_connections=4), AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(raw(cluster, b"POST /v1/ch" if i % 2 else b"")) for i in range(12)]
        async with open_http(cluster) as http, http.post(CHAT, json=chat(max_tokens=2)) as answer:
            assert answer.status == 200
        async with asyncio.timeout(60):
            for reader, _ in silent[:9]:
                # Half a head that nobody has read yet makes it a reset.
                with suppress(ConnectionResetError):
                    assert await reader.read() == b"", "closed, but for the last four"


async def test_when_all_connections_are_at_work_a_new_one_is_told_so(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever is told may be late with reading it.
    monkeypatch.setattr("router.http.connections.FAREWELL_S", 60.0)
    await served(cluster)
    cluster.workers[1].script.step_s = 600.0  # type: ignore[attr-defined]
    async with cluster.serving(max_connections=2), open_http(cluster) as http, AsyncExitStack() as stack:
        body = chat(max_tokens=500, ignore_eos=True, stream=True)
        streams = [await stack.enter_async_context(http.post(CHAT, json=body)) for _ in range(2)]
        async with aiohttp.ClientSession() as other, other.get(f"http://127.0.0.1:{cluster.router.http_port}/health") as refused:
            assert refused.status == 503
            assert refused.headers["Retry-After"] == "1"
            assert "--max-connections" in (await refused.json())["error"]["message"]
        for stream in streams:
            assert stream.status == 200
            assert await stream.content.readline(), "those that were there go on"


async def test_a_client_that_reads_nothing_is_cut_and_its_neighbours_are_not(cluster: Cluster) -> None:
    await served(cluster)
    decode = cluster.workers[1]
    decode.script.step_s = 0.0005  # type: ignore[attr-defined]
    async with cluster.serving(max_buffered_tokens=64), open_http(cluster) as http:
        # Events of some hundred bytes; the socket takes a few.
        body = json.dumps({"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True, "logprobs": 5}).encode()
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stuck, ("127.0.0.1", cluster.router.http_port))
        await loop.sock_sendall(stuck, head(TEXT, len(body)) + body)
        try:
            await until(lambda: bool(cluster.held()), "it is being served")
            async with http.post(TEXT, json={"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}) as answer:
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            await cluster.all_free()
        finally:
            stuck.close()
        refused = cluster.router.inference._metrics.requests.labels("RESOURCE_EXHAUSTED", "", "standard")._value
        await until(lambda: refused.get() > 0, "it is counted")
        assert refused.get() == 1
