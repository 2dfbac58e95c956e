"""The hand-over's state machine, as the decode worker keeps it: one pure function. kv_transfer.lease is its other half.

    WATCHING ──▶ FETCHING ──▶ COMPLETE ──▶ COMMITTING ──▶ COMMITTED
       │            │            │  one-sided:  │  the source still holds it
       └────────────┴────────────┴── transports ┴──▶ ABORTED

    chunk        ANNOUNCED ──▶ FETCHING ──▶ VERIFIED,   a mismatch: ──▶ AGAIN ──▶ VERIFIED, else the whole is ABORTED with DataLoss

    COMPLETE     every block is here and verified. What the source copied out is committed to the engine now
    COMMITTING   of what lay in the source's own memory, the source is asked first, with what was read: see Transition.refusal of
                 kv_transfer.lease. Nothing is read any more once it was asked. An answer that is lost is asked for again. The engine may
                 decode meanwhile, since the blocks are verified, but its tokens are withheld until the answer
    owner of     this machine up to its end, which is exactly one of two: CommitToEngine that the engine took, or FreeTargets. The
    the targets  latter comes only when every fetch that was started has ended, since each writes into them
    the source   hears how it ended, unless its own answer was the end
    repeated     events that come twice, or too late, change nothing

The caller that applies an event executes the returned actions in their order (decode_worker.pull); nothing here waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import chain

from kv_transfer.lease import Tick
from kv_transfer.transport import ChunkInfo
from twostep.errors import DataLoss, TwostepError, Unavailable

# ---- events -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Blocks [first_block, first_block + num_blocks) of the sequence, counted in the source's blocks."""

    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestCame:
    """`published`: what the source will publish, `wanted`: what the targets lack; `one_sided`: its transport does not copy out."""

    published: BlockSpan
    wanted: BlockSpan
    num_layers: int
    one_sided: bool


@dataclass(frozen=True, slots=True)
class ChunkAnnounced:
    chunk: ChunkInfo


@dataclass(frozen=True, slots=True)
class CompleteCame:
    """All is published. `output_ids` are the tokens sampled after it."""

    num_chunks: int
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """A fetch that was started writes nothing any more. `error` is None if its bytes are verified, DataLoss if they do not match, and
    any other if it failed, also Cancelled after CancelFetches."""

    index: int
    error: TwostepError | None = None


@dataclass(frozen=True, slots=True)
class SourceAnswered:
    """The source has answered AskSource. `refusal` says why what was read must not be used; empty: it may."""

    refusal: str = ""


@dataclass(frozen=True, slots=True)
class AskFailed:
    """AskSource found no answer: the source may have committed or not."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineAnswered:
    """The engine has answered CommitToEngine. `error` says why it did not take the blocks."""

    error: TwostepError | None = None


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The watch broke off or was refused. After CompleteCame this changes nothing."""

    error: TwostepError


@dataclass(frozen=True, slots=True)
class GivenUp:
    """This side ends it: the request was cancelled, or something went wrong here."""

    error: TwostepError


Event = (
    ManifestCame | ChunkAnnounced | CompleteCame | FetchEnded | SourceAnswered | AskFailed | EngineAnswered | SourceLost | GivenUp | Tick
)


# ---- actions ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Fetch the chunk into its targets, then apply FetchEnded, whatever happens."""

    chunk: ChunkInfo


@dataclass(frozen=True, slots=True)
class CancelFetches:
    """Cancel the fetches that run; FetchEnded of each is still due."""


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Tell the source that there is progress; no answer is needed."""


@dataclass(frozen=True, slots=True)
class AskSource:
    """Ask whether what was read may be used, by the fields of kv_transfer.lease.Commit; then apply SourceAnswered or AskFailed."""

    reader: int
    source_blocks: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecodeAhead:
    """Have the engine begin with the targets while the source is asked, and withhold its tokens until CommitToEngine; GivenUp if it
    does not take them."""

    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommitToEngine:
    """Give the targets to the engine, then apply EngineAnswered at once."""

    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TellSource:
    """Tell the source how it ended here; nothing depends on the arrival."""

    committed: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FreeTargets:
    """Give the targets back to the pool: nothing writes into them any more."""


Action = StartFetch | CancelFetches | RenewLease | AskSource | DecodeAhead | CommitToEngine | TellSource | FreeTargets


# ---- the machine ------------------------------------------------------------------------------------------------------------


class ReaderState(Enum):
    WATCHING = auto()
    FETCHING = auto()
    COMPLETE = auto()
    COMMITTING = auto()
    COMMITTED = auto()
    ABORTED = auto()

    @property
    def ended(self) -> bool:
        return self in (ReaderState.COMMITTED, ReaderState.ABORTED)


class ChunkState(Enum):
    ANNOUNCED = auto()
    FETCHING = auto()
    AGAIN = auto()  # fetched a second time: its first bytes did not match
    VERIFIED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One pull of one hand-over. Times are seconds of a monotonic clock.

    reader_id   64 random bits, which tell this pull from any other of the same ticket
    deadline    when it is given up, at the latest the ticket's expiry
    """

    reader_id: int
    deadline: float
    max_fetching: int = 16
    renew_every_s: float = 2.0
    max_asks: int = 3

    state: ReaderState = ReaderState.WATCHING
    manifest: ManifestCame | None = None
    complete: CompleteCame | None = None
    complete_at: float = 0.0
    # By index, in the order in which they were announced.
    infos: Mapping[int, ChunkInfo] = field(default_factory=dict)
    chunks: Mapping[int, ChunkState] = field(default_factory=dict)
    num_again: int = 0
    renewed_at: float = 0.0
    num_asks: int = 0
    engine_asked: bool = False  # and has not answered
    # Why it was aborted.
    error: TwostepError | None = None
    targets_freed: bool = False

    @property
    def num_running(self) -> int:
        """The number of fetches that write into the targets."""
        return sum(state in (ChunkState.FETCHING, ChunkState.AGAIN) for state in self.chunks.values())

    @property
    def num_bytes(self) -> int:
        """The number of bytes verified so far."""
        return sum(self.infos[i].num_bytes for i, state in self.chunks.items() if state is ChunkState.VERIFIED)

    @property
    def finished(self) -> bool:
        """The targets are the engine's, or free: it may be forgotten."""
        return self.state is ReaderState.COMMITTED or self.targets_freed


@dataclass(frozen=True, slots=True)
class ReaderStep:
    reader: Reader
    # In the order in which to execute them.
    actions: tuple[Action, ...] = ()


def advance(reader: Reader, event: Event, now: float) -> ReaderStep:
    """Applies one event. Never raises: what no honest source says ends in ABORTED, with DataLoss as `error`: it is no fault of the request,
    which another pair may serve."""
    if isinstance(event, FetchEnded):
        return _fetch_ended(reader, event, now)
    if reader.state.ended:
        return ReaderStep(reader)
    if isinstance(event, EngineAnswered):
        return _engine_answered(reader, event)
    if reader.engine_asked:
        # What comes in the middle of its answer comes too late.
        return ReaderStep(reader)
    match event:
        case ManifestCame():
            return _manifest_came(reader, event, now)
        case ChunkAnnounced(chunk):
            return _chunk_announced(reader, chunk)
        case CompleteCame():
            return _complete_came(reader, event, now)
        case SourceAnswered(refusal):
            if reader.state is not ReaderState.COMMITTING:
                return ReaderStep(reader)
            return _abort(reader, Unavailable(refusal)) if refusal else _to_engine(reader)
        case AskFailed(reason):
            return _ask_failed(reader, reason)
        case SourceLost(error):
            return _abort(reader, error) if reader.complete is None else ReaderStep(reader)
        case GivenUp(error):
            return _abort(reader, error)
        case Tick():
            if now < reader.deadline:
                return ReaderStep(reader)
            return _abort(reader, Unavailable("the hand-over did not end in its ticket's time; prefill again"))


def _manifest_came(reader: Reader, manifest: ManifestCame, now: float) -> ReaderStep:
    if reader.manifest is not None:
        # Of a watch that was opened again.
        if manifest == reader.manifest:
            return ReaderStep(reader)
        return _abort(reader, DataLoss("a second manifest differs from the first; the two workers run different versions"))
    published, wanted = manifest.published, manifest.wanted
    if published != wanted:
        return _abort(
            reader,
            DataLoss(
                f"blocks {published.first_block} + {published.num_blocks} are published, but {wanted.first_block} + {wanted.num_blocks} "
                "are missing; give the reservation's num_cached_tokens as num_decode_cached_tokens"
            ),
        )
    return ReaderStep(replace(reader, state=ReaderState.FETCHING, manifest=manifest, renewed_at=now))


def _chunk_announced(reader: Reader, chunk: ChunkInfo) -> ReaderStep:
    if reader.manifest is None:
        return _abort(reader, DataLoss("a chunk came before the manifest; the two workers run different versions"))
    if reader.infos.get(chunk.index) == chunk:
        return ReaderStep(reader)
    # A chunk outside of the manifest, or of blocks announced before, must not be written anywhere.
    doubled = chunk.index in reader.infos or any(_overlap(chunk, other, reader.manifest) for other in reader.infos.values())
    if doubled or not _inside(chunk, reader.manifest):
        return _abort(reader, DataLoss(f"chunk {chunk.index} does not fit the manifest; the two workers run different versions"))
    if reader.manifest.one_sided and not len(chunk.source_blocks) == len(chunk.generations) == chunk.num_blocks:
        return _abort(reader, DataLoss(f"chunk {chunk.index} does not say which blocks to read; the two workers run different versions"))
    known = replace(reader, infos={**reader.infos, chunk.index: chunk}, chunks={**reader.chunks, chunk.index: ChunkState.ANNOUNCED})
    return _start_more(known)


def _complete_came(reader: Reader, complete: CompleteCame, now: float) -> ReaderStep:
    if reader.manifest is None:
        return _abort(reader, DataLoss("the end came before the manifest; the two workers run different versions"))
    if reader.complete is not None:
        return ReaderStep(reader)
    wanted = reader.manifest.wanted.num_blocks * reader.manifest.num_layers
    announced = sum(chunk.num_blocks * len(_layers(chunk, reader.manifest)) for chunk in reader.infos.values())
    if complete.num_chunks != len(reader.infos) or announced != wanted or not complete.output_ids:
        return _abort(
            reader,
            DataLoss(
                f"{announced} of {wanted} blocks of a layer came in {len(reader.infos)} of {complete.num_chunks} chunks, with "
                f"{len(complete.output_ids)} tokens; prefill again"
            ),
        )
    return _maybe_complete(replace(reader, complete=complete, complete_at=now))


def _fetch_ended(reader: Reader, event: FetchEnded, now: float) -> ReaderStep:
    was = reader.chunks.get(event.index)
    if was not in (ChunkState.FETCHING, ChunkState.AGAIN):
        return ReaderStep(reader)
    if reader.state is ReaderState.ABORTED:
        return _free_if_quiet(replace(reader, chunks={**reader.chunks, event.index: ChunkState.ANNOUNCED}))
    if event.error is None:
        verified = replace(reader, chunks={**reader.chunks, event.index: ChunkState.VERIFIED})
        actions: tuple[Action, ...] = ()
        if now - verified.renewed_at >= verified.renew_every_s:
            verified, actions = replace(verified, renewed_at=now), (RenewLease(),)
        more = _start_more(verified)
        done = _maybe_complete(more.reader)
        return ReaderStep(done.reader, (*actions, *more.actions, *done.actions))
    if isinstance(event.error, DataLoss) and was is ChunkState.FETCHING:
        again = replace(reader, chunks={**reader.chunks, event.index: ChunkState.AGAIN}, num_again=reader.num_again + 1)
        return ReaderStep(again, (StartFetch(reader.infos[event.index]),))
    return _abort(replace(reader, chunks={**reader.chunks, event.index: ChunkState.ANNOUNCED}), event.error)


def _ask_failed(reader: Reader, reason: str) -> ReaderStep:
    if reader.state is not ReaderState.COMMITTING:
        return ReaderStep(reader)
    if reader.num_asks < reader.max_asks:
        return _ask(reader)
    return _abort(reader, Unavailable(f"the prefill worker does not say whether it still held what was read ({reason}); prefill again"))


def _engine_answered(reader: Reader, event: EngineAnswered) -> ReaderStep:
    if not reader.engine_asked:
        return ReaderStep(reader)
    if event.error is not None:
        return _abort(replace(reader, engine_asked=False), event.error)
    # A source that was asked knows.
    actions = () if reader.state is ReaderState.COMMITTING else (TellSource(committed=True),)
    return ReaderStep(replace(reader, state=ReaderState.COMMITTED, engine_asked=False), actions)


def _start_more(reader: Reader) -> ReaderStep:
    room = reader.max_fetching - reader.num_running
    waiting = [i for i, state in reader.chunks.items() if state is ChunkState.ANNOUNCED][: max(0, room)]
    if not waiting:
        return ReaderStep(reader)
    started = replace(reader, chunks={**reader.chunks, **dict.fromkeys(waiting, ChunkState.FETCHING)})
    return ReaderStep(started, tuple(StartFetch(reader.infos[i]) for i in waiting))


def _maybe_complete(reader: Reader) -> ReaderStep:
    if reader.complete is None or any(state is not ChunkState.VERIFIED for state in reader.chunks.values()):
        return ReaderStep(reader)
    assert reader.manifest is not None
    if not reader.manifest.one_sided:
        return _to_engine(replace(reader, state=ReaderState.COMPLETE))
    asking = _ask(replace(reader, state=ReaderState.COMMITTING))
    return ReaderStep(asking.reader, (*asking.actions, DecodeAhead(reader.complete.output_ids)))


def _ask(reader: Reader) -> ReaderStep:
    infos = [reader.infos[i] for i in sorted(reader.infos)]
    ask = AskSource(
        reader=reader.reader_id,
        source_blocks=tuple(chain.from_iterable(info.source_blocks for info in infos)),
        generations=tuple(chain.from_iterable(info.generations for info in infos)),
    )
    return ReaderStep(replace(reader, num_asks=reader.num_asks + 1), (ask,))


def _to_engine(reader: Reader) -> ReaderStep:
    assert reader.complete is not None
    return ReaderStep(replace(reader, engine_asked=True), (CommitToEngine(reader.complete.output_ids),))


def _abort(reader: Reader, error: TwostepError) -> ReaderStep:
    aborted = _free_if_quiet(replace(reader, state=ReaderState.ABORTED, error=error))
    return ReaderStep(aborted.reader, aborted.actions or (CancelFetches(),))


def _free_if_quiet(reader: Reader) -> ReaderStep:
    """Ends an aborted one once no fetch writes any more."""
    if reader.num_running or reader.targets_freed:
        return ReaderStep(reader)
    assert reader.error is not None
    return ReaderStep(replace(reader, targets_freed=True), (FreeTargets(), TellSource(committed=False, reason=reader.error.message)))


def _blocks(chunk: ChunkInfo) -> range:
    return range(chunk.first_block, chunk.first_block + chunk.num_blocks)


def _layers(chunk: ChunkInfo, manifest: ManifestCame) -> range:
    return range(chunk.first_layer, chunk.first_layer + (chunk.num_layers or manifest.num_layers))


def _inside(chunk: ChunkInfo, manifest: ManifestCame) -> bool:
    span, blocks, layers = manifest.wanted, _blocks(chunk), _layers(chunk, manifest)
    return (
        span.first_block <= blocks.start < blocks.stop <= span.first_block + span.num_blocks
        and 0 <= layers.start < layers.stop <= manifest.num_layers
    )


def _overlap(one: ChunkInfo, other: ChunkInfo, manifest: ManifestCame) -> bool:
    pairs = (_blocks(one), _blocks(other)), (_layers(one, manifest), _layers(other, manifest))
    return all(a.start < b.stop and b.start < a.stop for a, b in pairs)
