"""A load client of routers as a process of its own: streams that take whatever comes, tell how much that was between two marks, and at the
end check every token of every answer.

    router_load.py DIRECTORY
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

from router_helper import Reply, obey
from router_http2 import Connection
from router_place import Place, Stream, encode_request, tokens_in

from twostep.rpc import event_loop

_GENERATE = "/twostep.v1.Inference/Generate"


class Streams:
    """Those of one connection."""

    def __init__(self, connection_lost: asyncio.Event) -> None:
        self.by_number: dict[int, Stream] = {}
        self.num_ended = 0
        self.failure = ""
        self._lost = connection_lost
        self.connection = Connection(self._on_message, self._on_end)

    def start(self, num: int, request: bytes) -> None:
        for _ in range(num):
            self.by_number[self.connection.start(_GENERATE, request)] = Stream(sent_at=time.monotonic())

    def _on_message(self, number: int, message: bytes) -> None:
        self.by_number[number].messages.append(message)

    def _on_end(self, number: int, why: str) -> None:
        if self.num_ended == len(self.by_number):
            return  # all is over
        self.num_ended += number > 0
        if why:
            self.failure = self.failure or why
            self._lost.set()

    def all_began(self) -> bool:
        return all(stream.messages for stream in self.by_number.values())

    def all_ended(self) -> bool:
        return self.num_ended == len(self.by_number)


class Load:
    def __init__(self, place: Place) -> None:
        self._answer, self._tokenizer = place.answer(), place.tokenizer()
        self._groups: list[Streams] = []
        self._marks: list[tuple[float, list[int]]] = []
        self._num_tokens = 0
        self._failed = asyncio.Event()

    async def start(self, ports: list[int], streams: int, connections: int, num_tokens: int) -> None:
        """`streams` of them on `connections` to each port; returns when all have begun."""
        self._groups, self._marks, self._num_tokens = [], [], num_tokens
        self._failed = asyncio.Event()
        # Millions of small lists and bytes that live until the end: looking through them would take time that is measured.
        gc.disable()
        request, loop = encode_request(self._answer[:16], num_tokens=num_tokens), asyncio.get_running_loop()
        for port in ports:
            for i in range(connections):
                group = Streams(self._failed)
                self._groups.append(group)
                await loop.create_connection(lambda group=group: group.connection, "127.0.0.1", port)  # type: ignore[misc]
                group.start((streams - i + connections - 1) // connections, request)
        await self._until(lambda group: group.all_began())

    async def mark(self) -> Reply:
        self._marks.append((time.monotonic(), [len(stream.messages) for stream in self._streams()]))
        return {"ended": sum(group.num_ended for group in self._groups)}

    async def finish(self) -> Reply:
        """Waits for all ends; `tokens` in `pieces` came within `wall_s`, between the first and the last mark."""
        await self._until(lambda group: group.all_ended())
        for group in self._groups:
            group.connection.close()
        (begin, before), (end, after) = self._marks[0], self._marks[-1]
        streams = self._streams()
        for stream in streams:
            stream.check(self._answer, self._num_tokens, self._tokenizer)
        windows = [stream.messages[i:j] for stream, i, j in zip(streams, before, after, strict=True)]
        self._groups = []
        gc.enable()
        return {"tokens": sum(map(tokens_in, windows)), "pieces": sum(map(len, windows)), "wall_s": end - begin}

    def _streams(self) -> list[Stream]:
        return [stream for group in self._groups for stream in group.by_number.values()]

    async def _until(self, condition: Callable[[Streams], bool], timeout_s: float = 240.0) -> None:
        give_up = time.monotonic() + timeout_s
        while not all(condition(group) for group in self._groups):
            failures = [group.failure for group in self._groups if group.failure]
            if failures:
                raise RuntimeError(f"{len(failures)} connections failed, one so: {failures[0]}")
            if time.monotonic() > give_up:
                raise TimeoutError(f"streams neither began nor ended within {timeout_s:g} s")
            await asyncio.sleep(0.05)


async def main(directory: Path) -> None:
    load = Load(Place(directory))
    await obey({"start": load.start, "mark": load.mark, "finish": load.finish})


if __name__ == "__main__":
    event_loop.run(main(Path(sys.argv[1])))
