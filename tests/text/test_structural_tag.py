"""Structural tags: which answers they allow, tried with llguidance over bytes."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from twostep.errors import InvalidRequest
from twostep.text.structural_tag import structural_tag_grammar

BYTES = llguidance.LLTokenizer("byte")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
LEGACY = {
    "type": "structural_tag",
    "structures": [{"begin": f"<function={name}>", "schema": SCHEMA, "end": "</function>"} for name in ("f", "g")],
    "triggers": ["<function="],
}
TAGS = [{"begin": f"<function={name}>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</function>"} for name in "fg"]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<function="], "tags": TAGS}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
CALL, OTHER = '<function=f>{"n": 1}</function>', '<function=g>{"n":2}</function>'


def allows(given: dict[str, Any], text: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES, llguidance.grammar_from("lark", structural_tag_grammar(given)))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize("given", [LEGACY, {"format": TRIGGERED}], ids=["structures", "format"])
def test_free_text_with_calls_in_it(given: dict[str, Any]) -> None:
    for text in ("", "Hello, größer.", "a < b", CALL, f"I look.\n{CALL} and {OTHER}!", f"{CALL}{OTHER}"):
        assert allows(given, text), text
    for text in ("<function=h>", '<function=f>{"n": "x"}</function>', "<function=f>{}", f"{CALL}<function=", f"{CALL[:-1]} more"):
        assert not allows(given, text), text


@pytest.mark.parametrize(
    ("node", "allowed", "refused"),
    [
        (TRIGGERED | {"at_least_one": True}, [f"Well: {CALL}", f"{CALL}{OTHER}."], ["Hello.", ""]),
        (TRIGGERED | {"stop_after_first": True}, ["Hello.", f"a {CALL}"], [f"{CALL}.", f"{CALL}{OTHER}"]),
        ({"type": "tags_with_separator", "tags": TAGS, "separator": ", "}, ["", CALL, f"{CALL}, {OTHER}"], ["x", f"{CALL}{OTHER}"]),
        ({"type": "tags_with_separator", "tags": TAGS, "separator": "", "at_least_one": True}, [f"{CALL}{OTHER}"], [""]),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "</think>"}, JSON]},
            ['Hm.</think>{"n": 1}', '</think>{"n":1}'],
            ['{"n": 1}', "Hm.</think>x"],
        ),
        (
            {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": ["</think>", "</thought>"]},
            ["<think>so</think>", "<think></thought>"],
            ["so</think>", "<think>so", "<think>so</think>."],
        ),
        (
            {"type": "or", "elements": [{"type": "regex", "pattern": "[a-c]+/"}, {"type": "const_string", "value": 'say "yes"\n'}]},
            ["abc/", 'say "yes"\n'],
            ["d/", "say"],
        ),
    ],
)
def test_formats(node: dict[str, Any], allowed: list[str], refused: list[str]) -> None:
    for text in allowed:
        assert allows({"format": node}, text), text
    for text in refused:
        assert not allows({"format": node}, text), text


NESTED: dict[str, Any] = {"type": "any_text"}
for _ in range(40):
    NESTED = {"type": "or", "elements": [NESTED]}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"structures": [], "triggers": ["<"]},
        LEGACY | {"triggers": ["<tool="]},
        LEGACY | {"triggers": []},
        {"format": {"type": "qwen_xml_parameter", "json_schema": SCHEMA}},
        {"format": {"type": "sequence", "elements": [{"type": "any_text"}, JSON]}},
        {"format": {"type": "json_schema", "json_schema": "x"}},
        {"format": {"type": "const_string", "value": 1}},
        {"format": NESTED},
        {"format": []},
    ],
    ids=lambda given: json.dumps(given)[:40],
)
def test_what_has_no_such_form_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        structural_tag_grammar(given)
