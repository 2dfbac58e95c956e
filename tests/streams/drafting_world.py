"""A whole system that drafts, under random requests: prompts in chunks on a worker of their own or beside answers, in blocks of any size,
too few of them for all; half-way a decode worker is lost and another one comes, later a router goes, and some clients leave and come
back. Each answer is judged."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bare_deployment import until
from drafting_models import DraftedModel
from judge import Judge
from random_requests import RandomRequest, Requests
from whole_system import WholeSystem, whole_system

from twostep import AsyncClient, Choice, Completion
from twostep.engine.types import EngineStats
from twostep.model.runner.model_runner import ModelRunner
from twostep.worker.worker import Worker

# Of prompt and answer, in tokens.
_LONGEST = 120
_NUM_CLIENTS = 16


@dataclass
class Tally:
    """Counts requests, answers (of `n`), and what befell them."""

    seen: Counter[str] = field(default_factory=Counter)
    drafted: list[int] = field(default_factory=lambda: [0] * 7)
    accepted: list[int] = field(default_factory=lambda: [0] * 7)

    def __iadd__(self, other: Tally) -> Tally:
        self.seen += other.seen
        for i in range(7):
            self.drafted[i] += other.drafted[i]
            self.accepted[i] += other.accepted[i]
        return self

    def add_worker(self, stats: EngineStats) -> None:
        self.seen["preemptions"] += stats.num_preemptions
        self.seen["workers that gain"] += stats.tokens_per_step > 1.0
        assert not stats.drafting_failed
        for i, (drafted, accepted) in enumerate(zip(stats.num_drafted, stats.num_accepted, strict=True)):
            self.drafted[i] += drafted
            self.accepted[i] += accepted

    def __str__(self) -> str:
        names = ("requests", "answers", "near-ties", "tokens", "hand-overs", "with reused blocks", "prompts in chunks", "preemptions")
        names = (*names, "moved", "resumed", "workers that gain")
        rows = "".join(
            f"\n  position {i + 1}: {drafted} drafted, {accepted} accepted ({accepted / drafted:.0%})"
            for i, (drafted, accepted) in enumerate(zip(self.drafted, self.accepted, strict=True))
            if drafted
        )
        return ", ".join(f"{self.seen[name]} {name}" for name in names) + rows


def _num_running(worker: Worker) -> int:
    return worker.record().load.num_running


class DraftingWorld:
    """One system, drawn by its seed, for so many requests."""

    def __init__(self, model: DraftedModel, judge: Judge, method: str, seed: int, num_requests: int) -> None:
        self._model, self._judge, self._method, self._seed = model, judge, method, seed
        self._num = num_requests
        self._rng = rng = random.Random(f"{method} {seed}")
        self.tally = Tally()
        self._requests = Requests(rng, 512, model.usual, judge.tokenizer.decode, _LONGEST)
        self._answers: list[tuple[RandomRequest, Choice, Sequence[int]]] = []
        self._ended = asyncio.Condition()
        self._num_ended = 0
        self._step_tokens = rng.choice([24, 32, 48, 96])

    async def run(self, tmp_path: Path) -> Tally:
        rng, model = self._rng, self._model
        most = rng.choice([1, 2, 3, 4, 4, 5, 7])
        options = model.drafting(self._method, most, draft_blocks=rng.choice([12, 60, 200]))

        def runner() -> ModelRunner:
            """Each worker has blocks of its own size, for one sequence at least, and for no more than some."""
            block_size = rng.choice([4, 8, 16])
            return model.runner(-(-_LONGEST // block_size) * rng.choice([2, 3, 5]) + 1, block_size, self._method, most)

        options["worker_options"] |= {"max_num_seqs": rng.choice([4, 8, 16])}
        system_options = {"num_decode": 2, "num_routers": 2, "aggregated": self._seed % 3 == 2, "step_tokens": self._step_tokens}
        async with whole_system(model.model_dir, tmp_path, make_runner=runner, **system_options, **options) as system:
            async with AsyncClient([system.target(0), system.target(1)], timeout=200, max_retries=20) as client:
                await self._ask_all(system, client)
            await system.settled()
            for worker in (*system.decodes, *filter(None, (system.prefill,))):
                # What routers are told that drafts bring.
                assert worker.record().load.tokens_per_step == worker.engine.stats().tokens_per_step
                self.tally.add_worker(worker.engine.stats())
        for request, choice, had in self._answers:
            self.tally.seen["near-ties"] += self._judge.judge(request, choice, had)
        return self.tally

    async def _ask_all(self, system: WholeSystem, client: AsyncClient) -> None:
        left = [self._requests.next() for _ in range(self._num)]
        async with asyncio.TaskGroup() as group:
            for _ in range(_NUM_CLIENTS):
                group.create_task(self._ask_on(client, left))
            await self._until_ended(self._num // 3)
            # Answers crawl until it is lost, so that some are under way.
            system.brake.hold_at(1)
            await until(lambda: any(_num_running(worker) for worker in system.decodes), "answers are under way")
            busiest = max(range(2), key=lambda i: _num_running(system.decodes[i]))
            lost = await system.lose_decode(busiest)
            system.brake.open()
            self.tally.add_worker(lost.engine.stats())
            await system.add_decode()
            await self._until_ended(2 * self._num // 3)
            system.brake.hold_at(1)
            await system.routers.pop(0).drain(0.0)
            system.brake.open()

    async def _until_ended(self, num: int) -> None:
        async with self._ended:
            await self._ended.wait_for(lambda: self._num_ended >= num)

    async def _ask_on(self, client: AsyncClient, left: list[RandomRequest]) -> None:
        while left:
            request = left.pop()
            answer, had = await self._ask(client, request)
            self._take(request, answer, had)
            async with self._ended:
                self._num_ended += 1
                self._ended.notify_all()

    async def _ask(self, client: AsyncClient, request: RandomRequest) -> tuple[Completion, Sequence[int]]:
        """Returns the answer, and the tokens that the client came back with."""
        answer = client.generate(token_ids=request.token_ids, **request.options)
        if request.breaks_after:
            async for _ in answer:
                if len(answer.token_ids) >= request.breaks_after:
                    break
            if answer.finish_reason is None:
                had = answer.token_ids
                answer.cancel()
                self.tally.seen["resumed"] += 1
                again = client.generate(token_ids=request.token_ids, resume_token_ids=had, **request.options)
                return await again.result(), had
        return await answer.result(), ()

    def _take(self, request: RandomRequest, answer: Completion, had: Sequence[int]) -> None:
        seen = self.tally.seen
        seen["requests"] += 1
        seen["resumed"] += answer.resumes
        seen["prompts in chunks"] += len(request.token_ids) > self._step_tokens
        for choice in answer.choices:
            seen["answers"] += 1
            seen["tokens"] += len(had) + len(choice.token_ids)
            seen["hand-overs"] += choice.transfer.transport == "local"
            seen["with reused blocks"] += choice.transfer.blocks_reused > 0
            seen["moved"] += choice.attempts > 1
            self._answers.append((request, choice, had))
