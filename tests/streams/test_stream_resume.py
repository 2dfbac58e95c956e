"""A router dies in mid-stream: the SDK goes on through another one, and its user sees one answer without gap or repetition."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from whole_system import WholeSystem, expected, whole_system

from twostep import AsyncClient, Client, Completion, Piece, StreamBroken, TokenLogprobs, Unavailable
from twostep.local.ports import free_ports
from twostep.model.runner.model_runner import ModelRunner
from twostep.text.model_card import ModelCard
from twostep.text.tokenizer import Tokenizer

PROMPT = list(range(3, 60))


def free_port() -> int:
    (port,) = free_ports(1)
    return port


class DoomedRouter:
    """One more router of the system, a process of its own."""

    def __init__(self, system: WholeSystem) -> None:
        self._system = system
        self.port = free_port()
        self.target = f"127.0.0.1:{self.port}"
        self._flags = ["--model", system.model_dir, "--redis-url", system.redis_url, "--secret-file", system.secret_file]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        fixed = "--health-port -1 --port -1 --served-model-name m --prefix-lookup-timeout 5 --redis-start-timeout 60"
        flags = map(str, [*self._flags, "--grpc-port", self.port, *fixed.split()])
        argv = [sys.executable, "-P", "-m", "router", "--host", "127.0.0.1", *flags]
        await self._streams(0)
        self._process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
        async with AsyncClient(self.target, max_retries=1000, timeout=120) as client:
            while (await client.models())[0].decode_workers == 0:  # noqa: ASYNC110  it is another process
                await asyncio.sleep(0.05)
        await self._streams(1)

    async def _streams(self, num: int) -> None:
        """Waits until so many are its own on each decode worker."""
        wanted = len(self._system.routers) + num
        async with asyncio.timeout(60):
            while {s.num_streams for s in await self._system.stats() if s.role == "decode"} != {wanted}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        """Kills the router; callable from any thread."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def two_routers(model_dir: Path, tmp_path: Path, **options: Any) -> AsyncIterator[tuple[WholeSystem, DoomedRouter]]:
    async with whole_system(model_dir, tmp_path, **options) as system:
        doomed = DoomedRouter(system)
        try:
            await doomed.start()
            yield system, doomed
        finally:
            await doomed.stop()


@dataclass
class Seen:
    """The answer that a user puts together from pieces."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        assert piece.position == len(self.token_ids), "each position once, in order"
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs

    def check(self, answer: Completion) -> None:
        assert (self.text, self.token_ids, self.logprobs) == (answer.text, list(answer.token_ids), list(answer.logprobs))


def send_to(client: AsyncClient | Client, target: str) -> None:
    """The next request goes there: another router, if there is one, looks busier."""
    client._pool.take(avoid=[target])


async def ask_and_kill(
    system: WholeSystem, doomed: DoomedRouter, targets: Sequence[str], *, after: int, **options: Any
) -> tuple[Completion, int | None]:
    """The router is killed once `after` tokens are there, and not yet all. The answer, checked against its pieces, and the seed."""
    seen = Seen()
    system.brake.hold_at(after + 10)
    async with AsyncClient(targets, timeout=120) as client:
        if len(targets) > 1:
            send_to(client, doomed.target)
        answer = client.generate(token_ids=PROMPT, **options)
        alive = True
        async for piece in answer:
            seen.add(piece)
            if alive and len(seen.token_ids) >= after:
                doomed.kill()
                system.brake.open()
                alive = False
        assert not alive
        completion = await answer.result()
    seen.check(completion)
    return completion, answer.seed


@pytest.mark.smoke
async def test_an_answer_outlives_its_router(fake_model_dir: Path, tmp_path: Path) -> None:
    """Greedy, with logprobs and a stop string that no piece of the first router completes."""
    vocab_size = ModelCard.load(fake_model_dir).vocab_size
    ids = expected(PROMPT, 240, vocab_size)
    tokenizer = Tokenizer.load(fake_model_dir)
    # A stop string that comes much later, and does not occur before.
    text, begin = tokenizer.decode(ids), len(tokenizer.decode(ids[:150]))
    candidates = (text[at : at + 3] for at in range(begin, len(text) - 3))
    stop = next(s for s in candidates if "\ufffd" not in s and text.find(s) >= begin)
    options: dict[str, Any] = {"max_tokens": 240, "temperature": 0.0, "ignore_eos": True, "logprobs": 2}
    async with two_routers(fake_model_dir, tmp_path) as (system, doomed):
        async with AsyncClient(system.target()) as client:
            calm = await client.generate(token_ids=PROMPT, stop=stop, **options).result()
        answer, _ = await ask_and_kill(system, doomed, [doomed.target, system.target()], after=20, stop=stop, **options)
        await system.settled()
    assert answer.resumes == 1
    assert calm.resumes == 0
    assert list(answer.token_ids) == ids[: len(answer.token_ids)]
    assert (answer.text, answer.token_ids, answer.logprobs) == (calm.text, calm.token_ids, calm.logprobs)
    assert (answer.finish_reason, answer.stop_reason) == (calm.finish_reason, calm.stop_reason) == ("stop", stop)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (calm.usage.prompt_tokens, calm.usage.completion_tokens)
    assert answer.usage.completion_tokens >= 150


async def test_a_drawn_answer_goes_on_with_the_same_seed(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """A real model, with every parameter that looks back: penalties, min_tokens. Nobody gave a seed: the routers say which one it is."""
    options: dict[str, Any] = {
        "max_tokens": 150,
        "temperature": 0.9,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.1,
        "min_tokens": 150,
    }

    def runner() -> ModelRunner:
        return ModelRunner(tiny_llama_dir, num_blocks=128, block_size=16, dtype="float32", num_threads=1)

    async with two_routers(tiny_llama_dir, tmp_path, make_runner=runner) as (system, doomed):
        answer, seed = await ask_and_kill(system, doomed, [doomed.target, system.target()], after=10, **options)
        assert seed is not None
        async with AsyncClient(system.target()) as client:
            calm = await client.generate(token_ids=PROMPT, seed=seed, **options).result()
        await system.settled()
    assert answer.resumes == 1
    assert (answer.token_ids, answer.text) == (calm.token_ids, calm.text)
    assert len(answer.token_ids) == 150


async def test_the_blocking_client_resumes_too_and_only_if_it_may(fake_model_dir: Path, tmp_path: Path) -> None:
    vocab_size = ModelCard.load(fake_model_dir).vocab_size
    ids = expected(PROMPT, 200, vocab_size)

    async with two_routers(fake_model_dir, tmp_path) as (system, doomed):

        def ask(**how: Any) -> Completion:
            system.brake.hold_at(20)
            with Client([doomed.target, system.target()], timeout=120) as client:
                send_to(client, doomed.target)
                answer = client.generate(token_ids=PROMPT, max_tokens=200, ignore_eos=True, **how)
                seen, alive = Seen(), True
                for piece in answer:
                    seen.add(piece)
                    if alive and len(seen.token_ids) >= 10:
                        doomed.kill()
                        system.brake.open()
                        alive = False
                seen.check(answer.result())
                return answer.result()

        def go_on(broken: StreamBroken) -> Completion:
            with Client(system.target(), timeout=120) as client:
                resumed = {"resume_token_ids": broken.token_ids, "seed": broken.seed}
                return client.generate(token_ids=PROMPT, max_tokens=200, ignore_eos=True, **resumed).result()

        resumed = await asyncio.to_thread(ask)
        assert list(resumed.token_ids) == ids
        assert resumed.resumes == 1
        await doomed.stop()
        await doomed.start()
        with pytest.raises(StreamBroken) as caught:
            await asyncio.to_thread(ask, resume=False)
        had = list(caught.value.token_ids)
        assert had == ids[: len(had)]
        assert len(had) >= 10
        # By hand, as the error says.
        rest = await asyncio.to_thread(go_on, caught.value)
        assert [*had, *rest.token_ids] == ids
        assert rest.usage.completion_tokens == 200
        await system.settled()


async def test_a_router_that_drains_hands_its_answers_over(fake_model_dir: Path, tmp_path: Path) -> None:
    """An orderly end whose time is too short for what runs looks the same to the user as a sudden one."""
    vocab_size = ModelCard.load(fake_model_dir).vocab_size
    async with two_routers(fake_model_dir, tmp_path) as (system, doomed), AsyncClient([system.target(), doomed.target]) as client:
        send_to(client, system.target())
        answer = client.generate(token_ids=PROMPT, max_tokens=300, ignore_eos=True)
        draining: asyncio.Task[None] | None = None
        system.brake.hold_at(20)
        async for _ in answer:
            if draining is None and len(answer.token_ids) >= 10:
                draining = asyncio.create_task(system.routers.pop(0).drain(0.1))
                draining.add_done_callback(lambda _: system.brake.open())
        assert draining is not None
        await draining
        completion = await answer.result()
        assert list(completion.token_ids) == expected(PROMPT, 300, vocab_size)
        assert completion.resumes == 1
        await system.settled()


async def test_retries_are_bounded(fake_model_dir: Path, tmp_path: Path) -> None:
    async with two_routers(fake_model_dir, tmp_path) as (system, doomed):
        with pytest.raises(StreamBroken, match="no server answers") as caught:
            await ask_and_kill(system, doomed, [doomed.target], after=10, max_tokens=300, ignore_eos=True)
        assert isinstance(caught.value, Unavailable)
        await system.settled()
