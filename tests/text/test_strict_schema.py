"""The strict reading of schemas, as llguidance has it: what an answer may and may not have in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.errors import InvalidRequest
from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.grammar import library
from twostep.text.strict_schema import closed, strict

STRING = {"type": "string"}
_KEYS = (*("properties", "patternProperties", "$defs", "required", "allOf", "anyOf", "if"), *("items", "prefixItems", "$ref"))


def schemas_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(_KEYS), inner | st.sampled_from(["#", "#/properties/a", "#/$defs/allOf"]), max_size=4)


BYTES = llguidance.LLTokenizer("byte")


def an_object(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, STRING), **more}


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    compact = {**schema, "x-guidance": {"whitespace_flexible": False, "coerce_one_of": True}}
    matcher = library().LLMatcher(BYTES, library().LLMatcher.grammar_from_json_schema(json.dumps(compact)))
    assert not matcher.get_error()
    tokens = BYTES.tokenize_str(json.dumps(value, separators=(",", ":")))
    return bool(matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting())


A = {"$ref": "#/$defs/a"}
DEFS = {"$defs": {"a": an_object("a", required=["a"]), "b": an_object("b")}}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (an_object("a"), [{"a": "x"}, {}], [{"b": 1}, {"a": "x", "b": 1}]),
        ({"type": "array", "items": an_object("a")}, [[{"a": "x"}]], [[{"b": 1}]]),
        (an_object("a", additionalProperties={"type": "integer"}), [{"a": "x", "b": 1}], [{"b": "x"}]),
        (an_object("a", additionalProperties=True), [{"a": "x", "b": 1}], []),
        ({"type": "object"}, [{"any": 1}], [3]),
        ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
        ({"type": "object", "patternProperties": {"^a": STRING}}, [{"ab": "x"}], [{"b": "x"}]),
        (an_object("a", required=["a", "z"]), [{"a": "x", "z": 1}], [{"a": "x", "z": 1, "b": 2}]),
        ({"anyOf": [an_object("a"), {"type": "null"}]}, [{"a": "x"}, None], [{"b": 1}]),
        (
            {"properties": {"p": {"default": None, "anyOf": [A, {"type": "null"}]}}, **DEFS},
            [{"p": {"a": "x"}}],
            [{"p": {"a": "x", "b": 1}}],
        ),
        ({**DEFS, "$ref": "#/$defs/a", "description": "said of it"}, [{"a": "x"}], [{"a": "x", "b": 1}]),
        # Several schemas hold for one value: all of their names are known.
        ({"allOf": [an_object("a"), an_object("b")]}, [{"a": "x", "b": "y"}, {"b": "y"}], [{"a": "x", "c": 1}]),
        ({"allOf": [A, {"$ref": "#/$defs/b"}], **DEFS}, [{"a": "x", "b": "y"}], [{"a": "x", "c": 1}, {"b": "y"}]),
        ({**an_object("c"), **A, **DEFS}, [{"c": "y", "a": "x"}], [{"a": "x", "b": "y"}]),
        (
            {**an_object("k"), "anyOf": [A, {"$ref": "#/$defs/b"}], **DEFS},
            [{"k": "x", "a": "y"}, {"k": "x", "b": "y"}],
            [{"k": "x", "c": "y"}],
        ),
        ({"allOf": [A, an_object("p", additionalProperties=True)], **DEFS}, [{"a": "x", "c": 1}], []),
        # The same definition by itself is closed all the same.
        (
            {"properties": {"p": A, "q": {"allOf": [A, an_object("c")]}}, **DEFS},
            [{"p": {"a": "x"}, "q": {"a": "x", "c": "y"}}],
            [{"p": {"a": "x", "c": "y"}}],
        ),
        ({"type": "array", "prefixItems": [STRING, STRING]}, [["a", "b"]], [["a", "b", 3]]),
        (
            {"$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}}, "$ref": "#/$defs/tree"},
            [{"left": {"left": {}}}],
            [{"left": {"right": {}}}],
        ),
    ],
)
def test_what_is_not_named_is_not_there(schema: dict[str, Any], valid: list[Any], invalid: list[Any]) -> None:
    for value in valid:
        assert is_valid(schema, value)
        assert is_valid(closed(schema), value), value
    for value in invalid:
        assert not is_valid(closed(schema), value), value


@given(
    st.recursive(
        st.sampled_from([STRING, {}, True]),
        lambda inner: (
            st.builds(
                lambda given, key: {key: given},
                st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
                st.sampled_from(["properties", "$defs"]),
            )
            | st.builds(
                lambda given, key: {key: given, **A}, st.lists(inner, max_size=3), st.sampled_from(["allOf", "anyOf", "prefixItems"])
            )
        ),
        max_leaves=12,
    ).filter(lambda schema: isinstance(schema, dict))
)
def test_it_is_read_once(schema: dict[str, Any]) -> None:
    """A schema that is closed already stays as it is, but for what nobody refers to any more."""
    once = closed(schema)
    assert closed(once) == once


class Counting(dict[str, Any]):
    """Counts how often schemas are looked into."""

    looks = 0

    def __getitem__(self, key: str) -> Any:
        Counting.looks += 1
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        Counting.looks += 1
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        Counting.looks += 1
        return super().__contains__(key)


def looks_into(schema: dict[str, Any]) -> int:
    counted = json.loads(json.dumps(schema), object_hook=Counting)
    Counting.looks = 0
    closed(counted)
    return Counting.looks


def doubled(depth: int) -> dict[str, Any]:
    """Each definition twice the next one: 2 ** depth paths."""
    defs = {f"l{i}": {"allOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**defs, f"l{depth}": an_object("a")}, "$ref": "#/$defs/l0"}


def chained(depth: int) -> dict[str, Any]:
    """Each definition the next one and more: no path twice."""
    defs = {f"l{i}": {**an_object("p"), "allOf": [{"$ref": f"#/$defs/l{i + 1}"}]} for i in range(depth)}
    return {"$defs": {**defs, f"l{depth}": an_object("a")}, "$ref": "#/$defs/l0"}


def circular(size: int) -> dict[str, Any]:
    defs = {f"l{i}": {**an_object("p"), "anyOf": [{"$ref": f"#/$defs/l{each % size}"} for each in (i + 1, i * 7)]} for i in range(size)}
    return {"$defs": defs, "$ref": "#/$defs/l0"}


def fanned(size: int) -> dict[str, Any]:
    """Many that refer to one of many parts."""
    big = {"allOf": [{"$ref": f"#/$defs/p{i}"} for i in range(size)]}
    parts = {f"p{i}": an_object("a") for i in range(size)}
    return {"$defs": {**parts, "big": big}, "properties": {f"q{i}": {**an_object("b"), "$ref": "#/$defs/big"} for i in range(size)}}


@pytest.mark.parametrize("schema_of", [doubled, chained, circular, fanned])
def test_the_work_grows_with_the_schema_and_no_faster(schema_of: Callable[[int], dict[str, Any]]) -> None:
    small, large = looks_into(schema_of(16)), looks_into(schema_of(1600))
    assert large <= 200 * small, (small, large)


@pytest.mark.parametrize("schema_of", [doubled, chained, fanned])
def test_what_refers_to_each_other_is_closed_all_the_same(schema_of: Callable[[int], dict[str, Any]]) -> None:
    schema = schema_of(3)
    value: dict[str, Any] = {"q0": {"b": "x", "a": "x"}} if schema_of is fanned else {"a": "x"} if schema_of is doubled else {"p": "x"}
    assert is_valid(closed(schema), value)
    assert not is_valid(closed(schema), value | {"other": 1})


def test_names_that_are_inherited_over_and_over_are_refused() -> None:
    """Written out they would be a hundred times as long as the schema."""
    defs = {f"l{i}": {**an_object(f"p{i}"), "allOf": [{"$ref": f"#/$defs/l{i + 1}"}]} for i in range(2000)}
    with pytest.raises(InvalidRequest, match="inherit"):
        closed({"$defs": defs, "$ref": "#/$defs/l0"})


@given(st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3) | schemas_of(inner)))
def test_a_schema_that_is_none_is_left_to_who_reads_it(value: Any) -> None:
    """Members of a wrong type are no reason to fail."""
    if isinstance(value, dict):
        closed(value)


def test_what_is_no_schema() -> None:
    for text in ("[", "3", '"x"', "[" * 200 + "]" * 200):
        with pytest.raises(InvalidRequest):
            strict(Grammar(GrammarKind.JSON_SCHEMA, text))
    for grammar in (Grammar(GrammarKind.REGEX, "a+"), Grammar(GrammarKind.JSON_OBJECT)):
        assert strict(grammar) == grammar
