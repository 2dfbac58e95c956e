"""Drafted tokens: what is proposed, how much of it is worth a step's time, and answers that stay what they are."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_helpers import HookedRunner, KnowingProposer, answer_of, assert_idle, drain, engine_of, hand_over, ids_of, make_request
from grammar_cases import EOS, VOCAB, regex_case, save_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.draft_choice import Proposal, choose_drafts
from twostep.engine.draft_learning import Looking
from twostep.engine.draft_record import DraftRecord
from twostep.engine.generate import generate
from twostep.engine.grammar import GrammarCompiler
from twostep.engine.prompt_lookup import PromptLookup, look_up
from twostep.engine.proposer import DraftTime
from twostep.errors import SetupError
from twostep.settings.speculative import SpeculativeConfig
from twostep.step_curve import PACE_SHARE, StepCurve

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)


def looked_up(tokens: list[int], most: int, shortest: int, longest: int) -> list[int]:
    """Does what look_up does, place by place."""
    for length in range(longest, shortest - 1, -1):
        last = tokens[len(tokens) - length :]
        places = [end for end in range(length, len(tokens)) if tokens[end - length : end] == last] if length <= len(tokens) else []
        if places:
            far = [place for place in places if place + most <= len(tokens)]
            start = far[-1] if far else places[0]
            return tokens[start : start + most]
    return []


@given(tokens=TOKENS, most=st.integers(1, 7), shortest=st.integers(1, 4), more=st.integers(0, 4))
def test_what_followed_the_longest_equal_run_is_proposed(tokens: list[int], most: int, shortest: int, more: int) -> None:
    got = look_up(np.array(tokens, np.int32), most, shortest=shortest, longest=shortest + more)
    assert got == looked_up(tokens, most, shortest, shortest + more)


@given(parts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=200), min_size=1, max_size=5))
def test_a_sequence_is_looked_up_as_it_grows(parts: list[list[int]]) -> None:
    proposer, tokens = PromptLookup(NGRAM), list[int]()
    for part in parts:
        tokens += part
        assert proposer.propose("a", tokens, 4) == looked_up(tokens, 4, 1, 3)
    proposer.forget("a")
    proposer.forget("never here")
    assert proposer.propose("a", [1, 2, 1], 4) == [2, 1]


PROPOSALS = st.lists(st.tuples(st.integers(0, 7), st.floats(0, 1)), max_size=6)


@given(proposals=PROPOSALS, most=st.integers(0, 30), free=st.integers(0, 10), row_s=st.floats(0, 3))
def test_drafts_are_those_that_make_a_step_give_most_tokens_a_second(
    proposals: list[tuple[int, float]], most: int, free: int, row_s: float
) -> None:
    made = [Proposal(range(count), rate) for count, rate in proposals]
    num_decodes = max(1, len(made))

    def step_s(rows: int) -> float:
        return 1.0 + row_s * max(0, rows - free)

    def rate(counts: Sequence[int]) -> float:
        tokens = num_decodes + sum(p.rate ** (i + 1) for p, count in zip(made, counts, strict=True) for i in range(count))
        return tokens / step_s(sum(counts))

    counts = choose_drafts(made, num_tokens=num_decodes, most=most, step_s=step_s, bound_s=float("inf")).counts
    assert sum(counts) <= most
    assert all(0 <= count <= len(p.tokens) for p, count in zip(made, counts, strict=True))
    # Neither one more nor one less is better.
    for i in range(len(counts)):
        if counts[i] < len(made[i].tokens) and sum(counts) < most:
            assert rate([*counts[:i], counts[i] + 1, *counts[i + 1 :]]) <= rate(counts) + 1e-9
        if counts[i]:
            assert rate([*counts[:i], counts[i] - 1, *counts[i + 1 :]]) <= rate(counts) + 1e-9


def test_a_step_that_was_promised_to_be_short_has_no_drafts() -> None:
    certain = [Proposal([1, 2, 3], 1.0)]
    assert choose_drafts(certain, num_tokens=1, most=8, step_s=lambda rows: 1.0 + 0.1 * rows, bound_s=1.25).counts == [2]
    assert choose_drafts(certain, num_tokens=1, most=8, step_s=lambda rows: 1.0 + 0.1 * rows, bound_s=0.5).counts == [0]
    assert choose_drafts(certain, num_tokens=1, most=2, step_s=None, bound_s=0.0).counts == [2]


@pytest.mark.parametrize(
    ("num_proposals", "fixed_s", "before_s", "counts"),
    [
        # What a round takes is paid by two sequences, and not by one.
        (1, 1.5, 0.0, [0]),
        (2, 1.5, 0.0, [4, 4]),
        (2, 2.5, 0.0, [0, 0]),
        # What comes before the first token is paid by four, and not by one.
        (1, 0.0, 3.5, [4]),
        (1, 0.0, 4.5, [0]),
    ],
)
def test_what_drafting_takes_is_reckoned(num_proposals: int, fixed_s: float, before_s: float, counts: list[int]) -> None:
    """A step gives a token a second, rows are free, and all drafts are right."""
    proposals = [Proposal(range(4), 1.0, before_s)] * num_proposals
    time = DraftTime(fixed_s, 0.0)
    assert choose_drafts(proposals, num_tokens=1, most=8, step_s=lambda rows: 1.0, bound_s=math.inf, time=time).counts == counts
    assert not any(choose_drafts(proposals, num_tokens=1, most=8, step_s=lambda rows: 1.0, bound_s=1.0, time=DraftTime(0.1, 0.0)).counts)


def test_a_record_learns_from_proposals_that_no_step_computed() -> None:
    record, tokens = DraftRecord(), [1, 2]
    rates = []
    for _ in range(12):
        record.propose([7, 8], tokens)
        tokens += [7, 8]
        record.learn(tokens)
        rates.append(record.rate)
    assert rates == sorted(rates)
    assert rates[-1] > 0.95
    for _ in range(12):
        record.propose([7, 8], tokens)
        tokens += [9]
        record.learn(tokens)
    assert record.rate < 0.15


@pytest.mark.parametrize("most", [1, 3, 7])
def test_right_drafts_make_fewer_steps(most: int) -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=most)
    runner = HookedRunner(num_blocks=40, block_size=4, vocab_size=1000, max_model_len=100)
    engine = engine_of(runner, speculative=config, proposer=KnowingProposer(1000, 1.0, tireless=True))
    request = make_request("a", [5, 6, 7], max_tokens=30)
    engine.submit(request)
    tokens, steps = drain(engine)
    assert ids_of(tokens["a"]) == answer_of(request)
    # The first comes of the prompt; of the last one on there is nothing to draft.
    assert len(steps) == 1 + -(-29 // (most + 1))
    stats = engine.stats()
    assert stats.num_drafted == stats.num_accepted
    assert sum(stats.num_accepted) == 30 - len(steps)
    # Each row of a draft counts as a decode.
    assert sum(step.num_decode_tokens for step in steps) == 29
    assert_idle(engine)


def test_wrong_drafts_are_given_up_where_they_cost() -> None:
    """After some tokens none is computed any more, and those that were have changed nothing."""
    runner = HookedRunner(num_blocks=40, block_size=4, vocab_size=1000, max_model_len=150)
    engine = engine_of(runner, speculative=NGRAM, proposer=KnowingProposer(1000, 0.0))
    engine.set_curve(StepCurve(fixed_s=0.001, per_row_s=0.0002))
    request = make_request("a", [5, 6, 7], max_tokens=100)
    engine.submit(request)
    tokens, _ = drain(engine)
    assert ids_of(tokens["a"]) == answer_of(request)
    assert sum(engine.stats().num_drafted) <= 4


@pytest.mark.parametrize("look_ahead", [False, True])
def test_drafts_take_no_block_that_others_wait_for(look_ahead: bool) -> None:
    """Six sequences have not room for all of what they come to: they are preempted as often as without drafts, and no sooner."""

    def preempted_at(**drafting: Any) -> list[int]:
        engine = engine_of(HookedRunner(num_blocks=26, block_size=4, vocab_size=1000, max_model_len=48), look_ahead=look_ahead, **drafting)
        requests = [make_request(f"r{i}", [i + 3] * (3 + 2 * i), max_tokens=19 - 2 * i) for i in range(6)]
        for request in requests:
            engine.submit(request)
        lengths: dict[str, int] = dict.fromkeys((request.seq_id for request in requests), 0)
        found: list[int] = []
        while engine.stats().num_running or engine.stats().num_waiting:
            for token in engine.step().tokens:
                lengths[token.seq_id] += 1
            found += [sum(lengths.values())] * (engine.stats().num_preemptions - len(found))
        assert list(lengths.values()) == [len(answer_of(request)) for request in requests]
        return found

    without = preempted_at()
    with_drafts = preempted_at(speculative=NGRAM, proposer=KnowingProposer(1000, 0.0))
    assert without
    # Wrong drafts give no tokens: the same lengths have the same blocks. One behind drafts may wait for a step, and others end meanwhile.
    assert with_drafts == without or (look_ahead and len(with_drafts) <= len(without) and min(with_drafts, default=99) >= min(without))


def test_where_no_draft_pays_nothing_is_looked_up_of_many() -> None:
    proposer = KnowingProposer(1000, 1.0, tireless=True)
    engine = engine_of(HookedRunner(num_blocks=40, block_size=4, vocab_size=1000, max_model_len=100), speculative=NGRAM, proposer=proposer)
    engine.set_curve(StepCurve(fixed_s=0.0, per_row_s=0.001))
    requests = [make_request(name, [5, 6, 7 + place], max_tokens=16) for place, name in enumerate("abcde")]
    for request in requests:
        engine.submit(request)
    tokens, _ = drain(engine)
    assert [ids_of(tokens[request.seq_id]) for request in requests] == [answer_of(request) for request in requests]
    assert not proposer.num_asked


def test_a_promise_that_holds_without_drafts_holds_with_them() -> None:
    """After a long step one sequence makes up for it; neighbours that draft leave it the time."""

    def mean_step_s(**drafting: Any) -> float:
        now = [0.0]
        runner = HookedRunner(num_blocks=2000, block_size=4, vocab_size=1000, max_model_len=150)
        engine = engine_of(runner, clock=lambda: now[0], max_num_seqs=200, **drafting)
        curve = StepCurve(fixed_s=0.010, per_row_s=0.0005)
        engine.set_curve(curve)
        engine.submit(make_request("promised", [5, 6, 7], max_tokens=60, tpot_s=0.040, speculate=False))
        for i in range(24):
            engine.submit(make_request(f"r{i}", [i + 3] * 5, max_tokens=140))
        num_steps = 0
        while engine.stats().num_running or engine.stats().num_waiting:
            output = engine.step()
            now[0] += curve.step_s(output.workload) + (0.5 if num_steps == 5 else 0.0)
            num_steps += 1
            for token in output.tokens:
                if token.seq_id == "promised" and token.finish_reason is not None:
                    return now[0] / num_steps
        raise AssertionError("it has no end")

    assert mean_step_s() < 0.040
    assert mean_step_s(speculative=NGRAM, proposer=KnowingProposer(1000, 1.0, tireless=True)) <= 0.040


@pytest.mark.parametrize("tpot_s", [0.011, 0.008, 0.006])
@pytest.mark.parametrize("prompts", [False, True])
def test_a_pace_that_decoding_alone_is_too_slow_for_is_kept_by_drafts(tpot_s: float, prompts: bool) -> None:
    """A step takes 10.5 ms without them. Prompts that pass get on, and take no more than is left."""
    now = [0.0]
    runner = HookedRunner(num_blocks=4000, block_size=4, vocab_size=1000, max_model_len=500)
    drafting: dict[str, Any] = {"speculative": NGRAM, "proposer": KnowingProposer(1000, 1.0, tireless=True)}
    engine = engine_of(runner, clock=lambda: now[0], max_num_seqs=64, **drafting)
    curve = StepCurve(fixed_s=0.010, per_row_s=0.0005)
    engine.set_curve(curve)
    engine.submit(make_request("promised", [5, 6, 7], max_tokens=200, tpot_s=tpot_s))
    times, num_prompt_tokens = list[float](), 0
    while len(times) < 200:
        if prompts and not engine.stats().num_waiting:
            engine.submit(make_request(f"passing {engine.steps}", [engine.steps % 900] * 300, max_tokens=1))
        output = engine.step()
        now[0] += curve.step_s(output.workload)
        num_prompt_tokens += output.num_prefill_tokens
        times += [now[0]] * sum(token.seq_id == "promised" for token in output.tokens)
        if 0 < len(times) < 200:
            # What newcomers are told of steps beside it.
            assert engine.stats().max_step_s == pytest.approx(PACE_SHARE * tpot_s * engine.stats().tokens_per_step)
    assert (times[-1] - times[0]) / 199 <= tpot_s
    assert not prompts or num_prompt_tokens > 1000 * (times[-1] - times[0])


def test_what_drafts_bring_is_learnt_and_kept_while_nothing_decodes() -> None:
    """Four right ones in a step that takes a tenth longer for each."""
    curve = StepCurve(fixed_s=0.009, per_row_s=0.001)
    engine = engine_of(
        HookedRunner(num_blocks=400, block_size=4, vocab_size=1000, max_model_len=1500),
        speculative=NGRAM,
        proposer=KnowingProposer(1000, 1.0, tireless=True),
    )
    engine.set_curve(curve)
    assert engine.stats().tokens_per_step == 1.0
    engine.submit(make_request("a", [5, 6, 7], max_tokens=1400))
    drain(engine)
    assert engine.stats().tokens_per_step == pytest.approx(5 / 1.4, rel=0.02)
    engine.submit(make_request("b", [8, 9], max_tokens=1, speculate=False))
    drain(engine)
    assert engine.stats().tokens_per_step == pytest.approx(5 / 1.4, rel=0.02)
    engine.submit(make_request("c", [5, 6, 7], max_tokens=1400, speculate=False))
    drain(engine)
    assert engine.stats().tokens_per_step == pytest.approx(1.0, rel=0.01)


def test_a_request_without_drafts_has_none() -> None:
    engine = engine_of(
        HookedRunner(num_blocks=40, block_size=4, vocab_size=1000, max_model_len=100),
        speculative=NGRAM,
        proposer=KnowingProposer(1000, 1.0, tireless=True),
    )
    request = make_request("a", [5, 6, 7], max_tokens=20, speculate=False)
    engine.submit(request)
    tokens, _ = drain(engine)
    assert ids_of(tokens["a"]) == answer_of(request)
    assert not sum(engine.stats().num_drafted)


def test_an_answer_handed_over_is_drafted_on_the_other_side() -> None:
    source, target = (
        engine_of(
            HookedRunner(num_blocks=40, block_size=4, vocab_size=1000, max_model_len=100),
            speculative=NGRAM,
            proposer=KnowingProposer(1000, 1.0, tireless=True),
        )
        for _ in range(2)
    )
    request = make_request("a", [5, 6, 7], max_tokens=30)
    first, _ = hand_over(source, target, request)
    tokens, steps = drain(target)
    assert [first, *ids_of(tokens["a"])] == answer_of(request)
    assert len(steps) < 10
    assert_idle(source)
    assert_idle(target)


@pytest.mark.parametrize("min_tokens", range(6))
def test_an_answer_of_a_grammar_ends_no_sooner_for_its_drafts(tmp_path: Path, min_tokens: int) -> None:
    compiler = GrammarCompiler(save_tokenizer(tmp_path).parent, vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
    grammar = compiler.compile(regex_case("xqz(jv)?").grammar)
    got = []
    for speculative in (None, NGRAM):
        engine = engine_of(HookedRunner(num_blocks=60, block_size=4, vocab_size=VOCAB, max_model_len=200), speculative=speculative)
        request = replace(make_request("a", [5, 7, 9], eos=frozenset({EOS}), max_tokens=20, min_tokens=min_tokens), grammar=grammar)
        got.append(ids_of(generate(engine, [request])[0]))
    assert got[0] == got[1]


def test_what_a_grammar_forces_comes_without_a_step_of_its_own(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path).parent
    # No two of these letters are one token: there is one way to write them.
    case = regex_case("xqzjvkxqzjvk")
    compiler = GrammarCompiler(directory, vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
    got, steps = [], []
    for speculative in (None, NGRAM):
        engine = engine_of(HookedRunner(num_blocks=60, block_size=4, vocab_size=VOCAB, max_model_len=200), speculative=speculative)
        request = replace(make_request("a", [5, 7, 9], eos=frozenset({EOS}), max_tokens=60), grammar=compiler.compile(case.grammar))
        (tokens,) = generate(engine, [request])
        got.append(ids_of(tokens))
        steps.append(engine.steps)
    assert got[0] == got[1]
    # The last step is the end's; no draft goes with the prompt.
    assert steps == [13, 1 + 3]


def test_one_length_alone_moves_the_other() -> None:
    longer = SpeculativeConfig.parse('{"method": "ngram", "prompt_lookup_min": 6}')
    assert (longer.prompt_lookup_min, longer.prompt_lookup_max) == (6, 6)
    shorter = SpeculativeConfig.parse('{"method": "ngram", "prompt_lookup_max": 1}')
    assert (shorter.prompt_lookup_min, shorter.prompt_lookup_max) == (1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram", "no JSON"),
        ("[]", "give a JSON object"),
        ("{}", "give a method"),
        ('{"method": "eagle9"}', "method is 'eagle9'"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "from 1 to 7"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "from 1 to 7"),
        ('{"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 3}', "more than prompt_lookup_max"),
        ('{"method": "ngram", "tokens": 3}', "'tokens' is not known"),
    ],
)
def test_a_wrong_config_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        SpeculativeConfig.parse(text)


@pytest.mark.parametrize(
    ("times_as_long", "tokens", "share"),
    [(3.5, 2.2, (0.0, 0.05)), (1.3, 1.0, (0.0, 0.05)), (1.05, 2.2, (0.95, 1.0)), (1.5, 2.2, (0.95, 1.0))],
)
def test_steps_are_drafted_for_where_that_gives_more_tokens_a_second(
    times_as_long: float, tokens: float, share: tuple[float, float]
) -> None:
    """Whatever it is that takes the time; single steps take ten times as long for other reasons, and two are planned ahead."""
    looking, rng, planned, num_looked, num_steps = Looking(), random.Random(1), deque([True, True]), 0, 4000
    for _ in range(num_steps):
        planned.append(looking.looks(40))
        looked = planned.popleft()
        num_looked += looked
        seconds = (times_as_long if looked else 1.0) * rng.uniform(0.9, 1.1) * (10.0 if rng.random() < 0.002 else 1.0)
        looking.learn(40, round(40 * tokens) if looked else 40, seconds, 1.0)
    assert share[0] <= num_looked / num_steps <= share[1]


def test_what_turns_out_worth_it_later_is_found() -> None:
    looking = Looking()
    for step in range(8000):
        pays = step >= 4000
        looking.learn(8, 16 if pays and looking.looks(8) else 8, 1.5 if looking.looks(8) else 1.0, 1.0)
    assert looking.looks(8)
