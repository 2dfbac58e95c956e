"""Why a request could not be placed: sentences for clients and operators, with what to do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from twostep.cluster.convertible import reasons_against
from twostep.cluster.records import LayoutRecord
from twostep.cluster.snapshot import Candidate, PlacementRequest, Snapshot

_MAX_PAIRS_NAMED = 4


def missing(roles: Sequence[str], snapshot: Snapshot) -> str:
    """Roles of which there is no worker that takes work."""
    parts: list[str] = []
    for role in roles:
        here = snapshot.prefill if role == "prefill" else snapshot.decode
        idle = [f"{c.record.worker_id} {'is draining' if c.record.draining else 'is not ready'}" for c in here]
        parts.append(f"no {role} worker is available" + (f" ({', '.join(idle[:8])})" if idle else ""))
    return " and ".join(parts) + "; start one, or repeat the request later"


def too_large(demand: PlacementRequest, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> str:
    """`prefill` may be empty, where decode workers compute prompts."""
    sides = [side for side in (prefill, decode) if side]
    slots = min(max(c.record.num_blocks * c.record.layout.block_size for c in side) for side in sides)
    context = min(max(c.record.max_model_len for c in side) for side in sides)
    return (
        f"{demand.num_tokens} tokens and up to {demand.max_new_tokens} new ones do not fit the workers: "
        f"their context is {context} tokens, their KV pool {slots}; shorten the prompt or ask for fewer new tokens (max_tokens)"
    )


def incompatible(prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> str:
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


def versions_apart(prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> str:
    """Each is near enough to the router's, and none of one side to any of the other's."""
    sides = [sorted({c.record.version for c in side}) for side in (prefill, decode)]
    return (
        f"prefill workers run {', '.join(sides[0])} and decode workers {', '.join(sides[1])}, more than one minor version apart; "
        "upgrade the older ones, or repeat the request later"
    )


def no_transport(prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> str:
    """Says which transport is lacking where, for workers whose KV could travel."""
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
