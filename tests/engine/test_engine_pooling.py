"""Prompts that are pooled: one vector each, whatever is cached, however they are cut, beside whatever decodes, and whoever gives way."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from engine_helpers import VOCAB, answer_of, assert_idle, ids_of, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.fake import FakeRunner, fake_states
from twostep.engine.types import EngineRequest, FailureKind, TokenOutput
from twostep.errors import ContextExceeded, InvalidRequest
from twostep.pooling import Pooling

BLOCK = 4


def engine_of(*, num_blocks: int = 64, budget: int = 16, look_ahead: bool | None = None, **runner: object) -> Engine:
    fake = FakeRunner(num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB, **({"max_model_len": 256} | runner))  # type: ignore[arg-type]
    return Engine(fake, EngineConfig(max_num_batched_tokens=budget, max_num_seqs=8, hash_unit=BLOCK, look_ahead=look_ahead))


def pooled(seq_id: str, prompt: list[int], pooling: Pooling = Pooling.LAST) -> EngineRequest:
    return dataclasses.replace(make_request(seq_id, prompt, max_tokens=1), pooling=pooling)


def wanted(request: EngineRequest) -> npt.NDArray[np.float32]:
    states = fake_states(list(request.token_ids), VOCAB)
    return states[-1] if request.pooling is Pooling.LAST else states.astype(np.float64).mean(0).astype(np.float32)


def run(engine: Engine, requests: list[EngineRequest]) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, list[TokenOutput]]]:
    """Returns the vectors and the tokens, by name."""
    for request in requests:
        engine.submit(request)
    vectors: dict[str, npt.NDArray[np.float32]] = {}
    tokens: dict[str, list[TokenOutput]] = {}
    under_way = {request.seq_id for request in requests}
    while under_way:
        output = engine.step()
        assert not output.failures
        for each in output.pooled:
            assert each.seq_id not in vectors
            vectors[each.seq_id] = each.vector
            under_way.discard(each.seq_id)
        for token in output.tokens:
            tokens.setdefault(token.seq_id, []).append(token)
            if token.finish_reason is not None:
                under_way.discard(token.seq_id)
    engine.settle_launched()
    engine.check_integrity()
    return vectors, tokens


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


@given(
    st.lists(st.tuples(prompts, st.sampled_from([None, *Pooling])), min_size=1, max_size=6),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([14, 64]),
    st.booleans(),
)
@settings(max_examples=60)
def test_vectors_beside_answers(work: list[tuple[list[int], Pooling | None]], budget: int, num_blocks: int, look_ahead: bool) -> None:
    """Few blocks make sequences give way in the middle of their prompts; the second round finds the first one's prefixes cached."""
    engine = engine_of(num_blocks=num_blocks, budget=budget, look_ahead=look_ahead)
    for round_ in range(2):
        requests = [
            make_request(f"{round_}-{i}/1", prompt, max_tokens=9) if pooling is None else pooled(f"{round_}-{i}/1", prompt, pooling)
            for i, (prompt, pooling) in enumerate(work)
        ]
        vectors, tokens = run(engine, requests)
        for request in requests:
            if request.pooling is None:
                assert ids_of(tokens.pop(request.seq_id)) == answer_of(request)
            else:
                np.testing.assert_allclose(vectors.pop(request.seq_id), wanted(request), rtol=1e-6)
        assert not vectors
        assert not tokens
    assert_idle(engine)


def test_a_cached_prefix_serves_the_last_token_and_not_the_mean() -> None:
    engine = engine_of()
    prompt = list(range(5, 38))
    run(engine, [make_request("a/1", prompt, max_tokens=1)])
    found = []
    for pooling in (Pooling.MEAN, Pooling.LAST):
        before = engine.stats().num_hit_tokens
        request = pooled(f"{pooling.value}/1", prompt, pooling)
        vectors, _ = run(engine, [request])
        np.testing.assert_allclose(vectors[request.seq_id], wanted(request), rtol=1e-6)
        found.append(engine.stats().num_hit_tokens - before)
    assert found == [0, 32]


def test_what_a_pooled_prompt_leaves_is_a_prefix_for_others() -> None:
    engine = engine_of()
    prompt = list(range(5, 38))
    run(engine, [pooled("a/1", prompt)])
    run(engine, [make_request("b/1", prompt, max_tokens=1)])
    assert engine.stats().num_hit_tokens == 32


@pytest.mark.parametrize("pooling", list(Pooling))
def test_it_may_fill_the_context(pooling: Pooling) -> None:
    engine = engine_of(max_model_len=32)
    request = pooled("a/1", list(range(32)), pooling)
    vectors, _ = run(engine, [request])
    np.testing.assert_allclose(vectors["a/1"], wanted(request), rtol=1e-6)
    with pytest.raises(ContextExceeded):
        engine.submit(pooled("b/1", list(range(33)), pooling))
    with pytest.raises(ContextExceeded):
        engine.submit(make_request("c/1", list(range(32))))


@pytest.mark.parametrize("look_ahead", [False, True])
def test_cancelled_in_the_middle_it_says_nothing_more(look_ahead: bool) -> None:
    engine = engine_of(budget=8, look_ahead=look_ahead)
    engine.submit(pooled("a/1", list(range(30)), Pooling.MEAN))
    engine.step()
    assert engine.cancel("a/1")
    assert not any(output.pooled for output in engine.settle_launched())
    assert_idle(engine)


def test_states_that_are_not_finite_are_the_request_s_failure_and_no_prefix() -> None:
    engine = engine_of(broken_token=7)
    engine.submit(pooled("a/1", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    failures = []
    while not failures:
        failures = list(engine.step().failures)
    assert [(failure.seq_id, failure.kind) for failure in failures] == [("a/1", FailureKind.NO_TOKEN)]
    engine.settle_launched()
    before = engine.stats().num_hit_tokens
    run(engine, [make_request("b/1", [1, 2, 3, 4, 5, 6], max_tokens=1)])
    assert engine.stats().num_hit_tokens == before
    assert_idle(engine)


def test_a_model_without_an_output_layer_pools_and_does_nothing_else() -> None:
    engine = engine_of(generates=False)
    with pytest.raises(InvalidRequest):
        engine.submit(make_request("a/1", [1, 2, 3]))
    with pytest.raises(InvalidRequest):
        engine.reserve(make_request("b/1", [1, 2, 3]))
    assert "c/1" in run(engine, [pooled("c/1", [1, 2, 3])])[0]
