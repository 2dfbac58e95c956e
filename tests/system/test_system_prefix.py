"""A shared prefix: the second prompt goes to the workers that hold it, is not computed again there, and is not moved again."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from running import running

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def test_prefix_is_neither_computed_nor_moved_again(tiny_llama_dir: Path, tmp_path: Path) -> None:
    rng = random.Random(5)
    shared = [rng.randrange(2, 200) for _ in range(640)]
    block_size = 16
    with (
        running(tiny_llama_dir, tmp_path, prefill=2, decode=2, extra=("--block-size", str(block_size))) as system,
        system.client() as client,
    ):

        def ask(tail: list[int]) -> tuple[int, int, int, str, str]:
            done = client.generate(token_ids=shared + tail, max_tokens=3, ignore_eos=True).result()
            move = done.transfer
            return done.usage.cached_tokens, move.bytes, move.blocks_reused, move.prefill_worker, move.decode_worker

        cached, cold_bytes, reused, prefill, decode = ask([7])
        assert (cached, reused) == (0, 0)
        block_bytes = cold_bytes // (len(shared) // block_size + 1)
        time.sleep(2.5)  # a heartbeat announces what the workers hold now
        for n in range(4):
            tail = [rng.randrange(2, 200) for _ in range(5 + n)]
            cached, moved, reused, same_prefill, same_decode = ask(tail)
            assert (same_prefill, same_decode) == (prefill, decode)
            assert cached == len(shared)
            assert reused == len(shared) // block_size
            assert moved == block_bytes, "only the tail's block travels"
        other_salt = client.generate(token_ids=[*shared, 9], max_tokens=3, ignore_eos=True, cache_salt="another tenant").result()
        assert (other_salt.usage.cached_tokens, other_salt.transfer.blocks_reused) == (0, 0)
        system.check_empty()
