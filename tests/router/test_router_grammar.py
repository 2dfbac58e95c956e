"""Grammars of strangers, looked at by a process that may die of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grammar_cases import save_tokenizer
from router_fakes import Cluster

from router.prompting.grammar_check import GrammarChecker
from twostep.errors import InvalidRequest, SetupError
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.answer_grammar import AnswerTerms, grammar_of
from twostep.text.chat_format import ChatFormat
from twostep.text.reasoning import Begun
from twostep.text.tokenizer import Tokenizer

# Each derivative is a conjunction of more terms than the one before: gigabytes within seconds.
BOMB = json.dumps({"allOf": [{"type": "string", "pattern": f".*a{'b' * i}.{{30}}.*"} for i in range(40)]})


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def checker(tokenizer_file: Path) -> AsyncIterator[GrammarChecker]:
    made = checker_of(tokenizer_file, check_s=30.0)
    yield made
    await made.close()


def checker_of(tokenizer_file: Path, **options: Any) -> GrammarChecker:
    return GrammarChecker(tokenizer_file.parent, ChatFormat.named("qwen3", "hermes"), **options)


async def check(checker: GrammarChecker, grammar: Grammar | None, caller: str = "caller") -> Grammar | None:
    return await checker.grammar(AnswerTerms(own=grammar), caller)


def schema(text: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, text)


async def test_good_ones_pass_and_bad_ones_are_named(checker: GrammarChecker) -> None:
    await check(checker, None)
    await check(checker, Grammar(GrammarKind.JSON_OBJECT))
    await check(checker, Grammar(GrammarKind.REGEX, "(yes|no)"))
    await check(checker, schema('{"type": "object", "properties": {"a": {"type": "integer"}}}'))
    await check(checker, Grammar(GrammarKind.LARK, 'start: "a" | <[3]>'))
    for grammar, says in (
        (Grammar(GrammarKind.REGEX, "(yes|no"), "unclosed group"),
        (schema('{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (schema("\ud800"), "not JSON"),
        (Grammar(GrammarKind.LARK, "start: other"), "other"),
    ):
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=says):
                await check(checker, grammar)


async def test_one_that_takes_all_memory_is_refused_and_others_are_served(tokenizer_file: Path) -> None:
    checker = checker_of(tokenizer_file, check_s=60.0, memory_bytes=48 << 20)
    with pytest.raises(InvalidRequest, match="too much memory"):
        await check(checker, schema(BOMB))
    await check(checker, Grammar(GrammarKind.REGEX, "[0-9]+"))
    await checker.close()


async def test_one_that_takes_long_is_refused(tokenizer_file: Path) -> None:
    """Only processor time counts, not what the machine does besides."""
    checker = checker_of(tokenizer_file, check_s=0.2)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="too much time"):
            await check(checker, schema(BOMB))
    await check(checker, Grammar(GrammarKind.REGEX, "[0-9]+"))
    await checker.close()


async def test_what_no_library_bounds_is_refused_by_what_it_takes(checker: GrammarChecker) -> None:
    """llguidance's own limits know nothing of multiples: an automaton of as many states as the number."""
    with pytest.raises(InvalidRequest, match="MiB"):
        await check(checker, schema('{"type": "integer", "multipleOf": 199999}'))
    await check(checker, schema('{"type": "integer", "multipleOf": 100}'))


async def test_one_caller_s_grammars_do_not_delay_another_s(checker: GrammarChecker) -> None:
    await check(checker, Grammar(GrammarKind.JSON_OBJECT))
    much = [asyncio.create_task(check(checker, schema(f'{{"multipleOf": {9973 + i}}}'), "much")) for i in range(12)]
    await asyncio.sleep(0)
    await check(checker, Grammar(GrammarKind.REGEX, "[0-9]+"), "little")
    # Two were being tried already, and others are while this one is; in one line for all, it would come after all of them.
    assert sum(task.done() for task in much) <= len(much) // 2
    await asyncio.gather(*much)


async def test_schemas_are_read_where_they_can_do_no_harm(tokenizer_file: Path) -> None:
    """Strictly, within tools, and behind reasoning: the process that reads them has its time, and the router waits for it."""
    long = json.dumps({"$defs": {f"d{i}": {"type": "object", "properties": {"a": {}}} for i in range(4000)}, "$ref": "#/$defs/d0"})
    tool = json.dumps({"type": "function", "function": {"name": "f", "parameters": json.loads(long), "strict": True}})
    checker = checker_of(tokenizer_file, check_s=0.02)
    for terms in (AnswerTerms(own=schema(long)), AnswerTerms(tools=(tool,)), AnswerTerms(own=schema(long), begun=Begun.NOT_YET)):
        with pytest.raises(InvalidRequest, match="too much time"):
            await checker.grammar(terms, "caller")
    await checker.close()


async def test_a_grammar_is_made_of_all_that_holds_for_the_answer(checker: GrammarChecker, tokenizer_file: Path) -> None:
    tool = json.dumps({"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}})
    tokenizer, format = Tokenizer.load(tokenizer_file.parent), ChatFormat.named("qwen3", "hermes")
    own = schema('{"type": "object", "properties": {"b": {}}}')
    for terms in (
        AnswerTerms(own=own),
        AnswerTerms(own=own, plainly=True),
        AnswerTerms(tools=(tool,)),
        AnswerTerms(tools=(tool,), must=True, begun=Begun.YES),
        AnswerTerms(own=own, tools=(tool,), parallel=False, begun=Begun.NOT_YET),
        AnswerTerms(own=own, begun=Begun.OVER),
    ):
        for _ in range(2):
            assert await checker.grammar(terms, "caller") == grammar_of(terms, format, tokenizer)


async def test_without_a_tokenizer_there_are_no_grammars(tmp_path: Path) -> None:
    checker = GrammarChecker(tmp_path, ChatFormat())
    with pytest.raises(SetupError, match=r"tokenizer\.json"):
        await check(checker, Grammar(GrammarKind.JSON_OBJECT))
    await checker.close()


async def test_a_request_s_grammar_reaches_both_workers_or_none(cluster: Cluster) -> None:
    async with cluster.paired() as (prefill, decode):
        good = pb.Grammar(json_schema='{"type": "object"}')
        await cluster.ask(max_tokens=5, grammar=good)
        assert prefill.requests[0].sampling.grammar == decode.requests[0].sampling.grammar == good
        for grammar, says in ((pb.Grammar(regex="(yes"), "unclosed group"), (pb.Grammar(), "grammar is empty")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await cluster.ask(max_tokens=5, grammar=grammar)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert says in (refused.value.details() or "")
        await cluster.all_free()
    assert len(decode.requests) == 1
