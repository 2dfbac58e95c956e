"""Tests of what the engine says of its work: of each step, as the cost formula counts it, and of what is still to be done."""

from __future__ import annotations

import dataclasses

import pytest
from engine_helpers import assert_idle, drain, make_request

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.fake import FakeRunner
from twostep.request_class import RequestClass
from twostep.step_curve import StepCurve, StepWorkload


def make_engine(*, num_blocks: int = 60, **config: object) -> Engine:
    runner = FakeRunner(num_blocks=num_blocks, block_size=4, vocab_size=1000, max_model_len=120)
    return Engine(runner, EngineConfig(**({"hash_unit": 4, "max_num_batched_tokens": 20} | config)))  # type: ignore[arg-type]


def test_steps_tell_their_rows_pairs_and_context() -> None:
    engine = make_engine()
    engine.submit(make_request("a", range(1, 31), max_tokens=3))
    engine.submit(make_request("b", range(50, 55), max_tokens=2))
    _, steps = drain(engine)
    assert [step.workload for step in steps] == [
        StepWorkload(prompt_tokens=20, pairs=20 * 10),
        StepWorkload(prompt_tokens=15, pairs=10 * 25 + 5 * 2.5),
        StepWorkload(decodes=2, context=31 + 6),
        StepWorkload(decodes=1, context=32),
    ]
    assert_idle(engine)


def test_what_is_queued_and_what_decodes_is_counted_in_tokens() -> None:
    engine = make_engine(max_num_seqs=2)
    engine.submit(make_request("a", range(1, 31), max_tokens=3))
    engine.submit(make_request("b", range(50, 55), max_tokens=2))
    engine.submit(make_request("c", range(1, 35)))
    stats = engine.stats()
    assert (stats.num_queued_tokens, stats.num_context_tokens) == (30 + 5 + 34, 0)
    engine.step()
    stats = engine.stats()
    assert (stats.num_queued_tokens, stats.num_context_tokens) == (10 + 5 + 34, 0)
    engine.step()
    stats = engine.stats()
    assert (stats.num_queued_tokens, stats.num_context_tokens) == (34, 31 + 6), "no seat for c"
    drain(engine)
    stats = engine.stats()
    assert (stats.num_queued_tokens, stats.num_context_tokens) == (0, 0)
    engine.submit(make_request("d", range(1, 33)))
    assert engine.stats().num_queued_tokens == 4, "all its blocks are cached; the last one is computed for its logits"
    drain(engine)
    assert_idle(engine)


def test_batch_requests_tokens_are_told_apart() -> None:
    engine = make_engine(max_num_seqs=1)
    for seq_id, count, request_class in (("a", 30, RequestClass.BATCH), ("b", 5, RequestClass.STANDARD), ("c", 7, RequestClass.BATCH)):
        engine.submit(make_request(seq_id, range(1, count + 1), max_tokens=1, request_class=request_class))
    told = []
    while engine.stats().num_queued_tokens:
        told.append((engine.stats().num_queued_tokens, engine.stats().num_queued_batch_tokens))
        engine.step()
    assert told[0] == (42, 37)
    # Whatever runs first, of the 5 that are not batch none is left before the last of the others.
    assert {total - batch for total, batch in told} == {5, 0}
    assert engine.stats().num_queued_batch_tokens == 0
    drain(engine)
    assert_idle(engine)


def test_what_bounds_steps_is_told_while_it_does() -> None:
    engine = make_engine(max_step_s=0.5)
    engine.submit(make_request("a", range(1, 11), max_tokens=4))
    assert engine.stats().max_step_s == 0, "none decodes"
    engine.step()
    assert engine.stats().max_step_s == 0, "nothing is known of how long steps take"
    engine.set_curve(StepCurve(fixed_s=1e-3, per_row_s=1e-6))
    assert engine.stats().max_step_s == 0.5
    engine.submit(dataclasses.replace(make_request("b", range(1, 6), max_tokens=4), tpot_s=0.1))
    assert engine.stats().max_step_s == 0.5, "it has no token yet"
    engine.step()
    assert engine.stats().max_step_s == 0.1 * 0.95
    drain(engine)
    assert engine.stats().max_step_s == 0
    assert_idle(engine)


@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_sequence_that_gave_way_is_queued_with_all_of_its_tokens(look_ahead: bool) -> None:
    """With look-ahead it gives way when its last step is settled, before the next one is planned."""
    engine = make_engine(num_blocks=30, enable_prefix_caching=False, look_ahead=look_ahead)
    for name in "ab":
        engine.submit(make_request(name, range(1, 21), max_tokens=60))
    output = engine.step()
    got = {"a": 0, "b": 0}
    while not engine.stats().num_preemptions:
        for token in output.tokens:
            got[token.seq_id] += 1
        output = engine.step()
    got["b"] += sum(token.seq_id == "b" for token in output.tokens)
    assert engine.stats().num_queued_tokens == 20 + got["b"]
    drain(engine)
    assert_idle(engine)
