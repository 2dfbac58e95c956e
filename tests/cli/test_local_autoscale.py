"""`twostep up --autoscale` as a user starts it: workers come with the load, change their roles with its kind, and go with it, and no answer
is lost by that. Small pools, so that all of it shows within seconds: a prefill worker computes 640 prompt tokens a second, a decode worker
has sixteen seats. Many short requests: of a few, the autoscaler waits whether they are chance."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from twostep import AsyncClient
from twostep.engine.fake import fake_next_token
from twostep.errors import TwostepError
from twostep.local.ports import free_ports
from twostep.text import ModelCard

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]

WAIT_S = 400.0
ENVIRONMENT = {
    "TWOSTEP_FAKE_STEP_MS": "50",
    "TWOSTEP_INTERVAL": "0.5",
    "TWOSTEP_DEMAND_WINDOW": "4",
    "TWOSTEP_COOL_DOWN": "2",
    "TWOSTEP_STALE_AFTER": "100",
    "TWOSTEP_PREFILL_COLD_START": "10",
    "TWOSTEP_DECODE_COLD_START": "10",
    # No room is kept beyond what is needed, and none for chance: less load is believed slowly, and what is just enough soon is too much.
    "TWOSTEP_SPARE": "0",
    "TWOSTEP_HYSTERESIS": "0",
    "TWOSTEP_ATTAINMENT": "0.5",
    "TWOSTEP_TARGET_TTFT_MS": "700",
    "TWOSTEP_TARGET_TPOT_MS": "1000",
    # Three workers in all: a fourth would be had without anybody changing its role.
    "TWOSTEP_MAX_COST": "3",
}
FLAGS = ["--runner", "fake", "--no-local-prefill", "--max-num-batched-tokens", "32", "--max-num-seqs", "16", "--drain-timeout", "1"]
FLAGS += ["--autoscale", "--prefill-max-workers", "2", "--decode-max-workers", "2", "--http-port", "0", "--ray-store-bytes", str(100 << 20)]


class Up:
    """A running system and a client of it."""

    def __init__(self, client: AsyncClient, log: Path, vocab_size: int) -> None:
        self.client, self.log, self.vocab_size = client, log, vocab_size
        # Every worker in every role that it was seen in.
        self.roles: set[tuple[str, str]] = set()
        self._numbers = itertools.count()

    async def until(self, condition: Callable[[], object], what: str) -> None:
        give_up = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < give_up, f"not within {WAIT_S:g} s: {what}\n{self.log.read_text()}"
            await asyncio.sleep(0.1)

    async def until_workers(self, prefill: int, decode: int) -> None:
        give_up, found = time.monotonic() + WAIT_S, (0, 0)
        while found != (prefill, decode):
            assert time.monotonic() < give_up, f"{found} workers, not {prefill, decode}:\n{self.log.read_text()}"
            await asyncio.sleep(0.1)
            try:
                (model,) = await self.client.models(timeout=10)
                self.roles |= {(worker.worker_id, worker.role) for worker in (await self.client.status(timeout=10)).workers}
                found = model.prefill_workers, model.decode_workers
            except TwostepError:  # it is starting
                pass

    def somebody_changed_its_role(self) -> bool:
        """The router has said so, and `twostep up`."""
        told = re.search(r"(prefill-[01]: a decode|decode-[01]: a prefill) worker now", self.log.read_text())
        return told is not None and any(not name.startswith(role) for name, role in self.roles)

    def prompt(self, length: int) -> list[int]:
        rng = random.Random(next(self._numbers))
        return [rng.randrange(3, self.vocab_size) for _ in range(length)]

    async def ask(self, prompt_tokens: int, max_tokens: int) -> None:
        """Fails for a wrong token."""
        tokens = self.prompt(prompt_tokens)
        answer = self.client.generate(token_ids=tuple(tokens), max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout=WAIT_S)
        async for piece in answer:
            for token in piece.token_ids:
                assert token == fake_next_token(tokens, self.vocab_size)
                tokens.append(token)
        assert len(tokens) == prompt_tokens + max_tokens

    @asynccontextmanager
    async def load(self, num_clients: int, *, prompt_tokens: int, max_tokens: int) -> AsyncIterator[asyncio.Event]:
        """Clients that ask without a pause until the event is set or the block ends, and then wait for their answers."""
        stop = asyncio.Event()

        async def ask_on() -> None:
            while not stop.is_set():
                await self.ask(prompt_tokens, max_tokens)

        async with asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(ask_on())
            try:
                yield stop
            finally:
                stop.set()


@asynccontextmanager
async def up(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Up]:
    """Ends it by Ctrl-C, and checks that no process is left behind."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (port,) = free_ports(1)
    log = tmp_path / "up.log"
    words = [sys.executable, "-P", "-m", "twostep.cli", "up", "--model", str(model_dir), "--port", str(port), "--start-timeout", "300"]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*words, *FLAGS, stdout=out, stderr=out, cwd=tmp_path)
    family: list[psutil.Process] = []
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            yield Up(client, log, ModelCard.load(model_dir).vocab_size)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0, log.read_text()
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive, f"left behind: {alive}"
    finally:
        if process.returncode is None:
            # Its guardians end the others.
            process.kill()
            await process.wait()


async def test_workers_come_change_and_go_with_the_load(tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with up(tiny_llama_dir, tmp_path, monkeypatch) as system:
        await system.until(lambda: "Serving" in system.log.read_text(), "it serves")
        await system.until_workers(1, 1)
        async with system.load(2, prompt_tokens=16, max_tokens=150):
            # Long answers, which are under way whatever happens.
            for _ in range(3):
                async with system.load(6, prompt_tokens=150, max_tokens=2) as no_more_prompts:
                    await system.until_workers(2, 1)
                    no_more_prompts.set()
                    async with system.load(16, prompt_tokens=16, max_tokens=40):
                        await system.until_workers(1, 2)
                # With three in all one has to, unless a pause of this machine looked like the end of the load, and one was sent home.
                if system.somebody_changed_its_role():
                    break
            else:
                pytest.fail(f"nobody changed its role:\n{system.log.read_text()}")
            await system.until_workers(1, 1)
            gone = r"(prefill|decode)-[01]: gone, took"
            await system.until(lambda: re.search(gone, system.log.read_text()), "one is gone")
