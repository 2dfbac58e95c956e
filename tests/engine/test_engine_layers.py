"""Steps that tell how far they are: only for prompts that are handed over, nothing too early, and blocks stay where they were read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_helpers import HookedRunner, drain, make_request

from twostep.engine.batch import Batch, LayerMark, LayerRange
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.step_launcher import MarkedStep

NUM_LAYERS = 6


ALL = range(1, NUM_LAYERS + 1)


def layered(**options: Any) -> HookedRunner:
    return HookedRunner(**{"num_blocks": 64, "block_size": 4, "num_layers": NUM_LAYERS, "marks_layers": True} | options)


def make_engine(runner: HookedRunner, budget: int = 64) -> Engine:
    return Engine(runner, EngineConfig(max_num_batched_tokens=budget, max_num_seqs=8, hash_unit=4))


def marked_by(engine: Engine) -> list[MarkedStep]:
    steps: list[MarkedStep] = []
    engine.follow_layers(steps.append)
    return steps


def test_steps_are_marked_where_their_prompts_ask_and_each_is_told_of_its_own() -> None:
    runner = layered()
    engine = make_engine(runner)
    asked: list[list[int]] = []
    runner.launching = lambda batch: asked.append(list(batch.mark_layers))
    steps = marked_by(engine)
    engine.submit(make_request("a", range(10)), hold=True, mark_layers=(2, 6))
    engine.submit(make_request("b", range(12)), hold=True, mark_layers=(3,))
    engine.mark_layers("b", (3, 6))
    engine.mark_layers("gone", (1,))
    engine.submit(make_request("c", range(9)), hold=True)
    drain(engine)
    assert asked == [[2, 3, 6]]
    told = [(each.seq_id, each.num_computed_tokens, each.num_layers) for mark in steps[0].marks for each in steps[0].at(mark)]
    assert told == [("a", 10, 2), ("b", 12, 3), ("a", 10, 6), ("b", 12, 6)]
    for name in "abc":
        engine.release(name)


def test_no_follower_or_the_runner_tells_nothing() -> None:
    for runner, follow in ((layered(), False), (layered(marks_layers=False), True)):
        asked: list[int] = []
        runner.launching = lambda batch, asked=asked: asked.append(len(batch.mark_layers))  # type: ignore[misc]
        engine = make_engine(runner)
        steps = marked_by(engine) if follow else []
        engine.submit(make_request("s", range(50)), hold=True, mark_layers=ALL)
        drain(engine)
        assert (asked, steps) == ([0], [])
        engine.release("s")


def test_at_a_mark_its_layers_are_there_and_the_others_are_not() -> None:
    runner = layered()
    engine = make_engine(runner, budget=40)
    marks: list[LayerMark] = []
    engine.follow_layers(lambda step: marks.extend(step.marks))
    seen: list[tuple[int, list[bool]]] = []

    def look(layer: int) -> None:
        """Before a layer is computed: the mark of those before it is reached, the next one is not."""
        if layer:
            marks[layer - 1].wait()
            blocks = engine.block_ids("s")[:10]
            seen.append((marks[layer - 1].num_layers, [filled(runner, blocks, i) for i in range(NUM_LAYERS)]))

    runner.computing = look
    engine.submit(make_request("s", range(1, 73)), hold=True, mark_layers=ALL)
    engine.step()
    assert seen == [(n, [layer < n for layer in range(NUM_LAYERS)]) for n in range(1, NUM_LAYERS)]
    runner.computing = None
    drain(engine)
    engine.release("s")
    engine.check_integrity()


def filled(runner: HookedRunner, blocks: Any, layer: int) -> bool:
    """Returns whether every slot of the blocks holds a token (positions count from 1)."""
    out = np.empty((len(blocks), runner.kv_shape.layer_bytes), np.uint8)
    runner.read_blocks(blocks, out, LayerRange(layer, 1))
    return bool((out.view(np.int32)[:, 1::2] > 0).all())


@pytest.mark.parametrize("budget", [128, 24])
def test_blocks_that_leave_early_are_not_exchanged_for_a_twin(budget: int) -> None:
    runner = layered()
    engine = make_engine(runner, budget=budget)
    marked_by(engine)
    before: dict[str, list[int]] = {}

    def look(batch: Batch) -> None:
        for name in ("a", "b"):
            before[name] = [int(block) for block in engine.block_ids(name)]

    runner.during = look
    for name in ("a", "b"):
        engine.submit(make_request(name, range(40)), hold=True, mark_layers=ALL)
    drain(engine)
    after = {name: list(engine.block_ids(name)) for name in ("a", "b")}
    assert after == before
    engine.check_integrity()
    for name in ("a", "b"):
        engine.release(name)
    engine.check_integrity()
    # What one of them registered is found by the next.
    runner.during = None
    engine.submit(make_request("c", range(60)), hold=True)
    _, outputs = drain(engine)
    assert {each.num_cached_tokens for output in outputs for each in output.progress} == {40}
