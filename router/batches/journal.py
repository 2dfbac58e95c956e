"""The answers of one run of a batch, in a file that only grows. Pure.

A record is a line: a checksum, what there is to know without reading the answer, the answer as it goes to the client.

    crc32 of the rest ␠ {"id": custom id, "ok": for the output file or the error file, "usage": tokens} ⇥ answer ⏎

A run writes into its own file only, never behind the torn end that a dead one left. Whoever reads takes the first whole record of each
custom id, in the order of runs: so it does not matter how often a request was answered, nor whether an old run still writes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from router.batches.records import Tally

# Prompt, of these cached, answer, of these reasoning.
Usage = tuple[int, int, int, int]
NO_USAGE: Usage = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Entry:
    custom_id: str
    ok: bool
    usage: Usage
    payload: bytes


def encode(entry: Entry) -> bytes:
    assert b"\n" not in entry.payload, "an answer is one line"
    told = json.dumps({"id": entry.custom_id, "ok": entry.ok, "usage": entry.usage}).encode("ascii")
    rest = told + b"\t" + entry.payload
    return b"%08x %b\n" % (zlib.crc32(rest), rest)


def decode(line: bytes) -> Entry | None:
    """`line` with its end. None: torn or damaged."""
    if len(line) < 10 or line[8:9] != b" " or not line.endswith(b"\n"):
        return None
    rest = line[9:-1]
    if b"%08x" % zlib.crc32(rest) != line[:8]:
        return None
    told, _, payload = rest.partition(b"\t")
    try:
        known = json.loads(told)
        given, cached, made, reasoned = (int(each) for each in known["usage"])
        return Entry(str(known["id"]), bool(known["ok"]), (given, cached, made, reasoned), payload)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Place:
    """Of a record: the run, and where in its file, in bytes."""

    epoch: int
    offset: int
    length: int
    ok: bool


@dataclass(slots=True)
class Results:
    """What is there of a batch, over all of its runs."""

    places: dict[str, Place] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def read(self, epoch: int, lines: Iterable[bytes]) -> None:
        """All lines of a run's file. Runs are read in their order."""
        offset = 0
        for line in lines:
            entry = decode(line)
            if entry is not None and entry.custom_id not in self.places:
                self.places[entry.custom_id] = Place(epoch, offset, len(line), entry.ok)
                self.tally = self.tally.plus(entry.ok, entry.usage)
            offset += len(line)
