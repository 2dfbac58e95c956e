"""The workers and the request as placement sees them at one moment: plain values, so that a decision can be repeated.

Records come with heartbeats and are up to a second and a half old when they are looked at. What this router itself has on a worker
it knows to the moment. So each candidate carries three views of its load: the record's (all routers', late), the router's own (now), and
the means of both over the last seconds, from which placement reckons how much the other routers have there (twostep/cluster/prediction.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostep.cluster.records import WorkerRecord
from twostep.request_class import RequestClass


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLoad:
    """Means over the last seconds. All routers': prompt tokens not yet computed, those of batch requests among them, sequences that run or
    are reserved; `own_*`, the part of them that came from this router."""

    queued_tokens: float = 0.0
    batch_tokens: float = 0.0
    own_queued_tokens: float = 0.0
    num_seqs: float = 0.0
    own_num_seqs: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A live worker as this router sees it: its record, and what the router itself knows better or sooner."""

    record: WorkerRecord
    # Of the prompt, in its pool or in its host memory, and how many of them in the latter: those have to be copied to the pool first.
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    # Prompt tokens this router has sent it to compute, whose first token has not come yet.
    queued_tokens: int = 0
    batch_tokens: int = 0  # of batch requests, among them
    # And how many it has sent it lately, computed or not, the longer ago the less: about as many as records do not tell of yet. Batch
    # requests' are none of them.
    recent_tokens: float = 0.0
    # Attempts of this router that are there now.
    num_attempts: int = 0
    # It refused this request in this round, or lost an earlier attempt of it.
    excluded: bool = False
    # None: nothing is known but the record.
    mean: MeanLoad | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    prefill: Sequence[Candidate]
    decode: Sequence[Candidate]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """Describes what a request needs. `num_tokens` are to be prefilled, `max_new_tokens` may follow them. The targets are milliseconds from
    now; None: as soon as can be."""

    request_id: str
    num_tokens: int
    max_new_tokens: int
    request_class: RequestClass = RequestClass.STANDARD
    ttft_ms: float | None = None
    tpot_ms: float | None = None
