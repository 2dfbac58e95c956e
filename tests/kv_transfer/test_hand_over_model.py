"""Both halves of the hand-over's state machine (kv_transfer.lease, kv_transfer.reader) in one world, under any interleaving.

Leases are opened, published, watched, fetched block by block while memory is reused, committed, acknowledged, aborted and expire; readers
come late, twice, and give up; messages overtake each other, come twice or never; the source restarts over the same memory. Always:

    each block is freed exactly once for each lease and each reader, and belongs to nobody twice
    no reader commits anything but what its ticket's prompt computed, though checksums may find false matches where memory is read in place
    when all is over nothing is held, on either side, whatever still arrives

The run below makes at least 10,000 random operations. TWOSTEP_PROPERTY_STEPS asks for about so many instead, e.g.

    TWOSTEP_PROPERTY_STEPS=1000000 python -m pytest tests/kv_transfer/test_hand_over_model.py
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import pytest
from hand_over_world import SOURCE_BLOCKS, World
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kv_transfer import lease, reader
from kv_transfer.lease import Abort, Acknowledged, Commit, Lease, LeaseState, LeaseTable, PublisherStopped, Transition
from kv_transfer.reader import EngineAnswered, FreeTargets, GivenUp, Reader, ReaderState, ReaderStep, SourceLost
from kv_transfer.ticket import Ticket
from twostep.errors import Cancelled, InvalidRequest, Unavailable

OPERATIONS = 10_000
STEPS = 80
ENDS = ["aborts", "fails", "expires", "restarts"]
SEEDS = st.integers(0, 2**32 - 1)


class HandOvers(RuleBasedStateMachine):
    # How leases end.
    ends: ClassVar[Sequence[str]] = ENDS
    num_operations: ClassVar[int] = 0
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.steps = 0

    def drawn(self, seed: int) -> Random:
        """What a step does is drawn from one number: drawing each of its parts takes hypothesis longer than all the rest. The same step
        repeated is another one."""
        return Random(f"{seed} {self.steps}")

    @invariant()
    def adds_up(self) -> None:
        self.steps += 1
        type(self).num_operations += 1
        self.world.check()

    def teardown(self) -> None:
        world = self.world
        world.end()
        world.check()
        assert len(world.table) == 0
        assert not world.objects
        assert world.pool.num_available == world.pool.num_blocks
        assert world.target_pool.num_available == world.target_pool.num_blocks
        assert all(puller.machine.finished and puller.num_frees == 1 for puller in world.pullers)
        type(self).seen += world.seen

    # ---- what goes well -----------------------------------------------------------------------------------------------------

    @rule(seed=SEEDS)
    def opens(self, seed: int) -> None:
        random = self.drawn(seed)
        lease_id, content = random.choice("abc"), tuple(random.choices((0, 1), k=random.randint(0, 3)))
        one_sided, per_chunk, readers = random.choice((True, True, False)), random.randint(1, 2), random.choice((0, 1, 1, 2, 2, 3))
        note(f"{lease_id} of {content}, one-sided {one_sided}, {per_chunk} blocks a chunk, {readers} readers")
        self.world.open(lease_id, content, one_sided=one_sided, per_chunk=per_chunk)
        for _ in range(readers if self.world.prompts else 0):
            self.world.attach(self.world.prompts[-1])
        self.go_on(random, random.choice((0, 10, 20, 30)), "all")

    @rule(seed=SEEDS)
    def one_thing_goes_on(self, seed: int) -> None:
        random = self.drawn(seed)
        calls = self.world.forward()
        if calls:
            random.choice(calls)(random.random() < 0.5)

    @rule(seed=SEEDS)
    def all_go_on(self, seed: int) -> None:
        random = self.drawn(seed)
        self.go_on(random, random.choice((4, 8, 16, 40)), "all")

    @rule(seed=SEEDS, who=st.sampled_from(["source", "readers"]))
    def some_go_on(self, seed: int, who: str) -> None:
        """The others stand still meanwhile: that is how readers come late."""
        random = self.drawn(seed)
        self.go_on(random, random.choice((2, 4, 8)), who)

    def go_on(self, random: Random, times: int, who: str) -> None:
        for _ in range(times):
            calls = self.world.forward(who)
            if calls:
                random.choice(calls)(random.random() < 0.8)

    # ---- what does not ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.jobs)
    @rule(seed=SEEDS)
    def a_lease_ends_and_its_memory_is_reused(self, seed: int) -> None:
        world, random = self.world, self.drawn(seed)
        job, kind = random.choice(list(world.jobs.values())), random.choice(self.ends)
        again, count = random.random() < 0.75, random.randint(0, SOURCE_BLOCKS)
        note(f"{job.lease.lease_id} {kind}, the same id again {again}, {count} blocks for others")
        match kind:
            case "aborts":
                world.apply(job, Abort("why not"))
            case "fails":
                if job.lease.publishing:
                    world.apply(job, PublisherStopped())
            case "expires":
                world.tick(11.0)
            case "restarts":
                world.restart()
        if again:
            world.open_again(job)
            # Mostly to its end, so that those who read the first one meet it.
            self.go_on(random, random.choice((4, 16, 24)), "source")
        world.churn(min(count, world.pool.num_available))
        if world.churned and count % 4:
            world.pool.free(world.churned.pop(0))
        self.go_on(random, random.choice((0, 4, 12, 24)), random.choice(("source", "readers", "all")))

    @precondition(lambda self: self.world.soup)
    @rule(seed=SEEDS, kind=st.sampled_from(["lost", "twice"]))
    def a_message_fares_ill(self, seed: int, kind: str) -> None:
        place = self.drawn(seed).randrange(len(self.world.soup))
        if kind == "lost":
            self.world.lose(place)
        else:
            self.world.deliver(place, keep=True)

    @precondition(lambda self: any(not puller.machine.finished for puller in self.world.pullers))
    @rule(seed=SEEDS, kind=st.sampled_from(["broken", "doubled", "turned", "given up", "refused", "again"]))
    def a_reader_fares_ill(self, seed: int, kind: str) -> None:
        puller = self.drawn(seed).choice([puller for puller in self.world.pullers if not puller.machine.finished])
        match kind:
            case "broken":
                puller.stream[:] = [SourceLost(Unavailable("the connection broke"))]
            case "doubled":
                puller.stream[:] = [event for event in puller.stream for _ in range(2)]
            case "turned":
                puller.stream.reverse()
            case "given up":
                self.world.react(puller, GivenUp(Cancelled("it is not wanted")))
            case "refused":
                self.world.engine_error = InvalidRequest("nothing is left to decode")
            case "again":
                self.world.attach(puller.prompt)

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.5]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)


def run(operations: int, *, find_only: bool = False, ends: Sequence[str] = ENDS) -> type[HandOvers]:
    """A fresh class, so that its counts are of this run. `find_only`: a failure is raised as it was found."""
    machine = type("HandOvers", (HandOvers,), {"num_operations": 0, "seen": Counter(), "ends": ends})
    run_state_machine_as_test(
        machine,
        settings=settings(
            # Some of them are shorter.
            max_examples=-(-operations // STEPS) * 6 // 5,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate] if find_only else [Phase.explicit, Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            print_blob=False,
        ),
    )
    return machine


@pytest.mark.timeout(0)
def test_no_interleaving_leaks_or_commits_what_is_stale() -> None:
    operations = int(os.environ.get("TWOSTEP_PROPERTY_STEPS", OPERATIONS))
    machine = run(operations)
    print(f"{machine.num_operations} operations: {dict(machine.seen)}")
    assert machine.num_operations >= operations
    if operations >= OPERATIONS:
        for what in ("committed, copied out", "committed, read where it lay", "torn or stale bytes", "asked and accepted"):
            assert machine.seen[what] >= 10, f"{what} hardly ever happens: {machine.seen}"
        for why in (LeaseState.ABORTED.name, LeaseState.COMMITTED.name, Unavailable.__name__, "unknown"):
            assert machine.seen[f"refused: {why}"], f"nothing is ever refused for {why!r}: {machine.seen}"


def accept_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lease._commit

    def wrong(one: Lease, commit: Commit) -> Transition:
        transition = right(one, commit)
        return replace(transition, refusal="") if one.state in (LeaseState.ABORTED, LeaseState.EXPIRED) else transition

    monkeypatch.setattr(lease, "_commit", wrong)


def accept_any_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lease._commit
    monkeypatch.setattr(
        lease, "_commit", lambda one, commit: right(one, commit if one.reader is None else replace(commit, reader=one.reader))
    )


def accept_any_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LeaseTable.acknowledge

    def wrong(table: LeaseTable, ticket: Ticket, event: Any, *, now: float) -> Acknowledged:
        known = [one.ticket for one in (*table._leases.values(), *table._remembered.values()) if one.lease_id == ticket.lease_id]
        return right(table, known[0] if known else ticket, event, now=now)

    monkeypatch.setattr(LeaseTable, "acknowledge", wrong)


def free_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_give", lambda one, *actions: Transition(replace(one, given=one.given | set(actions)), actions))


def ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reader._maybe_complete

    def wrong(one: Reader) -> ReaderStep:
        done = right(one).reader.state is ReaderState.COMMITTING
        return reader._to_engine(replace(one, state=ReaderState.COMPLETE)) if done else right(one)

    monkeypatch.setattr(reader, "_maybe_complete", wrong)


def free_targets_under_a_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reader,
        "_free_if_quiet",
        lambda one: ReaderStep(one) if one.targets_freed else ReaderStep(replace(one, targets_freed=True), (FreeTargets(),)),
    )


def commit_what_the_engine_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reader._engine_answered
    monkeypatch.setattr(reader, "_engine_answered", lambda one, event: right(one, EngineAnswered()))


@pytest.mark.parametrize(
    "break_a_rule",
    [
        accept_after_the_end,
        accept_any_reader,
        accept_any_ticket,
        free_twice,
        ask_nobody,
        free_targets_under_a_fetch,
        commit_what_the_engine_refused,
    ],
)
def test_the_model_finds_a_broken_rule(break_a_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    # What is broken are parts of the two machines, which have names of their own only inside.
    break_a_rule(monkeypatch)
    with pytest.raises(AssertionError):
        run(10 * OPERATIONS, find_only=True)
