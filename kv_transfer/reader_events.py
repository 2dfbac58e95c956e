"""What happens to a hand-over on the decode worker (events), and what is then to be done (actions): the words of kv_transfer.reader."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.transport import ChunkInfo
from twostep.errors import Cancelled, TwostepError

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
    """All is published. `output_ids`: tokens sampled after it."""

    num_chunks: int
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """A fetch that was started writes nothing any more. `error`: None, its bytes are verified; DataLoss: they do not match; any other,
    also Cancelled after CancelFetches: it failed."""

    index: int
    error: TwostepError | None = None


@dataclass(frozen=True, slots=True)
class SourceAnswered:
    """To AskSource. `refusal`: why what was read must not be used; empty: it may."""

    refusal: str = ""


@dataclass(frozen=True, slots=True)
class AskFailed:
    """AskSource found no answer: the source may have committed or not."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineAnswered:
    """To CommitToEngine. `error`: why the engine did not take the blocks."""

    error: TwostepError | None = None


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The watch broke off or was refused. After Complete this says nothing."""

    error: TwostepError


@dataclass(frozen=True, slots=True)
class GivenUp:
    """This side wants it no more: cancelled, or anything unforeseen."""

    error: TwostepError = field(default_factory=lambda: Cancelled("the hand-over was cancelled"))


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    ManifestCame | ChunkAnnounced | CompleteCame | FetchEnded | SourceAnswered | AskFailed | EngineAnswered | SourceLost | GivenUp | Tick
)


# ---- actions ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Pull the chunk into its targets, then apply FetchEnded, whatever happens."""

    chunk: ChunkInfo


@dataclass(frozen=True, slots=True)
class CancelFetches:
    """Cancel those that run; FetchEnded of each is still due."""


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Tell the source of progress; no answer is needed."""


@dataclass(frozen=True, slots=True)
class AskSource:
    """May what was read be used? The fields are those of kv_transfer.lease.Commit. Then apply SourceAnswered or AskFailed."""

    reader: int
    source_blocks: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecodeAhead:
    """The engine may begin with the targets while the source is asked; what comes of it is withheld until CommitToEngine, and is for
    nothing after FreeTargets."""

    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommitToEngine:
    """Give the targets to the engine, then apply EngineAnswered."""

    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TellSource:
    """How it ended here; nothing depends on its arrival. Not sent where the source knows."""

    committed: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FreeTargets:
    """Give the targets back to the pool: nothing writes into them any more."""


Action = StartFetch | CancelFetches | RenewLease | AskSource | DecodeAhead | CommitToEngine | TellSource | FreeTargets
