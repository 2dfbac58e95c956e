"""Grammars of answers, as workers compile them: what they let through is what the parsers read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from twostep.engine.batch import WORD
from twostep.engine.grammar import LiveGrammar, Vocabulary
from twostep.errors import InvalidRequest
from twostep.sampling_params import Grammar, GrammarKind
from twostep.text import Detokenizer, Tokenizer
from twostep.text.answer_grammar import Function, after_reasoning, either, strict_grammar, tool_call_grammar
from twostep.text.reasoning import REASONING_FORMATS, Begun
from twostep.text.tool_calls import HERMES, LLAMA3_JSON, MISTRAL, CallArguments, CallBegun, ContentDelta, ToolCallFormat, ToolCallParser

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
    others = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    special = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
    return Model(tiny_llama_dir, tmp_path_factory.mktemp("marked"), special=special, others=others)


def calls_of(format: ToolCallFormat, text: str) -> list[tuple[str, dict[str, Any]]]:
    parser = ToolCallParser(format)
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


@pytest.mark.parametrize("kind", ["plain", "marked"])
def test_calls_in_the_formats_own_syntax(request: pytest.FixtureRequest, kind: str) -> None:
    model: Model = request.getfixturevalue(kind)
    one = {
        HERMES.name: f"<tool_call>\n{_PARIS}\n</tool_call>",
        LLAMA3_JSON.name: _PARIS.replace("arguments", "parameters"),
        MISTRAL.name: f"[TOOL_CALLS][{_PARIS}]" if kind == "plain" else '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
    }
    two = {
        HERMES.name: f"<tool_call>\n{_PARIS}\n</tool_call>\n<tool_call>\n{_NOW}\n</tool_call>",
        MISTRAL.name: f"[TOOL_CALLS][{_PARIS}, {_NOW}]" if kind == "plain" else one[MISTRAL.name] + "[TOOL_CALLS]now[ARGS]{}",
    }
    for format in (HERMES, LLAMA3_JSON, MISTRAL):
        many = tool_call_grammar(format, _FUNCTIONS, model.tokenizer, parallel=True)
        single = tool_call_grammar(format, _FUNCTIONS, model.tokenizer, parallel=False)
        text = one[format.name]
        assert model.accepts(many, text), format.name
        assert model.accepts(single, text), format.name
        assert calls_of(format, text) == [("get_weather", {"city": "Paris"})]
        for wrong in ("", "Paris", text.replace("get_weather", "other"), text.replace('"Paris"', "7"), text + "x", text[:-1]):
            assert not model.accepts(many, wrong), wrong
        if format.name in two:
            assert model.accepts(many, two[format.name])
            assert not model.accepts(single, two[format.name])
            assert calls_of(format, two[format.name]) == [("get_weather", {"city": "Paris"}), ("now", {})]


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
@pytest.mark.parametrize("format", [HERMES, MISTRAL])
def test_strict_functions_where_the_model_is_free_to_call(request: pytest.FixtureRequest, kind: str, format: ToolCallFormat) -> None:
    model: Model = request.getfixturevalue(kind)
    strict = Function("get_weather", _FUNCTIONS[0].parameters, strict=True)
    loose = Function("now", {"properties": {"zone": {"type": "string"}}, "required": ["zone"]})
    grammar = strict_grammar(format, [strict, loose], model.tokenizer, parallel=True)
    assert grammar is not None

    def calls(*objects: str) -> str:
        if format is HERMES:
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
        if kind == "plain":
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        told = [json.loads(each) for each in objects]
        return "".join(f"[TOOL_CALLS]{each['name']}[ARGS]{json.dumps(each['arguments'])}" for each in told)

    for text in ("", "It rains.\n<b>", calls(_PARIS), "I look.\n" + calls(_PARIS, _NOW), calls(_NOW)):
        assert model.accepts(grammar, text), text
    for text in (calls(_PARIS.replace('"Paris"', "7")), calls(_PARIS.replace("get_weather", "other")), calls(_PARIS)[:-1]):
        assert not model.accepts(grammar, text), text
    single = strict_grammar(format, [strict, loose], model.tokenizer, parallel=False)
    assert single is not None
    assert model.accepts(single, "So: " + calls(_PARIS))
    assert not model.accepts(single, calls(_PARIS, _NOW))
    assert strict_grammar(LLAMA3_JSON, [strict], model.tokenizer, parallel=True) is None, "no mark tells its calls from text"


@pytest.mark.parametrize("kind", ["plain", "marked"])
@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON, MISTRAL])
def test_every_sentence_is_read_as_calls(request: pytest.FixtureRequest, kind: str, format: ToolCallFormat) -> None:
    model: Model = request.getfixturevalue(kind)
    schema = {
        "properties": {
            "unit": {"enum": ["C", "größer 🙂"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "now": {"type": "boolean"},
        },
        "required": ["unit", "days"],
        "additionalProperties": False,
    }
    odd = "get_weather" if format is MISTRAL else 'get_"w\\é/'
    functions = [Function(odd, schema), Function("now")]
    num_read = 0
    for parallel in (True, False):
        grammar = tool_call_grammar(format, functions, model.tokenizer, parallel=parallel)
        for seed in range(8):
            text = model.sentence(grammar, random.Random(seed))
            if text is None:
                continue
            calls = calls_of(format, text)
            num_read += len(calls)
            assert calls
            assert parallel or len(calls) == 1
            for name, arguments in calls:
                if name == "now":
                    assert arguments == {}
                else:
                    assert name == odd
                    assert {"unit", "days"} <= arguments.keys() <= {"unit", "days", "now"}
                    assert arguments["unit"] in ("C", "größer 🙂")
                    assert 0 <= arguments["days"] <= 99
    assert num_read > 8
