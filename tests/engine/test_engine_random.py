"""Two engines, everything at once, at random: prompts of all classes that share prefixes, chunks, splits, hand-overs as bytes, cancels at
any moment, failing steps, a token after which the model has no next one, host memory, with look-ahead and steps bounded in time, and
without. Every token equals the one worked out by hand, and nothing is left behind."""

from __future__ import annotations

import functools
import random
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from engine_helpers import HookedRunner, KnowingProposer, assert_idle, engine_of, expected_answer, make_request

from twostep.engine.batch import Batch
from twostep.engine.draft_model import DraftModel
from twostep.engine.engine import Engine
from twostep.engine.types import EngineRequest, FinishReason, Reservation, StepOutput, StepTokens, TokenOutput
from twostep.errors import InvalidRequest, ResourceExhausted
from twostep.request_class import RequestClass
from twostep.settings.speculative import SpeculativeConfig
from twostep.step_curve import StepCurve


@dataclass(eq=False)
class Attempt:
    request: EngineRequest
    answer: list[int]
    reason: FinishReason
    engines: tuple[Engine, ...]
    reservation: Reservation | None = None
    got: list[int] = field(default_factory=list)
    over: str = ""  # "finished", "cancelled", "failed"
    # The model has no token after the last of the answer.
    breaks: bool = False


class World:
    """Runs attempts on a prefill engine and a decode engine of random bounds; `chaos` is asked many times a step."""

    # Tokens that the next one depends on: one of these; 0: all.
    windows: Sequence[int] = (0,)
    # Groups of layers, and how many of them have windows, where there are any.
    groups: Sequence[tuple[int, int]] = ((1, 1),)
    # Blocks of a sequence's state: one of these.
    state_blocks: Sequence[int] = (0, 0, 1, 3)
    # Tokens and sequences of a step: one of these each.
    budgets: Sequence[int] = (1, 7, 32, 200)
    seats: Sequence[int] = (1, 4, 16)
    drafts = False
    look_ahead_share = 0.6

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice([1, 2, 4, 5, 16])
        self.vocab = rng.choice([37, 1000])
        # An int64 is the least a state block holds.
        self.num_state_blocks = rng.choice(self.state_blocks)
        self.context = rng.choice([60, 150])
        self.window = random.Random(seed).choice(self.windows)
        self.num_groups, self.num_windowed = random.Random(seed).choice(self.groups)
        self.broken_token = 7 if seed % 2 and self.vocab > 37 and not self.window else None
        self.unit = self.block_size * rng.choice([1, 3])
        self.now = 0.0
        self.at_the_end = self.fail_next = self.refuse_next = False
        self.proposers: list[KnowingProposer] = []
        self.draft_models: list[DraftModel] = []
        # Those whose KV is not the right one: it may hold any token.
        self.wrong: set[str] = set()
        self.prefill, self.decode = self.make_engine(), self.make_engine()
        self.bases = [[rng.randrange(self.vocab) for _ in range(rng.randrange(2 * self.block_size, 50))] for _ in range(3)]
        self.attempts: dict[str, Attempt] = {}
        self.mirrors: dict[Engine, tuple[set[bytes], set[bytes]]] = {engine: (set(), set()) for engine in (self.prefill, self.decode)}
        self.seen: Counter[str] = Counter()

    @property
    def in_groups(self) -> dict[str, int]:
        return {"num_groups": self.num_groups, "num_windowed": self.num_windowed}

    def clock(self) -> float:
        self.now += 1e-4
        return self.now

    def make_engine(self) -> Engine:
        rng = self.rng
        longest = -(-self.context // self.block_size)
        runner = HookedRunner(
            num_blocks=longest * self.num_groups + self.num_state_blocks + rng.choice([0, 3, longest, 3 * longest]),
            block_size=self.block_size,
            vocab_size=self.vocab,
            max_model_len=self.context,
            num_layers=2,
            broken_token=self.broken_token,
            num_state_blocks=self.num_state_blocks,
            window=self.window,
            num_groups=self.num_groups,
            num_windowed=self.num_windowed,
        )
        runner.during = self.during
        engine = engine_of(
            runner,
            clock=self.clock,
            max_num_batched_tokens=rng.choice(self.budgets),
            max_num_seqs=rng.choice(self.seats),
            max_waiting=rng.choice([2, 20]),
            enable_prefix_caching=rng.random() < 0.85,
            hash_unit=self.unit,
            host_cache_bytes=rng.choice([0, 5, 1000]) * runner.kv_shape.block_bytes,
            host_ahead_share=rng.choice([0.125, 1.0]),
            look_ahead=rng.random() < self.look_ahead_share,
            max_step_s=rng.choice([0.0, 0.002]),
            min_chunk_tokens=rng.choice([1, 8]),
            ageing_s=rng.choice([0.001, 0.1, 30.0]),
            **self.drafting(),
        )
        runner.launching = partial(self.launching, engine)
        if rng.random() < 0.5:
            engine.set_curve(StepCurve(fixed_s=0.0005, per_row_s=1e-4, per_pair_s=1e-6, per_sequence_s=1e-5, per_context_s=1e-6))
        return engine

    def drafting(self) -> dict[str, Any]:
        if not self.drafts:
            return {}
        rng = self.rng
        proposer = KnowingProposer(self.vocab, rng.choice([0.0, 0.5, 0.9, 1.0]), rng.randrange(1000), self.window, **self.in_groups)
        self.proposers.append(proposer)
        config = SpeculativeConfig(method="ngram", num_speculative_tokens=rng.choice([1, 3, 7]))
        return {"speculative": config, "proposer": rng.choice([proposer, proposer, None])}

    # ---- new work ---------------------------------------------------------------------------------------------------

    def new_request(self) -> EngineRequest:
        rng = self.rng
        base = rng.choice(self.bases)
        tokens = base[: rng.randrange(1, len(base) + 1)]
        if rng.random() < 0.6:
            tokens = tokens + [rng.randrange(self.vocab) for _ in range(rng.randrange(0, 30))]
        if rng.random() < 0.1:
            tokens = [rng.randrange(self.vocab) for _ in range(self.context - rng.randrange(1, 5))]
        max_tokens = rng.choice([1, 2, 5, 20, 60])
        self.seen["requests"] += 1
        return make_request(
            f"r{self.seen['requests']}",
            tokens[: self.context - 1],
            max_tokens=max_tokens,
            eos=frozenset({1, 2}) if rng.random() < 0.5 else frozenset(),
            key=rng.choice([b"", b"one", b"one", b"one", b"two"]),
            ignore_eos=rng.random() < 0.2,
            min_tokens=rng.choice([0, 0, min(3, max_tokens)]),
            stop_token_ids=(3,) if rng.random() < 0.3 else (),
            request_class=rng.choice(list(RequestClass)),
            tpot_s=rng.choice([None, 0.001]),
        )

    def start(self) -> None:
        request = self.new_request()
        bounds = {"vocab_size": self.vocab, "max_model_len": self.context}
        stateful = bool(self.num_state_blocks)
        answer, reason = expected_answer(request, **bounds, window=self.window, stateful=stateful, **self.in_groups)
        attempt = Attempt(request, answer, reason, (self.prefill, self.decode))
        whole = [*request.token_ids, *answer]
        if self.broken_token in whole[:-1]:
            attempt.breaks = True
            attempt.answer = answer[: max(0, whole.index(self.broken_token) + 1 - len(request.token_ids))]
        try:
            if self.rng.random() < 0.5:
                attempt.engines = (self.rng.choice([self.prefill, self.decode]),)
                attempt.engines[0].submit(request)
            else:
                attempt.reservation = self.decode.reserve(request)
                try:
                    self.prefill.submit(request, hold=True)
                except (ResourceExhausted, InvalidRequest):
                    assert self.decode.cancel(request.seq_id)
                    raise
        except ResourceExhausted:
            return
        except InvalidRequest:  # it could never fit the pool
            return
        self.attempts[request.seq_id] = attempt

    def cancel(self, attempt: Attempt) -> None:
        attempt.over = "cancelled"
        found = [engine.cancel(attempt.request.seq_id) for engine in attempt.engines]
        assert any(found)

    def chaos(self) -> None:
        if self.rng.random() < 0.35:
            self.start()
        alive = [a for a in self.attempts.values() if not a.over]
        if alive and self.rng.random() < 0.06:
            self.cancel(self.rng.choice(alive))

    def during(self, batch: Batch) -> None:
        """In the middle of a step, and from another thread: the engine must not hold its lock."""
        if self.at_the_end:
            return
        thread = threading.Thread(target=self.chaos)
        thread.start()
        thread.join()
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the fake device fails as it was told to")

    def launching(self, engine: Engine, batch: Batch) -> None:
        assert len(batch.token_ids) <= engine.max_num_batched_tokens
        self.seen["carried"] += batch.carried is not None
        self.seen["behind drafts"] += batch.behind is not None
        if self.refuse_next:
            self.refuse_next = False
            raise RuntimeError("the fake device refuses as it was told to")

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self, engine: Engine) -> bool:
        output = self.told(engine, engine.step())
        engine.check_integrity()
        self.take_failures(output)
        for progress in output.progress:
            attempt = self.attempts[progress.seq_id]
            assert progress.num_cached_tokens <= progress.num_computed_tokens <= len(attempt.request.token_ids)
        for token in output.tokens:
            attempt = self.attempts[token.seq_id]
            assert not attempt.over, f"{token.seq_id} is {attempt.over} and still reports tokens"
            assert token.position == len(attempt.got)
            attempt.got.append(token.token_id)
            assert attempt.got == attempt.answer[: len(attempt.got)]
            last = len(attempt.got) == len(attempt.answer) and not attempt.breaks
            assert token.finish_reason is (attempt.reason if last else None)
            if attempt.reservation is not None and engine is self.prefill:
                if last:
                    assert self.decode.cancel(token.seq_id)
                else:
                    self.hand_over(attempt, attempt.reservation)
                assert self.prefill.release(token.seq_id)
            if last:
                attempt.over = "finished"
        delta, (pool, host) = engine.take_prefix_delta(), self.mirrors[engine]
        follow(pool, delta.added, delta.removed, engine.cached_prefixes())
        follow(host, delta.host_added, delta.host_removed, engine.host_prefixes())
        return bool(output.num_prefill_tokens + output.num_decode_tokens)

    def told(self, engine: Engine, output: StepOutput) -> StepOutput:
        """Returns what others are told of a step."""
        return output

    def take_failures(self, output: StepOutput) -> None:
        for failure in output.failures:
            attempt = self.attempts[failure.seq_id]
            if "as it was told to" not in failure.message and failure.seq_id not in self.wrong:
                assert attempt.breaks
                assert attempt.got == attempt.answer
                self.seen["broken"] += 1
            if attempt.over == "cancelled":
                # While the engine looked whether it was its own fault.
                continue
            assert not attempt.over
            attempt.over = "failed"
            for engine in attempt.engines:
                engine.cancel(failure.seq_id)

    def hand_over(self, attempt: Attempt, reservation: Reservation) -> None:
        """Does the workers' part in one go: the blocks' bytes, then commit."""
        self.move(attempt, reservation)
        self.decode.commit(attempt.request.seq_id, attempt.got)

    def move(self, attempt: Attempt, reservation: Reservation, *, spoil: bool = False) -> None:
        order = self.decode.runner.kv_shape.order(len(attempt.request.token_ids))
        skip = order.before(reservation.num_cached_tokens // self.block_size)
        source = self.prefill.block_ids(attempt.request.seq_id)[skip:]
        data = np.empty((len(source), self.prefill.runner.kv_shape.block_bytes), np.uint8)
        self.prefill.runner.read_blocks(source, data)
        if spoil:
            data.view(np.int32)[:] += 1
        self.decode.runner.write_blocks(reservation.block_ids[skip : skip + len(source)], data)
        self.seen["moved"] += len(source)
        self.seen["reused"] += skip

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.chaos()
            self.fail_next = self.rng.random() < 0.02
            self.refuse_next = self.rng.random() < 0.02
            self.step(self.rng.choice([self.prefill, self.decode]))
        self.fail_next = self.refuse_next = False
        self.at_the_end = True
        while any([self.step(self.prefill), self.step(self.decode)]):
            pass


def follow(mirror: set[bytes], added: Iterable[bytes], removed: Iterable[bytes], there: Iterable[bytes]) -> None:
    """Brings a mirror of findable prefixes up to date by a delta, which says nothing twice."""
    assert not mirror & set(added)
    assert mirror >= set(removed)
    mirror |= set(added)
    mirror -= set(removed)
    assert mirror == set(there)


class AheadWorld(World):
    """The decode engine begins before it is known whether what was handed over is the right KV: its tokens are withheld until that is
    confirmed. Where it was not, the sequence is cancelled, and no other one has ever seen its KV."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        # Tokens of those not confirmed yet.
        self.withheld: dict[str, list[TokenOutput]] = {}
        self.confirmed: list[TokenOutput] = []

    def hand_over(self, attempt: Attempt, reservation: Reservation) -> None:
        seq_id = attempt.request.seq_id
        # Blocks that were given to another prompt while they were read.
        if self.rng.random() < 0.3 and (self.num_state_blocks or reservation.num_cached_tokens < len(attempt.request.token_ids)):
            self.wrong.add(seq_id)
        self.move(attempt, reservation, spoil=seq_id in self.wrong)
        self.decode.commit(seq_id, attempt.got, confirmed=False)
        self.withheld[seq_id] = []

    def resolve(self, seq_id: str) -> None:
        withheld = self.withheld.pop(seq_id)
        ended = bool(withheld) and withheld[-1].finish_reason is not None
        self.seen["ended before they were confirmed"] += ended
        if seq_id in self.wrong:
            assert self.decode.cancel(seq_id) != ended
            self.attempts[seq_id].over = "cancelled"
            self.seen["undone"] += 1
        else:
            self.decode.confirm(seq_id)
            self.confirmed += withheld
            self.seen["confirmed"] += 1

    def cancel(self, attempt: Attempt) -> None:
        seq_id = attempt.request.seq_id
        if any(token.seq_id == seq_id for token in self.confirmed):
            return  # it is about to be told
        if (withheld := self.withheld.pop(seq_id, None)) is None:
            super().cancel(attempt)
            return
        attempt.over = "cancelled"
        assert self.decode.cancel(seq_id) != (bool(withheld) and withheld[-1].finish_reason is not None)

    def chaos(self) -> None:
        super().chaos()
        for seq_id in list(self.withheld):
            if self.rng.random() < 0.05:
                self.resolve(seq_id)

    def step(self, engine: Engine) -> bool:
        for seq_id in list(self.withheld) if self.at_the_end else ():
            self.resolve(seq_id)
        return super().step(engine)

    def told(self, engine: Engine, output: StepOutput) -> StepOutput:
        if engine is not self.decode:
            return output
        tokens: list[TokenOutput] = []
        for token in output.tokens:
            self.withheld.get(token.seq_id, tokens).append(token)
        failed = {failure.seq_id for failure in output.failures}
        for seq_id in failed:
            self.withheld.pop(seq_id, None)
        # Who was confirmed during this very step, and failed in it, is told of the failure alone.
        before = [token for token in self.confirmed if token.seq_id not in failed]
        self.confirmed = []
        return replace(output, tokens=StepTokens.of([*before, *tokens]))


class WindowWorld(World):
    """Blocks behind the window are other sequences' while their first owner goes on."""

    windows = (1, 5, 16, 33)


class WindowAheadWorld(AheadWorld):
    windows = WindowWorld.windows


class GroupWorld(WindowWorld):
    """Some layers have windows."""

    groups = ((2, 1), (3, 2), (3, 1), (4, 4))
    state_blocks = (0,)


class GroupAheadWorld(GroupWorld, AheadWorld):
    pass


class StateWorld(World):
    """Prefixes are found as far as a state was kept; many prompts go on where an answer has ended."""

    state_blocks = (1, 2, 3, 5)

    def new_request(self) -> EngineRequest:
        request, rng = super().new_request(), self.rng
        over = [attempt for attempt in self.attempts.values() if attempt.over == "finished"]
        if over and rng.random() < 0.4:
            before = rng.choice(over)
            tokens = [*before.request.token_ids, *before.answer, *(rng.randrange(self.vocab) for _ in range(rng.randrange(1, 9)))]
            tokens = tokens[: self.context - 1]
            request = replace(request, token_ids=tokens, num_prompt_tokens=len(tokens), prefix_key=before.request.prefix_key)
        return request


class StateAheadWorld(StateWorld, AheadWorld):
    pass


class DraftWorld(World):
    """Engines draft tokens, right and wrong ones."""

    drafts, look_ahead_share, state_blocks = True, 0.6, (0,)


class DraftModelWorld(DraftWorld):
    """A model drafts them, the served one or another, whose pool may be too small and whose context too short."""

    # Where there is room for drafts.
    budgets, seats = (7, 32, 200), (4, 16)

    def drafting(self) -> dict[str, Any]:
        rng = self.rng
        block_size = rng.choice([1, 3, 16])
        num_tokens = rng.choice([self.context // 2, 3 * self.context, 10 * self.context])
        runner = HookedRunner(
            num_blocks=-(-num_tokens // block_size),
            block_size=block_size,
            vocab_size=self.vocab,
            max_model_len=rng.choice([self.context, self.context // 2]),
            window=rng.choice([0, 0, 3]),
            broken_token=rng.choice([self.broken_token, 9]),
        )
        draft_model = DraftModel(runner, max_num_seqs=rng.choice([1, 4, 16]), clock=self.clock)
        runner.during = partial(self.while_drafting, rng.choice([0.0, 0.0, 0.05]))
        self.draft_models.append(draft_model)
        config = SpeculativeConfig(method="draft_model", model="another", num_speculative_tokens=rng.choice([1, 3, 7]))
        return {"speculative": config, "proposer": draft_model}

    def while_drafting(self, failing: float, batch: Batch) -> None:
        """Requests come and go meanwhile; now and then it fails, of which they learn nothing."""
        if self.at_the_end:
            return
        thread = threading.Thread(target=self.chaos)
        thread.start()
        thread.join()
        if self.rng.random() < failing:
            raise RuntimeError("the draft model fails as it was told to")


class DraftModelWindowWorld(DraftModelWorld, WindowWorld):
    pass


class DraftModelAheadWorld(DraftModelWorld, AheadWorld):
    pass


class DraftAheadWorld(DraftWorld, AheadWorld):
    pass


class DraftWindowWorld(DraftWorld, WindowWorld):
    pass


class DraftGroupWorld(DraftWorld, GroupWorld):
    pass


@functools.cache
def ran(kind: type[World], seed: int) -> World:
    world = kind(seed)
    world.run(250)
    return world


# The first of their seeds, how many there are in the tier, and how many more by hand.
SEEDS: dict[type[World], tuple[int, int, int]] = {
    World: (0, 8, 8),
    AheadWorld: (300, 6, 6),
    WindowWorld: (400, 6, 6),
    WindowAheadWorld: (500, 3, 3),
    GroupWorld: (1400, 5, 5),
    GroupAheadWorld: (1500, 4, 0),
    DraftGroupWorld: (1600, 4, 0),
    StateWorld: (600, 6, 6),
    StateAheadWorld: (700, 3, 3),
    DraftWorld: (800, 4, 4),
    DraftAheadWorld: (900, 4, 0),
    DraftWindowWorld: (1000, 4, 0),
    DraftModelWorld: (1100, 12, 0),
    DraftModelAheadWorld: (1200, 4, 0),
    DraftModelWindowWorld: (1300, 4, 0),
}
WORLDS = [(kind, seed) for kind, (first, count, _) in SEEDS.items() for seed in range(first, first + count)]
SELDOM = [(kind, first + count + i) for kind, (first, count, more) in SEEDS.items() for i in range(more)]


@pytest.mark.parametrize(("kind", "seed"), [*WORLDS, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in SELDOM)])
def test_every_token_is_right_and_nothing_is_left(kind: type[World], seed: int) -> None:
    world = ran(kind, seed)
    for attempt in world.attempts.values():
        assert attempt.over, f"{attempt.request.seq_id} is not answered"
        assert attempt.over != "finished" or (attempt.got == attempt.answer and not attempt.breaks)
    assert_idle(world.prefill)
    assert_idle(world.decode)
    assert not any(proposer.known for proposer in world.proposers)
    for draft_model in world.draft_models:
        draft_model.prepare([], 0)
        assert draft_model.failed or draft_model.num_free_blocks == draft_model.num_blocks


def test_the_random_worlds_visit_what_they_should() -> None:
    worlds = [ran(kind, seed) for kind, seed in WORLDS]
    stats = [engine.stats() for world in worlds for engine in (world.prefill, world.decode)]
    counts = sum((world.seen for world in worlds), Counter(a.over for world in worlds for a in world.attempts.values()))
    counts["preempted"] = sum(stat.num_preemptions for stat in stats)
    counts["drafted"] = sum(map(sum, (stat.num_drafted for stat in stats)))
    counts["accepted"] = sum(map(sum, (stat.num_accepted for stat in stats)))
    counts["drafted by a model"] = sum(
        sum(engine.stats().num_accepted) for world in worlds if world.draft_models for engine in (world.prefill, world.decode)
    )
    counts["draft model failed"] = sum(draft_model.failed for world in worlds for draft_model in world.draft_models)
    counts["from host"] = sum(stat.num_host_hit_tokens for stat in stats)
    counts["from states"] = sum(stat.num_hit_tokens for world, stat in zip(worlds, stats[::2], strict=True) if world.num_state_blocks)
    wanted = (
        "from states",
        "finished",
        "cancelled",
        "failed",
        "broken",
        "moved",
        "reused",
        "carried",
        "behind drafts",
        "preempted",
        "from host",
        "confirmed",
        "undone",
        "drafted",
        "accepted",
        "drafted by a model",
        "draft model failed",
    )
    assert all(counts[name] >= 3 for name in (*wanted, "ended before they were confirmed")), counts


@pytest.mark.parametrize(("look_ahead", "drafts"), [(False, False), (True, False), (True, True)])
def test_a_stepping_thread_among_submitting_and_cancelling_ones(look_ahead: bool, drafts: bool) -> None:
    """Real threads on one engine; who wins a race is open, what comes out is not."""
    runner = HookedRunner(num_blocks=60, block_size=4, vocab_size=1000, max_model_len=120)
    speculative = SpeculativeConfig(method="ngram", prompt_lookup_min=1) if drafts else None
    engine = engine_of(runner, max_num_batched_tokens=40, max_num_seqs=8, look_ahead=look_ahead, speculative=speculative)
    done = threading.Event()
    got: dict[str, list[int]] = {}
    requests: dict[str, EngineRequest] = {}
    cancelled: set[str] = set()

    def loop() -> None:
        while not done.is_set() or engine.wait_for_work(0.0):
            engine.wait_for_work(0.005)
            for token in engine.step().tokens:
                got.setdefault(token.seq_id, []).append(token.token_id)

    def client(index: int) -> None:
        rng = random.Random(index)
        for i in range(40):
            tokens = [7] * rng.randrange(1, 40) + [rng.randrange(1000)] * 3
            request = make_request(f"{index}-{i}", tokens, max_tokens=rng.randrange(1, 20))
            requests[request.seq_id] = request
            engine.submit(request)
            engine.check_integrity()
            if rng.random() < 0.3 and engine.cancel(request.seq_id):
                cancelled.add(request.seq_id)

    with ThreadPoolExecutor(4) as threads:
        stepper = threads.submit(loop)
        try:
            for one in [threads.submit(client, i) for i in range(3)]:
                one.result(60)
        finally:
            done.set()
        stepper.result(60)
    assert cancelled
    for seq_id, request in requests.items():
        answer, _ = expected_answer(request, vocab_size=1000, max_model_len=120)
        tokens = got.get(seq_id, [])
        assert tokens == (answer[: len(tokens)] if seq_id in cancelled else answer)
    assert_idle(engine)
