"""A shared prefix: the second prompt goes to the workers that hold it, is not computed again there, and is not moved again; a router that
is started anew knows where it is."""

from __future__ import annotations

import os
import random
import signal

import pytest
from running import System, wait_until

from twostep import Client
from twostep.client import Transfer

_BLOCK_SIZE = 16

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def test_prefix_is_neither_computed_nor_moved_again(pairs: System) -> None:
    rng = random.Random(5)
    with pairs.client() as client:
        # Announcements and loads are a heartbeat old at best, and later where the machine is busy: then another prefix is tried.
        rounds = [_round(pairs, client, rng)]
        while not rounds[-1] and len(rounds) < 3:
            rounds.append(_round(pairs, client, rng))
        assert rounds[-1], f"in {len(rounds)} rounds, prompts were sent past the workers that hold their prefix"
        # The last request's effect on a worker's load is a heartbeat old, so that another one may seem better.
        assert any(_found_by_a_new_router(pairs, client, rng) for _ in range(3)), "a new router knew nothing of the prefix"
    pairs.check_empty()


def _round(system: System, client: Client, rng: random.Random) -> bool:
    """Three prompts after a first one with the same prefix: whether all went where it is. Those that did are checked. By chance alone,
    one round in 64 would pass."""
    shared = [rng.randrange(2, 200) for _ in range(640)]
    num_blocks = len(shared) // _BLOCK_SIZE

    def ask(tail: list[int], salt: str = "") -> tuple[int, Transfer]:
        done = client.generate(token_ids=shared + tail, max_tokens=3, ignore_eos=True, cache_salt=salt).result()
        return done.usage.cached_tokens, done.transfer

    cached, cold = ask([7])
    assert (cached, cold.blocks_reused) == (0, 0)
    block_bytes = cold.bytes // (num_blocks + 1)
    for n in range(3):
        system.wait_until_told()
        cached, move = ask([rng.randrange(2, 200) for _ in range(5 + n)])
        if (move.prefill_worker, move.decode_worker) != (cold.prefill_worker, cold.decode_worker):
            return False
        assert cached == len(shared)
        assert move.blocks_reused == num_blocks
        assert move.bytes == block_bytes, "only the tail's block travels"
    cached, move = ask([9], "another tenant")
    assert (cached, move.blocks_reused) == (0, 0)
    return True


def _found_by_a_new_router(system: System, client: Client, rng: random.Random) -> bool:
    """Whether the first request of a new router goes where the prefix is, of which nothing was announced since the one before it died."""
    shared = [rng.randrange(2, 200) for _ in range(640)]
    cold = client.generate(token_ids=[*shared, 7], max_tokens=3, ignore_eos=True).result()
    system.wait_until_told()
    (router,) = system.pids("router")
    os.kill(router, signal.SIGKILL)
    wait_until(lambda: system.pids("router") not in ([], [router]) and system.is_whole(2, 2), timeout_s=120, what="another router serves")
    with system.client() as fresh:
        warm = fresh.generate(token_ids=[*shared, 8, 9], max_tokens=3, ignore_eos=True).result()
    assert cold.usage.cached_tokens == 0
    return warm.usage.cached_tokens == len(shared)
