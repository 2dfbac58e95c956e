"""The answers of one run of a batch, in a file that only grows. Pure.

A record is a line: a checksum, what there is to know without reading the answer, the answer as it goes to the client.

    crc32 of the rest ␠ {"id": custom id, "ok": for the output file or the error file, "usage": tokens} ⇥ answer ⏎

A run writes into its own file only, never behind the torn end that a dead one left. Readers take the first whole record of each
custom id, in the order of runs: so it does not matter how often a request was answered, nor whether an old run still writes.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from router.batches.records import AnswerCounts

# Prompt, of these cached, answer, of these reasoning.
Usage = tuple[int, int, int, int]
NO_USAGE: Usage = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    custom_id: str
    ok: bool
    usage: Usage
    payload: bytes


def encode(entry: AnswerRecord) -> bytes:
    assert b"\n" not in entry.payload, "an answer is one line"
    head = json.dumps({"id": entry.custom_id, "ok": entry.ok, "usage": entry.usage}).encode("ascii")
    rest = head + b"\t" + entry.payload
    return b"%08x %b\n" % (zlib.crc32(rest), rest)


def decode(line: bytes) -> AnswerRecord | None:
    """`line` with its end. None: torn or damaged."""
    if len(line) < 10 or line[8:9] != b" " or not line.endswith(b"\n"):
        return None
    rest = line[9:-1]
    if b"%08x" % zlib.crc32(rest) != line[:8]:
        return None
    head, _, payload = rest.partition(b"\t")
    try:
        known = json.loads(head)
        given, cached, made, reasoned = (int(each) for each in known["usage"])
        return AnswerRecord(str(known["id"]), bool(known["ok"]), (given, cached, made, reasoned), payload)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Says where a record is: the run, and the place in its file, in bytes."""

    epoch: int
    offset: int
    length: int
    ok: bool


@dataclass(slots=True)
class Results:
    """Holds what is answered of a batch, over all of its runs."""

    places: dict[str, RecordPlace] = field(default_factory=dict)
    tally: AnswerCounts = field(default_factory=AnswerCounts)

    def read(self, epoch: int, lines: Iterable[bytes]) -> None:
        """Reads all lines of a run's file. Runs are read in their order."""
        offset = 0
        for line in lines:
            entry = decode(line)
            if entry is not None and entry.custom_id not in self.places:
                self.places[entry.custom_id] = RecordPlace(epoch, offset, len(line), entry.ok)
                self.tally = self.tally.plus(entry.ok, entry.usage)
            offset += len(line)


class GroupWriter:
    """`write_all` puts entries on disk. As many may wait as ask: each does for its own."""

    def __init__(self, write_all: Callable[[list[AnswerRecord]], Awaitable[None]]) -> None:
        self._write_all = write_all
        self._waiting: list[AnswerRecord] = []
        self._next: asyncio.Future[None] | None = None
        self._turn = asyncio.Lock()

    async def write(self, entry: AnswerRecord) -> None:
        """Writes an entry. It is on disk when this returns. Raises what `write_all` does, to everybody whose entry it was."""
        self._waiting.append(entry)
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        mine = self._next
        async with self._turn:
            if mine.done():
                mine.result()
                return
            entries, self._waiting, self._next = self._waiting, [], None
            try:
                await self._write_all(entries)
            except BaseException as error:
                # Cancelled while it wrote for others too: none of them knows whether it is on disk.
                mine.set_exception(error if isinstance(error, Exception) else asyncio.InvalidStateError("the writer was cancelled"))
                mine.exception()
                raise
            mine.set_result(None)
