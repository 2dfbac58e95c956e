"""Prompts computed on decode workers, in real processes: right tokens, alone and beside hand-overs, turns that find their prefix, and
processes that die."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from oracle import Oracle
from running import System, running, wait_until
from test_system_tokens import PROMPTS, Case, cases

from twostep import AsyncClient, Completion, TwostepError

pytestmark = pytest.mark.timeout(600)

PROMPT = list(range(2, 202))


@contextmanager
def patient() -> Iterator[pytest.MonkeyPatch]:
    """Content is tested here, not this machine's speed: a lookup of prefixes may take long, and workers that are alike look alike, whatever
    else ran while either would have measured itself."""
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("TWOSTEP_PREFIX_LOOKUP_TIMEOUT", "5")
        environ.setenv("TWOSTEP_CALIBRATE", "0")
        yield environ


def prompt_of(n: int) -> list[int]:
    return [(t + n) % 200 + 2 for t in PROMPT]


async def ask(client: AsyncClient, prompt: Sequence[int], max_tokens: int = 200) -> Completion:
    return await client.generate(token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout=60).result()


def answered(system: System, model_dir: Path, seed: int) -> list[str]:
    """20 requests, eight at a time, each compared with the oracle. Returns how their KV travelled."""
    oracle = Oracle(model_dir)
    todo = cases(oracle.vocab_size, [oracle.chat_ids(p) for p in PROMPTS], seed=seed)
    with system.client() as client:

        def one(case: Case) -> Completion:
            return client.generate(token_ids=case.token_ids, timeout=300, **case.options).result()

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(one, todo))
    near_ties = sum(oracle.compare(case.token_ids, case.options, a.token_ids) for case, a in zip(todo, answers, strict=True))
    assert near_ties <= 2, f"{near_ties} of {len(answers)} comparisons ended at a near-tie"
    return [answer.transfer.transport for answer in answers if len(answer.token_ids) > 1]


# ---- without prefill workers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aggregated(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Two workers that do everything, in steps of 48 tokens; each test leaves it whole."""
    extra = ("--dtype", "float32", "--max-num-batched-tokens", "48")
    with patient() as _, running(tiny_llama_dir, tmp_path_factory.mktemp("aggregated"), prefill=0, decode=2, extra=extra) as system:
        yield system


def test_an_aggregated_system_gives_the_oracle_s_tokens_without_ray(aggregated: System, tiny_llama_dir: Path) -> None:
    assert set(answered(aggregated, tiny_llama_dir, seed=7)) == {"none"}
    assert aggregated.pids_of_program("raylet") == []
    aggregated.check_empty()


def test_another_worker_goes_on_where_a_killed_one_was(aggregated: System) -> None:
    async def streamed(client: AsyncClient, prompt: Sequence[int], begun: asyncio.Event) -> Completion:
        answer = client.generate(token_ids=prompt, max_tokens=400, temperature=0.0, ignore_eos=True, timeout=60)
        async for _ in answer:
            begun.set()
        return await answer.result()

    async def under_fire() -> None:
        async with AsyncClient(aggregated.target) as client:
            calm = await asyncio.gather(*(ask(client, prompt_of(n), 400) for n in range(12)))
            begun = asyncio.Event()
            tasks = [asyncio.create_task(streamed(client, prompt_of(n), begun)) for n in range(12)]
            await begun.wait()
            # Their prefixes may all be on one worker.
            workers = aggregated.workers("decode_worker")
            running = [stats.num_running for stats in await asyncio.gather(*(asyncio.to_thread(worker.stats) for worker in workers))]
            workers[running.index(max(running))].kill()
            fired = await asyncio.gather(*tasks)
            assert [answer.token_ids for answer in fired] == [answer.token_ids for answer in calm]
            assert max(answer.attempts for answer in fired) > 1, "the kill struck nobody"

    asyncio.run(under_fire())
    wait_until(lambda: aggregated.serves(0, 2), timeout_s=60, what="the killed worker is back")
    aggregated.check_empty(timeout_s=60)


def test_cancels_at_all_moments_free_everything(aggregated: System) -> None:
    async def leave() -> None:
        async with AsyncClient(aggregated.target) as client:
            for n in range(20):
                answer = client.generate(token_ids=prompt_of(n) * 5, max_tokens=500, ignore_eos=True, timeout=60)
                first = asyncio.create_task(anext(aiter(answer)))
                await asyncio.sleep(0.005 * n)
                if n % 2:
                    await first
                answer.cancel()
                try:
                    await first
                except (TwostepError, asyncio.CancelledError, StopAsyncIteration):
                    pass

    asyncio.run(leave())
    aggregated.check_empty()


def test_a_second_turn_finds_the_worker_that_has_the_first(aggregated: System) -> None:
    rng = random.Random(3)
    with aggregated.client() as client:

        def conversation(num_turns: int = 5) -> bool:
            """Whether all of it stayed on one worker. By chance alone, one in sixteen would."""
            prompt = [rng.randrange(2, 200) for _ in range(640)]
            worker, before = "", 0
            for turn in range(num_turns):
                done = client.generate(token_ids=prompt, max_tokens=30, temperature=0.0, ignore_eos=True, timeout=60).result()
                if turn and done.transfer.decode_worker != worker:
                    return False
                # All whole blocks of prompt and answer so far, but that of the last token, which was never computed.
                assert done.usage.cached_tokens == max(0, before - 1) // 16 * 16
                worker, before = done.transfer.decode_worker, len(prompt) + len(done.token_ids)
                prompt = [*prompt, *done.token_ids, *(rng.randrange(2, 200) for _ in range(9))]
                aggregated.wait_until_told()
            return True

        # A heartbeat that is later than all others yet may cost one.
        assert conversation() or conversation(), "a heartbeat after the first turn the router knows who has it"
    aggregated.check_empty()


def test_the_demo_of_an_aggregated_system(smollm2_dir: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-m", "twostep.cli", "demo", "--aggregated", "--model", str(smollm2_dir), "--max-tokens", "16"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for sign in ("Paris", "decode-0", "computed the prompt itself", "hold nothing any more", "All is well"):
        assert sign in done.stdout, done.stdout
    assert "ray" not in done.stdout


# ---- beside hand-overs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One prefill worker and two decode workers that compute prompts too, one waiting at most: under load both ways are taken."""
    with patient() as environ:
        environ.setenv("TWOSTEP_MAX_WAITING", "1")
        extra = ("--dtype", "float32")
        with running(tiny_llama_dir, tmp_path_factory.mktemp("mixed"), decode=2, local_prefill=True, extra=extra) as system:
            yield system


@pytest.mark.ray
def test_both_ways_under_load_give_the_oracle_s_tokens(mixed: System, tiny_llama_dir: Path) -> None:
    ways = set[str]()
    for seed in range(5):
        ways |= set(answered(mixed, tiny_llama_dir, seed=seed))
        if len(ways) == 2:
            break
    assert ways == {"none", "ray"}
    mixed.check_empty()


@pytest.mark.ray
def test_a_short_suffix_of_a_known_conversation_is_computed_where_it_is_decoded(mixed: System) -> None:
    rng = random.Random(4)
    with mixed.client() as client:

        def conversation() -> bool:
            """Whether both later turns were. Of the four ways that there are, by chance alone one conversation in sixteen would."""
            prompt = [rng.randrange(2, 200) for _ in range(900)]
            done = client.generate(token_ids=prompt, max_tokens=30, temperature=0.0, ignore_eos=True, timeout=60).result()
            for _ in range(2):
                mixed.wait_until_told()
                holder, prompt = done.transfer.decode_worker, [*prompt, *done.token_ids, 5, 6, 7]
                done = client.generate(token_ids=prompt, max_tokens=5, temperature=0.0, ignore_eos=True, timeout=60).result()
                if (done.transfer.transport, done.transfer.decode_worker) != ("none", holder):
                    return False
                assert done.usage.cached_tokens >= 900
            return True

        # A heartbeat that is later than all others yet may cost one.
        assert conversation() or conversation(), "a decode worker has nearly all of the prompt, and another one was taken"
    mixed.check_empty()


@pytest.mark.ray
@pytest.mark.parametrize("module", ["prefill_worker", "decode_worker"])
def test_a_killed_worker_of_either_role_costs_no_answer(mixed: System, module: str) -> None:
    """From pairs to decode workers alone, and the other way round."""

    async def under_fire() -> None:
        async with AsyncClient(mixed.target) as client:
            calm = [(await ask(client, prompt_of(n) * 3)).token_ids for n in range(12)]
            tasks = [asyncio.create_task(ask(client, prompt_of(n) * 3)) for n in range(12)]
            await asyncio.sleep(0.3)
            mixed.workers(module)[0].kill()
            fired = await asyncio.gather(*tasks)
            assert [answer.token_ids for answer in fired] == calm

    asyncio.run(under_fire())
    wait_until(lambda: mixed.serves(1, 2), timeout_s=60, what=f"the killed {module} is back")
    mixed.check_empty(timeout_s=60)


@pytest.mark.ray
def test_losing_ray_does_not_stop_serving(mixed: System) -> None:
    wait_until(lambda: len(mixed.all_workers()) == 3 and mixed.serves(1, 2), timeout_s=60, what="all workers are there")
    raylets = mixed.pids_of_program("raylet")
    assert raylets
    for pid in raylets:
        os.kill(pid, signal.SIGKILL)
    ways: list[str] = []
    with mixed.client(max_retries=0) as client:
        end = time.monotonic() + 15
        while time.monotonic() < end:
            answer = client.generate(token_ids=prompt_of(len(ways)) * 3, max_tokens=4, ignore_eos=True, timeout=30).result()
            assert len(answer.token_ids) == 4
            ways.append(answer.transfer.transport)
    assert "none" in ways, "without a transport decode workers compute prompts"
    mixed.check_empty(timeout_s=60)
