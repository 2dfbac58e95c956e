"""A worker dies while clients ask without a pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from oracle import Oracle
from running import System, Worker
from steady_load import Outcome, SteadyLoad, model_cases

# Prompts that nobody has computed before are still coming when the first are answered.
_NUM_CASES, _NUM_CLIENTS = 24, 8
_BUSY_WITHIN_S = 60.0
_MOST_NEAR_TIES = 2


async def kill_under_load(system: System, oracle: Oracle, module: str) -> list[Outcome]:
    """Strikes the busiest worker of a role. Fails for an answer that is lost or not the oracle's; what became of all of them."""
    cases = model_cases(oracle, _NUM_CASES, max_tokens=(40, 80))
    async with SteadyLoad([system.target], cases, num_clients=_NUM_CLIENTS) as load:
        await load.more(_NUM_CLIENTS // 2)
        (await _busiest(system.workers(module))).kill()
        await load.settled()
    assert not [outcome.error for outcome in load.ended if outcome.error]
    wrong = [outcome for outcome in load.ended if list(outcome.token_ids) != list(outcome.case.expected)]
    near_ties = sum(oracle.compare(outcome.case.token_ids, outcome.case.options, outcome.token_ids) for outcome in wrong)
    assert near_ties <= _MOST_NEAR_TIES, f"{near_ties} of {len(load.ended)} comparisons ended at a near-tie"
    return load.ended


async def _busiest(workers: Sequence[Worker]) -> Worker:
    """As soon as one has something to do."""
    give_up = time.monotonic() + _BUSY_WITHIN_S
    while True:
        stats = await asyncio.gather(*(asyncio.to_thread(worker.stats) for worker in workers))
        held = [each.num_running + each.num_waiting + each.num_leases for each in stats]
        if max(held):
            return workers[held.index(max(held))]
        assert time.monotonic() < give_up, f"none of {workers} had anything to do in {_BUSY_WITHIN_S:g} s"
        await asyncio.sleep(0.01)
