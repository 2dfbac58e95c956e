"""Dynamic SplitFuse: the plan of one step, and that every prompt ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.step_bound import StepTimeLimit
from twostep.engine.step_plan import BatchDecode, Capacity, RunningPrompt, StepPlan, WaitingPrompt, plan_step
from twostep.request_class import RequestClass
from twostep.step_curve import StepCurve, StepWorkload, chunk_pairs

INTERACTIVE, STANDARD, BATCH = RequestClass
RANKS = st.integers(0, 2)
CURVE = StepCurve(fixed_s=5e-3, per_row_s=20e-6, knee=40, per_pair_s=1e-8, per_sequence_s=1e-5, per_context_s=1e-7)


def named(plan: StepPlan[str]) -> list[tuple[str, int]]:
    return [*((item, 1) for item in plan.decodes), *((chunk.item, chunk.num_tokens) for chunk in plan.prompts)]


def test_decodes_first_then_prompts_in_order_split_and_fused() -> None:
    plan = plan_step(
        decodes=["d0", "d1"],
        prompts=[RunningPrompt("a", 40)],
        waiting=[WaitingPrompt("b", 12, 1), WaitingPrompt("c", 100, 9), WaitingPrompt("d", 1, 1)],
        budget=64,
        max_seqs=64,
        capacity=Capacity(9, 99),
    )
    assert named(plan) == [("d0", 1), ("d1", 1), ("a", 40), ("b", 12), ("c", 10)]
    assert [candidate.item for candidate in plan.admitted] == ["b", "c"]
    assert plan.short is None


def test_classes_in_order_and_batch_work_in_the_gaps() -> None:
    plan = plan_step(
        decodes=["d"],
        batch_decodes=[BatchDecode("fd0", 9), BatchDecode("fd1", 9)],
        prompts=[RunningPrompt("s0", 10), RunningPrompt("f0", 5, rank=BATCH)],
        waiting=[WaitingPrompt("i1", 10, 1, rank=INTERACTIVE), WaitingPrompt("s1", 10, 1), WaitingPrompt("f1", 50, 1, rank=BATCH)],
        budget=40,
        max_seqs=64,
        capacity=Capacity(9, 99),
    )
    assert named(plan) == [("d", 1), ("fd0", 1), ("fd1", 1), ("i1", 10), ("s0", 10), ("s1", 10), ("f0", 5), ("f1", 2)]


def test_the_first_that_does_not_fit_ends_admission_and_is_named() -> None:
    waiting = [WaitingPrompt("a", 5, 3), WaitingPrompt("b", 5, 8), WaitingPrompt("c", 5, 1), WaitingPrompt("f", 5, 1, rank=BATCH)]
    plan = plan_step(decodes=[], prompts=[], waiting=waiting, budget=64, max_seqs=64, capacity=Capacity(9, 10))
    assert named(plan) == [("a", 5)], "neither c nor f may overtake b"
    assert plan.short == waiting[1]


def test_waiting_is_read_only_as_far_as_needed() -> None:
    read: list[int] = []

    def waiting() -> Iterator[WaitingPrompt[int]]:
        for i in range(100):
            read.append(i)
            yield WaitingPrompt(i, 10, 1)

    plan_step(decodes=[], prompts=[], waiting=waiting(), budget=20, max_seqs=64, capacity=Capacity(9, 99))
    assert read == [0, 1]
    plan_step(decodes=[0], prompts=[], waiting=waiting(), budget=1, max_seqs=64, capacity=Capacity(9, 99))
    plan_step(decodes=[0], prompts=[], waiting=waiting(), budget=9, max_seqs=64, capacity=Capacity(0, 99))
    plan_step(decodes=[0], prompts=[], waiting=waiting(), budget=9, max_seqs=1, capacity=Capacity(9, 99))
    plan_step(
        decodes=[], prompts=[RunningPrompt(0, 9, rank=INTERACTIVE)], waiting=waiting(), budget=9, max_seqs=9, capacity=Capacity(9, 99)
    )
    assert read == [0, 1]


def test_a_prompt_for_which_just_the_least_chunk_fits_gets_it() -> None:
    plan = plan_step(
        decodes=["d"],
        prompts=[RunningPrompt("a", 5), RunningPrompt("b", 100)],
        waiting=(),
        budget=64,
        max_seqs=64,
        capacity=Capacity(9, 99),
        time_limit=StepTimeLimit(curve=StepCurve(fixed_s=0.0, per_row_s=1.0), max_step_s=10.0, min_chunk=4),
    )
    assert named(plan) == [("d", 1), ("a", 5), ("b", 4)]


@dataclass(frozen=True)
class PlanCase:
    num_decodes: int
    batch_decodes: list[int]  # contexts
    prompts: list[tuple[int, int, int]]  # rank, remaining, before
    waiting: list[tuple[int, int, int]]  # rank, uncached, blocks
    budget: int
    max_seqs: int
    capacity: Capacity
    batch_capacity: Capacity
    num_context: int
    max_step_s: float | None
    min_chunk: int
    waits: bool
    whole: bool = False  # prompts are not split

    def plan(self) -> StepPlan[str]:
        return plan_step(
            decodes=[f"d{i}" for i in range(self.num_decodes)],
            batch_decodes=[BatchDecode(f"f{i}", context) for i, context in enumerate(self.batch_decodes)],
            prompts=[RunningPrompt(f"p{i}", n, before, rank, self.least(n)) for i, (rank, n, before) in enumerate(self.prompts)],
            waiting=[WaitingPrompt(f"w{i}", n, blocks, 0, rank, self.least(n)) for i, (rank, n, blocks) in enumerate(self.waiting)],
            budget=self.budget,
            max_seqs=self.max_seqs,
            capacity=self.capacity,
            batch_capacity=self.batch_capacity,
            num_context=self.num_context,
            time_limit=None
            if self.max_step_s is None
            else StepTimeLimit(curve=CURVE, max_step_s=self.max_step_s, min_chunk=self.min_chunk, waits=self.waits),
        )

    def least(self, num_tokens: int) -> int:
        return num_tokens if self.whole else 1

    @property
    def ranks(self) -> dict[str, int]:
        ranks = {f"p{i}": rank for i, (rank, _, _) in enumerate(self.prompts)} | {f"f{i}": BATCH for i in range(len(self.batch_decodes))}
        return ranks | {f"w{i}": rank for i, (rank, _, _) in enumerate(self.waiting)} | {f"d{i}": -1 for i in range(self.num_decodes)}

    @property
    def sizes(self) -> dict[str, int]:
        return {f"p{i}": n for i, (_, n, _) in enumerate(self.prompts)} | {f"w{i}": n for i, (_, n, _) in enumerate(self.waiting)}

    def workload(self, plan: StepPlan[str]) -> StepWorkload:
        before = {f"p{i}": before for i, (_, _, before) in enumerate(self.prompts)}
        return StepWorkload(
            prompt_tokens=sum(chunk.num_tokens for chunk in plan.prompts),
            pairs=sum(chunk_pairs(chunk.num_tokens, before.get(chunk.item, 0)) for chunk in plan.prompts),
            decodes=len(plan.decodes),
            context=self.num_context + sum(self.batch_decodes[int(item[1:])] for item in plan.decodes if item[0] == "f"),
        )


@st.composite
def cases(draw: st.DrawFn, *, paced: bool | None = None) -> PlanCase:
    rooms = sorted(draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))), sorted(draw(st.tuples(st.integers(0, 20), st.integers(0, 20))))
    paced = draw(st.booleans()) if paced is None else paced
    return PlanCase(
        num_decodes=draw(st.integers(0, 12)),
        batch_decodes=draw(st.lists(st.integers(1, 300), max_size=6)),
        prompts=sorted(
            draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.integers(0, 200)), max_size=6)), key=lambda p: p[0]
        ),
        waiting=sorted(draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.integers(0, 9)), max_size=8)), key=lambda w: w[0]),
        budget=draw(st.integers(1, 120)),
        max_seqs=draw(st.integers(1, 30)),
        capacity=Capacity(rooms[0][1], rooms[1][1]),
        batch_capacity=Capacity(rooms[0][0], rooms[1][0]),
        num_context=draw(st.integers(0, 3000)),
        max_step_s=draw(st.floats(1e-3, 9e-3)) if paced else None,
        min_chunk=draw(st.sampled_from([1, 4, 32])),
        waits=draw(st.booleans()),
    )


@given(cases())
def test_a_step_keeps_to_its_bounds(case: PlanCase) -> None:
    plan = case.plan()
    chunks = named(plan)
    assert sum(count for _, count in chunks) <= case.budget
    assert len(chunks) <= case.max_seqs
    assert len({item for item, _ in chunks}) == len(chunks), "none twice"
    assert all(1 <= count <= case.sizes[item] for item, count in chunks[len(plan.decodes) :])
    assert [item for item in plan.decodes if item[0] == "d"] == [f"d{i}" for i in range(min(case.num_decodes, case.budget, case.max_seqs))]
    blocks = {f"w{i}": n for i, (_, _, n) in enumerate(case.waiting)}
    for below, room in ((BATCH, case.capacity), (BATCH + 1, case.batch_capacity)):
        admitted = [candidate for candidate in plan.admitted if candidate.rank < below]
        if below == BATCH or len(admitted) > sum(candidate.rank < BATCH for candidate in plan.admitted):
            assert len(admitted) <= room.seats
            assert sum(blocks[candidate.item] for candidate in admitted) <= room.blocks


@given(cases())
def test_order_within_and_between_classes(case: PlanCase) -> None:
    plan = case.plan()
    served = [chunk.item for chunk in plan.prompts]
    assert served == sorted(served, key=lambda item: (case.ranks[item], item[0], int(item[1:])))
    for kind in "pw":
        of_kind = [item for item in served if item[0] == kind]
        assert of_kind == [f"{kind}{i}" for i in range(len(of_kind))], "a prefix of those there are"
    assert [candidate.item for candidate in plan.admitted] == [item for item in served if item[0] == "w"]
    assert all(chunk.num_tokens == case.sizes[chunk.item] for chunk in plan.prompts[:-1]), "only the last may be cut short"
    fillers = [item for item in plan.decodes if item[0] == "f"]
    assert fillers == [f"f{i}" for i in range(len(fillers))]


@given(cases(paced=False))
def test_the_whole_budget_is_used_while_there_is_work_that_fits(case: PlanCase) -> None:
    plan = case.plan()
    chunks = named(plan)
    if sum(count for _, count in chunks) == case.budget or len(chunks) == case.max_seqs:
        return
    assert all(chunk.num_tokens == case.sizes[chunk.item] for chunk in plan.prompts)
    served = {item for item, _ in chunks}
    assert {f"d{i}" for i in range(case.num_decodes)} <= served
    assert {f"f{i}" for i in range(len(case.batch_decodes))} <= served
    assert {f"p{i}" for i in range(len(case.prompts))} <= served
    if len(plan.admitted) < len(case.waiting):
        rank, _, num_blocks = case.waiting[len(plan.admitted)]
        room = case.capacity if rank < BATCH else case.batch_capacity
        taken = sum(candidate.num_blocks for candidate in plan.admitted)
        assert len(plan.admitted) >= room.seats or taken + num_blocks > room.blocks


@given(cases())
def test_batch_work_gets_only_what_the_others_leave(case: PlanCase) -> None:
    """A step has the same urgent work with batch work and without."""
    alone = replace(
        case, batch_decodes=[], prompts=[p for p in case.prompts if p[0] < BATCH], waiting=[w for w in case.waiting if w[0] < BATCH]
    )
    urgent = [(item, count) for item, count in named(case.plan()) if case.ranks[item] < BATCH]
    assert urgent == named(alone.plan())


@given(cases(paced=True))
def test_a_paced_step_takes_no_longer_than_it_may(case: PlanCase) -> None:
    plan = case.plan()
    assert case.max_step_s is not None
    work = case.workload(plan)
    fillers = [item for item in plan.decodes if item[0] == "f"]
    urgent = [chunk for chunk in plan.prompts if case.ranks[chunk.item] < BATCH]
    if CURVE.step_s(work) > case.max_step_s * (1 + 1e-9):
        # Decodes alone, or the least chunk beside them.
        assert not fillers
        assert len(plan.prompts) == len(urgent) <= (0 if case.waits else 1)
        assert all(chunk.num_tokens <= case.min_chunk for chunk in plan.prompts)
    elif plan.prompts and (last := plan.prompts[-1]).num_tokens < case.sizes[last.item]:
        # It is cut short by the budget, or not one token more would do.
        before = {f"p{i}": before for i, (_, _, before) in enumerate(case.prompts)}.get(last.item, 0) + last.num_tokens
        longer = replace(work, prompt_tokens=work.prompt_tokens + 1, pairs=work.pairs + chunk_pairs(1, before))
        if sum(count for _, count in named(plan)) < case.budget:
            assert CURVE.step_s(longer) > case.max_step_s or last.num_tokens == case.min_chunk


@given(cases(paced=True))
def test_an_urgent_prompt_always_makes_progress_unless_it_is_to_wait(case: PlanCase) -> None:
    plan = case.plan()
    assert not plan.withheld or (case.waits and not plan.prompts)
    first = next((p for p in case.prompts if p[0] < BATCH), None)
    if first is not None and case.num_decodes < min(case.budget, case.max_seqs) and not plan.withheld:
        assert plan.prompts
        room = case.budget - case.num_decodes
        assert plan.prompts[0].num_tokens >= min(case.min_chunk, case.sizes[plan.prompts[0].item], room)


@given(cases())
def test_prompts_that_are_not_split_wait_for_a_step_with_room(case: PlanCase) -> None:
    case = replace(case, whole=True)
    plan = case.plan()
    assert all(chunk.num_tokens == case.sizes[chunk.item] for chunk in plan.prompts)
    assert sum(count for _, count in named(plan)) <= case.budget
    for kind in "pw":
        of_kind = [chunk.item for chunk in plan.prompts if chunk.item[0] == kind]
        assert of_kind == [f"{kind}{i}" for i in range(len(of_kind))], "no shorter one goes ahead"
    num_decodes = sum(item[0] == "d" for item in plan.decodes)
    urgent = bool(case.prompts) and case.prompts[0][0] < BATCH
    if urgent and not case.waiting and case.max_step_s is None and num_decodes < case.max_seqs:
        assert bool(plan.prompts) == (case.prompts[0][1] <= case.budget - num_decodes), "the first is in as soon as it can be"
