"""A worker dies while clients ask without a pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from oracle import Oracle
from running import System, Worker, wait_until
from steady_load import SteadyLoad, model_cases

_NUM_CASES, _NUM_CLIENTS = 12, 6
_BUSY_WITHIN_S = 60.0
_MEND_S = 180.0
_MOST_KILLS = 8
_MOST_NEAR_TIES = 2


async def kill_under_load(system: System, oracle: Oracle, module: str, *, is_whole: Callable[[], bool], seed: int) -> None:
    """Strikes the busiest worker of a role. Fails for an answer that is lost or not the oracle's. A decode worker may just have sent its
    last token, a prefill worker its last block: then another one is struck, as soon as `is_whole`, until somebody else had to go on with
    an answer. Prompts stay new to everybody: decode workers would compute those whose prefix they have, and prefill workers have nothing
    to do."""
    cases = model_cases(oracle, _NUM_CASES, max_tokens=(60, 100), seed=seed)
    async with SteadyLoad([system.target], cases, num_clients=_NUM_CLIENTS, fresh=True) as load:
        for _ in range(_MOST_KILLS):
            await load.more(_NUM_CLIENTS // 2)
            (await _busiest(system, module)).kill()
            await load.settled()
            if any(outcome.moved for outcome in load.ended):
                break
            await asyncio.to_thread(wait_until, is_whole, timeout_s=_MEND_S, what=f"the killed {module} is back")
        else:
            raise AssertionError(f"{_MOST_KILLS} kills struck nobody")
    assert not [outcome.error for outcome in load.ended if outcome.error]
    wrong = [outcome for outcome in load.ended if list(outcome.token_ids) != list(outcome.case.expected)]
    near_ties = sum(oracle.compare(outcome.case.token_ids, outcome.case.options, outcome.token_ids) for outcome in wrong)
    assert near_ties <= _MOST_NEAR_TIES, f"{near_ties} of {len(load.ended)} comparisons ended at a near-tie"


async def _busiest(system: System, module: str) -> Worker:
    """As soon as one has something to do. Blocks while it asks: nothing comes between the answer and what is done with it."""
    workers = system.workers(module)
    give_up = time.monotonic() + _BUSY_WITHIN_S
    while True:
        held = [stats.num_running + stats.num_waiting + stats.num_leases for stats in (worker.stats() for worker in workers)]
        if max(held):
            return workers[held.index(max(held))]
        assert time.monotonic() < give_up, f"none of {workers} had anything to do in {_BUSY_WITHIN_S:g} s"
        await asyncio.sleep(0.01)
