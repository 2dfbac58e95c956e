"""A moment of an engine, as load reports and metrics want it."""

from __future__ import annotations

from twostep.engine.block_pool import BlockPool
from twostep.engine.ledger import SequenceLedger
from twostep.engine.types import EngineStats
from twostep.request_class import RequestClass


def stats_of(ledger: SequenceLedger, pool: BlockPool, *, steps: int, stalled_s: float) -> EngineStats:
    """Under the engine's lock. O(sequences). `steps` were launched; `stalled_s` as EngineStats has it."""
    return EngineStats(
        num_running=ledger.num_running,
        num_waiting=ledger.num_waiting,
        num_reserved=ledger.num_reserved,
        num_held=ledger.num_held,
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        steps=steps,
        num_queued_tokens=ledger.num_queued_tokens(),
        num_queued_batch_tokens=ledger.num_queued_tokens(RequestClass.BATCH),
        max_step_s=ledger.planner.max_step_s,
        num_context_tokens=ledger.num_context_tokens,
        num_preemptions=ledger.preemptor.num_preemptions,
        swapped_bytes=ledger.preemptor.swapped_bytes,
        num_queried_tokens=ledger.num_queried_tokens,
        num_hit_tokens=ledger.num_hit_tokens,
        num_host_blocks=ledger.tier.num_blocks,
        num_host_hit_tokens=ledger.num_host_hit_tokens,
        stalled_s=stalled_s,
    )
