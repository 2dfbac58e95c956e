"""Dynamic SplitFuse: the plan of one step, and that every prompt ends."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.scheduler import Running, StepPlan, Waiting, plan_step

LENGTHS = st.lists(st.integers(1, 50), max_size=8)


def named(plan: StepPlan[str]) -> list[tuple[str, int]]:
    return [*((item, 1) for item in plan.decodes), *((chunk.item, chunk.num_tokens) for chunk in plan.prompts)]


def test_decodes_first_then_prompts_in_order_split_and_fused() -> None:
    plan = plan_step(
        decodes=["d0", "d1"],
        prompts=[Running("a", 40)],
        waiting=[Waiting("b", 12, 1), Waiting("c", 100, 9), Waiting("d", 1, 1)],
        budget=64,
        num_seats=9,
        num_free_blocks=99,
    )
    assert named(plan) == [("d0", 1), ("d1", 1), ("a", 40), ("b", 12), ("c", 10)]
    assert [candidate.item for candidate in plan.admitted] == ["b", "c"]


def test_the_first_that_does_not_fit_ends_admission() -> None:
    waiting = [Waiting("a", 5, 3), Waiting("b", 5, 8), Waiting("c", 5, 1)]
    plan = plan_step(decodes=[], prompts=[], waiting=waiting, budget=64, num_seats=9, num_free_blocks=10)
    assert named(plan) == [("a", 5)], "c must not overtake b"


def test_waiting_is_read_only_as_far_as_needed() -> None:
    read: list[int] = []

    def waiting() -> Iterator[Waiting[int]]:
        for i in range(100):
            read.append(i)
            yield Waiting(i, 10, 1)

    plan_step(decodes=[], prompts=[], waiting=waiting(), budget=20, num_seats=9, num_free_blocks=99)
    assert read == [0, 1]
    plan_step(decodes=[0], prompts=[], waiting=waiting(), budget=1, num_seats=9, num_free_blocks=99)
    plan_step(decodes=[0], prompts=[], waiting=waiting(), budget=9, num_seats=0, num_free_blocks=99)
    assert read == [0, 1]


@given(
    st.integers(0, 12), LENGTHS, st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), max_size=8),
    st.integers(1, 80), st.integers(0, 6), st.integers(0, 20),
)  # fmt: skip
def test_invariants(num_decodes: int, prompts: list[int], waiting: list[tuple[int, int]], budget: int, seats: int, blocks: int) -> None:
    plan = plan_step(
        decodes=[f"d{i}" for i in range(num_decodes)],
        prompts=[Running(f"p{i}", n) for i, n in enumerate(prompts)],
        waiting=[Waiting(f"w{i}", n, b) for i, (n, b) in enumerate(waiting)],
        budget=budget,
        num_seats=seats,
        num_free_blocks=blocks,
    )
    chunks = named(plan)
    total = sum(count for _, count in chunks)
    assert total <= budget
    assert len({item for item, _ in chunks}) == len(chunks)
    assert list(plan.decodes) == [f"d{i}" for i in range(min(num_decodes, budget))]
    # First in, first out: prompts served are a prefix of all, and only the last of them may be cut short.
    sizes = {f"p{i}": n for i, n in enumerate(prompts)} | {f"w{i}": n for i, (n, _) in enumerate(waiting)}
    served = chunks[len(plan.decodes) :]
    order = [f"p{i}" for i in range(len(prompts))][: len(served)] + [candidate.item for candidate in plan.admitted]
    assert [item for item, _ in served] == order
    assert [candidate.item for candidate in plan.admitted] == [f"w{i}" for i in range(len(plan.admitted))]
    assert all(1 <= count <= sizes[item] for item, count in served)
    assert all(count == sizes[item] for item, count in served[:-1])
    if served and served[-1][1] < sizes[served[-1][0]]:
        assert total == budget
    # Admission keeps to seats and blocks, and stops early for no other reason than tokens.
    assert len(plan.admitted) <= seats
    taken = sum(candidate.num_blocks for candidate in plan.admitted)
    assert taken <= blocks
    if len(plan.admitted) < len(waiting) and total < budget:
        assert len(plan.admitted) == seats or taken + waiting[len(plan.admitted)][1] > blocks


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=20),
    st.integers(1, 8), st.integers(0, 40),
)  # fmt: skip
def test_every_prompt_ends_and_in_order(requests: list[tuple[int, int]], max_num_seqs: int, extra: int) -> None:
    """(prompt, answer) lengths; the budget is the smallest allowed, or some more."""
    budget = max_num_seqs + extra
    waiting = dict(enumerate(requests))
    prompts: dict[int, int] = {}
    decodes: dict[int, int] = {}
    started: list[int] = []
    work = sum(prompt + answer for prompt, answer in requests)
    for _ in range(work + 1):
        if not waiting and not prompts and not decodes:
            break
        plan = plan_step(
            decodes=list(decodes),
            prompts=[Running(i, n) for i, n in prompts.items()],
            waiting=[Waiting(i, prompt, 0) for i, (prompt, _) in waiting.items()],
            budget=budget,
            num_seats=max_num_seqs - len(prompts) - len(decodes),
            num_free_blocks=0,
        )
        assert len(plan.decodes) == len(decodes), "no decode misses a step"
        if prompts or (waiting and len(decodes) < max_num_seqs):
            assert plan.prompts, "prompts make progress in every step"
        for item in plan.decodes:
            decodes[item] -= 1
        for chunk in plan.prompts:
            if chunk.item in waiting:
                prompts[chunk.item] = waiting.pop(chunk.item)[0]
                started.append(chunk.item)
            prompts[chunk.item] -= chunk.num_tokens
        for i in [i for i, left in prompts.items() if not left]:
            del prompts[i]
            decodes[i] = requests[i][1]
        decodes = {i: left for i, left in decodes.items() if left > 0}
    assert not waiting
    assert not prompts
    assert not decodes
    assert started == sorted(started)
