"""Calls with a tag that is missing, doubled, misplaced or cut: the others are found all the same, and no argument swallows a tag."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tool_calls import cut, read
from written_calls import WRITTEN

from twostep.text.tool_calls import TOOL_CALL_FORMATS

# Where calls follow each other without a mark, nothing but the first one's own end tells where the second begins.
MARKS = {"llama3_json": "<|python_tag|>", "llama4_json": "<|python_start|>", "pythonic": "<|python_start|>"}
TAGS = re.compile(r"</?\w+>|<\w+=\w*>?|<\|\w+\|>|<｜[^｜]+｜>|\[[A-Z_]+\]")
arguments = st.fixed_dictionaries(
    {},
    optional={
        "a": st.sampled_from(["Rome", "", "größte 🙂", 'say "x"', "it's", ",", "1\n2"]),
        "n": st.integers(-9, 999),
        "b": st.booleans(),
        "l": st.lists(st.sampled_from(["x", '"', "a, b", "}"]), max_size=2),
        "o": st.dictionaries(st.sampled_from("kl"), st.none() | st.integers(0, 9), max_size=2),
    },
)
call = st.tuples(st.sampled_from(["f", "g"]), arguments)


def damaged(text: str, draw: st.DrawFn) -> str:
    tags = list(TAGS.finditer(text))
    kind = draw(st.sampled_from(["cut", "missing", "doubled", "swapped", "half"]))
    at = draw(st.integers(0, len(text)))
    if kind == "cut" or not tags:
        return text[:at]
    tag, other = sorted(draw(st.tuples(st.sampled_from(tags), st.sampled_from(tags))), key=lambda found: found.start())
    if kind == "swapped" and tag.end() <= other.start():
        return text[: tag.start()] + other.group() + text[tag.end() : other.start()] + tag.group() + text[other.end() :]
    middle = {"missing": "", "half": tag.group()[: draw(st.integers(1, len(tag.group()) - 1))]}.get(kind, 2 * tag.group())
    return text[: tag.start()] + middle + text[tag.end() :]


@st.composite
def answers(draw: st.DrawFn, name: str) -> tuple[str, list[list[tuple[str, dict[str, Any]]]]]:
    """Calls of which one is damaged, and those before and behind it."""
    before, behind = draw(st.lists(call, max_size=2)), draw(st.lists(call, min_size=1, max_size=2))
    between = draw(st.sampled_from(["\n", "", " "]))

    def write(one: tuple[str, dict[str, Any]]) -> str:
        return MARKS.get(name, "") + WRITTEN[name]([one])

    parts = [*map(write, before), damaged(write(draw(call)), draw), *map(write, behind)]
    return between.join(parts), [before, behind]


@pytest.mark.parametrize("name", WRITTEN)
def test_one_damaged_call_is_all_that_is_lost(name: str) -> None:
    format = TOOL_CALL_FORMATS[name.removesuffix("[ARGS]")]

    @settings(max_examples=60)
    @given(answers(name), st.lists(st.integers(0, 1000), max_size=20))
    def check(answer: tuple[str, list[list[tuple[str, dict[str, Any]]]]], places: list[int]) -> None:
        text, (before, behind) = answer
        found = read(format, list(text), names=("f", "g"))
        assert read(format, [text], names=("f", "g")) == found == read(format, cut(text, places), names=("f", "g"))
        calls = [(function, told) for _, function, told in found.calls]
        for function, told in calls:
            assert not TAGS.search(function)
            assert not TAGS.search(told), told
        whole = [(function, json.loads(told)) for function, told in calls[: len(before)]]
        assert whole == before
        assert [(function, json.loads(told)) for function, told in calls[len(calls) - len(behind) :]] == behind
        # One whose opening is doubled may be two.
        assert len(calls) <= len(before) + 2 + len(behind)

    check()
