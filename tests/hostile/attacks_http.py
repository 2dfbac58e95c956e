"""Attacks by requests over HTTP: packed, slow, huge, half, foreign or from a web page."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from attack import CHAT, Attack, Target

_MIB = 1 << 20


def _head(path: str, *headers: str, method: str = "POST", host: str = "localhost") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode()


def _json_head(target: Target, path: str, size: int, *headers: str) -> bytes:
    own = ("Content-Type: application/json", f"Content-Length: {size}", f"Authorization: Bearer {target.api_key}")
    return _head(path, *own, *headers)


@asynccontextmanager
async def _connected(target: Target, port: int = 0) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(target.host, port or target.http_port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _status(reader: asyncio.StreamReader, timeout_s: float = 30.0) -> str:
    """Returns the status of one answer; "closed" where none comes."""
    try:
        async with asyncio.timeout(timeout_s):
            line = await reader.readline()
    except ConnectionError:
        return "closed"
    return line.split()[1].decode() if line else "closed"


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Until the other side has it, or wants no more of it."""
    with suppress(ConnectionError):
        for i in range(0, len(data), _MIB):
            writer.write(data[i : i + _MIB])
            await writer.drain()


async def _exchange(target: Target, data: bytes, port: int = 0, timeout_s: float = 60.0) -> str:
    async with _connected(target, port) as (reader, writer):
        sending = asyncio.create_task(_send(writer, data))
        try:
            return await _status(reader, timeout_s)
        finally:
            sending.cancel()
            await asyncio.wait((sending,))


async def _many(target: Target, requests: Sequence[bytes]) -> Counter[str]:
    """Sends all at once, each over a connection of its own."""
    return Counter(await asyncio.gather(*(_exchange(target, each) for each in requests)))


def _told(statuses: Counter[str]) -> str:
    return ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))


def _zeros(num_bytes: int) -> bytes:
    """gzip of so many bytes, of which 64 MiB at a time are packed once and repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(64 * _MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + block * (num_bytes // (64 * _MIB))


async def _gzip(target: Target) -> str:
    packed = _zeros(8192 * _MIB)
    headers = ("Content-Encoding: gzip", "Content-Type: application/json", f"Content-Length: {len(packed)}")
    asked = [(path, port) for path in ("/", CHAT, "/v1/files") for port in (target.http_port, target.admin_port)]
    told = Counter([await _exchange(target, _head(path, *headers) + packed, port) for path, port in asked])
    assert set(told) <= {"401", "415"}, told
    with_key = await _exchange(target, _json_head(target, CHAT, len(packed), "Content-Encoding: gzip") + packed)
    assert with_key == "415", with_key
    return f"{len(packed) / _MIB:.0f} MB of gzip: {_told(told)}; with a key {with_key}"


async def _trickle(target: Target) -> str:
    """A byte each second: all are cut within seconds, not minutes."""

    async def one(path: str, kind: str) -> str:
        async with _connected(target) as (reader, writer):
            key = f"Authorization: Bearer {target.api_key}"
            writer.write(_head(path, f"Content-Type: {kind}", "Content-Length: 10000000", key))
            answer = asyncio.create_task(_status(reader, 40.0))
            while not answer.done():
                with suppress(ConnectionError):
                    writer.write(b"-")
                await asyncio.wait((answer,), timeout=1.0)
            return answer.result()

    kinds = ((CHAT, "application/json"), ("/v1/files", "multipart/form-data; boundary=x"))
    told = Counter(await asyncio.gather(*(one(*kinds[i % 2]) for i in range(64))))
    assert set(told) == {"408"}, told
    return _told(told)


def _lists(num_bytes: int) -> bytes:
    return b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":[' + b"[]," * (num_bytes // 3) + b"[]]}}"


async def _json_lists(target: Target) -> str:
    body = _lists(15 * _MIB)
    told = await _many(target, [_json_head(target, path, len(body)) + body for path in (CHAT, "/tokenize", CHAT, "/v1/completions")])
    assert set(told) == {"400"}, told
    return _told(told)


async def _json_most(target: Target) -> str:
    """As many values as are taken. No more is generated than a few tokens: what stalls is reading them."""
    ids = b",".join(b"%d" % (i % 200) for i in range(1 << 20))
    parts = b",".join([b'{"type":"text","text":"a"}'] * 5)
    calls = b",".join([b'{"type":"function","function":{"name":"f","arguments":"{}"}}'] * 1000)
    bodies = [
        (CHAT, _lists(96_000)[:-1] + b',"max_tokens":1}'),
        (CHAT, b'{"messages":[' + b",".join([b'{"role":"user","content":[' + parts + b"]}"] * 4000) + b"]}"),
        (CHAT, b'{"messages":[' + b",".join([b'{"role":"assistant","tool_calls":[' + calls + b"]}"] * 14) + b'],"max_tokens":1}'),
        ("/v1/completions", b'{"prompt":[' + ids + b"]}"),
        ("/v1/completions", b'{"prompt":[' + b",".join([b"[" + b",".join([b"7"] * 900) + b"]"] * 2048) + b'],"max_tokens":4096}'),
        (CHAT, b'{"messages":[{"role":"user","content":"' + b'a, \\"b\\" ' * 1_600_000 + b'"}]}'),
    ]
    told = await _many(target, [_json_head(target, path, len(body)) + body for path, body in bodies * 3])
    assert set(told) <= {"200", "400"}, told
    assert told["200"] == 6, told
    return _told(told)


async def _heads(target: Target) -> str:
    """Half heads that grow, lines without number, one line without end."""
    line = b"x-%d: " + b"y" * 4000 + b"\r\n"
    start = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    growing = start + b"".join(line % i for i in range(120))
    told = await _many(target, [growing] * 32)
    told += await _many(target, [start + b"".join(b"x-%d: y\r\n" % i for i in range(100_000))] * 8)
    told += await _many(target, [start + b"x: " + b"y" * _MIB] * 8)
    assert set(told) <= {"400", "431", "closed"}, told
    return _told(told)


async def _chunks(target: Target) -> str:
    """A body of a byte a chunk, from 16 at once."""
    head = _head(CHAT, "Content-Type: application/json", "Transfer-Encoding: chunked", f"Authorization: Bearer {target.api_key}")
    told = await _many(target, [head + b"1\r\n \r\n" * 500_000] * 16)
    assert set(told) <= {"400", "408", "closed"}, told
    return _told(told)


async def _forms(target: Target) -> str:
    """Empty lines before the first part, heads of parts without end, parts without number."""
    key = f"Authorization: Bearer {target.api_key}"
    part = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n'
    bodies = [
        b"\n" * (8 * _MIB),
        b"--x\r\n" + b"a: b\r\n" * _MIB,
        b"--x\r\na: " + b"b" * (8 * _MIB),
        part * 100_000,
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"\r\n" * (4 * _MIB),
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"\r\n-" * (4 * _MIB),
    ]
    headers = ("Content-Type: multipart/form-data; boundary=x", key)
    told = await _many(target, [_head("/v1/files", *headers, f"Content-Length: {len(body) + 5}") + body + b"--x--" for body in bodies])
    assert set(told) <= {"400", "413", "closed"}, told
    return _told(told)


async def _pipelines(target: Target) -> str:
    """Ten thousand requests before one answer is read, over each of 8 connections; then upgrades that nobody offers."""

    async def one(data: bytes, least: int) -> int:
        async with _connected(target) as (reader, writer):
            sending = asyncio.create_task(_send(writer, data))
            num_bytes = 0
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(20):
                    while num_bytes < least and (piece := await reader.read(_MIB)):
                        num_bytes += len(piece)
            sending.cancel()
            await asyncio.wait((sending,))
            return num_bytes

    ask = _head("/health", method="GET")
    sizes = await asyncio.gather(*(one(ask * 10_000, 2_000_000) for _ in range(8)))
    upgrade = _head("/v1/realtime", "Upgrade: websocket", "Connection: upgrade", method="GET")
    sizes += await asyncio.gather(*(one(upgrade + b"\x00" * (4 * _MIB), 1 << 30) for _ in range(8)))
    return f"{sum(sizes) / _MIB:.0f} MB of answers"


async def _refused_but_sending(target: Target) -> str:
    """Bodies of requests without a key, which go on and on: nobody reads them for long."""
    head = _head(CHAT, "Content-Type: application/json", f"Content-Length: {1 << 40}")

    async def one() -> str:
        async with _connected(target) as (reader, writer):
            writer.write(head)
            piece = bytes(64 << 10)
            with suppress(ConnectionError):
                async with asyncio.timeout(30):  # it is not read for longer
                    while not writer.is_closing():
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0.02)
            return await _status(reader)

    told = Counter(await asyncio.gather(*(one() for _ in range(16))))
    assert set(told) <= {"401", "closed"}, told
    return _told(told)


async def _only_open(target: Target) -> str:
    """800 connections that say nothing, and 800 that say half a line."""
    opened: list[asyncio.StreamWriter] = []
    try:
        for i in range(1600):
            _, writer = await asyncio.open_connection(target.host, target.http_port)
            opened.append(writer)
            if i % 2:
                writer.write(b"POST /v1/ch")
        await asyncio.sleep(1.0)
    finally:
        for writer in opened:
            writer.transport.abort()
    return f"{len(opened)} connections"


async def _all_at_once(target: Target) -> str:
    """More connections at once than a router takes; each says half a line."""

    async def one() -> asyncio.StreamWriter | None:
        with suppress(ConnectionError):
            _, writer = await asyncio.open_connection(target.host, target.http_port)
            writer.write(b"POST /v1/ch")
            return writer
        return None

    opened = [writer for writer in await asyncio.gather(*(one() for _ in range(5000))) if writer is not None]
    await asyncio.sleep(1.0)
    for writer in opened:
        writer.transport.abort()
    return f"{len(opened)} of 5000 connections opened"


def _attack(name: str, run: Callable[[Target], Awaitable[str]], *, short: bool = False) -> Attack:
    return Attack(f"http: {name}", run, short=short)


ATTACKS = (
    _attack("8 MB of gzip without a key", _gzip, short=True),
    _attack("64 bodies of a byte a second", _trickle),
    _attack("16 MiB of JSON lists", _json_lists, short=True),
    _attack("as many JSON values as are taken", _json_most),
    _attack("heads without end", _heads, short=True),
    _attack("chunks of a byte", _chunks),
    _attack("forms without end", _forms),
    _attack("pipelines and upgrades", _pipelines),
    _attack("refused bodies that go on", _refused_but_sending),
    _attack("5,000 connections at once", _all_at_once),
    _attack("connections that only open", _only_open, short=True),
)
