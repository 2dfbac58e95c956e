"""Conversations whose workers keep what was said before: in the pool, and in host memory what a small one gives up.

In a file behind those that share systems, which end where a test has its own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from oracle import Oracle
from running import running

from twostep import Client, SamplingOptions

BLOCK_SIZE = 16

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


class Talk:
    """A conversation: every prompt is all that was said before, and some words more."""

    def __init__(self, client: Client, oracle: Oracle, rng: random.Random) -> None:
        self._client = client
        self._oracle = oracle
        self._rng = rng
        self.history: list[int] = []
        self.num_prompt_tokens = 0

    def turn(self) -> tuple[int, int]:
        """The next question and its answer, which is right. Returns the tokens that the prefill worker found, and the blocks that the
        decode worker had."""
        prompt = self.history + [self._rng.randrange(3, 200) for _ in range(self._rng.randrange(20, 50))]
        options = SamplingOptions(max_tokens=self._rng.randrange(20, 40), temperature=0.0, ignore_eos=True)
        done = self._client.generate(token_ids=prompt, timeout=120, **options).result()
        self._oracle.compare(prompt, options, done.token_ids)
        self.history = [*prompt, *done.token_ids]
        self.num_prompt_tokens = len(prompt)
        return done.usage.cached_tokens, done.transfer.blocks_reused


@pytest.mark.usefixtures("alone")
def test_conversations_find_what_was_said_in_the_pool_or_in_host_memory(tiny_llama_dir: Path, tmp_path: Path, oracle: Oracle) -> None:
    """The prefill worker finds the prompts before, the decode worker the answers too. Its KV cache has room for one conversation. Every
    prompt is handed over, so that both workers have their part of it."""
    rng = random.Random(11)
    env = {"TWOSTEP_NUM_BLOCKS": "64", "TWOSTEP_PREFIX_CACHE_SPACE": "0.05"}
    extra = ("--dtype", "float32", "--block-size", str(BLOCK_SIZE))
    with running(tiny_llama_dir, tmp_path, extra=extra, env=env) as system, system.client() as client:
        talk = Talk(client, oracle, rng)
        for number in range(7):
            wanted = talk.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE, max(0, len(talk.history) - 1) // BLOCK_SIZE
            assert talk.turn() == wanted, f"turn {number}"
        for _ in range(30):
            # A little at a time: what is cached is saved ahead of being given up, not all at once.
            Talk(client, oracle, rng).turn()
        wanted = talk.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE, max(0, len(talk.history) - 1) // BLOCK_SIZE
        assert talk.turn() == wanted
        for worker in system.all_workers():
            stats = worker.stats(check_integrity=True)
            assert not stats.integrity_error
            assert stats.num_host_hit_tokens > 0, stats
        system.check_empty()
