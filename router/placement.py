"""Which prefill and which decode worker serve a request: a pure function of a snapshot.

Costs are in tokens of prefill work, so that cached prefixes, queues, hand-over and decode load can be added up:

    prefill worker   tokens queued before this prompt  +  tokens of the prompt it has not cached
    decode worker    tokens that must be moved to it / 8  +  64 for each sequence it runs  (+ a penalty when it looks full)
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from twostep.cluster.convertible import HOST_TRANSPORTS, joinable, keeps_keys, reasons_against
from twostep.cluster.records import LayoutRecord, WorkerRecord
from twostep.request_class import RequestClass

# Moving a token's KV through host memory takes about an eighth of the time that computing it does.
_HANDOVER_COST = 0.125
# The same for cutting KV into other blocks on the decode worker's CPU.
_CONVERSION_COST = _HANDOVER_COST
# Copying it from the worker's own host memory to its pool: a tenth.
_HOST_COST = 0.1
# KV in another number format gives answers that no single worker would give, and is no cached prefix afterwards: only where nobody else
# has room.
_ROUNDING_COST = 5e5
# A sequence more slows the others' decode steps: over an answer of some hundred tokens about as long as 64 tokens of prefill.
_SEQUENCE_COST = 64.0
# Heartbeats are a second old, so a worker that looks full is asked last, not never.
_FULL_COST = 1e6
_MAX_PAIRS_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A live worker as this router sees it: its record, and what the router itself knows better or sooner."""

    record: WorkerRecord
    # Of the prompt, in its pool or in its host memory, and how many of them in the latter: those have to be copied to the pool first.
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    # Prefill: prompt tokens this router has sent and whose first token has not come yet, and in how many requests.
    queued_tokens: int = 0
    # Attempts of this router that are there now.
    num_attempts: int = 0
    # It refused this request in this round, or lost an earlier attempt of it.
    excluded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    prefill: Sequence[Candidate]
    decode: Sequence[Candidate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request needs. `num_tokens` are to be prefilled, `max_new_tokens` may follow them. The targets are milliseconds from now;
    None: as soon as can be."""

    request_id: str
    num_tokens: int
    max_new_tokens: int
    request_class: RequestClass = RequestClass.STANDARD
    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who serves a request. `prefill` is None where the decode worker computes the prompt itself.

    Of the choice, as predicted now: time to the first token, time per token after it, whether both are within the demand's targets, and if
    not, after how many seconds it is worth asking again (0 otherwise)."""

    prefill: WorkerRecord | None
    decode: WorkerRecord
    cost: float
    reason: str
    predicted_ttft_s: float = 0.0
    predicted_tpot_s: float = 0.0
    meets_targets: bool = True
    retry_after_s: float = 0.0


class Shortage(Enum):
    MISSING = "missing"  # a role has no worker that could serve this request
    NO_TRANSPORT = "no transport"  # workers are there, but KV cannot travel between any two of them
    EXCLUDED = "excluded"  # every pair that could serve it has an excluded worker
    INCOMPATIBLE = "incompatible"  # no prefill worker's KV means anything to any decode worker
    TOO_LARGE = "too large"  # no live worker could ever hold it


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlacement:
    """Why nobody can serve the request now; `reason` is a sentence for the client."""

    shortage: Shortage
    reason: str


def place(snapshot: Snapshot, demand: Demand) -> Placement | NoPlacement:
    """The cheapest pair that has a KV layout and a transport in common. Ties fall by a hash of request and worker: the same for
    the same request, spread evenly over requests. Linear in the number of workers."""
    prefill = [c for c in snapshot.prefill if _serves(c.record)]
    decode = [c for c in snapshot.decode if _serves(c.record)]
    missing = [role for role, workers in (("prefill", prefill), ("decode", decode)) if not workers]
    if missing:
        return NoPlacement(shortage=Shortage.MISSING, reason=_missing_reason(missing, snapshot))
    fitting_prefill = [c for c in prefill if _blocks(demand.num_tokens, c.record) <= c.record.num_blocks and _in_context(c.record, demand)]
    total = demand.num_tokens + demand.max_new_tokens
    fitting_decode = [c for c in decode if _blocks(total, c.record) <= c.record.num_blocks and _in_context(c.record, demand)]
    if not fitting_prefill or not fitting_decode:
        return NoPlacement(shortage=Shortage.TOO_LARGE, reason=_too_large_reason(demand, prefill, decode))
    best = _cheapest(fitting_prefill, fitting_decode, demand, skip_excluded=True)
    if best is not None:
        return best
    if _cheapest(fitting_prefill, fitting_decode, demand, skip_excluded=False) is not None:
        return NoPlacement(shortage=Shortage.EXCLUDED, reason="every worker that could serve the request is full or has just failed")
    layouts = {c.record.layout for c in fitting_prefill}, {c.record.layout for c in fitting_decode}
    if not any(there == here or joinable(there, here) for there in layouts[0] for here in layouts[1]):
        return NoPlacement(shortage=Shortage.INCOMPATIBLE, reason=_incompatible_reason(fitting_prefill, fitting_decode))
    return NoPlacement(shortage=Shortage.NO_TRANSPORT, reason=_no_transport_reason(fitting_prefill, fitting_decode))


def _serves(record: WorkerRecord) -> bool:
    return record.ready and not record.draining


def _blocks(num_tokens: int, record: WorkerRecord) -> int:
    return -(-num_tokens // record.layout.block_size)


def _in_context(record: WorkerRecord, demand: Demand) -> bool:
    return demand.num_tokens + demand.max_new_tokens <= record.max_model_len


@dataclass(frozen=True, slots=True)
class _Scored:
    cost: float
    tie: int
    candidate: Candidate


# Workers can be paired along rails of one transport: of the same layout, or of two that can be converted, where the transport passes
# through the reader's host memory.
_Rail = tuple[LayoutRecord, str]


def _cheapest(prefill: Iterable[Candidate], decode: Iterable[Candidate], demand: Demand, *, skip_excluded: bool) -> Placement | None:
    best_prefill = _best_by_rail(((c, _prefill_cost(c, demand)) for c in prefill if not (skip_excluded and c.excluded)), demand)
    best_decode = _best_by_rail(((c, _decode_cost(c, demand)) for c in decode if not (skip_excluded and c.excluded)), demand)
    pairs = [
        (p.cost + d.cost + _conversion_cost(there[0], here[0], demand), p, d)
        for there, p in best_prefill.items()
        for here, d in best_decode.items()
        if _joined(there, here)
    ]
    if not pairs:
        return None
    cost, p, d = min(pairs, key=lambda pair: (pair[0], pair[1].tie, pair[2].tie))
    return Placement(
        prefill=p.candidate.record,
        decode=d.candidate.record,
        cost=cost,
        reason=(
            f"prefill {p.candidate.record.worker_id}: {p.candidate.cached_tokens} of {demand.num_tokens} tokens cached, cost {p.cost:.0f}; "
            f"decode {d.candidate.record.worker_id}: {d.candidate.cached_tokens} cached, cost {d.cost:.0f}"
        ),
    )


def _conversion_cost(there: LayoutRecord, here: LayoutRecord, demand: Demand) -> float:
    if there == here:
        return 0.0
    return _CONVERSION_COST * demand.num_tokens + (0.0 if keeps_keys(there, here) else _ROUNDING_COST)


def _joined(there: _Rail, here: _Rail) -> bool:
    if there[1] != here[1]:
        return False
    return there[0] == here[0] or (there[1] in HOST_TRANSPORTS and joinable(there[0], here[0]))


def _best_by_rail(scored: Iterable[tuple[Candidate, float]], demand: Demand) -> dict[_Rail, _Scored]:
    best: dict[_Rail, _Scored] = {}
    for candidate, cost in scored:
        entry = _Scored(cost, _tie(demand.request_id, candidate.record.worker_id), candidate)
        for transport in candidate.record.transports:
            rail = (candidate.record.layout, transport)
            known = best.get(rail)
            if known is None or (entry.cost, entry.tie) < (known.cost, known.tie):
                best[rail] = entry
    return best


def _tie(request_id: str, worker_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{request_id}/{worker_id}".encode(), digest_size=8).digest(), "little")


def _prefill_cost(candidate: Candidate, demand: Demand) -> float:
    load = candidate.record.load
    # Other routers' prompts are known by number only; take each for one like this.
    others = max(0, load.num_running + load.num_waiting - candidate.num_attempts)
    here = max(0, demand.num_tokens - candidate.cached_tokens) + _HOST_COST * candidate.host_cached_tokens
    return candidate.queued_tokens + others * demand.num_tokens + here


def _decode_cost(candidate: Candidate, demand: Demand) -> float:
    record = candidate.record
    num_seqs = max(record.load.num_running + record.load.num_reserved, candidate.num_attempts)
    moved = _HANDOVER_COST * max(0, demand.num_tokens - candidate.cached_tokens) + _HOST_COST * candidate.host_cached_tokens
    cost = moved + _SEQUENCE_COST * num_seqs
    # New tokens get their blocks as they come.
    needed = _blocks(demand.num_tokens - candidate.cached_tokens + candidate.host_cached_tokens + 1, record)
    if num_seqs >= record.max_num_seqs or record.load.num_free_blocks < needed:
        cost += _FULL_COST
    return cost


# ---- sentences ----------------------------------------------------------------------------------------------------------


def _missing_reason(roles: Sequence[str], snapshot: Snapshot) -> str:
    parts: list[str] = []
    for role in roles:
        here = snapshot.prefill if role == "prefill" else snapshot.decode
        idle = [f"{c.record.worker_id} {'is draining' if c.record.draining else 'is not ready'}" for c in here]
        parts.append(f"no {role} worker is available" + (f" ({', '.join(idle[:8])})" if idle else ""))
    return " and ".join(parts) + "; start one, or repeat the request later"


def _too_large_reason(demand: Demand, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> str:
    slots = min(max(c.record.num_blocks * c.record.layout.block_size for c in side) for side in (prefill, decode))
    context = min(max(c.record.max_model_len for c in side) for side in (prefill, decode))
    return (
        f"{demand.num_tokens} tokens and up to {demand.max_new_tokens} new ones do not fit the workers: "
        f"their context is {context} tokens, their KV pool {slots}; shorten the prompt or lower max_tokens"
    )


def _incompatible_reason(prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> str:
    """Why KV cannot be converted, for one worker of each layout; the first few pairs."""
    sides = [{c.record.layout: c.record.worker_id for c in reversed(side)} for side in (prefill, decode)]
    pairs = list(itertools.product(sides[0].items(), sides[1].items()))
    parts = [f"from {p} to {d}, {_why_not(there, here)}" for (there, p), (here, d) in pairs[:_MAX_PAIRS_NAMED]]
    if len(pairs) > _MAX_PAIRS_NAMED:
        parts.append(f"and so on for {len(pairs) - _MAX_PAIRS_NAMED} more such pairs")
    return (
        f"no prefill worker has a KV layout that any decode worker takes: {'; '.join(parts)}. "
        "Start both with the same model, and with blocks of a multiple of 4 tokens where KV is quantized"
    )


def _why_not(there: LayoutRecord, here: LayoutRecord) -> str:
    return ", ".join(reasons_against(there, here)) or f"KV is in {there.tp_size} parts there and {here.tp_size} here"


def _no_transport_reason(prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> str:
    sides = (("prefill", prefill), ("decode", decode))
    names = sorted({t for c in (*prefill, *decode) for t in c.record.transports})
    ids = {role: ", ".join(sorted(c.record.worker_id for c in workers)[:8]) for role, workers in sides}
    if not names:
        return f"no KV transport is ready on {ids['prefill']}, {ids['decode']}; see that Ray is up, and repeat the request later"
    parts: list[str] = []
    for name in names:
        lacking = [ids[role] for role, workers in sides if not any(name in c.record.transports for c in workers)]
        parts.append(f"KV transport {name} is not ready on {', '.join(lacking) or 'workers of one layout'}")
    return "; ".join(parts) + "; see that Ray is up, and repeat the request later"
