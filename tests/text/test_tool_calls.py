"""Tool calls in text: found however the text comes, streamed, and what is no call is content, every character of it, once."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, pairwise

import pytest
from chat_templates import TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st
from written_calls import CALL, CALL_END, CALLS, CALLS_END, SEP, WRITTEN, coder, glm, v3, v31

from twostep.errors import SetupError
from twostep.text.chat_template import ChatTemplate
from twostep.text.tool_calls import TOOL_CALL_FORMATS, ToolCallParser, tool_call_format
from twostep.text.tool_formats.events import CallArguments, CallBegun, ContentDelta
from twostep.text.tool_formats.format import ToolCallFormat
from twostep.text.tool_formats.json_calls import DEEPSEEK_V3, DEEPSEEK_V31, HERMES, LLAMA3_JSON, LLAMA4_JSON, MISTRAL
from twostep.text.tool_formats.pythonic import PYTHONIC
from twostep.text.tool_formats.tagged_calls import GLM45, QWEN3_CODER

FORMATS = list(dict.fromkeys(TOOL_CALL_FORMATS.values()))
SCHEMA = {
    "properties": {
        "a": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "l": {"$ref": "#/$defs/list"},
        "o": {"type": "object"},
        "u": {},
        "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "t": {"type": ["string", "integer"]},
    },
    "$defs": {"list": {"type": "array", "items": {"type": "string"}}},
}


@dataclass
class Found:
    content: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)


def read(
    format: ToolCallFormat,
    pieces: list[str],
    *,
    names: tuple[str, ...] = (),
    parallel: bool = True,
    must: bool = False,
    cut_off: bool = False,
) -> Found:
    """Checks the order of events on the way."""
    numbers = count()
    functions = dict.fromkeys(names, lambda: SCHEMA)
    parser = ToolCallParser(format, functions=functions, parallel=parallel, must=must, new_id=lambda: f"id{next(numbers)}")
    found = Found()
    for events in [*map(parser.push, pieces), parser.finish(cut=cut_off)]:
        for event in events:
            match event:
                case ContentDelta(text):
                    assert text
                    found.content += text
                case CallBegun(index, call_id, name):
                    assert index == len(found.calls)
                    found.calls.append((call_id, name, ""))
                case CallArguments(index, text):
                    assert text
                    assert index == len(found.calls) - 1, "arguments are of the call that has begun last"
                    call_id, name, arguments = found.calls[index]
                    found.calls[index] = (call_id, name, arguments + text)
    assert parser.num_calls == len(found.calls)
    return found


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(edges)]


_FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '{"name": "f"', '{"answer": 42}', "{",
    "}", "[", "]", ",", ";", '"', "\\", ":", " ", "\n", "f", "<", "<tool", "null", "text", "🙂é",
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "g", "parameters": {"b": "}"}}',
    '{"arguments": {"x": [1, 2]}, "name": "h"}',
    '{"name": "f", "arguments": "{\\"a\\": 1}"}',
    '{"name": "f", "arguments": {"a": oops}}',
    '{"id": "x", "name": "f", "arguments": {"a": 1}, "id": "abc", "more": [{}]}',
    '{"name": "f", "arguments": {"a": 1}, "id": oops',
    '"arguments": {"a": "\\"',
    "<function=f>", "<parameter=a>", "\n</parameter>", "</function>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<function=",
    CALLS, CALL, "function", SEP, "```json\n", "```", CALL_END, CALLS_END, "[f(", "f()", "a=", "=", "(", ")", "'", "True", "\\u00e", "9",
    "<|python_start|>", "<|python_end|>",
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(_FRAGMENTS), st.text(max_size=4)), max_size=12).map("".join)
arguments = st.sampled_from(['{"a": 1}', "{}", '{"b": {"c": "}"}}', "{"])
values = st.sampled_from([
    "Rome", "5", "-0.5e3", "True", "null", '["a", "</parameter>"]', "{'k': (1, None,)}", "", " x\n", '"q\\""', "'it\\'s \\x41\\u00e9'",
    '"\\ud83d\\ude00\\ud83d"', "[1, 2", "é🙂", "a=1)", '"""a"b\\\n"""', "5 6", '"x" y',
])  # fmt: skip
# Calls as models write them, now and then with something missing.
objects = st.sampled_from([fragment for fragment in _FRAGMENTS if fragment.startswith("{") and len(fragment) > 1])
written = st.one_of(
    st.lists(objects, min_size=1, max_size=3).map(lambda o: "".join(f"<tool_call>\n{each}\n</tool_call>\n" for each in o)),
    st.lists(objects, min_size=1, max_size=3).map(lambda o: f"<tool_call>[{', '.join(o)}]</tool_call>"),
    st.lists(objects, min_size=1, max_size=3).map(lambda o: f"[TOOL_CALLS] [{', '.join(o)}]"),
    st.lists(arguments, max_size=3).map(lambda o: "".join(f"[TOOL_CALLS]f_1[ARGS]{each}" for each in o)),
    st.lists(objects, min_size=1, max_size=3).map("; ".join),
    objects.map(lambda o: f"<|python_tag|>{o}"),
    st.lists(values, min_size=1, max_size=3).map(lambda v: "\n".join(coder("f", a=each, n=each, m=each) for each in v)),
    st.lists(values, min_size=1, max_size=3).map(lambda v: "\n".join(glm("f", a=each, l=each, u=each) for each in v)),
    st.lists(values, min_size=1, max_size=3).map(lambda v: f"[{', '.join(f'f(a={each}, b={each}, u={each})' for each in v)}]"),
    st.lists(arguments, max_size=3).map(lambda a: v3(*(("f", each) for each in a))),
    st.lists(arguments, max_size=3).map(lambda a: v31(*(("f", each) for each in a))),
)
anything = st.one_of(texts, st.tuples(st.one_of(st.just(""), texts), written, st.one_of(st.just(""), texts)).map("".join))


@settings(max_examples=150)
@given(st.sampled_from(FORMATS), anything, st.lists(st.integers(0, 1000), max_size=20), st.booleans(), st.booleans(), st.booleans())
def test_however_the_text_is_cut(format: ToolCallFormat, text: str, places: list[int], parallel: bool, typed: bool, cut_off: bool) -> None:
    def found(pieces: list[str]) -> Found:
        return read(format, pieces, names=("f", "g") if typed else (), parallel=parallel, cut_off=cut_off)

    assert found(list(text)) == found(cut(text, places)) == found([text])


# Without what could hide a word in a part of a call that nobody reads.
_OPEN_FRAGMENTS = [fragment for fragment in _FRAGMENTS if fragment not in ('"', '"arguments": {"a": "\\"')]


@settings(max_examples=150)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.one_of(st.sampled_from(_OPEN_FRAGMENTS), written, st.none()), max_size=12),
)
def test_nothing_is_lost_and_nothing_comes_twice(format: ToolCallFormat, fragments: list[str | None]) -> None:
    """None: a word that stands in the text once, outside of what calls are made of."""
    words = [f"#{i}#" for i in range(len(fragments))]
    text = "".join(word if fragment is None else fragment for word, fragment in zip(words, fragments, strict=True))
    found = read(format, list(text))
    if not found.calls:
        assert found.content == text
    out = found.content + "".join(arguments for _, _, arguments in found.calls)
    for word, fragment in zip(words, fragments, strict=True):
        assert out.count(word) == (fragment is None), word


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
        (
            HERMES,
            'Let me look.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n'
            '<tool_call>{"name":"g","arguments":{"s":"</tool_call>"}}</tool_call>\n',
            "Let me look.\n",
            [("f", "{}"), ("g", '{"s":"</tool_call>"}')],
        ),
        (HERMES, '<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>', "", [("f", '{"a": [1, {}]}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (
            HERMES,
            '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        # The end is missing, or the closing tag.
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "un', "", [("f", '{"a": "un')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
        # No call: content.
        (HERMES, "<tool_call>f(x)</tool_call>", "<tool_call>f(x)</tool_call>", []),
        (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
        (HERMES, '<tool_call>{"name": "f", "arguments": 5}</tool_call>', '<tool_call>{"name": "f", "arguments": 5}</tool_call>', []),
        (HERMES, '<tool_call>oops<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>oops", [("f", "{}")]),
        # What a call has beyond itself is said, not lost.
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}}</tool_call>done', "}done", [("f", "{}")]),
        # Once it has begun, arguments are the model's: as it wrote them.
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', "", [("f", '{"a": oops}')]),
        (LLAMA3_JSON, '{"name": "f", "parameters": {"a": "é}"}}', "", [("f", '{"a": "é}"}')]),
        (LLAMA3_JSON, '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        (
            LLAMA3_JSON,
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
            "",
            [("f", "{}"), ("g", '{"b": 2}')],
        ),
        (LLAMA3_JSON, '{"name": "f", "parameters": {}} and so on', " and so on", [("f", "{}")]),
        (LLAMA3_JSON, 'Look: <|python_tag|>{"name": "f", "parameters": {}}', "Look: ", [("f", "{}")]),
        (LLAMA3_JSON, '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        (LLAMA3_JSON, '{"name": "Ada"}', '{"name": "Ada"}', []),
        (LLAMA3_JSON, 'It is {"name": "f", "parameters": {}}', 'It is {"name": "f", "parameters": {}}', []),
        (LLAMA4_JSON, '<|python_start|>{"name": "f", "parameters": {}}<|python_end|>', "", [("f", "{}")]),
        (LLAMA4_JSON, '<|python_start|><|python_end|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (LLAMA3_JSON, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
        (
            MISTRAL,
            '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": [2]}}]',
            "",
            [("f", "{}"), ("g", '{"b": [2]}')],
        ),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{"b": 2}', "", [("f", '{"a": 1}'), ("g", '{"b": 2}')]),
        (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        (MISTRAL, "[TOOL_CALLS] is a token", "[TOOL_CALLS] is a token", []),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, oops', ", oops", [("f", "{}")]),
        (DEEPSEEK_V3, "So.\n" + v3(("f", '{"a": 1}'), ("g", "{}")), "So.\n", [("f", '{"a": 1}'), ("g", "{}")]),
        (DEEPSEEK_V3, f'{CALL}function{SEP}f\n```json\n{{"a": "```"}}\n```', "", [("f", '{"a": "```"}')]),
        (DEEPSEEK_V3, f"{CALLS}{CALL}function{SEP}f\noops{CALL_END}", f"{CALLS}{CALL}function{SEP}f\noops{CALL_END}", []),
        (DEEPSEEK_V31, v31(("f", '{"a": 1}'), ("g", "{}")), "", [("f", '{"a": 1}'), ("g", "{}")]),
        # Either is read as the other.
        (DEEPSEEK_V3, v31(("f", '{"a": 1}')), "", [("f", '{"a": 1}')]),
        (DEEPSEEK_V31, v3(("f", '{"a": 1}')), "", [("f", '{"a": 1}')]),
        (QWEN3_CODER, "So.\n\n" + coder("f", a=" x\ny\n") + "\n" + coder("g"), "So.\n\n", [("f", '{"a": " x\\ny\\n"}'), ("g", "{}")]),
        (
            QWEN3_CODER,
            coder("f", a="5", n="5", x="5", l='["</parameter>"]'),
            "",
            [("f", '{"a": "5", "n": 5, "x": 5, "l": ["</parameter>"]}')],
        ),
        # The outer tag is missing, or what ends it.
        (QWEN3_CODER, coder("f", a="x").removeprefix("<tool_call>\n"), "", [("f", '{"a": "x"}')]),
        (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=a>\nx", "", [("f", '{"a": "x"}')]),
        (QWEN3_CODER, "<function=f>\n<parameter=n>\n3\n</parameter>\n", "", [("f", '{"n": 3}')]),
        (QWEN3_CODER, "<tool_call>\n<function=a b>", "<tool_call>\n<function=a b>", []),
        (QWEN3_CODER, "<function=f>\nwell</function>\n</tool_call>", "well</function>\n", [("f", "{}")]),
        (QWEN3_CODER, "Say <function=h>", "Say <function=h>", []),
        (GLM45, "\n" + glm("f", a="x\n", n="5") + "\n" + glm("g"), "", [("f", '{"a": "x\\n", "n": 5}'), ("g", "{}")]),
        (GLM45, glm("f", a="x").replace("\n", ""), "", [("f", '{"a": "x"}')]),
        (GLM45, "<tool_call>f is one</tool_call>", "<tool_call>f is one</tool_call>", []),
        (GLM45, "<tool_call>f\n<arg_key>a</arg_key>oops", "<arg_key>a</arg_key>oops", [("f", "{}")]),
        (PYTHONIC, "[f(a='it\\'s \\u00e9', n=5), g()]", "", [("f", '{"a": "it\'s é", "n": 5}'), ("g", "{}")]),
        (PYTHONIC, "<|python_start|>[f(n = '5', a=5,)]<|python_end|>", "", [("f", '{"n": 5, "a": "5"}')]),
        (PYTHONIC, "[f(l=['a', \"b)\"], u={'k': (1, None)})] so", " so", [("f", '{"l": ["a", "b)"], "u": {"k": [1, null]}}')]),
        (PYTHONIC, "[f(a=Rome, n=1 + 1)]", "", [("f", '{"a": "Rome", "n": "1 + 1"}')]),
        (PYTHONIC, "[f(a='x' \"y\"\n'''z''', n=+2)]", "", [("f", '{"a": "xyz", "n": 2}')]),
        (
            PYTHONIC,
            "[f(n=1_000, x=-0x10, u=['a' 'b', 1_0, (5), (5,)], a=0x10)]",
            "",
            [("f", '{"n": 1000, "x": -16, "u": ["ab", 10, 5, [5]], "a": "0x10"}')],
        ),
        (PYTHONIC, "[f(u=5 6, n=1(2))]", "", [("f", '{"u": "5 6", "n": "1(2)"}')]),
        # A value whose closing tag is missing ends before the next tag.
        (QWEN3_CODER, "<function=f>\n<parameter=a>\nx\n</function>\n<function=g>\n</function>", "", [("f", '{"a": "x"}'), ("g", "{}")]),
        (QWEN3_CODER, "<function=f>\n<parameter=a>\nx\n<parameter=n>\n5\n</tool_call>", "", [("f", '{"a": "x", "n": 5}')]),
        (
            QWEN3_CODER,
            '<function=f>\n<parameter=l>\n["</parameter>", "x\n</parameter>\n</function>',
            "",
            [("f", '{"l": "[\\"</parameter>\\", \\"x"}')],
        ),
        (GLM45, "<tool_call>f\n<arg_key>a<arg_value>x\n<arg_key>n</arg_key><arg_value>5</tool_call>", "", [("f", '{"a": "x", "n": 5}')]),
        (GLM45, "<tool_call>f\n<arg_key>a\n<arg_value>x\n<tool_call>g\n</tool_call>", "", [("f", '{"a": "x"}'), ("g", "{}")]),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
            "",
            [("f", '{"a": "x'), ("g", "{}")],
        ),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": "<tool_call> and </tool_call>"  }}</tool_call>',
            "",
            [("f", '{"a": "<tool_call> and </tool_call>"  }')],
        ),
        (PYTHONIC, "[f(5)]", "[f(5)]", []),
        (PYTHONIC, "[h(a=5)]", "[h(a=5)]", []),
        (PYTHONIC, "Call [f(a=5)]", "Call [f(a=5)]", []),
    ],
)
def test_examples(format: ToolCallFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    found = read(format, list(text), names=("f", "g", "Ada"))
    assert (found.content, [(name, arguments) for _, name, arguments in found.calls]) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a", "5", "5"),
        ("a", '"x"', '"x"'),
        ("a", "a\t\\b", "a\t\\b"),
        ("n", "5", 5),
        ("n", "5.0", 5.0),
        ("n", "+2", 2),
        ("n", "1_000", 1000),
        ("n", "007", "007"),
        ("n", "5 6", "5 6"),
        ("x", "1_0.5", 10.5),
        ("t", "+49", "+49"),
        ("n", "5.5", "5.5"),
        ("n", "many", "many"),
        ("x", "-1e3", -1000),
        ("x", "NaN", "NaN"),
        ("b", "True", True),
        ("b", "false", False),
        ("b", "1", "1"),
        ("l", '["a", {}]', ["a", {}]),
        ("l", "('a', None,)", ["a", None]),
        ("l", "[1, 2", "[1, 2"),
        ("l", '{"a": 1}', '{"a": 1}'),
        ("o", "{'it': 'is \"x\" \\x41'}", {"it": 'is "x" A'}),
        ("o", "{" * 100_000, "{" * 100_000),
        ("u", '{"a": [1]}', {"a": [1]}),
        ("u", "True", "True"),
        ("u", "Rome", "Rome"),
        ("m", "null", None),
        ("m", "None", None),
        ("m", "nothing", "nothing"),
        ("m", "5", "5"),
        ("other", "5", 5),
    ],
)
@pytest.mark.parametrize(("format", "write"), [(QWEN3_CODER, coder), (GLM45, glm)])
def test_values_have_the_types_of_the_schema(
    format: ToolCallFormat, write: Callable[..., str], name: str, text: str, expected: object
) -> None:
    answer = write("f", **{name: text})
    [(_, _, arguments)] = read(format, [answer[i : i + 1000] for i in range(0, len(answer), 1000)], names=("f",)).calls
    if len(text) < 1000:
        assert json.loads(arguments) == {name: expected}
    else:
        assert arguments == f'{{"{name}": {text}}}', "too long to be looked at goes on as it is"


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
spelled = st.one_of(
    literals.map(repr),
    st.integers(0, 1 << 70).map(lambda n: f"{n:_}"),
    st.tuples(st.sampled_from(["", "+", "-", "- "]), st.integers(0, 99), st.sampled_from(["d", "#x", "#o", "#b", "#X"])).map(
        lambda parts: parts[0] + format(parts[1], parts[2])
    ),
    st.lists(st.text(max_size=4).map(repr), min_size=1, max_size=3).map(" ".join),
    st.lists(st.text(max_size=4).map(repr), min_size=1, max_size=3).map(lambda parts: f"[({' '.join(parts)}), ({parts[0]},), 1_0.5]"),
    st.sampled_from([".5", "1.", "1_0e2", "(1)", "((1), 2)", "{'a': +1}", "'''a\nb''' 'c'"]),
)


@given(spelled)
def test_pythonic_values_are_what_python_reads(text: str) -> None:
    [(_, _, arguments)] = read(PYTHONIC, list(f"[f(u={text})]"), names=("f",)).calls
    # JSON has no tuples.
    assert json.loads(arguments) == json.loads(json.dumps({"u": ast.literal_eval(text)}))


# Of types that text is told from; a value that looks as what comes after it is no template's to write.
typed = st.fixed_dictionaries(
    {},
    optional={
        "a": st.text(max_size=8).filter(lambda text: "</" not in text),
        "n": st.integers(),
        "x": st.floats(allow_nan=False, allow_infinity=False),
        "b": st.booleans(),
        "l": st.lists(st.text(max_size=4) | st.just("</parameter>"), max_size=3),
        "o": st.dictionaries(st.text(max_size=3), st.none() | st.booleans() | st.integers(), max_size=2),
    },
)


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral", "qwen3_coder", "glm45"])
def test_calls_as_chat_templates_write_them(name: str) -> None:
    format = tool_call_format("auto", TEMPLATES[name])
    assert format is not None
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "", "eos_token": ""})

    @settings(max_examples=40)
    @given(st.lists(st.tuples(st.sampled_from(["f", "g"]), typed), min_size=1, max_size=1 if name == "llama3" else 3))
    def check(calls: list[tuple[str, dict[str, object]]]) -> None:
        told = [{"id": "a" * 9, "type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
        messages = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": "", "tool_calls": told}]
        tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
        text = template.render(messages, tools=[tool], add_generation_prompt=False).rpartition("asked")[2]
        # Which of these the model ends its answer with.
        answer = text.removeprefix("<|eot_id|>").removeprefix("<|start_header_id|>assistant<|end_header_id|>").removesuffix("<|eot_id|>")
        found = read(format, list(answer), names=("f", "g"))
        assert [(name, json.loads(arguments)) for _, name, arguments in found.calls] == calls

    check()


ANSWERS = [
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    ),
    (HERMES, '<tool_call>[{"name": "f", "arguments": {"a": "}"}}, {"arguments": {}, "name": "g"}]</tool_call>'),
    (HERMES, '<tool_call>{"id": "x", "name": "f", "arguments": "{\\"a\\": \\"}\\"}"}</tool_call><tool_call>{"name": "g"}</tool_call>'),
    (LLAMA3_JSON, '{"name": "f", "parameters": {"a": "}"}}; {"name": "g", "parameters": {}}'),
    (LLAMA3_JSON, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": "}"}}<|python_tag|>{"name": "g", "parameters": {}}'),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "}"}}, {"name": "g", "arguments": {}}]'),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": "}"}[TOOL_CALLS]g[ARGS]{}'),
    (MISTRAL, '[TOOL_CALLS]f{"a": "}"}[TOOL_CALLS]g {}'),
    *((format, WRITTEN[format.name]([("f", {"a": "}"}), ("g", {})])) for format in FORMATS if format not in (HERMES, LLAMA3_JSON, MISTRAL)),
    (PYTHONIC, """<|python_start|>[f(a="}"), g()]<|python_end|>"""),
]


@pytest.mark.parametrize(("format", "answer"), ANSWERS)
def test_nothing_of_a_call_that_is_cut_off_is_content(format: ToolCallFormat, answer: str) -> None:
    whole = [("f", '{"a": "}"}'), ("g", "{}")]
    num_calls = []
    for end in range(len(answer) + 1):
        found = read(format, list(answer[:end]), names=("f", "g"), must=True, cut_off=True)
        assert found == read(format, [answer[:end]], names=("f", "g"), must=True, cut_off=True)
        assert found.content == "", answer[:end]
        assert len(found.calls) <= len(whole)
        for (_, name, arguments), (its_name, its_arguments) in zip(found.calls, whole, strict=False):
            assert name == its_name
            assert its_arguments.startswith(arguments)
        num_calls.append(len(found.calls))
    assert num_calls == sorted(num_calls)
    assert [(name, arguments) for _, name, arguments in found.calls] == whole


@pytest.mark.parametrize(("format", "answer"), ANSWERS)
@pytest.mark.parametrize("must", [True, False])
def test_an_answer_is_unfinished_where_a_call_is(format: ToolCallFormat, answer: str, must: bool) -> None:
    whole = [("f", '{"a": "}"}'), ("g", "{}")]
    for parallel, expected in ((True, whole), (False, whole[:1])):
        states = []
        for end in range(len(answer) + 1):
            parser = ToolCallParser(format, functions=dict.fromkeys("fg", lambda: SCHEMA), parallel=parallel, must=must)
            parser.push(answer[:end])
            parser.finish(cut=True)
            states.append(parser.unfinished)
            found = [(name, arguments) for _, name, arguments in read(format, [answer[:end]], names=("f", "g"), parallel=parallel,
                                                                     must=must, cut_off=True).calls]  # fmt: skip
            if found and not parser.unfinished:
                assert found == expected[: len(found)], answer[:end]
            if found != expected[: len(found)]:
                assert parser.unfinished, answer[:end]
        assert not states[-1]
        # It is finished between two calls, and in none.
        assert 1 <= sum(before and not after for before, after in pairwise(states)) <= len(expected) + 1
        parser = ToolCallParser(format, must=must)
        parser.push(answer[: states.index(True)])
        parser.finish()
        assert not parser.unfinished, "the model ended by itself"


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        (HERMES, "I look.\n<tool_call>", "I look.\n", []),
        (HERMES, '<tool_call>\n{"na', "", []),
        (HERMES, '<tool_call>\n{"name": "f', "", []),
        (HERMES, '<tool_call>\n{"name": "f", "arg', "", [("f", "")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}\n</tool', "", [("f", "{}")]),
        # It may as well be anything else.
        (HERMES, "a <too", "a <too", []),
        (HERMES, "<tool_call>oops", "<tool_call>oops", []),
        (HERMES, '<tool_call>{"name": 5, "ar', '<tool_call>{"name": 5, "ar', []),
        (LLAMA3_JSON, '{"na', '{"na', []),
        (LLAMA3_JSON, '{"name": "Ada", "na', '{"name": "Ada", "na', []),
        (LLAMA3_JSON, '{"name": "f", "par', "", [("f", "")]),
        (LLAMA3_JSON, "Look: <|python_tag|> ", "Look: ", []),
        (MISTRAL, "[TOOL_CALLS]weat", "", []),
        (MISTRAL, "[TOOL_CALLS]f[AR", "", []),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]", "", [("f", "")]),
        (MISTRAL, "a [TOOL", "a [TOOL", []),
        (DEEPSEEK_V31, f"{CALLS}{CALL}f{SEP}", "", []),
        (DEEPSEEK_V3, f"{CALLS}{CALL}function{SEP}f\n```json\n", "", [("f", "")]),
        (QWEN3_CODER, "<tool_call>\n<function=f>\n<param", "", [("f", "")]),
        (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=a>\nx\n</para", "", [("f", '{"a": "x')]),
        (GLM45, "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>5", "", [("f", '{"n": ')]),
        (PYTHONIC, "[f(", "", [("f", "")]),
        (PYTHONIC, "[h(a", "[h(a", []),
        (PYTHONIC, "[f(a='x\\u00", "", [("f", '{"a": "x')]),
    ],
)
def test_an_answer_that_need_not_call_is_cut_off(format: ToolCallFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    found = read(format, list(text), names=("f", "g"), cut_off=True)
    assert (found.content, [(name, arguments) for _, name, arguments in found.calls]) == (content, calls)


@settings(max_examples=100)
@given(st.sampled_from(FORMATS), anything, st.booleans(), st.booleans())
def test_being_cut_off_adds_no_content(format: ToolCallFormat, text: str, parallel: bool, must: bool) -> None:
    ended, cut_off = (read(format, list(text), parallel=parallel, must=must, cut_off=cut) for cut in (False, True))
    assert ended.content.startswith(cut_off.content)
    assert len(ended.calls) <= len(cut_off.calls) <= len(ended.calls) + 1
    for (its_id, its_name, its_arguments), (call_id, name, told) in zip(ended.calls, cut_off.calls, strict=False):
        assert (its_id, its_name) == (call_id, name)
        # What is converted is closed only where the model ended by itself.
        assert its_arguments.startswith(told)


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser(HERMES, new_id=lambda: "i")
    assert parser.push("Well.") == [ContentDelta("Well.")]
    assert parser.push('<tool_call>{"name": "f", "argu') == []
    assert parser.push('ments": {"a') == [CallBegun(0, "i", "f"), CallArguments(0, '{"a')]
    assert parser.push('": "x') == [CallArguments(0, '": "x')]
    assert parser.push('}\\"') == [CallArguments(0, '}\\"')]
    assert parser.push('"}}</tool') == [CallArguments(0, '"}')]
    assert parser.push("_call>") == []
    assert parser.finish() == []


def test_strings_come_as_they_are_written_and_other_values_one_by_one() -> None:
    parser = ToolCallParser(QWEN3_CODER, functions={"f": lambda: SCHEMA}, new_id=lambda: "i")
    assert parser.push("<tool_call>\n<function=f>\n<parameter=m>\nThe fi") == [CallBegun(0, "i", "f"), CallArguments(0, '{"m": "The fi')]
    assert parser.push('rst "line"\n') == [CallArguments(0, 'rst \\"line\\"')]
    assert parser.push("and\n</parameter>\n<parameter=n>\n1") == [CallArguments(0, '\\nand", "n": ')]
    assert parser.push("2\n</parameter>") == [CallArguments(0, "12")]
    assert parser.push("</function>") == [CallArguments(0, "}")]
    parser = ToolCallParser(PYTHONIC, functions={"f": lambda: SCHEMA}, new_id=lambda: "i")
    assert parser.push("[f(a") == []
    assert parser.push("='Ro\\") == [CallBegun(0, "i", "f"), CallArguments(0, '{"a": "Ro')]
    assert parser.push("nme', l=[1") == [CallArguments(0, '\\nme", "l": ')]
    assert parser.push("])]") == [CallArguments(0, "[1]}")]


def test_content_is_not_kept_waiting() -> None:
    for format in FORMATS:
        parser = ToolCallParser(format)
        said = "".join(event.text for word in ("It ", "is ", "<5", " [T") for event in parser.push(word) if isinstance(event, ContentDelta))
        assert len(said) >= len("It is <5 [") - 2


def test_a_bare_object_is_a_call_only_of_a_known_function() -> None:
    text = '{"name": "g", "parameters": {}}'
    assert read(LLAMA3_JSON, [text], names=("f",)).content == text
    assert read(LLAMA3_JSON, [text], names=("f", "g")).calls == [("id0", "g", "{}")]
    # A mark leaves no doubt.
    assert read(LLAMA3_JSON, ["<|python_tag|>" + text], names=("f",)).calls == [("id0", "g", "{}")]


def test_ids() -> None:
    def first(format: ToolCallFormat, text: str) -> str:
        event = ToolCallParser(format).push(text)[0]
        assert isinstance(event, CallBegun)
        return event.id

    ids = {first(HERMES, '<tool_call>{"name": "f", "arguments": {}}') for _ in range(10)}
    assert len(ids) == 10
    assert all(i.startswith("call_") for i in ids)
    # Mistral's chat templates refuse other ones.
    short = first(MISTRAL, '[TOOL_CALLS]f{"a": 1}')
    assert len(short) == 9
    assert short.isalnum()


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "' + "x" * 70_000,
        "<tool_call>" * 1000,
        '<tool_call>{"name": "f", "arguments": {"a": "' + "</tool_call>" * 6000,
        '<tool_call>{"name": "f", "arguments": {"a": "' + "</tool_call>" * 6000 + '"}}',
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"' + " " * 60_000,
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>' + "\\" * 60_000,
        '<tool_call>{"arguments": {"a": "' + "</tool_call>" * 6000 + '"}}',
        '<tool_call>{"name": "f", "arguments": {}}' * 1100,
        '<tool_call>{"name": "f", "arguments": {' + "[" * 30_000,
        "[TOOL_CALLS]" + "a" * 20_000,
        "<tool_call>[" + '{"name": "f", "arguments": {}},' * 1100,
        "\n" * 20_000,
        "<tool_call>" + "\n" * 100_000 + "f",
        "<function=f>" * 1000,
        "<function=f><parameter=a>" + "</paramete" * 2000,
        "<function=f><parameter=u>[" + '"</parameter>' * 5500,
        "<tool_call>f<arg_key>" + "k" * 20_000,
        CALLS * 1000 + (CALL + "f") * 1000,
        "[f(a=" + "[" * 80_000,
        "[f(a='" + "\\" * 20_000,
        "[" + "f(a=1)," * 1100,
        '{"name": ' * 2000,
    ],
)
def test_work_is_bounded(text: str) -> None:
    """A long answer, however odd, costs about the same for each of its characters."""
    for format in FORMATS:
        found = read(format, [text[i : i + 9] for i in range(0, len(text), 9)])
        assert read(format, [text]) == found
        if not found.calls:
            assert found.content == text
        assert len(found.calls) <= 1024


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ tools }} <tool_call>", HERMES),
        ("{{ tools }} <tool_call><function=", QWEN3_CODER),
        ("{{ tools }} <tool_call>{{ name }}<arg_key>", GLM45),
        (f"{{{{ tools }}}} {CALL}{{{{ call.type }}}}{SEP}{{{{ name }}}}\n```json", DEEPSEEK_V3),
        (f"{{{{ tools }}}} {CALL}{{{{ name }}}}{SEP}", DEEPSEEK_V31),
        ("{{ tools }} <|start_header_id|> {{ tool_calls }} parameters: [func_name1(params_name1=params_value1)]", PYTHONIC),
        ("{{ tools }} [TOOL_CALLS]", MISTRAL),
        ('{% if tools %}<|start_header_id|>{{ message.tool_calls }} "parameters"', LLAMA3_JSON),
        ('{% if tools %}<|header_start|>{{ message.tool_calls }} "parameters"', LLAMA4_JSON),
        ("{{ messages }}", None),
        ("{{ tools }}", None),
        (None, None),
    ],
)
def test_told_by_the_chat_template(template: str | None, expected: ToolCallFormat | None) -> None:
    assert tool_call_format("auto", template) is expected
    assert tool_call_format("none", template) is None
    assert tool_call_format("hermes", template) is HERMES
    assert tool_call_format("glm47", template) is GLM45
    with pytest.raises(SetupError, match="llama3_json"):
        tool_call_format("jamba", template)
