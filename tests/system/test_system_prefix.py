"""A shared prefix: the second prompt goes to the workers that hold it, is not computed again there, and is not moved again."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from running import running

from twostep import Client
from twostep.client import Transfer

_BLOCK_SIZE = 16

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def test_prefix_is_neither_computed_nor_moved_again(tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Content is tested here, not this machine's speed: a lookup may take long.
    monkeypatch.setenv("TWOSTEP_PREFIX_LOOKUP_TIMEOUT", "5")
    rng = random.Random(5)
    with (
        running(tiny_llama_dir, tmp_path, prefill=2, decode=2, extra=("--block-size", str(_BLOCK_SIZE))) as system,
        system.client() as client,
    ):
        # Announcements and loads are a heartbeat old at best, and later where the machine is busy: then another prefix is tried.
        rounds = [_round(client, rng)]
        while not rounds[-1] and len(rounds) < 3:
            rounds.append(_round(client, rng))
        assert rounds[-1], f"in {len(rounds)} rounds, prompts were sent past the workers that hold their prefix"
        system.check_empty()


def _round(client: Client, rng: random.Random) -> bool:
    """Four prompts after a first one with the same prefix: whether all went where it is. Those that did are checked. By chance alone,
    one round in 256 would pass."""
    shared = [rng.randrange(2, 200) for _ in range(640)]
    num_blocks = len(shared) // _BLOCK_SIZE

    def ask(tail: list[int], salt: str = "") -> tuple[int, Transfer]:
        done = client.generate(token_ids=shared + tail, max_tokens=3, ignore_eos=True, cache_salt=salt).result()
        return done.usage.cached_tokens, done.transfer

    cached, cold = ask([7])
    assert (cached, cold.blocks_reused) == (0, 0)
    block_bytes = cold.bytes // (num_blocks + 1)
    for n in range(4):
        time.sleep(2.5)  # a heartbeat tells what the workers hold now, and that they are idle
        cached, move = ask([rng.randrange(2, 200) for _ in range(5 + n)])
        if (move.prefill_worker, move.decode_worker) != (cold.prefill_worker, cold.decode_worker):
            return False
        assert cached == len(shared)
        assert move.blocks_reused == num_blocks
        assert move.bytes == block_bytes, "only the tail's block travels"
    cached, move = ask([9], "another tenant")
    assert (cached, move.blocks_reused) == (0, 0)
    return True
