"""Sequences held to a grammar: their answers are those worked out token by token, whatever else happens, and their neighbours' stay."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import HookedRunner, assert_idle, engine_of, expected_answer, make_request
from grammar_cases import EOS, OTHER_EOS, VOCAB, GrammarCase, Reference, cases, object_case, regex_case, save_tokenizer, schema_case
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.engine import constrained as constrained_sequences
from twostep.engine import grammar as engine_grammar
from twostep.engine.batch import Batch
from twostep.engine.engine import Engine
from twostep.engine.generate import generate
from twostep.engine.grammar import AllowedTokens, GrammarCompiler, LiveGrammar
from twostep.engine.types import EngineRequest, FailureKind, FinishReason, StepOutput
from twostep.errors import InvalidRequest, ResourceExhausted
from twostep.request_class import RequestClass
from twostep.sampling_params import Grammar, GrammarKind
from twostep.settings.speculative import SpeculativeConfig
from twostep.text.grammar import rule_of, source_of

CONTEXT = 200
WAIT_S = 60.0


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def reference(tokenizer_file: Path) -> Reference:
    return Reference(tokenizer_file)


@pytest.fixture(scope="session")
def compiler(tokenizer_file: Path) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_file.parent, vocab_size=VOCAB, eos_token_ids=frozenset({EOS, OTHER_EOS}))


def make_engine(*, num_blocks: int = 200, block_size: int = 4, **config: Any) -> Engine:
    return engine_of(HookedRunner(num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB, max_model_len=CONTEXT), **config)


def constrained(compiler: GrammarCompiler, case: GrammarCase, request: EngineRequest) -> EngineRequest:
    prior = request.token_ids[request.num_prompt_tokens :]
    sampling = replace(request.sampling, grammar=case.grammar)
    return replace(request, sampling=sampling, grammar=compiler.compile(case.grammar).after(prior))


def ask(
    compiler: GrammarCompiler, case: GrammarCase, seq_id: str = "a", prompt: Sequence[int] = (5, 7, 9), **options: Any
) -> EngineRequest:
    defaults = {"eos": frozenset({EOS, OTHER_EOS}), "max_tokens": 40}
    return constrained(compiler, case, make_request(seq_id, prompt, **(defaults | options)))


def want(reference: Reference, request: EngineRequest) -> tuple[list[int], FinishReason]:
    if request.sampling.grammar is None:
        return expected_answer(request, vocab_size=VOCAB, max_model_len=CONTEXT)
    return reference.answer(request, source_of(request.sampling.grammar), max_model_len=CONTEXT)


def run(engine: Engine, seq_ids: set[str]) -> tuple[dict[str, list[int]], list[StepOutput]]:
    """Steps until all of these are over, as the worker's loop does."""
    tokens: dict[str, list[int]] = {seq_id: [] for seq_id in seq_ids}
    outputs, left = [], set(seq_ids)
    while left:
        assert engine.wait_for_work(WAIT_S), left
        output = engine.step()
        outputs.append(output)
        engine.check_integrity()
        for token in output.tokens:
            tokens.setdefault(token.seq_id, []).append(token.token_id)
            if token.finish_reason is not None:
                left.discard(token.seq_id)
        left -= {failure.seq_id for failure in output.failures}
    outputs += engine.settle_launched()
    return tokens, outputs


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[GrammarCase | None, dict[str, Any]]]:
    made: list[tuple[GrammarCase | None, dict[str, Any]]] = []
    shared = draw(st.lists(st.integers(3, 300), min_size=1, max_size=20))
    for _ in range(draw(st.integers(1, 5))):
        case = draw(st.none() | cases())
        max_tokens = draw(st.integers(1, 50))
        prompt = shared[: draw(st.integers(1, len(shared)))] + draw(st.lists(st.integers(3, 300), max_size=12))
        options: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "min_tokens": draw(st.sampled_from([0, 0, min(3, max_tokens)])),
            "ignore_eos": draw(st.booleans()) if case is not None else False,
            "stop_token_ids": draw(st.sampled_from([(), (), (1,)])),
            "request_class": draw(st.sampled_from(list(RequestClass))),
        }
        made.append((case, options))
    return made


@settings(max_examples=30)
@given(
    work=batches(),
    budget=st.integers(1, 40),
    num_seqs=st.integers(1, 6),
    num_blocks=st.integers(50, 110),
    ahead=st.booleans(),
    drafts=st.sampled_from([0, 1, 5]),
)
def test_any_batch_gives_the_answers_worked_out(
    compiler: GrammarCompiler,
    reference: Reference,
    work: list[tuple[GrammarCase | None, dict[str, Any]]],
    budget: int,
    num_seqs: int,
    num_blocks: int,
    ahead: bool,
    drafts: int,
) -> None:
    """With chunks, preemption, look-ahead and drafts; what stopped by itself is a sentence of its grammar."""
    requests = []
    for i, (case, options) in enumerate(work):
        options = dict(options)
        plain = make_request(f"r{i}", options.pop("prompt"), eos=frozenset({EOS, OTHER_EOS}), **options)
        requests.append(plain if case is None else constrained(compiler, case, plain))
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=drafts, prompt_lookup_min=1) if drafts else None
    bounds = {"max_num_batched_tokens": budget, "max_num_seqs": num_seqs}
    engine = make_engine(num_blocks=num_blocks, look_ahead=ahead, speculative=speculative, **bounds)
    got = generate(engine, requests)
    for (case, _), request, tokens in zip(work, requests, got, strict=True):
        answer, reason = want(reference, request)
        assert [token.token_id for token in tokens] == answer
        assert tokens[-1].finish_reason is reason
        if case is not None and reason is FinishReason.STOP:
            case.judge(reference.text(answer[:-1]))
    assert_idle(engine)


def _first(engine: Engine) -> Any:
    while True:
        assert engine.wait_for_work(WAIT_S)
        for token in engine.step().tokens:
            return token


class MasksMade:
    """Makes masks on the calling thread, when it is time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._due: list[Callable[[], None]] = []
        monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda _, call: self._due.append(call))

    def drain(self) -> None:
        while self._due:
            self._due.pop(0)()


def test_neighbours_run_in_every_step_and_the_constrained_in_every_other(
    compiler: GrammarCompiler, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one step computes, the next is planned: the constrained sequence is not in it, and none waits."""
    made = MasksMade(monkeypatch)
    engine = make_engine(look_ahead=True)
    free = [make_request(f"free{i}", [3, 4, 5 + i], max_tokens=30) for i in range(3)]
    held = ask(compiler, object_case(), max_tokens=12, ignore_eos=True)
    batches: list[Batch] = []
    assert isinstance(engine.runner, HookedRunner)
    engine.runner.launching = batches.append
    for request in (*free, held):
        engine.submit(request)
    # Masks are made in no time here: each is there when the step after the next is planned.
    outputs: list[StepOutput] = []
    while engine.stats().num_running + engine.stats().num_waiting:
        outputs.append(engine.step())
        made.drain()
    outputs += engine.settle_launched()
    by_step = [{token.seq_id for token in output.tokens} for output in outputs]
    assert all({request.seq_id for request in free} <= step for step in by_step[:30])
    turns = [i for i, step in enumerate(by_step) if "a" in step]
    assert turns == list(range(0, 24, 2))
    # Nothing is carried to a constrained row: its token is known when it is planned.
    for batch in batches:
        if batch.masks is not None and batch.carried is not None:
            assert all(batch.carried[batch.sample_rows[row]] < 0 for row in batch.masks.rows)
    assert [token.token_id for output in outputs for token in output.tokens if token.seq_id == "a"] == want(reference, held)[0]
    assert_idle(engine)


class Slow:
    """Makes masks when told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.real = constrained_sequences.make_all

    def __call__(self, work: Any) -> Any:
        assert self.go.wait(WAIT_S)
        return self.real(work)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow()
    monkeypatch.setattr(constrained_sequences, "make_all", made)
    yield made
    made.go.set()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_mask_that_takes_long_holds_up_no_other(compiler: GrammarCompiler, reference: Reference, slow: Slow, ahead: bool) -> None:
    engine = make_engine(look_ahead=ahead)
    free, held = make_request("free", [3, 4, 5], max_tokens=30), ask(compiler, object_case(), max_tokens=6)
    engine.submit(free)
    engine.submit(held)
    tokens, _ = run(engine, {"free"})
    assert tokens["free"] == want(reference, free)[0]
    assert len(tokens["a"]) == 1
    for _ in range(10):
        engine.step()
    assert not engine.wait_for_work(0.0), "there is nothing to do but to wait"
    assert engine.stats().stalled_s > 0, "a mask that never comes is a worker that hangs"
    slow.go.set()
    rest, _ = run(engine, {"a"})
    assert tokens["a"] + rest["a"] == want(reference, held)[0]
    assert_idle(engine)


def test_it_may_be_cancelled_while_its_mask_is_made(compiler: GrammarCompiler, slow: Slow) -> None:
    engine = make_engine()
    engine.submit(ask(compiler, object_case()))
    _first(engine)
    assert engine.cancel("a")
    engine.settle_launched()
    assert engine.stats().num_running == 0
    assert_idle(engine)
    slow.go.set()
    # The name is free again.
    engine.submit(ask(compiler, object_case(), max_tokens=3))
    assert len(run(engine, {"a"})[0]["a"]) == 3


def test_a_held_one_waits_for_no_mask(compiler: GrammarCompiler) -> None:
    engine = make_engine()
    engine.submit(ask(compiler, object_case()), hold=True)
    _first(engine)
    assert not engine.makes_masks
    assert engine.stats().stalled_s == 0, "it is no work"
    engine.release("a")
    assert_idle(engine)


def test_it_may_give_way_while_its_mask_is_made(compiler: GrammarCompiler, reference: Reference, slow: Slow) -> None:
    """An older sequence needs the blocks: it leaves the batch, and comes back only with its mask."""
    engine = make_engine(num_blocks=12, block_size=2)
    older = make_request("older", [3, 4, 5, 6], max_tokens=18)
    held = ask(compiler, object_case(), max_tokens=12, ignore_eos=True)
    engine.submit(older)
    engine.submit(held)
    tokens, _ = run(engine, {"older"})
    assert tokens["older"] == want(reference, older)[0]
    assert engine.stats().num_preemptions == 1
    slow.go.set()
    rest, _ = run(engine, {"a"})
    assert tokens["a"] + rest["a"] == want(reference, held)[0]
    assert_idle(engine)


def test_a_grammar_that_fails_ends_its_sequence_alone(
    compiler: GrammarCompiler, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose automaton grows beyond its bounds."""
    real = constrained_sequences.advance_all

    def fail_bad(work: Sequence[tuple[LiveGrammar, Sequence[int]]]) -> Sequence[AllowedTokens]:
        found = zip(work, real(work), strict=True)
        at_bounds = [len(live.tokens) == 3 and live.tokens[0] == tokens_of_bad[0] for live, _ in work]
        return [
            replace(allowed, failure="too many states") if fails else allowed for fails, (_, allowed) in zip(at_bounds, found, strict=True)
        ]

    bad, good = ask(compiler, regex_case("[0-9]{9}"), "bad"), ask(compiler, schema_case({"enum": ["green"]}), "good")
    tokens_of_bad = want(reference, bad)[0]
    monkeypatch.setattr(constrained_sequences, "advance_all", fail_bad)
    free = make_request("free", [3, 4, 5], max_tokens=20)
    engine = make_engine()
    for request in (free, bad, good):
        engine.submit(request)
    tokens, outputs = run(engine, {"free", "bad", "good"})
    (failure,) = [failure for output in outputs for failure in output.failures]
    assert (failure.seq_id, failure.kind) == ("bad", FailureKind.REQUEST)
    assert tokens["bad"] == tokens_of_bad[:3]
    assert tokens["good"] == want(reference, good)[0]
    assert tokens["free"] == want(reference, free)[0]
    assert_idle(engine)


@pytest.mark.parametrize("halfway", [False, True])
def test_whatever_the_thread_meets_it_is_one_sequence_s_and_none_waits_for_ever(
    compiler: GrammarCompiler, reference: Reference, monkeypatch: pytest.MonkeyPatch, halfway: bool
) -> None:
    """Those made side by side with it are then made by themselves, whether or not they had been given their tokens."""
    bad, good = ask(compiler, object_case(), "bad"), ask(compiler, regex_case("[0-9]{9}"), "good")
    side_by_side, by_itself = constrained_sequences.advance_all, LiveGrammar.again

    def broken(work: Sequence[tuple[LiveGrammar, Sequence[int]]]) -> Sequence[AllowedTokens]:
        if halfway:
            side_by_side(work)
        raise RuntimeError("a bug")

    def again(live: LiveGrammar) -> AllowedTokens:
        if live.matcher.is_error() or live.grammar == bad.sampling.grammar:
            raise RuntimeError("the bug")
        return by_itself(live)

    monkeypatch.setattr(constrained_sequences, "advance_all", broken)
    monkeypatch.setattr(LiveGrammar, "again", again)
    engine = make_engine()
    for request in (bad, good):
        engine.submit(request)
    tokens, outputs = run(engine, {"bad", "good"})
    assert [(failure.seq_id, failure.kind) for output in outputs for failure in output.failures] == [("bad", FailureKind.REQUEST)]
    assert tokens["good"] == want(reference, good)[0]
    assert_idle(engine)


def test_a_shared_automaton_at_its_bounds_is_no_other_s_failure(compiler: GrammarCompiler) -> None:
    """llguidance's copies of a grammar share one: after a failure of one of them, others start anew."""
    state = compiler.compile(Grammar(GrammarKind.REGEX, "[ab]*a[ab]{3}c[0-9]+"))
    first = _allowed(state.allowed)[0]
    # This copy is beyond use; from the grammar's text it goes on.
    broken = LiveGrammar(state)
    broken.matcher.consume_token(VOCAB + 1000)
    assert broken.matcher.is_error()
    again = broken.advance([first])
    assert not again.failure
    assert _allowed(again) == _allowed(LiveGrammar(state).advance([first]))


def _allowed(step: AllowedTokens) -> list[int]:
    return [token for token in range(VOCAB) if step.bits[token // 32] >> (token % 32) & 1]


# ---- what they take ------------------------------------------------------------------------------------------------------


def letters(i: int) -> Grammar:
    """Some text that is short itself, and whose automaton is megabytes."""
    return Grammar(GrammarKind.REGEX, rf"\p{{L}}{{1900}}{i}")


def bounded(tokenizer_file: Path, **bounds: int) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_file.parent, vocab_size=VOCAB, eos_token_ids=frozenset({EOS}), **bounds)


def follow(live: LiveGrammar, allowed: AllowedTokens, num_tokens: int) -> AllowedTokens:
    for i in range(num_tokens):
        tokens = _allowed(allowed)
        allowed = live.advance([tokens[i * 2654435761 % len(tokens)]])
    return allowed


def test_compiled_grammars_are_kept_by_what_they_take(tokenizer_file: Path) -> None:
    compiler = bounded(tokenizer_file, max_cached_bytes=24 << 20)
    small = Grammar(GrammarKind.REGEX, "[0-9]+")
    for grammar in (small, *map(letters, range(6))):
        state = compiler.compile(grammar)
        follow(LiveGrammar(state), state.allowed, 130 if grammar is not small else 1)
        assert compiler.cached(grammar) is state
    kept = [grammar for grammar in map(letters, range(6)) if compiler.cached(grammar) is not None]
    assert kept == [letters(i) for i in range(6 - len(kept), 6)]
    assert 1 < len(kept) < 6
    assert compiler.cached(small) is None


def test_grammars_of_answers_under_way_are_bounded_too(tokenizer_file: Path) -> None:
    compiler = bounded(tokenizer_file, max_cached_bytes=1, max_used_bytes=8 << 20)
    under_way = [LiveGrammar(compiler.compile(letters(i))) for i in range(4)]
    with pytest.raises(ResourceExhausted, match="MiB"):
        under_way += [LiveGrammar(compiler.compile(letters(i))) for i in range(4, 16)]
    under_way.clear()
    compiler.compile(letters(20))


def test_an_automaton_that_has_grown_is_begun_anew_and_nobody_notices(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_grammar, "_MAX_GROWN_BYTES", 1 << 40)
    state = bounded(tokenizer_file).compile(letters(0))
    plain = LiveGrammar(state)
    expected = [plain.advance([first := _allowed(state.allowed)[0]])] + [plain.advance([first]) for _ in range(700)]
    monkeypatch.setattr(engine_grammar, "_MAX_GROWN_BYTES", 1 << 20)
    monkeypatch.setattr(engine_grammar, "_LOOK_EVERY", 8)
    compiler = bounded(tokenizer_file)
    state = compiler.compile(letters(0))
    lives = [LiveGrammar(state), LiveGrammar(state)]
    sizes = []
    for allowed in expected:
        for live in lives:
            assert _allowed(live.advance([first])) == _allowed(allowed)
        sizes.append(state.vocabulary.num_bytes)
    assert plain.vocabulary.num_bytes > 2 * max(sizes)
    assert compiler.cached(letters(0)) is None, "the one that was kept has grown too"


# ---- what may come when --------------------------------------------------------------------------------------------------


def test_stop_tokens_that_leave_nothing_are_refused(compiler: GrammarCompiler) -> None:
    nine = int(_allowed(compiler.compile(Grammar(GrammarKind.REGEX, "9")).allowed)[0])
    engine = make_engine()
    with pytest.raises(InvalidRequest):
        engine.submit(ask(compiler, regex_case("9"), stop_token_ids=(nine,)))
    engine.submit(ask(compiler, regex_case("ü9"), stop_token_ids=(nine,)))
    _, outputs = run(engine, {"a"})
    assert [failure.kind for output in outputs for failure in output.failures] == [FailureKind.REQUEST]
    assert_idle(engine)


def test_something_must_end_an_answer(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest):
        make_engine().submit(ask(compiler, object_case(), eos=frozenset()))
    make_engine().submit(ask(compiler, object_case(), eos=frozenset(), stop_token_ids=(EOS,)))


def test_ids_without_a_text_never_come(compiler: GrammarCompiler) -> None:
    """Rows of the embedding beyond the tokenizer's tokens, and special tokens."""
    allowed = _allowed(compiler.compile(Grammar(GrammarKind.REGEX, "(?s:.*)")).allowed)
    assert min(allowed) > 2
    assert max(allowed) < 400 <= VOCAB


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "(ab"),
        (GrammarKind.REGEX, "(?=a)b"),
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.JSON_SCHEMA, '{}, "lark_grammar": {'),
        (GrammarKind.JSON_SCHEMA, '{"minimum": NaN}'),
        (GrammarKind.JSON_SCHEMA, "[]"),
        (GrammarKind.JSON_SCHEMA, "[" * 100_000),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 200 + "{}" + "}" * 200),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1/schema"}'),
        (GrammarKind.JSON_SCHEMA, "false"),
        (GrammarKind.LARK, "begin: x"),
        (GrammarKind.LARK, 'start: <|nothing|> "a"'),
    ],
)
def test_what_is_no_grammar_is_refused(compiler: GrammarCompiler, kind: GrammarKind, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(Grammar(kind, text))
    assert len(refused.value.message) < 800


@pytest.mark.parametrize(
    ("schema", "about"),
    [
        ({"type": "string", "pattern": "^a$", "minLength": 5}, "minLength"),
        ({"type": "string", "enum": ["a"], "pattern": "b"}, "enum"),
        ({"type": "integer", "minimum": 1e30}, "minimum"),
        ({"type": "string", "pattern": "("}, "pattern"),
        ({"type": "string", "pattern": r"a\b"}, "pattern"),
        ({"type": "object", "patternProperties": {"^a": {}, "^ab": {}}}, "patternProperties"),
    ],
)
@pytest.mark.parametrize("within", [False, True], ids=["alone", "within-another"])
def test_what_is_wrong_with_a_schema_is_said_of_the_schema(
    compiler: GrammarCompiler, schema: dict[str, Any], about: str, within: bool
) -> None:
    """Whoever wrote a schema wrote neither the regular expressions that are made of it nor the grammar that it becomes a part of."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(Grammar(GrammarKind.LARK, f"start: {rule_of(grammar)}\n") if within else grammar)
    message = refused.value.message
    assert "json_schema" in message
    assert f'"{about}"' in message
    assert not any(word in message for word in ("regex", "Regex", "lark", "%json")), message


def test_tokens_of_another_answer_are_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest):
        compiler.compile(Grammar(GrammarKind.REGEX, "[0-9]+")).after([70, 71])
