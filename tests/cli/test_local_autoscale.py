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
from twostep.text.model_card import ModelCard

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]

WAIT_S = 400.0
FLAGS = {
    **{"runner": "fake", "fake-step-ms": 50, "max-num-batched-tokens": 32, "max-num-seqs": 16, "drain-timeout": 1, "port": 0},
    **{"prefill-max-workers": 2, "decode-max-workers": 2, "ray-store-bytes": 100 << 20, "start-timeout": 300},
    **{"interval": 0.5, "demand-window": 4, "cool-down": 2, "stale-after": 100, "prefill-cold-start": 10, "decode-cold-start": 10},
    # No room is kept beyond what is needed, and none for chance: less load is believed slowly, and what is just enough soon is too much.
    **{"spare": 0, "hysteresis": 0, "attainment": 0.5, "target-ttft-ms": 700, "target-tpot-ms": 1000},
    # Three workers in all: a fourth would be had without anybody changing its role.
    "max-cost": 3,
}


class Up:
    """A running system and a client of it."""

    def __init__(self, client: AsyncClient, log: Path, vocab_size: int) -> None:
        self.client, self._log, self.vocab_size = client, log, vocab_size
        self._numbers = itertools.count()

    @property
    def said(self) -> str:
        return self._log.read_text()

    async def until_workers(self, prefill: int, decode: int) -> None:
        async with asyncio.timeout(WAIT_S):
            found = (0, 0)
            while found != (prefill, decode):
                await asyncio.sleep(0.1)
                try:
                    (model,) = await self.client.models(timeout=10)
                    found = model.prefill_workers, model.decode_workers
                except (TwostepError, ValueError):  # it is starting
                    pass

    async def ask(self, prompt_tokens: int, max_tokens: int) -> None:
        """Fails for a wrong token."""
        rng = random.Random(next(self._numbers))
        tokens = [rng.randrange(3, self.vocab_size) for _ in range(prompt_tokens)]
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
async def up(model_dir: Path, tmp_path: Path) -> AsyncIterator[Up]:
    """Ends it by Ctrl-C, and checks that no process is left behind."""
    (port,) = free_ports(1)
    log = tmp_path / "up.log"
    words = [sys.executable, "-P", "-m", "twostep.cli", "up", "--autoscale", "--no-local-prefill"]
    words += [f"--model={model_dir}", f"--grpc-port={port}"]
    with log.open("wb") as out:
        flags = (f"--{name}={value}" for name, value in FLAGS.items())
        process = await asyncio.create_subprocess_exec(*words, *flags, stdout=out, stderr=out, cwd=tmp_path)
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


async def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.1)


async def test_workers_come_change_and_go_with_the_load(tiny_llama_dir: Path, tmp_path: Path) -> None:
    async with up(tiny_llama_dir, tmp_path) as system:
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
                if re.search(r"(prefill-[01]: a decode|decode-[01]: a prefill) worker now", system.said):
                    break
            else:
                pytest.fail(f"nobody changed its role:\n{system.said}")
            await system.until_workers(1, 1)
            await until(lambda: re.search(r"(prefill|decode)-[01]: gone, took", system.said))
