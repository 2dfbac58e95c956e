"""A whole system of processes, KV through a real Ray: an operator gives workers other roles while clients ask, and workers die over it."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from role_harness import expected, make_model_dir

from twostep.text.model_card import ModelCard

sys.path.append(str(Path(__file__).parent.parent / "system"))
from running import System, Worker, running, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

COMMAND = [sys.executable, "-P", "-m", "twostep.cli", "role"]


def role_command(system: System, worker: Worker, *words: str) -> list[str]:
    """As an operator types it: `twostep up` has said where the secret is."""
    found = re.search(r" role HOST:PORT \S+ --secret-file (\S+)\n", system.log.read_text())
    assert found is not None, system.log_tail()
    assert worker.address in system.log.read_text()
    return [*COMMAND, worker.address, *words, "--secret-file", found[1]]


def switch(system: System, worker: Worker, role: str) -> float:
    """Seconds that the switch took beside the drain."""
    words = role_command(system, worker, role, "--drain-timeout", "20")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(rf"\S+ is a {role} worker now: drained in ([\d.]+) s, switched in ([\d.]+) s\.\n", done.stdout)
    assert found is not None, done.stdout
    return float(found[2])


@contextmanager
def load(system: System, vocab_size: int, *, num_clients: int) -> Iterator[list[int]]:
    """Clients that ask until the block ends; every answer is checked. What comes is the list of answers' lengths so far."""
    stop, answered = threading.Event(), list[int]()

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        with system.client(max_retries=0) as client:
            while not stop.is_set():
                prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, 200))]
                count = rng.randrange(1, 60)
                answer = client.generate(token_ids=prompt, max_tokens=count, temperature=0.0, ignore_eos=True, timeout=120).result()
                assert list(answer.token_ids) == expected(prompt, count, vocab_size)
                answered.append(count)

    with ThreadPoolExecutor(num_clients) as pool:
        asking = [pool.submit(ask, seed) for seed in range(num_clients)]
        try:
            yield answered
        finally:
            stop.set()
            for each in asking:
                each.result()


def more(answered: list[int], count: int) -> None:
    wanted = len(answered) + count
    wait_until(lambda: len(answered) >= wanted, timeout_s=120, what=f"{count} more answers")


def test_an_operator_moves_workers_between_the_roles_while_clients_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_FAKE_STEP_MS", "4")
    monkeypatch.setenv("TWOSTEP_LOCAL_PREFILL", "0")
    model_dir = make_model_dir(tmp_path / "m")
    vocab_size = ModelCard.load(model_dir).vocab_size
    with running(model_dir, tmp_path / "up", prefill=1, decode=2, extra=("--runner", "fake")) as system:
        (prefill,), (first, second) = system.workers("prefill_worker"), system.workers("decode_worker")
        agents = system.pids("kv_transfer.agent")
        seconds = []
        with load(system, vocab_size, num_clients=4) as answered:
            more(answered, 8)
            # Two prefill workers and one decode worker, then each where the other was, then as it began.
            for worker, role, prefills in (
                (second, "prefill", 2),
                (prefill, "decode", 1),
                (first, "prefill", 2),
                (second, "decode", 1),
                (first, "decode", 0),
                (prefill, "prefill", 1),
            ):
                seconds.append(switch(system, worker, role))
                wait_until(lambda n=prefills: system.serves(n, 3 - n), timeout_s=60, what=f"{prefills} prefill workers")
                if prefills:
                    more(answered, 8)
        print("switches under load took", seconds, "beside their drains")
        # The KV agents are those of the start, which takes Ray seconds.
        assert system.pids("kv_transfer.agent") == agents
        system.check_empty()
        system.check_store_empty()
        idle = [switch(system, first, role) for role in ("prefill", "decode") * 3]
        print("switches of an idle worker took", idle)
        done = subprocess.run([*COMMAND, first.address], capture_output=True, text=True, timeout=60, check=False)
        assert re.fullmatch(r"decode-[01] is a decode worker, ready, with 0 requests\.\n", done.stdout)
        wrong = tmp_path / "wrong"
        wrong.write_text("x" * 32)
        words = [*COMMAND, first.address, "prefill", "--secret-file", str(wrong)]
        refused = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "--secret-file" in refused.stderr


@pytest.mark.parametrize("victim", ["decode_worker", "prefill_worker"])
def test_a_worker_that_dies_in_its_switch_costs_no_answer_and_comes_back_as_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    monkeypatch.setenv("TWOSTEP_FAKE_STEP_MS", "10")
    monkeypatch.setenv("TWOSTEP_LOCAL_PREFILL", "0")
    model_dir = make_model_dir(tmp_path / "m")
    vocab_size = ModelCard.load(model_dir).vocab_size
    with running(model_dir, tmp_path / "up", prefill=2, decode=2, extra=("--runner", "fake")) as system:
        worker = system.workers(victim)[0]
        with load(system, vocab_size, num_clients=6) as answered:
            more(answered, 6)
            words = role_command(system, worker, "prefill" if victim == "decode_worker" else "decode", "--drain-timeout", "60")
            operator = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            wait_until(lambda: worker.stats().draining or operator.poll() is not None, timeout_s=30, what="it drains")
            time.sleep(random.Random(victim).random() / 5)
            worker.kill()
            _, said = operator.communicate(timeout=60)
            # Perhaps it had ended a moment before.
            assert operator.returncode == 0 or said.startswith("twostep: "), said
            more(answered, 12)
        wait_until(lambda: system.serves(2, 2), timeout_s=60, what="the supervisor has started it again in its first role")
        system.check_empty()
