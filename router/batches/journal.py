"""The tries and the answers of one run of a batch, in a file that only grows. Pure.

A record is a line: a checksum, what there is to know without reading the answer, the answer as it goes to the client.

    crc32 of the rest ␠ {"id": custom id, "tried": true} ⇥ ⏎                                  before the request is read and asked
    crc32 of the rest ␠ {"id": custom id, "ok": for the output file or the error file, "usage": tokens} ⇥ answer ⏎
    crc32 of the rest ␠ {"left": true} ⇥ ⏎                                                    the run ended, and its router did not

A try without an answer in a run that was not left may be why that run's router died.

A run writes into its own file only, never behind the torn end that a dead one left. Readers take the first whole record of each
custom id, in the order of runs: so it does not matter how often a request was answered, nor whether an old run still writes.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from router.batches.lines import InputLine
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


@dataclass(frozen=True, slots=True)
class TryRecord:
    custom_id: str


@dataclass(frozen=True, slots=True)
class LeftRecord:
    pass


Record = AnswerRecord | TryRecord | LeftRecord


def encode(entry: Record) -> bytes:
    known: dict[str, Any]
    match entry:
        case AnswerRecord(custom_id, ok, usage, payload):
            assert b"\n" not in payload, "an answer is one line"
            known = {"id": custom_id, "ok": ok, "usage": usage}
        case TryRecord(custom_id):
            known, payload = {"id": custom_id, "tried": True}, b""
        case LeftRecord():
            known, payload = {"left": True}, b""
    rest = json.dumps(known).encode("ascii") + b"\t" + payload
    return b"%08x %b\n" % (zlib.crc32(rest), rest)


def decode(line: bytes) -> Record | None:
    """`line` with its end. None: torn or damaged."""
    if len(line) < 10 or line[8:9] != b" " or not line.endswith(b"\n"):
        return None
    rest = line[9:-1]
    if b"%08x" % zlib.crc32(rest) != line[:8]:
        return None
    head, _, payload = rest.partition(b"\t")
    try:
        known = json.loads(head)
        if known.get("left"):
            return LeftRecord()
        if known.get("tried"):
            return TryRecord(str(known["id"]))
        given, cached, made, reasoned = (int(each) for each in known["usage"])
        return AnswerRecord(str(known["id"]), bool(known["ok"]), (given, cached, made, reasoned), payload)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
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
    """Holds what is answered of a batch, over all of its runs. `deaths`: how many routers died while they worked on a request, for those
    that have no answer."""

    places: dict[str, RecordPlace] = field(default_factory=dict)
    tally: AnswerCounts = field(default_factory=AnswerCounts)
    deaths: Counter[str] = field(default_factory=Counter)

    def read(self, epoch: int, lines: Iterable[bytes], *, runs: bool = False) -> None:
        """Reads all lines of a run's file. Runs are read in their order. `runs`: this one's router lives."""
        offset, lost = 0, set[str]()
        for line in lines:
            match decode(line):
                case TryRecord(custom_id):
                    lost.add(custom_id)
                case LeftRecord():
                    lost.clear()
                case AnswerRecord(custom_id, ok, usage):
                    lost.discard(custom_id)
                    if custom_id not in self.places:
                        self.places[custom_id] = RecordPlace(epoch, offset, len(line), ok)
                        self.tally = self.tally.plus(ok, usage)
            offset += len(line)
        if not runs:
            self.deaths.update(lost)

    def unanswered(self, lines: Iterable[InputLine]) -> list[InputLine]:
        return [line for line in lines if line.custom_id not in self.places]


class GroupWriter:
    """`write_all` puts entries on disk. As many may wait as ask: each does for its own."""

    def __init__(self, write_all: Callable[[list[Record]], Awaitable[None]]) -> None:
        self._write_all = write_all
        self._waiting: list[Record] = []
        self._next: asyncio.Future[None] | None = None
        self._turn = asyncio.Lock()

    async def write(self, entry: Record) -> None:
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
