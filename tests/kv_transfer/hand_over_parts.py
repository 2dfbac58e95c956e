"""What the hand-over model's world is made of: jobs, tickets, readers and messages, as plain values."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer import lease as source_side
from kv_transfer import reader_events as events
from kv_transfer.lease import Lease
from kv_transfer.reader import Reader
from kv_transfer.transport import ChunkInfo

TTL_S = 10.0
SOURCE_BLOCKS = 9
TARGET_BLOCKS = 16
Tag = tuple[object, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Ticket:
    lease_id: str
    epoch: int
    one_sided: bool
    tags: tuple[Tag, ...]


@dataclass(eq=False, kw_only=True)
class Job:
    """One prompt on the source: `tags[i]` is what its i-th block shall hold; all but the last are full and may be shared."""

    ticket: Ticket
    lease: Lease
    tags: list[Tag]
    blocks: list[int]
    per_chunk: int
    infos: list[ChunkInfo] = field(default_factory=list)
    num_computed: int = 0
    stop_asked: bool = False
    drop_asked: bool = False
    num_releases: int = 0

    @property
    def num_chunks(self) -> int:
        return -(-len(self.tags) // self.per_chunk)


@dataclass(eq=False, kw_only=True)
class Fetch:
    chunk: ChunkInfo
    read: list[Tag] = field(default_factory=list)
    cancelled: bool = False


@dataclass(eq=False, kw_only=True)
class Puller:
    """One reader: a watch stream that keeps its order, fetches on their way, and targets in the decode worker's pool."""

    ticket: Ticket
    machine: Reader
    targets: list[int]
    stream: list[events.Event] = field(default_factory=list)
    watching: bool = False  # the source serves its watch
    num_sent: int = 0
    fetches: dict[int, Fetch] = field(default_factory=dict)
    ahead: bool = False  # the engine decodes with the targets, whatever the source may answer
    in_engine: bool = False
    num_frees: int = 0


@dataclass(frozen=True, kw_only=True)
class ToSource:
    """An RPC of a reader. Of an Acknowledge that asks, `asks`."""

    puller: Puller
    event: source_side.FetchProgress | source_side.Commit | source_side.Abort | None  # None: Watch
    asks: bool = False


@dataclass(frozen=True, kw_only=True)
class ToReader:
    puller: Puller
    event: events.Event


def checksum(tags: Sequence[Tag]) -> int:
    return zlib.crc32(repr(list(tags)).encode())


def kind_of(refusal: str) -> str:
    for kind in ("has ended", "another reader", "not what lease", "epoch", "no lease", "before all of it"):
        if kind in refusal:
            return f"refused: {kind}"
    assert not refusal, refusal
    return "asked and accepted"
