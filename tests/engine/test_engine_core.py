"""The engine's contract, method by method, over the fake device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_helpers import (
    KEY,
    VOCAB,
    HookedRunner,
    answer_of,
    assert_idle,
    drain,
    engine_of,
    hand_over,
    hooked,
    ids_of,
    make_request,
)

from twostep.engine.batch import Batch
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.fake import FakeRunner, fake_next_token
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest, FinishReason
from twostep.errors import ContextExceeded, InternalError, InvalidRequest, NotFound, ResourceExhausted, SetupError
from twostep.prefix import prefix_hashes

CONTEXT = 256


def make_engine(*, num_blocks: int = 64, block_size: int = 8, **options: Any) -> Engine:
    runner = HookedRunner(num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB, max_model_len=CONTEXT)
    return engine_of(runner, **({"hash_unit": 16} | options))


def prompt(length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


# ---- a prompt to its end --------------------------------------------------------------------------------------------


def test_the_fake_s_worked_example() -> None:
    assert fake_next_token([5, 7, 2], 100) == 28
    assert fake_next_token([5, 7, 2, 28], 100) == 41
    engine = Engine(FakeRunner(num_blocks=4, block_size=2, vocab_size=100), EngineConfig(hash_unit=2))
    (tokens,) = generate(engine, [make_request("a", [5, 7, 2], max_tokens=2)])
    assert [(token.token_id, token.position, token.finish_reason) for token in tokens] == [(28, 0, None), (41, 1, FinishReason.LENGTH)]


def test_the_budget_holds_and_decodes_ride_along() -> None:
    engine = make_engine(max_num_batched_tokens=20)
    engine.submit(make_request("short", prompt(5), max_tokens=6))
    engine.submit(make_request("long", prompt(50, 2), max_tokens=2))
    tokens, steps = drain(engine)
    assert [(s.num_decode_tokens, s.num_prefill_tokens) for s in steps][:4] == [(0, 20), (1, 19), (1, 16), (2, 0)]
    assert [p.num_computed_tokens for s in steps for p in s.progress if p.seq_id == "long"] == [15, 34, 50]
    assert [p.first_scheduled for s in steps for p in s.progress if p.seq_id == "long"] == [True, False, False]
    assert len(tokens["short"]) == 6


def test_stop_ids_eos_min_tokens_and_context() -> None:
    ids = prompt(10)
    first, second, third, *_ = answer_of(make_request("a", ids))
    engine = make_engine()
    requests = [
        make_request("stop", ids, stop_token_ids=(second,)),
        make_request("eos", ids, eos=frozenset({third})),
        make_request("ignored", ids, eos=frozenset({third}), ignore_eos=True),
        make_request("not yet", ids, stop_token_ids=(first,), min_tokens=2),
        make_request("context", prompt(CONTEXT - 3), max_tokens=100),
    ]
    got = dict(zip([r.seq_id for r in requests], generate(engine, requests), strict=True))
    assert [(len(tokens), tokens[-1].finish_reason) for tokens in got.values()] == [
        (2, FinishReason.STOP),
        (3, FinishReason.STOP),
        (8, FinishReason.LENGTH),
        (8, FinishReason.LENGTH),
        (3, FinishReason.LENGTH),
    ]
    assert got["not yet"][0].token_id == first + 1
    for request in requests:
        assert [token.token_id for token in got[request.seq_id]] == answer_of(request, CONTEXT)


def test_a_resumed_sequence_goes_on_where_it_was() -> None:
    ids = prompt(20)
    whole = make_request("first", ids, max_tokens=12, stop_token_ids=(VOCAB - 1,))
    answer = answer_of(whole)
    engine = make_engine(enable_prefix_caching=False)
    seen: list[Batch] = []
    hooked(engine).during = seen.append
    resumed = make_request("second", ids + answer[:7], num_prompt_tokens=20, max_tokens=12, stop_token_ids=(VOCAB - 1,))
    (tokens,) = generate(engine, [resumed])
    assert [(token.position, token.token_id) for token in tokens] == list(enumerate(answer))[7:]
    assert [row.position for batch in seen for row in batch.sampling] == [7, 8, 9, 10, 11]
    assert all(row.num_prompt_tokens == 20 for batch in seen for row in batch.sampling)
    assert all(list(row.history)[:27] == ids + answer[:7] for batch in seen for row in batch.sampling)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (make_request("a", [], num_prompt_tokens=0), InvalidRequest),
        (make_request("a", [1, 2], num_prompt_tokens=3), InvalidRequest),
        (make_request("a", [1, VOCAB]), InvalidRequest),
        (make_request("a", [-1]), InvalidRequest),
        (make_request("a", [2**70]), InvalidRequest),
        (make_request("a", [1] * CONTEXT), ContextExceeded),
        (make_request("a", [1] * 70, max_tokens=60), InvalidRequest),
        (make_request("a", [1, 2, 3], num_prompt_tokens=1, max_tokens=2), InvalidRequest),
    ],
)
def test_what_can_never_succeed_is_refused_by_both_doors(request_: EngineRequest, error: type[Exception]) -> None:
    engine = make_engine(num_blocks=16)
    for door in (engine.submit, engine.reserve):
        with pytest.raises(error):
            door(request_)
    assert_idle(engine)


def test_the_queue_is_bounded_and_ids_are_unique() -> None:
    engine = make_engine(max_waiting=2)
    engine.submit(make_request("a", [1]))
    with pytest.raises(InvalidRequest):
        engine.submit(make_request("a", [1]))
    with pytest.raises(InvalidRequest):
        engine.reserve(make_request("a", [1]))
    engine.submit(make_request("b", [1]))
    with pytest.raises(ResourceExhausted):
        engine.submit(make_request("c", [1]))
    drain(engine)
    assert_idle(engine)


@pytest.mark.parametrize("bounds", [{"max_num_seqs": 0}, {"max_num_batched_tokens": 0}, {"max_waiting": 0}, {"hash_unit": 12}])
def test_bounds_that_make_no_sense(bounds: dict[str, int]) -> None:
    with pytest.raises(SetupError):
        make_engine(**bounds)


# ---- prefix reuse ---------------------------------------------------------------------------------------------------


def test_a_shared_prefix_is_computed_once() -> None:
    engine = make_engine()
    shared = prompt(32)
    first, second = make_request("a", shared + prompt(9, 2)), make_request("b", shared + prompt(5, 3))
    generate(engine, [first])
    engine.submit(second)
    tokens, steps = drain(engine)
    assert steps[0].num_prefill_tokens == 5
    assert steps[0].progress[0].num_cached_tokens == 32
    assert ids_of(tokens["b"]) == answer_of(second)
    assert_idle(engine)


def test_keys_part_tenants_and_no_key_shares_nothing() -> None:
    engine = make_engine()
    ids = prompt(40)
    for seq_id, key in (("a", KEY), ("b", b"another tenant"), ("c", b""), ("d", b"")):
        engine.submit(make_request(seq_id, ids, key=key))
        _, steps = drain(engine)
        assert steps[0].num_prefill_tokens == 40
    generate(engine, [make_request("e", ids)])
    assert_idle(engine)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(64, 1), (64, 8), (4, 8)])
def test_of_a_wholly_cached_prompt_the_last_block_is_computed_again(num_blocks: int, block_size: int) -> None:
    engine = make_engine(num_blocks=num_blocks, block_size=block_size)
    request = make_request("a", prompt(32), max_tokens=1)
    generate(engine, [request])
    engine.submit(make_request("b", request.token_ids, max_tokens=1))
    tokens, steps = drain(engine)
    assert steps[0].num_prefill_tokens == block_size
    assert steps[0].progress[0].num_cached_tokens == 32 - block_size
    assert ids_of(tokens["b"]) == answer_of(request, CONTEXT)
    assert_idle(engine)


# ---- hold and release -----------------------------------------------------------------------------------------------


def test_a_held_sequence_keeps_its_blocks_until_released() -> None:
    engine = make_engine()
    request = make_request("a", prompt(20), max_tokens=100)
    engine.submit(request, hold=True)
    assert engine.block_ids("a") == []
    tokens, steps = drain(engine)
    assert ids_of(tokens["a"]) == answer_of(request, CONTEXT)[:1]
    assert steps[-1].progress[0].num_computed_tokens == 20
    assert len(engine.block_ids("a")) == 3, "the prompt's blocks only"
    stats = engine.stats()
    assert (stats.num_held, stats.num_running) == (1, 0)
    assert stats.stalled_s == 0.0, "a held sequence is no work"
    assert engine.release("a")
    assert not engine.release("a")
    with pytest.raises(NotFound):
        engine.block_ids("a")
    assert_idle(engine)


# ---- reserve and commit ---------------------------------------------------------------------------------------------


def test_hand_over_moves_only_what_is_not_there() -> None:
    source, target = make_engine(), make_engine()
    ids = prompt(32)
    for seq_id, moved in (("a", 4), ("b", 0)):
        request = make_request(seq_id, ids)
        first, blocks = hand_over(source, target, request)
        assert blocks == moved
        tokens, _ = drain(target)
        assert [first, *(t.token_id for t in tokens[seq_id])] == answer_of(request, CONTEXT)
        assert [t.position for t in tokens[seq_id]] == list(range(1, 8))
        assert list(target.cached_prefixes())[:2] == prefix_hashes(KEY, ids, 16)
    assert_idle(source)
    assert_idle(target)


def test_kv_that_is_not_exact_is_never_found() -> None:
    engine = make_engine()
    engine.reserve(make_request("a", prompt(32)))
    engine.commit("a", [1], exact=False)
    drain(engine)
    assert not engine.cached_prefixes()
    assert_idle(engine)


def test_commit_refuses_what_it_cannot_go_on_with() -> None:
    engine = make_engine()
    with pytest.raises(NotFound):
        engine.commit("unknown", [1])
    engine.reserve(make_request("a", [1, 2], max_tokens=3, stop_token_ids=(9,)))
    for bad in ([], [VOCAB], [-1], [9], [1, 2, 3]):
        with pytest.raises(InvalidRequest):
            engine.commit("a", bad)
    assert engine.stats().num_reserved == 1
    engine.commit("a", [1])
    with pytest.raises(NotFound):
        engine.commit("a", [1])
    engine.cancel("a")
    engine.reserve(make_request("b", [1, 2]))
    engine.cancel("b")
    with pytest.raises(NotFound):
        engine.commit("b", [1])
    assert_idle(engine)


def test_reservations_take_seats_and_blocks() -> None:
    engine = make_engine(num_blocks=10, max_num_seqs=2)
    assert len(engine.reserve(make_request("a", prompt(20), max_tokens=21)).block_ids) == 3, "20 tokens; more when it grows"
    with pytest.raises(ResourceExhausted):
        engine.reserve(make_request("b", prompt(56), max_tokens=1))
    engine.reserve(make_request("c", prompt(8), max_tokens=9))
    with pytest.raises(ResourceExhausted):
        engine.reserve(make_request("d", [1], max_tokens=1))
    engine.submit(make_request("e", [1]))
    assert engine.step().num_prefill_tokens == 0, "no seat is left for a prompt either"
    assert not engine.wait_for_work(0.0)
    assert engine.stats().stalled_s == 0.0, "waiting for room is no stall"
    engine.cancel("a")
    assert engine.wait_for_work(0.0)
    drain(engine)
    engine.cancel("c")
    assert_idle(engine)


def test_a_reservation_takes_nothing_that_a_waiting_prompt_needs() -> None:
    engine = make_engine(num_blocks=10)
    engine.submit(make_request("a", prompt(40), max_tokens=30))
    engine.step()
    engine.submit(make_request("long", prompt(60, 2), max_tokens=1))
    engine.step()
    with pytest.raises(ResourceExhausted):
        engine.reserve(make_request("b", [1]))
    assert len(drain(engine)[0]["long"]) == 1
    engine.reserve(make_request("b", [1]))
    engine.cancel("b")
    assert_idle(engine)


# ---- cancel ---------------------------------------------------------------------------------------------------------


def test_cancel_in_every_state() -> None:
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=4)
    assert not engine.cancel("unknown")
    for i in range(3):
        engine.submit(make_request(f"r{i}", prompt(12, i)))
    engine.reserve(make_request("reserved", prompt(12, 5)))
    engine.step()
    for seq_id in ("r2", "r0", "reserved", "r1"):
        assert engine.cancel(seq_id)
        assert not engine.cancel(seq_id)
        engine.check_integrity()
    assert not engine.step().tokens
    assert_idle(engine)


# ---- a device that fails --------------------------------------------------------------------------------------------


def test_a_failed_step_ends_its_sequences_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    reserved = engine.reserve(make_request("reserved", [1, 2, 3]))

    def fail(batch: Batch) -> None:
        engine.cancel("cancelled")
        raise RuntimeError("out of memory")

    hooked(engine).during = fail
    engine.submit(make_request("a", prompt(20)))
    engine.submit(make_request("b", prompt(20, 2)), hold=True)
    engine.submit(make_request("cancelled", prompt(5)))
    output = engine.step()
    engine.check_integrity()
    assert [(f.seq_id, "out of memory" in f.message) for f in output.failures] == [("a", True), ("b", True)]
    assert not output.tokens
    assert not output.progress
    assert "out of memory" in caplog.text
    assert not engine.cached_prefixes(), "what a failed step wrote is never found"
    hooked(engine).during = None
    again = make_request("a", prompt(20))
    (tokens,) = generate(engine, [again])
    assert ids_of(tokens) == answer_of(again)
    assert engine.block_ids("reserved") == reserved.block_ids
    engine.cancel("reserved")
    assert_idle(engine)


def test_generate_gives_up_clearly() -> None:
    engine = make_engine(num_blocks=4, max_num_seqs=1)
    engine.reserve(make_request("in the way", [1]))
    with pytest.raises(InternalError):
        generate(engine, [make_request("a", [1])])
    with pytest.raises(InvalidRequest):
        generate(engine, [make_request("b", [1]), make_request("c", [VOCAB])])
    engine.cancel("in the way")
    assert_idle(engine)


# ---- threads and time -----------------------------------------------------------------------------------------------


def test_stalled_counts_from_the_last_step() -> None:
    now = 1000.0
    runner = HookedRunner(num_blocks=64, block_size=8, vocab_size=VOCAB, max_model_len=CONTEXT)
    engine = engine_of(runner, clock=lambda: now)
    assert engine.stats().stalled_s == 0.0
    engine.submit(make_request("a", [1], max_tokens=3))
    now += 3.0
    assert engine.stats().stalled_s == 3.0
    inside: list[float] = []

    def during(batch: Batch) -> None:
        nonlocal now
        now += 20.0
        inside.append(engine.stats().stalled_s)

    hooked(engine).during = during
    engine.step()
    hooked(engine).during = None
    assert inside[0] >= 20.0, "a hanging step is a stall"
    assert engine.stats().stalled_s == 0.0
    now += 5.0
    assert engine.stats().stalled_s == 5.0
    drain(engine)
    assert engine.stats().stalled_s == 0.0
