"""Which workers a simulated request goes to. A placement is any function of this shape, so that others can be tried in a simulation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostep.lab.plan.virtual_engine import VirtualEngine
from twostep.lab.plan.workload import Request
from twostep.step_curve import chunk_pairs


@dataclass(frozen=True, slots=True)
class Choice:
    """Indices. `prefill` None: the decode worker computes the prompt itself."""

    prefill: int | None
    decode: int


class Placement(Protocol):
    def __call__(
        self,
        request: Request,
        now: float,
        prefill: Sequence[VirtualEngine],
        decode: Sequence[VirtualEngine],
        full: Collection[int],
    ) -> Choice | None:
        """`full` are decode workers that have just refused the request. None: it waits in the router's queue until somebody has room."""
        ...


def shortest_ttft(
    request: Request,
    now: float,
    prefill: Sequence[VirtualEngine],
    decode: Sequence[VirtualEngine],
    full: Collection[int],
) -> Choice | None:
    """The prefill worker whose first token would be there soonest, and the decode worker whose next step would be shortest with it. Without
    prefill workers, the decode worker whose first token would be there soonest."""
    open_ = [i for i in range(len(decode)) if i not in full]
    if not open_:
        return None
    if not prefill:
        return Choice(None, min(open_, key=lambda i: (predicted_ttft(decode[i], request, now), decode[i].num_seqs)))
    first = min(range(len(prefill)), key=lambda i: predicted_ttft(prefill[i], request, now))
    return Choice(first, min(open_, key=lambda i: (decode[i].num_seqs, decode[i].context)))


def predicted_ttft(engine: VirtualEngine, request: Request, now: float) -> float:
    """Seconds until the first token: what is left of the launched steps, the prompts queued here, and this one, in full steps beside those
    that decode here now."""
    spec, curve = engine.spec, engine.spec.prompt_curve
    num_tokens = engine.queued_tokens + request.num_uncached
    pairs = engine.queued_pairs + chunk_pairs(request.num_uncached, request.num_prompt - request.num_uncached)
    decodes = engine.num_decoding
    num_steps = -(-num_tokens // max(1, spec.step_tokens - decodes))
    rows = max(0.0, num_tokens + num_steps * (decodes - curve.knee))
    each = curve.fixed_s + curve.per_sequence_s * decodes + curve.per_context_s * engine.context
    return max(0.0, engine.free_at_s - now) + num_steps * each + curve.per_row_s * rows + curve.per_pair_s * pairs
