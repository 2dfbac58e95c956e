"""Clients that ask without a pause, whatever happens to the system, and what became of each answer."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from oracle import Oracle

from twostep import AsyncClient, SamplingOptions
from twostep.engine.fake import fake_next_token
from twostep.errors import TwostepError, status_of
from twostep.sampling_params import SamplingParams

TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt with the right answer."""

    token_ids: Sequence[int]
    options: SamplingOptions
    expected: Sequence[int]


def model_cases(oracle: Oracle, count: int, *, max_tokens: tuple[int, int], seed: int = 1) -> list[Case]:
    """Greedy ones and drawn ones, prompts of one to twenty blocks."""
    rng, cases = random.Random(seed), []
    for n in range(count):
        prompt = [rng.randrange(3, oracle.vocab_size) for _ in range(rng.randrange(10, 320))]
        options = SamplingOptions(max_tokens=rng.randrange(*max_tokens), temperature=0.0, top_p=1.0, ignore_eos=True)
        if n % 2:
            options |= SamplingOptions(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=rng.randrange(1 << 40))
        cases.append(Case(prompt, options, oracle.answer(prompt, SamplingParams(**options))))
    return cases


def fake_cases(vocab_size: int, count: int, *, max_tokens: tuple[int, int]) -> list[Case]:
    """For workers with the fake runner, whose answers follow from the prompt by hand."""
    rng, cases = random.Random(1), []
    for _ in range(count):
        tokens = [rng.randrange(3, vocab_size) for _ in range(rng.randrange(10, 320))]
        options = SamplingOptions(max_tokens=rng.randrange(*max_tokens), temperature=0.0, top_p=1.0, ignore_eos=True)
        prompt = tuple(tokens)
        for _ in range(options["max_tokens"]):
            tokens.append(fake_next_token(tokens, vocab_size))
        cases.append(Case(prompt, options, tokens[len(prompt) :]))
    return cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request's end. `error`: empty, or its status and message. `gap_s`: the longest time without a token after the first."""

    case: Case
    token_ids: tuple[int, ...]
    error: str = ""
    moved: bool = False
    """Another worker or another router went on with it."""
    seconds: float = 0.0
    first_s: float = 0.0
    gap_s: float = 0.0


class SteadyLoad:
    """`num_clients` requests at any time from `async with` on, through one client of the SDK that knows `targets`, each answer put together
    from its pieces. Leaving the block waits for those under way. `fresh`: the cases' prompts come again and again, and no KV of them is
    ever found."""

    def __init__(
        self, targets: Sequence[str], cases: Sequence[Case], *, num_clients: int, fresh: bool = False, max_retries: int = 3
    ) -> None:
        self.ended: list[Outcome] = []
        self._client = AsyncClient(list(targets), timeout=TIMEOUT_S, max_retries=max_retries)
        self._cases = itertools.cycle(cases)
        self._num_clients = num_clients
        self._fresh = fresh
        self._begun = itertools.count()
        self._under_way: set[int] = set()
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> SteadyLoad:
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(self._num_clients)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if error is not None:
            for task in self._tasks:
                task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()
        if error is None:
            for result in results:
                if isinstance(result, BaseException):
                    raise result

    async def more(self, count: int) -> None:
        """Until so many more have ended."""
        wanted = len(self.ended) + count
        await self._until(lambda: len(self.ended) >= wanted)

    async def settled(self) -> None:
        """Until all that are under way now have ended."""
        now = set(self._under_way)
        await self._until(lambda: not now & self._under_way)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(2 * TIMEOUT_S):
            while not condition():
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)

    async def _ask_on(self) -> None:
        while not self._stop.is_set():
            number = next(self._begun)
            self._under_way.add(number)
            self.ended.append(await self._ask(next(self._cases), salt=f"{number}" if self._fresh else ""))
            self._under_way.discard(number)

    async def _ask(self, case: Case, *, salt: str) -> Outcome:
        begun = last = time.monotonic()
        first_s = gap_s = 0.0
        token_ids: list[int] = []
        answer = self._client.generate(token_ids=case.token_ids, cache_salt=salt, **case.options)
        try:
            async for piece in answer:
                now = time.monotonic()
                if token_ids:
                    gap_s = max(gap_s, now - last)
                else:
                    first_s = now - begun
                last = now
                assert not piece.token_ids or piece.position == len(token_ids), "each position once, in order"
                token_ids += piece.token_ids
            completion = await answer.result()
        except TwostepError as error:
            return Outcome(case=case, token_ids=tuple(token_ids), error=f"{status_of(error).grpc}: {error.message}")
        return Outcome(
            case=case,
            token_ids=tuple(token_ids),
            moved=completion.attempts > 1 or completion.resumes > 0,
            seconds=time.monotonic() - begun,
            first_s=first_s,
            gap_s=gap_s,
        )
