"""Rows for which the model has no token: they end their own requests, leave nothing for others to find, and never make a worker sick whose
model computes anything. See also test_engine_random.py, where such rows come among everything else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine_helpers import VOCAB, HookedRunner, answer_of, assert_idle, drain, ids_of, make_request
from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.fake import FakeRunner
from twostep.engine.generate import generate
from twostep.engine.self_test import SelfTest, gives_tokens, probe_tokens
from twostep.engine.step_work import StepResult
from twostep.engine.types import EngineRequest, FailureKind, SequenceFailure, StepOutput, StepTokens, TokenOutput
from twostep.errors import InternalError
from twostep.prefix import PrefixHasher

CONTEXT, BLOCK, BROKEN = 200, 4, 300


def make_engine(*, num_blocks: int = 60, **bounds: object) -> tuple[Engine, HookedRunner]:
    runner = HookedRunner(num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB, max_model_len=CONTEXT, broken_token=BROKEN)
    config = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "hash_unit": BLOCK} | bounds
    return Engine(runner, EngineConfig(**config)), runner  # type: ignore[arg-type]


def failures(steps: Sequence[StepOutput]) -> list[tuple[str, FailureKind]]:
    return [(failure.seq_id, failure.kind) for step in steps for failure in step.failures]


def right(request: EngineRequest, tokens: Sequence[TokenOutput]) -> bool:
    return ids_of(tokens) == answer_of(request, CONTEXT)


def find_breaking(max_tokens: int = 20) -> EngineRequest:
    """A prompt whose answer comes upon the broken token half-way."""
    for first in range(VOCAB):
        request = make_request("breaking", [first, 5], max_tokens=max_tokens)
        if first != BROKEN and BROKEN in answer_of(request, CONTEXT)[2:-4]:
            return request
    raise AssertionError("none")


@pytest.mark.parametrize("look_ahead", [False, True])
def test_it_ends_alone_and_its_neighbours_are_right(look_ahead: bool) -> None:
    engine, _ = make_engine(look_ahead=look_ahead)
    neighbours = [make_request(f"n{i}", range(10 + i, 14 + 5 * i), max_tokens=15) for i in range(5)]
    breaking = find_breaking()
    for request in (*neighbours[:3], make_request("poison", [5, BROKEN, 7]), breaking, *neighbours[3:]):
        engine.submit(request)
    tokens, steps = drain(engine)
    assert sorted(failures(steps)) == [("breaking", FailureKind.NO_TOKEN), ("poison", FailureKind.NO_TOKEN)]
    assert all(right(request, tokens[request.seq_id]) for request in neighbours)
    answer = answer_of(breaking, CONTEXT)
    assert ids_of(tokens["breaking"]) == answer[: answer.index(BROKEN) + 1]
    assert tokens.keys() == {"breaking", *(request.seq_id for request in neighbours)}, "the probes are not reported"
    assert_idle(engine)


@pytest.mark.parametrize("host_blocks", [0, 40])
def test_its_kv_is_not_found(host_blocks: int) -> None:
    """Chunks of the prompt are findable before its last row shows that they are no good."""
    engine, _ = make_engine(num_blocks=16, host_cache_bytes=host_blocks * 2 * BLOCK * 16)
    prompt = [*range(1, 9), BROKEN, *range(11, 50)]
    hasher = PrefixHasher(b"key", BLOCK)
    hasher.extend(prompt)
    engine.submit(make_request("poison", prompt, key=b"key"))
    seen = False
    steps = []
    while output := engine.step():
        steps.append(output)
        engine.check_integrity()
        seen = seen or hasher.hashes[3] in engine.cached_prefixes()
        if not output.num_prefill_tokens + output.num_decode_tokens:
            break
    assert failures(steps) == [("poison", FailureKind.NO_TOKEN)]
    assert seen, "else this shows nothing"
    assert not set(hasher.hashes) & {*engine.cached_prefixes(), *engine.host_prefixes()}
    delta = engine.take_prefix_delta()
    assert not set(hasher.hashes) & {*delta.added, *delta.host_added}
    good = make_request("good", [*range(1, 9), 10, *range(11, 50)], key=b"key")
    assert right(good, generate(engine, [good])[0])
    assert_idle(engine)


def test_cancelled_while_it_is_kept_back_nothing_is_told_of_it() -> None:
    engine, _ = make_engine()
    engine.submit(make_request("poison", [BROKEN]))
    assert not engine.step().failures
    assert engine.cancel("poison")
    assert not engine.cancel("poison")
    assert not failures(drain(engine)[1])
    assert_idle(engine)


def test_however_many_come_and_however_they_differ_the_worker_is_well() -> None:
    """With the queue full of them, so that the probes come on top."""
    engine, _ = make_engine(max_waiting=8)
    for turn in range(12):
        for i in range(8):
            engine.submit(make_request(f"{turn}-{i}", [*range(i), BROKEN, turn], key=b"%d" % i))
        assert sorted(failures(drain(engine)[1])) == [(f"{turn}-{i}", FailureKind.NO_TOKEN) for i in range(8)]
    good = make_request("good", [1, 2, 3])
    assert right(good, generate(engine, [good])[0])
    assert_idle(engine)


@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_device_that_gives_no_token_at_all_is_sick(look_ahead: bool) -> None:
    """Its requests are to go on elsewhere: they are not the ones at fault."""
    engine, runner = make_engine(look_ahead=look_ahead)
    for i in range(3):
        engine.submit(make_request(f"r{i}", [1, 2, 3 + i], max_tokens=50))
    for _ in range(4):
        assert not engine.step().failures
    runner.broken = True
    told: list[tuple[str, FailureKind]] = []
    while len(told) < 3:
        told += failures([engine.step()])
    with pytest.raises(InternalError):
        engine.step()
    assert sorted(told) == [(f"r{i}", FailureKind.STEP) for i in range(3)]
    assert engine.wait_for_work(0.0), "its thread is to learn of it"


def test_a_model_that_never_gives_a_token_is_found_out_before_it_serves() -> None:
    runner = FakeRunner(num_blocks=2, block_size=BLOCK, vocab_size=VOCAB, broken_token=probe_tokens(VOCAB)[0])
    assert gives_tokens(runner)
    runner.broken = True
    assert not gives_tokens(runner)


@given(st.lists(st.tuples(st.sampled_from(["token", "no token", "failed"]), st.integers(0, 2)), min_size=3, max_size=3))
def test_only_when_no_probe_has_a_token_it_is_the_worker(outcomes: list[tuple[str, int]]) -> None:
    """Whichever step each of them ends in."""
    test = SelfTest(VOCAB)
    suspect = SequenceFailure(seq_id="suspect/1", message="", kind=FailureKind.NO_TOKEN)
    result, probes = test.settle(StepResult(failures=[suspect]))
    assert not result.failures
    told: list[SequenceFailure] = []
    for step in range(3):
        now = [(probe.seq_id, outcome) for probe, (outcome, at) in zip(probes, outcomes, strict=True) if at == step]
        tokens = [TokenOutput(seq_id=seq_id, token_id=1, position=0) for seq_id, outcome in now if outcome == "token"]
        kinds = {"no token": FailureKind.NO_TOKEN, "failed": FailureKind.STEP}
        ended = [SequenceFailure(seq_id=seq_id, message="", kind=kinds[outcome]) for seq_id, outcome in now if outcome in kinds]
        result, more = test.settle(StepResult(tokens=StepTokens.of(tokens), failures=ended))
        assert not result.tokens
        assert not more
        told += result.failures
    said = {outcome for outcome, _ in outcomes}
    assert test.sick == (said == {"no token"})
    assert [failure.kind for failure in told] == [FailureKind.NO_TOKEN if "token" in said else FailureKind.STEP]
