"""A system without prefill workers, in real processes: right tokens, turns that find their prefix, and a worker that dies."""

from __future__ import annotations

import asyncio
import functools
import random
import subprocess
import sys
from pathlib import Path

import pytest
from kills import kill_under_load
from oracle import Oracle
from oracle_cases import answered
from running import System, wait_until

pytestmark = pytest.mark.timeout(600)


def test_an_aggregated_system_gives_the_oracle_s_tokens_without_ray(aggregated: System, oracle: Oracle) -> None:
    assert set(answered(aggregated, oracle, seed=7)) == {"none"}
    assert aggregated.pids_of_program("raylet") == []
    aggregated.check_empty()


def test_another_worker_goes_on_where_a_killed_one_was(aggregated: System, oracle: Oracle) -> None:
    is_whole = functools.partial(aggregated.is_whole, 0, 2)
    asyncio.run(kill_under_load(aggregated, oracle, "decode_worker", is_whole=is_whole, seed=1))
    wait_until(is_whole, timeout_s=180, what="the killed worker is back")
    aggregated.check_empty()


def test_a_second_turn_finds_the_worker_that_has_the_first(aggregated: System) -> None:
    rng = random.Random(3)
    with aggregated.client() as client:

        def conversation(num_turns: int = 5) -> bool:
            """Returns whether all of it stayed on one worker. By chance alone, one in sixteen would."""
            prompt = [rng.randrange(2, 200) for _ in range(640)]
            worker, before = "", 0
            for turn in range(num_turns):
                if turn:
                    aggregated.wait_until_told()
                done = client.generate(token_ids=prompt, max_tokens=12, temperature=0.0, ignore_eos=True, timeout=180).result()
                if turn and done.transfer.decode_worker != worker:
                    return False
                # All whole blocks of prompt and answer so far, but that of the last token, which was never computed.
                assert done.usage.cached_tokens == max(0, before - 1) // 16 * 16
                worker, before = done.transfer.decode_worker, len(prompt) + len(done.token_ids)
                prompt = [*prompt, *done.token_ids, *(rng.randrange(2, 200) for _ in range(9))]
            return True

        # A heartbeat that is later than all others yet may cost one.
        assert conversation() or conversation(), "a heartbeat after the first turn the router knows who has it"
    aggregated.check_empty()


@pytest.mark.usefixtures("alone")
def test_the_demo_of_an_aggregated_system(tiny_llama_dir: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-m", "twostep.cli", "demo", "--aggregated", "--model", str(tiny_llama_dir), "--max-tokens", "16"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for sign in ("decode-0", "computed the prompt itself", "hold nothing any more", "All is well"):
        assert sign in done.stdout, done.stdout
    assert "ray" not in done.stdout
