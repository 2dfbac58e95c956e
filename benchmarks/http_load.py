"""A load client of routers' HTTP as a process of its own: event streams that take whatever comes, a connection each, tell how much that was
between two marks, and at the end check the text of every answer.

    http_load.py DIRECTORY
"""

from __future__ import annotations

import asyncio
import bisect
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import cast

from router_helper import Reply, obey
from router_place import Place

from twostep.rpc import event_loop


class Stream(asyncio.Protocol):
    """One answer, and the connection that it comes on."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self.received: list[bytes] = []
        self.num_bytes = 0
        self.ended = False
        self.failure = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received.append(data)
        self.num_bytes += len(data)
        if data.endswith(b"0\r\n\r\n"):
            self.ended = True

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended:
            self.failure = f"the connection is lost ({error}) after {b''.join(self.received)[-300:]!r}"

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def texts(self, until: int | None = None) -> list[str]:
        """Of each event in the first so many bytes; raises ValueError for anything but an answer."""
        head, _, body = b"".join(self.received)[:until].partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise ValueError(f"refused: {head!r} {body[:300]!r}")
        pieces, at = [], 0
        while (end := body.find(b"\r\n", at)) > 0 and (size := int(body[at:end], 16)) and end + 2 + size <= len(body):
            pieces.append(body[end + 2 : end + 2 + size])
            at = end + 4 + size
        texts = []
        for event in b"".join(pieces).split(b"\n\n"):
            if event.startswith(b"data: {"):
                for choice in json.loads(event[6:])["choices"]:
                    texts.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
        return texts


def encode_request(token_ids: Sequence[int], *, num_tokens: int) -> bytes:
    body = json.dumps({"prompt": list(token_ids), "max_tokens": num_tokens, "temperature": 0, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Load:
    def __init__(self, place: Place) -> None:
        self._answer, self._tokenizer = place.answer(), place.tokenizer()
        self._streams: list[Stream] = []
        self._marks: list[tuple[float, list[int]]] = []
        self._num_tokens = 0

    async def start(self, port: int, streams: int, num_tokens: int) -> None:
        """Returns when all are connected."""
        self._marks, self._num_tokens = [], num_tokens
        # Millions of small bytes that live until the end: looking through them would take time that is measured.
        gc.disable()
        request, loop = encode_request(self._answer[:16], num_tokens=num_tokens), asyncio.get_running_loop()
        self._streams = [Stream(request) for _ in range(streams)]
        for stream in self._streams:
            await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
        # The first token comes from the prefill worker, whatever the decode workers hold.
        await self._until(lambda stream: stream.num_bytes > 0)

    async def mark(self) -> Reply:
        self._marks.append((time.monotonic(), [stream.num_bytes for stream in self._streams]))
        return {"ended": sum(stream.ended for stream in self._streams)}

    async def finish(self) -> Reply:
        """Waits for all ends; `tokens` in `pieces` came within `wall_s`, between the first and the last mark."""
        await self._until(lambda stream: stream.ended)
        (begin, before), (end, after) = self._marks[0], self._marks[-1]
        ids = [self._answer[i % len(self._answer)] for i in range(self._num_tokens)]
        wanted = self._tokenizer.decode(ids)
        # How long the text is after so many tokens; of characters that are split, the last token tells.
        lengths = list(accumulate(len(self._tokenizer.decode([token_id])) for token_id in ids))
        num_tokens = num_pieces = 0
        for stream, first, last in zip(self._streams, before, after, strict=True):
            stream.close()
            if (text := "".join(stream.texts())) != wanted:
                raise ValueError(f"a wrong answer: {text[:200]!r} of {len(text)} characters, {len(wanted)} expected")
            early, late = stream.texts(first), stream.texts(last)
            num_pieces += len(late) - len(early)
            num_tokens += bisect.bisect(lengths, len("".join(late))) - bisect.bisect(lengths, len("".join(early)))
        num_bytes = sum(after) - sum(before)
        self._streams = []
        gc.enable()
        return {"tokens": num_tokens, "pieces": num_pieces, "bytes": num_bytes, "wall_s": end - begin}

    async def _until(self, condition: Callable[[Stream], bool], timeout_s: float = 240.0) -> None:
        give_up = time.monotonic() + timeout_s
        while not all(condition(stream) for stream in self._streams):
            failures = [stream.failure for stream in self._streams if stream.failure]
            if failures:
                raise RuntimeError(f"{len(failures)} streams failed, one so: {failures[0]}")
            if time.monotonic() > give_up:
                raise TimeoutError(f"streams neither began nor ended within {timeout_s:g} s")
            await asyncio.sleep(0.05)


async def main(directory: Path) -> None:
    load = Load(Place(directory))
    await obey({"start": load.start, "mark": load.mark, "finish": load.finish})


if __name__ == "__main__":
    event_loop.run(main(Path(sys.argv[1])))
