"""Answers in a grammar through both workers are those worked out token by token, whichever worker samples a token."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grammar_cases import EOS, OTHER_EOS, VOCAB, GrammarCase, Reference, cases, object_case, save_tokenizer, schema_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker_harness import WAIT_S, RouterDouble, make_runner, routed, started

from twostep.engine import grammar as engine_grammar
from twostep.engine.fake import fake_next_token
from twostep.engine.types import EngineRequest, FinishReason
from twostep.sampling_params import Grammar, GrammarKind, SamplingParams
from twostep.text.grammar import source_of
from twostep.worker.preparation import Grammars

EOS_IDS = frozenset({EOS, OTHER_EOS})
CONTEXT = 512


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def reference(tokenizer_file: Path) -> Reference:
    return Reference(tokenizer_file)


def pair_of(redis_url: str, tokenizer_file: Path | None, **options: Any) -> Any:
    runners = {f"{role}_runner": make_runner(vocab_size=VOCAB) for role in ("prefill", "decode")}
    return started(redis_url, tokenizer_dir=tokenizer_file and tokenizer_file.parent, eos=EOS_IDS, **runners | options)


def want(reference: Reference, case: GrammarCase, prompt: Sequence[int], max_tokens: int, **params: Any) -> tuple[list[int], FinishReason]:
    request = EngineRequest(
        seq_id="",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **params),
        eos_token_ids=EOS_IDS,
    )
    return reference.answer(request, source_of(case.grammar), max_model_len=CONTEXT)


def prompt_of(length: int, seed: int) -> list[int]:
    return [3 + (i * 7 + seed * 13) % 300 for i in range(length)]


def free_answer(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and not (len(tokens) > len(prompt) and tokens[-1] in EOS_IDS):
        tokens.append(fake_next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(work=st.lists(st.tuples(st.none() | cases(), st.integers(1, 20), st.integers(1, 40), st.booleans()), min_size=2, max_size=6))
def test_the_pair_gives_the_answers_worked_out(
    redis_url: str, tokenizer_file: Path, reference: Reference, work: list[tuple[GrammarCase | None, int, int, bool]]
) -> None:
    """Handed over or computed on the decode worker, many at once, in small chunks, beside answers without a grammar."""

    async def serve() -> None:
        async with pair_of(redis_url, tokenizer_file, prefill_options={"max_num_batched_tokens": 8}) as pair, routed(pair) as router:

            async def one(i: int, case: GrammarCase | None, length: int, max_tokens: int, here: bool) -> None:
                prompt = prompt_of(length, i)
                options: dict[str, Any] = {} if case is None else {"grammar": case.grammar}
                answer = await (router.generate_here if here else router.generate)(f"r{i}", prompt, max_tokens, **options)
                assert answer.failed is None, answer.failed
                if case is None:
                    assert answer.tokens == free_answer(prompt, max_tokens)
                    return
                tokens, reason = want(reference, case, prompt, max_tokens)
                assert answer.tokens == tokens
                if reason is FinishReason.STOP:
                    case.judge(reference.text(tokens[:-1]))

            await asyncio.gather(*(one(i, *item) for i, item in enumerate(work)))

    asyncio.run(serve())


async def test_another_attempt_goes_on_in_the_grammar(redis_url: str, tokenizer_file: Path, reference: Reference) -> None:
    """A migration, or a client that resumes, sends the prompt with the tokens so far behind it."""
    case, prompt = schema_case({"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 3, "maxItems": 5}), prompt_of(11, 5)
    tokens, _ = want(reference, case, prompt, 60)
    async with pair_of(redis_url, tokenizer_file) as pair, routed(pair) as router:
        for cut in (1, 4, 9):
            for ask in (router.generate, router.generate_here):
                options = {"num_prompt_tokens": len(prompt), "attempt": 2, "grammar": case.grammar}
                answer = await ask(f"{ask.__name__}-{cut}", [*prompt, *tokens[:cut]], 60, **options)
                assert answer.tokens == tokens[cut:]
                assert answer.positions == list(range(cut, len(tokens)))


async def refused(router: RouterDouble, **options: Any) -> list[grpc.aio.AioRpcError]:
    """Returns the refusals of both workers."""
    errors = []
    for ask in (lambda: router.reserve("r", [5, 6], 9, **options), lambda: router.run("r", [5, 6], 9, **options).read()):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ask()
        errors.append(error.value)
    return errors


async def test_what_is_no_grammar_is_an_invalid_request(redis_url: str, tokenizer_file: Path) -> None:
    async with pair_of(redis_url, tokenizer_file) as pair, routed(pair) as router:
        for grammar, says in (
            (Grammar(GrammarKind.REGEX, "(yes|no"), "unclosed group"),
            (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "strin"}'), "strin"),
        ):
            for error in await refused(router, grammar=grammar):
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert says in (error.details() or "")
        # As are tokens that are no beginning of its sentences.
        for error in await refused(router, grammar=Grammar(GrammarKind.REGEX, "[0-9]+"), num_prompt_tokens=1):
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_without_llguidance_or_tokenizer_says_so(
    redis_url: str, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = Grammar(GrammarKind.JSON_OBJECT)
    async with pair_of(redis_url, None) as pair, routed(pair) as router:
        for error in await refused(router, grammar=grammar):
            assert (error.code(), "tokenizer.json" in (error.details() or "")) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    async with pair_of(redis_url, tokenizer_file) as pair, routed(pair) as router:
        for error in await refused(router, grammar=grammar):
            assert (error.code(), "pip install" in (error.details() or "")) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        assert (await router.generate("free", prompt_of(5, 1), 4)).tokens == free_answer(prompt_of(5, 1), 4)


async def test_grammars_that_are_known_to_be_slow_delay_no_other(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, seconds = threading.Event(), 0.0
    real = engine_grammar.Vocabulary.state

    def state(self: Any, grammar: Grammar) -> Any:
        nonlocal seconds
        if grammar.text.startswith("slow"):
            assert go.wait(WAIT_S)
            seconds += 1.0
        return real(self, grammar)

    monkeypatch.setattr(engine_grammar.Vocabulary, "state", state)
    compiler = engine_grammar.GrammarCompiler(tokenizer_file.parent, vocab_size=VOCAB, eos_token_ids=EOS_IDS, max_cached_bytes=0)
    grammars = Grammars(compiler, clock=lambda: seconds)
    slow = [Grammar(GrammarKind.REGEX, f"slow{i}") for i in range(3)]
    go.set()
    for grammar in slow:
        await grammars.state(grammar, ())
    await grammars.state(Grammar(GrammarKind.REGEX, "last"), ())
    go.clear()
    held = [asyncio.create_task(grammars.state(grammar, ())) for grammar in slow]
    await asyncio.sleep(0)
    await grammars.state(Grammar(GrammarKind.REGEX, "quick"), ())
    assert not any(task.done() for task in held)
    go.set()
    await asyncio.gather(*held)
    grammars.close()


async def test_compiling_holds_up_neither_loop_nor_engine(redis_url: str, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While grammars are compiled, others are served."""
    go = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = engine_grammar.Vocabulary.state

    def slow(self: Any, grammar: Grammar) -> Any:
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(WAIT_S)
        return real(self, grammar)

    monkeypatch.setattr(engine_grammar.Vocabulary, "state", slow)
    async with pair_of(redis_url, tokenizer_file) as pair, routed(pair) as router:
        held = asyncio.create_task(router.generate("held", prompt_of(5, 1), 6, grammar=object_case().grammar))
        assert (await router.generate("free", prompt_of(9, 2), 12)).tokens == free_answer(prompt_of(9, 2), 12)
        assert not held.done()
        go.set()
        assert len((await held).tokens) == 6
