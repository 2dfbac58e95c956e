"""Reasoning and answer: told apart the same way however the text comes, and nothing of either is lost."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.errors import SetupError
from twostep.text.chat_format import REASONING_FORMATS, reasoning_format
from twostep.text.reasoning import Begun, ReasoningFormat, ReasoningSplitter

FORMATS = [REASONING_FORMATS["qwen3"], REASONING_FORMATS["mistral"], REASONING_FORMATS["deepseek_r1"]]


def split(format: ReasoningFormat, pieces: list[str], *, begun: bool = False) -> tuple[str, str, bool]:
    splitter = ReasoningSplitter(format, begun=begun)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    answered = False
    for part in parts:
        assert not (answered and part.reasoning), "no reasoning follows text"
        answered |= bool(part.text)
    return "".join(p.reasoning for p in parts), "".join(p.text for p in parts), splitter.opened


def expected(format: ReasoningFormat, text: str, begun: bool) -> tuple[str, str, bool]:
    """Splits the whole text at once."""
    opening, closing = re.escape(format.opening), re.escape(format.closing)
    found = re.match(rf"(\s{{0,16}}){opening}", text)
    if found:
        rest = text[found.end() :]
    elif begun and text:
        rest = text
    else:
        return "", text, False
    rest = rest.removeprefix("\n")
    inside, marker, after = rest.partition(format.closing)
    if not marker:
        return inside, "", True
    assert re.search(closing, rest)
    return inside.removesuffix("\n"), re.sub(r"\A\n{1,2}", "", after), True


texts = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "[THINK]",
                "[/THINK]",
                "\n",
                "\n\n",
                " ",
                "<",
                "</",
                "think>",
                "[",
                "</thi",
                "nk>",
                "a",
                "so be it",
                "🙂",
            ]
        ),
        st.text(max_size=5),
    ),
    max_size=14,
).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=200)
@given(st.sampled_from(FORMATS), texts, st.lists(st.integers(0, 1000), max_size=20), st.booleans())
def test_however_the_text_is_cut(format: ReasoningFormat, text: str, places: list[int], begun: bool) -> None:
    whole = split(format, [text], begun=begun)
    assert split(format, list(text), begun=begun) == split(format, cut(text, places), begun=begun) == whole
    assert whole == expected(format, text, begun)


@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "answer"),
    [
        ("<think>\nLet me see.\n</think>\n\nIt is 4.", False, "Let me see.", "It is 4."),
        ("Let me see.\n</think>\n\nIt is 4.", True, "Let me see.", "It is 4."),
        ("It is 4, <think> is a tag.", False, "", "It is 4, <think> is a tag."),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<think>never done", False, "never done", ""),
        ("<think>a</think>\n\n\nb", False, "a", "\nb"),
    ],
)
def test_examples(text: str, begun: bool, reasoning: str, answer: str) -> None:
    assert split(FORMATS[0], [text], begun=begun)[:2] == (reasoning, answer)


def test_text_is_not_kept_waiting() -> None:
    splitter = ReasoningSplitter(FORMATS[0], begun=False)
    assert splitter.push("<think>") == ("", "")
    assert splitter.thinking
    assert splitter.push("one < two") == ("one < two", "")
    assert splitter.push(" </th") == (" ", "")
    assert splitter.push("at") == ("</that", "")
    assert splitter.push("</think>") == ("", "")
    assert not splitter.thinking
    assert splitter.push("It") == ("", "It")
    assert splitter.settled
    assert splitter.push("\n</think>") == ("", "\n</think>")


@pytest.mark.parametrize(
    ("name", "prompt", "continued", "begun"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", None, Begun.YES),
        ("qwen3", "<|im_start|>assistant\n", None, Begun.NOT_YET),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", None, Begun.OVER),
        ("qwen3", "<|im_start|>assistant\n<think>I wonder", "<think>I wonder", Begun.YES),
        ("qwen3", "<|im_start|>assistant\n<think>I wonder</think>So", "<think>I wonder</think>So", Begun.OVER),
        ("qwen3", "<|im_start|>assistant\nSo", "So", Begun.OVER),
        ("qwen3", "<|im_start|>assistant\n", "", Begun.NOT_YET),
        ("deepseek_r1", "Assistant:", None, Begun.YES),
        ("deepseek_r1", "Assistant: <think></think>", None, Begun.OVER),
        ("deepseek_r1", "Assistant: The", "The", Begun.OVER),
    ],
)
def test_what_the_prompt_begins(name: str, prompt: str, continued: str | None, begun: Begun) -> None:
    assert REASONING_FORMATS[name].begun_in(prompt, continued) is begun


def test_parsers_by_name() -> None:
    assert reasoning_format("auto", "{{ x.split('</think>') }}") == REASONING_FORMATS["qwen3"]
    assert reasoning_format("auto", "[THINK]{{ x }}[/THINK]") == REASONING_FORMATS["mistral"]
    assert reasoning_format("auto", "{{ messages }}") is None
    assert reasoning_format("auto", None) is None
    assert reasoning_format("none", "</think>") is None
    assert reasoning_format("deepseek_r1", None) == REASONING_FORMATS["deepseek_r1"]
    with pytest.raises(SetupError, match="qwen3"):
        reasoning_format("gpt", None)
