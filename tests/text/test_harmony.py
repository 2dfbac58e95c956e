"""Harmony: messages of an answer are told apart the same way however the text comes, and what a grammar holds is read as a call."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_answer_grammar import Model

from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.answer_grammar import after_reasoning, tool_call_grammar
from twostep.text.chat_format import reasoning_format
from twostep.text.harmony import HarmonyFormat
from twostep.text.reasoning import Begun
from twostep.text.tool_calls import ToolCallParser, tool_call_format
from twostep.text.tool_formats.events import CallArguments, CallBegun
from twostep.text.tool_formats.format import Function
from twostep.text.tool_formats.harmony_calls import HARMONY

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
TEMPLATE = "{{ tools }}<|start|>assistant<|channel|>analysis<|message|> to=functions.f<|channel|>commentary"


def split(pieces: list[str], begun: Begun = Begun.NOT_YET) -> tuple[str, str]:
    splitter = HarmonyFormat().splitter(begun)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.text for part in parts)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        (f"{ANALYSIS}Let me see.{NEXT}{FINAL}It is 4.", "Let me see.", "It is 4."),
        (f"{FINAL}It is 4.", "", "It is 4."),
        (f"{ANALYSIS}Never done", "Never done", ""),
        (f"{ANALYSIS}a<|start|>assistant{FINAL}b", "a", "b"),
        (f"{ANALYSIS}a{NEXT}<|channel|>commentary<|message|>I call.{NEXT}{ANALYSIS}b", "ab", "I call."),
        (f"{ANALYSIS}a{NEXT} to=functions.f<|channel|>commentary <|constrain|>json<|message|>{{}}", "a", "<|call|>f<|message|>{}"),
        ("<|channel|>commentary to=functions.f code<|message|>{}<|call|>", "", "<|call|>f<|message|>{}<|end|>"),
        ("It is 4, without a header.", "", "It is 4, without a header."),
        (f"{FINAL}a < b <|e", "", "a < b <|e"),
        (f"{ANALYSIS}a{NEXT}<|channel|>fin", "a", ""),
        ("x" * 600 + f"{FINAL}", "", "x" * 600 + FINAL),
    ],
)
def test_examples(text: str, reasoning: str, answer: str) -> None:
    assert split([text]) == (reasoning, answer)


def test_an_answer_that_goes_on_with_its_final_message() -> None:
    assert HarmonyFormat().begun_in("<|start|>assistant", "It is") is Begun.OVER
    assert split([" 4."], Begun.OVER) == ("", " 4.")


words = st.sampled_from(
    ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "analysis", "final", " to=functions.f", "<|", "a"]
)


@given(st.lists(st.one_of(words, st.text(max_size=4)), max_size=14).map("".join), st.lists(st.integers(0, 1000), max_size=12))
def test_however_the_text_is_cut(text: str, places: list[int]) -> None:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    assert split([text[a:b] for a, b in pairwise(edges)]) == split(list(text)) == split([text])


def test_told_by_the_chat_template() -> None:
    assert isinstance(reasoning_format("auto", TEMPLATE), HarmonyFormat)
    assert tool_call_format("auto", TEMPLATE) is HARMONY


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tiny_llama_dir, tmp_path_factory.mktemp("harmony"), special=HarmonyFormat.tokens)


@pytest.mark.parametrize("header", ["", f"{ANALYSIS}Which city? {{}}{NEXT}"])
def test_what_a_grammar_holds(model: Model, header: str) -> None:
    schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer"}))
    asked = after_reasoning(schema, HarmonyFormat(), model.tokenizer, Begun.NOT_YET)
    assert model.accepts(asked, f"{header}{FINAL}12")
    assert not model.accepts(asked, f"{header}12")
    assert not model.accepts(asked, f"{header}{FINAL}twelve")

    functions = [Function("get_weather", {"properties": {"city": {"type": "string"}}, "required": ["city"]}), Function("now")]
    calls = tool_call_grammar(HARMONY, functions, model.tokenizer, parallel=True)
    held = after_reasoning(calls, HarmonyFormat(), model.tokenizer, Begun.NOT_YET, is_calls=True)
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'
    assert model.accepts(held, header + call)
    assert not model.accepts(held, header + call.replace("city", "town"))
    assert not model.accepts(held, f"{header}{FINAL}No.")
    parser = ToolCallParser(HARMONY)
    events = [*parser.push(split([header + call])[1]), *parser.finish()]
    assert [event.name for event in events if isinstance(event, CallBegun)] == ["get_weather"]
    assert "".join(event.text for event in events if isinstance(event, CallArguments)) == '{"city": "Paris"}'
