"""A whole system of processes, KV through a real Ray: an operator gives workers other roles while clients ask."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from twostep.text.model_card import ModelCard

sys.path.append(str(Path(__file__).parent.parent / "system"))
from loads import SteadyLoad, fake_cases
from running import System, Worker, running, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

WAIT_S = 120.0
COMMAND = [sys.executable, "-P", "-m", "twostep.cli", "role"]


def role_command(system: System, worker: Worker, *words: str) -> list[str]:
    """As an operator types it: `twostep up` has said where the secret is."""
    found = re.search(r" role HOST:PORT \S+ --secret-file (\S+) --target (\S+)", system.log.read_text())
    assert found is not None, system.log_tail()
    assert worker.address in system.log.read_text()
    return [*COMMAND, worker.address, *words, "--secret-file", found[1], "--target", found[2]]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)


def switch(system: System, worker: Worker, role: str) -> None:
    # By force: the test leaves the system without a prefill worker for a while.
    words = role_command(system, worker, role, "--drain-timeout", "60", "--force")
    done = run(words)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"\S+ is a {role} worker now: drained in [\d.]+ s, switched in [\d.]+ s\.\n", done.stdout), done.stdout


@pytest.fixture
def system(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    monkeypatch.setenv("TWOSTEP_FAKE_STEP_MS", "4")
    # Requests wait while there is no prefill worker.
    monkeypatch.setenv("TWOSTEP_NO_WORKER_GRACE", str(WAIT_S))
    with running(model_dir, tmp_path, prefill=1, decode=2, extra=("--runner", "fake")) as system:
        yield system


async def test_an_operator_moves_workers_between_the_roles_while_clients_ask(system: System, model_dir: Path, tmp_path: Path) -> None:
    (prefill,), (first, second) = system.workers("prefill_worker"), system.workers("decode_worker")
    agents = system.pids("kv_transfer.ray.agent")
    cases = fake_cases(ModelCard.load(model_dir).vocab_size, 40, max_tokens=(1, 60))
    async with SteadyLoad([system.target], cases, num_clients=4, fresh=True, max_retries=0) as load:
        await load.more(4)
        # Two prefill workers and one decode worker, then both where the other was, then nobody for prompts, then as it began.
        for worker, role, prefills in ((second, "prefill", 2), (prefill, "decode", 1), (second, "decode", 0), (prefill, "prefill", 1)):
            await asyncio.to_thread(switch, system, worker, role)
            serves = partial(system.serves, prefills, 3 - prefills)
            await asyncio.to_thread(wait_until, serves, timeout_s=WAIT_S, what=f"{prefills} prefill workers")
            if prefills:
                await load.more(6)
    assert [(outcome.error, outcome.token_ids) for outcome in load.ended] == [("", tuple(outcome.case.expected)) for outcome in load.ended]
    # The KV agents are those of the start, which takes Ray seconds.
    assert system.pids("kv_transfer.ray.agent") == agents
    system.check_empty(timeout_s=WAIT_S)
    system.check_store_empty(timeout_s=WAIT_S)
    done = await asyncio.to_thread(run, role_command(system, first))
    assert re.fullmatch(r"decode-[01] is a decode worker, ready, with 0 requests\.\n", done.stdout)
    wrong = tmp_path / "wrong"
    wrong.write_text("x" * 32)
    words = [*COMMAND, first.address, "prefill", "--secret-file", str(wrong)]
    refused = await asyncio.to_thread(run, words)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "--secret-file" in refused.stderr
