"""Prompts computed on decode workers beside hand-overs, in real processes: right tokens either way, and processes that die."""

from __future__ import annotations

import itertools
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from loads import answered
from oracle import Oracle
from running import System, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPT = list(range(2, 202))


def test_both_ways_under_load_give_the_oracle_s_tokens(both_ways: System, oracle: Oracle) -> None:
    """Which way is the quicker one is the router's to say: where hand-overs were slow, it tries them again once that is forgotten."""
    ways, seeds = set[str](), itertools.count()

    def both() -> bool:
        ways.update(answered(both_ways, oracle, seed=next(seeds)))
        return ways == {"none", "ray"}

    wait_until(both, timeout_s=300, what="prompts have gone both ways")
    both_ways.check_empty()


def test_a_short_suffix_of_a_known_conversation_is_computed_where_it_is_decoded(both_ways: System) -> None:
    rng = random.Random(4)
    with both_ways.client() as client:

        def conversation() -> bool:
            """Returns whether both later turns were. Of the four ways that there are, by chance alone one conversation in sixteen would."""
            prompt = [rng.randrange(2, 200) for _ in range(900)]
            done = client.generate(token_ids=prompt, max_tokens=12, temperature=0.0, ignore_eos=True, timeout=180).result()
            for _ in range(2):
                both_ways.wait_until_told()
                holder, before = done.transfer.decode_worker, len(prompt) + len(done.token_ids)
                prompt = [*prompt, *done.token_ids, 5, 6, 7]
                done = client.generate(token_ids=prompt, max_tokens=5, temperature=0.0, ignore_eos=True, timeout=180).result()
                if (done.transfer.transport, done.transfer.decode_worker) != ("none", holder):
                    return False
                assert done.usage.cached_tokens == (before - 1) // 16 * 16, "all whole blocks but that of the last token"
            return True

        # A heartbeat that is later than all others yet may cost one.
        assert conversation() or conversation(), "a decode worker has nearly all of the prompt, and another one was taken"
    both_ways.check_empty()


def test_losing_ray_does_not_stop_serving(both_ways: System) -> None:
    before = {worker.pid for worker in both_ways.all_workers()}
    raylets = both_ways.pids_of_program("raylet")
    assert raylets
    with both_ways.client(max_retries=0) as client:

        def way(n: int) -> str:
            """Returns the transport of a prompt that no cache has."""
            answer = client.generate(token_ids=PROMPT * 3, max_tokens=4, cache_salt=f"{n}", ignore_eos=True, timeout=180).result()
            assert len(answer.token_ids) == 4
            return answer.transfer.transport

        numbers = itertools.count()

        def handed_over() -> bool:
            with ThreadPoolExecutor(8) as pool:
                return "ray" in list(pool.map(way, itertools.islice(numbers, 16)))

        with both_ways.left_alone():
            for pid in raylets:
                os.kill(pid, signal.SIGKILL)
            # At first workers think that they can hand over.
            wait_until(lambda: way(next(numbers)) and not _can_hand_over(both_ways), timeout_s=120, what="workers know that Ray is gone")
            ways = [way(n) for n in itertools.islice(numbers, 8)]
            assert set(ways) == {"none"}, "without a transport decode workers compute prompts"
        wait_until(lambda: way(next(numbers)) and both_ways.is_whole(1, 2), timeout_s=180, what="Ray is back")
        wait_until(handed_over, timeout_s=120, what="prompts are handed over again")
    assert {worker.pid for worker in both_ways.all_workers()} == before, "a worker was lost with Ray"
    both_ways.check_empty()


def _can_hand_over(system: System) -> bool:
    return any(transport.ready for worker in system.all_workers() for transport in worker.stats().transports)
