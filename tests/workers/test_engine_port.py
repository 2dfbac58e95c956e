"""What an edge may ask of an engine, of one in this process and of one in a process of its own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worker_harness import VOCAB, WAIT_S, expected, prompt_of, until

from twostep.engine.types import EngineRequest, FailureKind, FinishReason, LayerProgress, StepOutput, TokenOutput
from twostep.errors import InvalidRequest, ResourceExhausted, SetupError, Unavailable
from twostep.prefix import prefix_hashes
from twostep.process.startup import NoProgress
from twostep.sampling_params import Grammar, GrammarKind, SamplingParams
from twostep.step_curve import StepCurve
from twostep.worker.config import WorkerConfig
from twostep.worker.engine_child import EngineChild
from twostep.worker.engine_port import EngineEvents, EnginePort
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import load_model, resolve_config
from twostep.worker.remote_engine import RemoteEngine

MODULE = "kv_transfer.engine_process"
BLOCK = 4
KEY = b"k" * 32


class Edge:
    """Sorts what an engine tells."""

    def __init__(self, port: EnginePort) -> None:
        self.port = port
        self.outputs: list[StepOutput] = []
        self.layers: list[LayerProgress] = []
        self.failure: Exception | None = None
        # Called with each step's output, before it is sorted.
        self.on_step: Callable[[StepOutput], None] = lambda output: None

    def start(self) -> None:
        self.port.start(EngineEvents(on_step=self._step, on_layers=self.layers.extend, on_failure=self._failed))

    def _step(self, output: StepOutput) -> None:
        self.on_step(output)
        self.outputs.append(output)

    def _failed(self, error: Exception) -> None:
        self.failure = error

    def tokens(self, seq_id: str) -> list[TokenOutput]:
        return [token for output in self.outputs for token in output.tokens if token.seq_id == seq_id]

    def failures(self, seq_id: str) -> list[FailureKind]:
        return [failure.kind for output in self.outputs for failure in output.failures if failure.seq_id == seq_id]

    async def ended(self, seq_id: str) -> list[int]:
        await until(lambda: any(token.finish_reason for token in self.tokens(seq_id)), f"{seq_id} did not end")
        return [token.token_id for token in self.tokens(seq_id)]

    async def unused(self) -> None:
        async def nothing() -> bool:
            stats = (await self.port.look(check_integrity=True)).stats
            held = stats.num_running + stats.num_waiting + stats.num_reserved + stats.num_held
            return not held and stats.num_available_blocks == stats.num_blocks

        await until(nothing, "something is still held")
        assert not (await self.port.look(check_integrity=True)).integrity_error


def request(seq_id: str = "r/1", length: int = 30, *, max_tokens: int = 5, seed: int = 1, **sampling: Any) -> EngineRequest:
    return EngineRequest(
        seq_id=seq_id,
        token_ids=tuple(prompt_of(length, seed)),
        num_prompt_tokens=length,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **sampling),
        prefix_key=KEY,
    )


def config_of(**options: Any) -> WorkerConfig:
    defaults: dict[str, Any] = {"runner": "fake", "num_blocks": 256, "block_size": BLOCK, "hash_unit": 2 * BLOCK, "calibrate": False}
    return WorkerConfig(role="decode", **defaults | options)


@asynccontextmanager
async def _local(config: WorkerConfig) -> AsyncIterator[Edge]:
    config = resolve_config(config)
    edge = Edge(LocalEngine(config, load_model(config)))
    edge.start()
    yield edge
    await edge.port.stop()


@asynccontextmanager
async def _remote(config: WorkerConfig) -> AsyncIterator[Edge]:
    engine = RemoteEngine.launch(config, EngineChild.start(MODULE), NoProgress())
    edge = Edge(engine)
    edge.start()
    try:
        yield edge
        await engine.stop()
    finally:
        engine.close()


Started = Callable[..., Any]


@pytest.fixture(params=[_local, pytest.param(_remote, marks=pytest.mark.system)], ids=["local", "remote"])
def started(request: pytest.FixtureRequest) -> Started:
    return lambda **options: request.param(config_of(**options))


async def test_a_prompt_becomes_its_tokens(started: Started) -> None:
    async with started() as edge:
        asked = [request(f"r{i}/1", 10 + i, seed=i, max_tokens=8) for i in range(12)]
        await asyncio.gather(*map(edge.port.submit, asked))
        for each in asked:
            assert await edge.ended(each.seq_id) == expected(each.token_ids, 8)
            tokens = edge.tokens(each.seq_id)
            assert [token.position for token in tokens] == list(range(8))
            assert tokens[-1].finish_reason is FinishReason.LENGTH
        assert sum(output.num_prefill_tokens for output in edge.outputs) == sum(len(each.token_ids) for each in asked)
        await edge.unused()
        found = {one for each in asked for one in prefix_hashes(KEY, each.token_ids, 2 * BLOCK)}
        told: set[bytes] = set()

        def all_told() -> bool:
            told.update(edge.port.take_prefix_delta().added)
            return told >= found

        await until(all_told, "prefixes that can be found were not told of")


async def test_what_few_sequences_have_is_told(started: Started) -> None:
    async with started() as edge:
        await edge.port.submit(request(logprobs=2, prompt_logprobs=1))
        await edge.ended("r/1")
        assert [token.logprob for token in edge.tokens("r/1")] == [0.0] * 5
        assert [len(token.top_logprobs) for token in edge.tokens("r/1")] == [2] * 5
        progress = [each for output in edge.outputs for each in output.progress]
        assert progress[0].first_scheduled
        assert progress[-1].num_computed_tokens == 30
        assert sum(len(scores.values) for output in edge.outputs for scores in output.scores) == 29


async def test_an_answer_comes_before_the_first_step(started: Started) -> None:
    async with started() as edge:
        known: set[str] = set()

        def check(output: StepOutput) -> None:
            assert {token.seq_id for token in output.tokens} <= known, "a token of what is not known yet"

        edge.on_step = check

        async def submit(i: int) -> None:
            await edge.port.submit(request(f"r{i}/1", 4, max_tokens=3))
            known.add(f"r{i}/1")

        await asyncio.gather(*(submit(i) for i in range(40)))
        for i in range(40):
            await edge.ended(f"r{i}/1")


async def test_a_held_sequence_keeps_its_blocks_until_it_is_cancelled(started: Started) -> None:
    async with started() as edge:
        await edge.port.submit(request(max_tokens=1), hold=True)
        await edge.ended("r/1")
        stats = (await edge.port.look(check_integrity=False)).stats
        assert (stats.num_held, stats.num_blocks - stats.num_available_blocks) == (1, 8)
        edge.port.cancel("r/1")
        assert not (await edge.port.look(check_integrity=True)).stats.num_held, "what is asked later is done later"
        await edge.unused()


async def test_reserved_committed_and_decoded(started: Started) -> None:
    async with started() as edge:
        reservation = await edge.port.reserve(request())
        assert (len(reservation.block_ids), reservation.num_cached_tokens) == (8, 0)
        assert len(await edge.port.generations(reservation.block_ids)) == 8
        edge.port.commit("r/1", [7], confirmed=False)
        edge.port.confirm("r/1")
        # Nobody has written the KV that its tokens depend on: only how many there are can be said.
        assert len(await edge.ended("r/1")) == 4
        await edge.unused()


@pytest.mark.parametrize("output_ids", [[VOCAB], [], [-1]])
async def test_output_ids_that_are_none_end_the_sequence(started: Started, output_ids: list[int]) -> None:
    async with started() as edge:
        await edge.port.reserve(request())
        edge.port.commit("r/1", output_ids)
        await until(lambda: edge.failures("r/1"), "the failure was not told")
        assert edge.failures("r/1") == [FailureKind.REQUEST]
        # What has ended is no failure once more.
        edge.port.commit("r/1", [1])
        await edge.unused()
        assert edge.failures("r/1") == [FailureKind.REQUEST]


async def test_no_output_after_a_cancel(started: Started) -> None:
    async with started(fake_step_ms=1.0) as edge:
        await edge.port.submit(request(max_tokens=150))
        await until(lambda: len(edge.tokens("r/1")) > 2, "it decodes")
        edge.port.cancel("r/1")
        edge.port.cancel("r/1")
        seen = len(edge.tokens("r/1"))
        await edge.port.submit(request("s/1", 9, max_tokens=3))
        assert await edge.ended("s/1") == expected(prompt_of(9), 3)
        assert len(edge.tokens("r/1")) == seen
        await edge.unused()


async def test_what_cannot_be_taken_is_refused(started: Started) -> None:
    async with started(fake_step_ms=1000.0) as edge:
        await edge.port.submit(request(max_tokens=100))
        refused: list[tuple[Callable[[EngineRequest], Awaitable[Any]], EngineRequest, type[Exception]]] = [
            (edge.port.submit, request(), InvalidRequest),
            (edge.port.reserve, request(), InvalidRequest),
            (edge.port.submit, request("s/1", 9000), InvalidRequest),
            (edge.port.reserve, request("s/1", 1000, max_tokens=3), ResourceExhausted),
            (edge.port.submit, request("s/1", grammar=Grammar(GrammarKind.REGEX, "a")), SetupError),
        ]
        for ask, asked, error in refused:
            with pytest.raises(error):
                await ask(asked)
        # What was refused has left the others as they were.
        assert not edge.failures("r/1")
        edge.port.cancel("r/1")
        await edge.unused()


async def test_who_gives_up_asking_leaves_nothing(started: Started) -> None:
    async with started(num_blocks=1024) as edge:
        for turns in range(12):
            asking = asyncio.create_task(edge.port.reserve(request(f"r{turns}/1", 3000, seed=turns)))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            if not asking.cancelled():
                edge.port.cancel(f"r{turns}/1")
        await edge.unused()


async def test_bounds_change_only_while_nothing_is_here(started: Started) -> None:
    async with started(fake_step_ms=5.0) as edge:
        await edge.port.submit(request(max_tokens=100))
        assert not await edge.port.reconfigure(max_num_batched_tokens=77, max_num_seqs=7)
        edge.port.cancel("r/1")
        await edge.unused()
        assert await edge.port.reconfigure(max_num_batched_tokens=77, max_num_seqs=7)
        assert edge.port.max_num_batched_tokens == 77
        with pytest.raises(SetupError):
            await edge.port.reconfigure(max_num_batched_tokens=0, max_num_seqs=7)


async def test_a_curve_is_taken(started: Started) -> None:
    async with started(max_step_ms=20.0) as edge:
        edge.port.set_curve(StepCurve(fixed_s=1e-3, per_row_s=1e-5))
        await edge.port.submit(request())
        await edge.ended("r/1")
        assert edge.port.alive(WAIT_S)


# ---- a process of its own ----------------------------------------------------------------------------------------------------


@pytest.mark.system
async def test_its_death_is_told_at_once_and_ends_what_is_asked() -> None:
    async with _remote(config_of(fake_step_ms=5.0)) as edge:
        assert isinstance(edge.port, RemoteEngine)
        await edge.port.submit(request(max_tokens=100))
        asking = [asyncio.create_task(edge.port.reserve(request(f"s{i}/1"))) for i in range(3)]
        edge.port.kill(signal.SIGKILL)
        await until(lambda: edge.failure is not None, "nobody was told")
        for each in asking:
            try:
                await asyncio.wait_for(each, WAIT_S)
            except Unavailable:
                pass
        assert not edge.port.alive(WAIT_S)
        with pytest.raises(Unavailable):
            await edge.port.submit(request("t/1"))
        # What nobody can be told of any more is no error.
        edge.port.commit("r/1", [1])
        edge.port.cancel("r/1")


@pytest.mark.system
async def test_one_that_stands_still_is_not_alive_and_goes_on() -> None:
    async with _remote(config_of(fake_step_ms=2.0)) as edge:
        assert isinstance(edge.port, RemoteEngine)
        asked = request(max_tokens=100)
        await edge.port.submit(asked)
        await until(lambda: edge.tokens("r/1"), "it decodes")
        edge.port.kill(signal.SIGSTOP)
        await until(lambda: not edge.port.alive(0.3), "it is taken for alive")
        edge.port.kill(signal.SIGCONT)
        assert await edge.ended("r/1") == expected(asked.token_ids, 100)
        await until(lambda: edge.port.alive(1.0), "it is taken for dead")


@pytest.mark.smoke
def test_what_keeps_it_from_starting_is_told() -> None:
    with pytest.raises(SetupError):
        RemoteEngine.launch(replace(config_of(), max_model_len=1 << 20), EngineChild.start(MODULE), NoProgress())
    with pytest.raises(SetupError):
        RemoteEngine.launch(replace(config_of(runner="model"), model=str(Path("/nowhere"))), EngineChild.start(MODULE), NoProgress())
