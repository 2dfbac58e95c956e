"""Requests whose right tokens are known, and clients that ask them: eight at a time, without a pause while workers die or are replaced, or
only to leave their answers."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from oracle import Oracle
from running import System, Worker, wait_until

from twostep import AsyncClient, Completion, SamplingOptions, TwostepError
from twostep.engine.fake import fake_next_token
from twostep.errors import status_of
from twostep.sampling_params import SamplingParams

TIMEOUT_S = 180.0
_ANSWER_S = 300.0
_NUM_CASES, _NUM_CLIENTS = 12, 6
_BUSY_WITHIN_S = 60.0
_MEND_S = 180.0
_MOST_KILLS = 8
_MOST_NEAR_TIES = 2
_NUM_LEFT = 20
# Between the moments at which answers are left.
_STEP_S = 0.005

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List the first five prime numbers.",
    "Name three rivers in Europe and say where they end.",
]


@dataclass(frozen=True, slots=True)
class LoadCase:
    """A prompt, and the right answer where it was worked out beforehand."""

    token_ids: Sequence[int]
    options: SamplingOptions
    expected: Sequence[int] = ()


def model_cases(oracle: Oracle, count: int, *, max_tokens: tuple[int, int], seed: int = 1) -> list[LoadCase]:
    """Greedy ones and drawn ones, prompts of one to twenty blocks."""
    rng, cases = random.Random(seed), []
    for n in range(count):
        prompt = [rng.randrange(3, oracle.vocab_size) for _ in range(rng.randrange(10, 320))]
        options = SamplingOptions(max_tokens=rng.randrange(*max_tokens), temperature=0.0, top_p=1.0, ignore_eos=True)
        if n % 2:
            options |= SamplingOptions(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=rng.randrange(1 << 40))
        cases.append(LoadCase(prompt, options, oracle.answer(prompt, SamplingParams(**options))))
    return cases


def fake_cases(vocab_size: int, count: int, *, max_tokens: tuple[int, int]) -> list[LoadCase]:
    """For workers with the fake runner, whose answers follow from the prompt by hand."""
    rng, cases = random.Random(1), []
    for _ in range(count):
        tokens = [rng.randrange(3, vocab_size) for _ in range(rng.randrange(10, 320))]
        options = SamplingOptions(max_tokens=rng.randrange(*max_tokens), temperature=0.0, top_p=1.0, ignore_eos=True)
        prompt = tuple(tokens)
        for _ in range(options["max_tokens"]):
            tokens.append(fake_next_token(tokens, vocab_size))
        cases.append(LoadCase(prompt, options, tokens[len(prompt) :]))
    return cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request's end. `error`: empty, or its status and message. `gap_s`: the longest time without a token after the first."""

    case: LoadCase
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
        self,
        targets: Sequence[str],
        cases: Sequence[LoadCase],
        *,
        num_clients: int,
        fresh: bool = False,
        max_retries: int = 3,
        api_key: str | None = None,
    ) -> None:
        self.ended: list[Outcome] = []
        self._client = AsyncClient(list(targets), timeout=TIMEOUT_S, max_retries=max_retries, api_key=api_key)
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

    async def _ask(self, case: LoadCase, *, salt: str) -> Outcome:
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


def mixed_cases(vocab_size: int, prompts: Sequence[Sequence[int]], seed: int, *, count: int, longest: int) -> list[LoadCase]:
    """Real prompts, greedy and seeded with all the sampler's parts; two long ones with a shared prefix; others of any length.
    `longest`: of a prompt, in tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab_size) for _ in range(longest * 3 // 4)]
    ids = [list(p) for p in prompts]
    ids += [shared + [rng.randrange(vocab_size) for _ in range(rng.randrange(1, longest // 4))] for _ in range(2)]
    ids += [[rng.randrange(vocab_size) for _ in range(rng.randrange(1, longest))] for _ in range(count - len(ids))]
    sampled = SamplingOptions(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.1, presence_penalty=0.3)
    result = []
    for n, tokens in enumerate(ids):
        max_tokens = rng.randrange(1, 25)
        options = SamplingOptions(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        if n % 2:
            options = SamplingOptions(**sampled, max_tokens=max_tokens, seed=rng.randrange(1 << 40), frequency_penalty=0.2)
        if n % 3 == 0:
            options["logit_bias"] = {rng.randrange(vocab_size): rng.choice([-100.0, 3.0, 8.0]) for _ in range(20)}
        result.append(LoadCase(tokens, options))
    return result


def answered(system: System, oracle: Oracle, *, seed: int, count: int = 20, longest: int = 300) -> list[str]:
    """Fails for an answer that is not the oracle's. Returns how their KV travelled."""
    todo = mixed_cases(oracle.vocab_size, [oracle.chat_ids(p) for p in PROMPTS], seed, count=count, longest=longest)
    with system.client() as client:

        def one(case: LoadCase) -> Completion:
            return client.generate(token_ids=case.token_ids, timeout=_ANSWER_S, **case.options).result()

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(one, todo))
    near_ties = sum(oracle.compare(case.token_ids, case.options, a.token_ids) for case, a in zip(todo, answers, strict=True))
    assert near_ties <= max(1, count // 10), f"{near_ties} of {len(answers)} comparisons ended at a near-tie"
    return [answer.transfer.transport for answer in answers if len(answer.token_ids) > 1]


async def kill_under_load(system: System, oracle: Oracle, module: str, *, is_whole: Callable[[], bool], seed: int) -> None:
    """Strikes the busiest worker of a role. Fails for an answer that is lost or not the oracle's. A decode worker may just have sent its
    last token, a prefill worker its last block: then another one is struck, as soon as `is_whole`, until somebody else had to go on with
    an answer. Prompts stay new to everybody: decode workers would compute those whose prefix they have, and prefill workers have nothing
    to do."""
    cases = model_cases(oracle, _NUM_CASES, max_tokens=(60, 100), seed=seed)
    async with SteadyLoad([system.target], cases, num_clients=_NUM_CLIENTS, fresh=True) as load:
        for _ in range(_MOST_KILLS):
            await load.more(_NUM_CLIENTS // 2)
            (await _busiest(system, module)).kill()
            await load.settled()
            if any(outcome.moved for outcome in load.ended):
                break
            await asyncio.to_thread(wait_until, is_whole, timeout_s=_MEND_S, what=f"the killed {module} is back")
        else:
            raise AssertionError(f"{_MOST_KILLS} kills struck nobody")
    assert not [outcome.error for outcome in load.ended if outcome.error]
    wrong = [outcome for outcome in load.ended if list(outcome.token_ids) != list(outcome.case.expected)]
    near_ties = sum(oracle.compare(outcome.case.token_ids, outcome.case.options, outcome.token_ids) for outcome in wrong)
    assert near_ties <= _MOST_NEAR_TIES, f"{near_ties} of {len(load.ended)} comparisons ended at a near-tie"


async def _busiest(system: System, module: str) -> Worker:
    """Waits for a worker with something to do. Blocks while it asks: nothing comes between the answer and what is done with it."""
    workers = system.workers(module)
    give_up = time.monotonic() + _BUSY_WITHIN_S
    while True:
        held = [stats.num_running + stats.num_waiting + stats.num_leases for stats in (worker.stats() for worker in workers)]
        if max(held):
            return workers[held.index(max(held))]
        assert time.monotonic() < give_up, f"none of {workers} had anything to do in {_BUSY_WITHIN_S:g} s"
        await asyncio.sleep(0.01)


async def cancel_at_all_moments(system: System) -> None:
    """From before the prompt is placed until tokens come; every other one after its first piece."""
    async with AsyncClient(system.target) as client:
        for n in range(_NUM_LEFT):
            prompt = [(token + n) % 200 + 2 for token in range(200)] * 5
            answer = client.generate(token_ids=prompt, max_tokens=500, ignore_eos=True, timeout=180)
            first = asyncio.create_task(anext(aiter(answer)))
            await asyncio.sleep(_STEP_S * n)
            if n % 2:
                await first
            answer.cancel()
            try:
                await first
            except (TwostepError, asyncio.CancelledError, StopAsyncIteration):
                pass
