"""Grammars of answers, as workers compile them: what they let through is what the parsers read."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tokenizers
from tokenizers import AddedToken
from written_calls import MARKERS, WRITTEN

from twostep.engine.batch import WORD
from twostep.engine.grammar import LiveGrammar, Vocabulary
from twostep.errors import InvalidRequest
from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.answer_grammar import after_reasoning, either, strict_grammar, tool_call_grammar
from twostep.text.chat_format import REASONING_FORMATS
from twostep.text.detokenizer import Detokenizer
from twostep.text.reasoning import Begun
from twostep.text.tokenizer import Tokenizer
from twostep.text.tool_calls import TOOL_CALL_FORMATS, ToolCallParser
from twostep.text.tool_formats.events import CallArguments, CallBegun, ContentDelta
from twostep.text.tool_formats.format import Function, ToolCallFormat
from twostep.text.tool_formats.harmony_calls import HARMONY
from twostep.text.tool_formats.json_calls import HERMES, LLAMA3_JSON, LLAMA4_JSON, MISTRAL
from twostep.text.tool_formats.pythonic import PYTHONIC

# What a grammar of harmony holds is read message by message (test_harmony.py).
_FORMATS = [format for format in dict.fromkeys(TOOL_CALL_FORMATS.values()) if format is not HARMONY]
# Formats whose calls nothing but the answer itself tells from text.
_BARE = (LLAMA3_JSON, LLAMA4_JSON, PYTHONIC)
_FUNCTIONS = [
    Function(
        "get_weather", {"properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"], "$defs": {"City": {"type": "string"}}}
    ),
    Function("now"),
]


class Model:
    """A tokenizer with these markers among its added tokens, and what the workers' grammars make of it."""

    def __init__(self, model_dir: Path, tmp_dir: Path, special: tuple[str, ...] = (), others: tuple[str, ...] = ()) -> None:
        self.inner = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in others])
        self.inner.add_special_tokens([AddedToken(text, special=True) for text in special])
        self.tokenizer = Tokenizer(self.inner)
        self.inner.save(str(tmp_dir / "tokenizer.json"))
        self._vocabulary = Vocabulary(tmp_dir, vocab_size=self.inner.get_vocab_size(), eos_token_ids=frozenset({2}))

    def sentence(self, grammar: Grammar, choose: random.Random, most: int = 200) -> str | None:
        """Any answer of the grammar, token by token out of all that may follow; None if it becomes too long."""
        state = self._vocabulary.state(grammar)
        live, step = LiveGrammar(state), state.allowed
        detokenizer, text = Detokenizer(self.tokenizer.showing(self.tokenizer.special_ids)), ""
        for _ in range(most):
            allowed = [i for i in range(self.inner.get_vocab_size()) if step.bits[i // WORD] >> (i % WORD) & 1]
            if step.complete and (not allowed or choose.random() < 0.5):
                return text + detokenizer.finish()
            token = choose.choice(allowed)
            text += detokenizer.push([token])
            step = live.advance([token])
        return None

    def accepts(self, grammar: Grammar, text: str) -> bool:
        ids = self.inner.encode(text, add_special_tokens=False).ids
        state = self._vocabulary.state(grammar)
        try:
            return state.after(ids).allowed.complete
        except InvalidRequest:
            return False


@pytest.fixture(scope="module")
def plain(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tiny_llama_dir, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def marked(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    others = ("<think>", "</think>", "<tool_call>", "</tool_call>", *MARKERS)
    special = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
    return Model(tiny_llama_dir, tmp_path_factory.mktemp("marked"), special=special, others=others)


def calls_of(format: ToolCallFormat, text: str, functions: Sequence[Function] = _FUNCTIONS) -> list[tuple[str, dict[str, Any]]]:
    parser = ToolCallParser(format, functions={each.name: partial(getattr, each, "parameters") for each in functions})
    names: list[str] = []
    arguments: list[str] = []
    for event in [*parser.push(text), *parser.finish()]:
        match event:
            case CallBegun(name=name):
                names.append(name)
                arguments.append("")
            case CallArguments(text=more):
                arguments[-1] += more
            case ContentDelta(more):
                raise AssertionError(f"content: {more!r}")
    return [(name, json.loads(found)) for name, found in zip(names, arguments, strict=True)]


_PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
_NOW = '{"name": "now", "arguments": {}}'


def written(format: ToolCallFormat, kind: str, *calls: tuple[str, dict[str, Any]]) -> str:
    return WRITTEN[f"{format.name}[ARGS]" if format is MISTRAL and kind == "marked" else format.name](calls)


@pytest.mark.parametrize("kind", ["plain", "marked"])
@pytest.mark.parametrize("format", _FORMATS, ids=lambda format: format.name)
def test_calls_in_the_formats_own_syntax(request: pytest.FixtureRequest, kind: str, format: ToolCallFormat) -> None:
    model: Model = request.getfixturevalue(kind)
    weather, now = ("get_weather", {"city": "Paris"}), ("now", dict[str, Any]())
    many = tool_call_grammar(format, _FUNCTIONS, model.tokenizer, parallel=True)
    single = tool_call_grammar(format, _FUNCTIONS, model.tokenizer, parallel=False)
    text = written(format, kind, weather)
    if format is PYTHONIC:
        text = text.replace("'", '"')
    assert model.accepts(many, text)
    assert model.accepts(single, text)
    assert calls_of(format, text) == [weather]
    for wrong in ("", "Paris", text.replace("get_weather", "other"), text.replace('"Paris"', "7"), text + "x", text[:-1]):
        assert wrong == text or not model.accepts(many, wrong), wrong
    if format not in (LLAMA3_JSON, LLAMA4_JSON):
        two = text[:-1] + ", now()]" if format is PYTHONIC else written(format, kind, weather, now)
        assert model.accepts(many, two)
        assert not model.accepts(single, two)
        assert calls_of(format, two) == [weather, now]


_GRAMMARS = [
    (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}}'), '{"a": 1}'),
    (Grammar(GrammarKind.JSON_OBJECT), '{"a": 1}'),
    (Grammar(GrammarKind.REGEX, "a/b|\\/{2}\n"), "a/b"),
    (Grammar(GrammarKind.REGEX, "a\\\nb"), "a\nb"),
    (Grammar(GrammarKind.LARK, 'start: "{" inner "}"\ninner: /[0-9]+/'), "{12}"),
]


@pytest.mark.parametrize(("grammar", "answer"), _GRAMMARS)
@pytest.mark.parametrize(("kind", "parser"), [("plain", "qwen3"), ("marked", "qwen3"), ("marked", "mistral")])
def test_the_model_thinks_before_what_is_asked_for(
    request: pytest.FixtureRequest, kind: str, parser: str, grammar: Grammar, answer: str
) -> None:
    model: Model = request.getfixturevalue(kind)
    format = REASONING_FORMATS[parser]
    opening, closing = format.opening, format.closing
    begun = after_reasoning(grammar, format, model.tokenizer, Begun.YES)
    for text in (f"So <b> it\nis.\n{closing}\n\n{answer}", f"{closing}{answer}"):
        assert model.accepts(begun, text), text
    for text in (answer, f"So{closing}\n\n\n{answer}", f"So{closing}x"):
        assert not model.accepts(begun, text), text
    perhaps = after_reasoning(grammar, format, model.tokenizer, Begun.NOT_YET)
    for text in (f"{opening}\nSo.\n{closing}\n\n{answer}", answer):
        assert model.accepts(perhaps, text), text
    for text in (f"So.{closing}{answer}", f"{opening}{answer}"):
        assert not model.accepts(perhaps, text), text
    assert after_reasoning(grammar, format, model.tokenizer, Begun.OVER) is grammar


@pytest.mark.parametrize(("grammar", "answer"), _GRAMMARS)
def test_calls_or_what_is_asked_for(marked: Model, grammar: Grammar, answer: str) -> None:
    calls = tool_call_grammar(HERMES, _FUNCTIONS, marked.tokenizer, parallel=True)
    both = either(calls, grammar)
    assert marked.accepts(both, answer)
    assert marked.accepts(both, f"<tool_call>\n{_PARIS}\n</tool_call>")
    assert not marked.accepts(both, f"{answer}<tool_call>\n{_PARIS}\n</tool_call>")
    assert marked.accepts(after_reasoning(both, REASONING_FORMATS["qwen3"], marked.tokenizer, Begun.YES), f"Hm.</think>\n\n{answer}")


@pytest.mark.parametrize("kind", ["plain", "marked"])
@pytest.mark.parametrize("format", [format for format in _FORMATS if format not in _BARE], ids=lambda format: format.name)
def test_strict_functions_where_the_model_is_free_to_call(request: pytest.FixtureRequest, kind: str, format: ToolCallFormat) -> None:
    model: Model = request.getfixturevalue(kind)
    properties = {"days": {"type": "integer"}, "city": {"$ref": "#/$defs/City"}}
    schema = {"properties": properties, "required": ["days"], "$defs": {"City": {"type": "string"}}}
    strict = Function("get_weather", schema, strict=True)
    loose = Function("now", {"properties": {"zone": {"type": "string"}}, "required": ["zone"]})
    grammar = strict_grammar(format, [strict, loose], model.tokenizer, parallel=True)
    assert grammar is not None
    calls = partial(written, format, kind)
    weather, now = ("get_weather", {"days": 3, "city": "Paris"}), ("now", {"a": "b"})
    for text in ("", "It rains.\n<b>", calls(weather), "I look.\n" + calls(weather, ("now", {})), calls(now)):
        assert model.accepts(grammar, text), text
    for text in (calls(weather).replace("3", "some"), calls(weather).replace("get_weather", "other"), calls(weather)[:-1]):
        assert not model.accepts(grammar, text), text
    single = strict_grammar(format, [strict, loose], model.tokenizer, parallel=False)
    assert single is not None
    assert model.accepts(single, "So: " + calls(weather))
    assert not model.accepts(single, calls(weather, now))


@pytest.mark.parametrize("format", _BARE, ids=lambda format: format.name)
def test_no_mark_tells_calls_from_text(marked: Model, format: ToolCallFormat) -> None:
    assert strict_grammar(format, _FUNCTIONS, marked.tokenizer, parallel=True) is None


@pytest.mark.parametrize("kind", ["plain", "marked"])
@pytest.mark.parametrize("format", _FORMATS, ids=lambda format: format.name)
def test_every_sentence_is_read_as_calls(request: pytest.FixtureRequest, kind: str, format: ToolCallFormat) -> None:
    model: Model = request.getfixturevalue(kind)
    schema = {
        "properties": {
            "unit": {"enum": ["C", "größer 🙂"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "now": {"type": "boolean"},
            "where": {"type": "string", "maxLength": 3},
            "why": {"anyOf": [{"enum": ["x"]}, {"type": "null"}]},
            "list": {"type": "array", "items": {"$ref": "#/$defs/each"}, "maxItems": 2},
        },
        "$defs": {"each": {"type": "string", "maxLength": 3}},
        "required": ["unit", "days"],
        "additionalProperties": False,
    }
    odd = 'get_"w\\é/' if format in (HERMES, LLAMA3_JSON, LLAMA4_JSON) else "get_wé"
    functions = [Function(odd, schema), Function("now")]
    num_read = 0
    for parallel in (True, False):
        grammar = tool_call_grammar(format, functions, model.tokenizer, parallel=parallel)
        for seed in range(8):
            text = model.sentence(grammar, random.Random(seed))
            if text is None:
                continue
            calls = calls_of(format, text, functions)
            num_read += len(calls)
            assert calls
            assert parallel or len(calls) == 1
            for name, arguments in calls:
                if name == "now":
                    assert arguments == {}
                else:
                    assert name == odd
                    jsonschema.validate(arguments, schema)
    assert num_read > 8
