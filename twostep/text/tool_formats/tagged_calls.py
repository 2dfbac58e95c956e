"""Calls whose arguments stand between tags, each as plain text or as JSON; the tool's schema says which.

qwen3_coder    <tool_call>\\n<function=f>\\n<parameter=a>\\nx\\n</parameter>\\n</function>\\n</tool_call>        Qwen3-Coder, Qwen 3.5
glm45          <tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>x</arg_value>\\n</tool_call>                   GLM-4.5, 4.6, 4.7
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from twostep.text.tool_formats.format import Argument, CallGrammar, Function, Rules, ToolCallFormat, literal, plain_name
from twostep.text.tool_formats.reader import MAX_NAME, Brackets, NoCall, Read, Reading, ToolCallReader
from twostep.text.tool_formats.values import STRING, Types, Value, quoted, types_of

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
# A quantifier of more would be too much for a grammar.
_MAX_COUNTED = 1000


@dataclass(frozen=True, slots=True)
class _Tags:
    """The text before and after the parts of a call; empty: nothing. `lines`: every part has lines of its own, values too; without it
    line breaks may stand between the parts."""

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""
    lines: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """Returns all that are long enough to be told from text."""
        return tuple(tag for tag in (_OPENING, _CLOSING, *self.name, *self.key, *self.value, self.end) if len(tag) > 1)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, reader: ToolCallReader) -> Iterator[None]:
        # Models leave out the outer tag now and then.
        openings = [_OPENING, self.name[0]] if self.name[0] else [_OPENING]

        def call(opening: str) -> Reading:
            if opening == _OPENING:
                yield from reader.skip_space()
                yield from reader.need(self.name[0])
            name = yield from reader.word()
            yield from reader.need(self.name[1])
            if opening != _OPENING and not reader.may_be(name):
                raise NoCall
            if not self.name[1]:
                yield from reader.skip_space()
                if not ((yield from reader.ahead(self.key[0])) or (yield from reader.ahead(_CLOSING))):
                    raise NoCall
            reader.begin_call(name)
            reader.release()
            yield from self._arguments(reader, name)
            # What else is inside is content, and the tag goes with the call.
            if (yield from reader.content_until(_CLOSING, *openings)) == _CLOSING:
                yield from reader.follows(_CLOSING)

        return reader.calls_behind(openings, call)

    def _arguments(self, reader: ToolCallReader, name: str) -> Reading:
        types = reader.types(name)
        before = "{"
        while True:
            yield from reader.skip_space()
            reader.mark()
            try:
                key = yield from self._key(reader)
            except NoCall:
                reader.rewind()
                break
            reader.release()
            reader.argue(f"{before}{quoted(key)}: ")
            yield from self._value(reader, types.of(key))
            before = ", "
        if not reader.cut_in_call:
            reader.end_call("{}" if before == "{" else "}")
        yield from reader.follows(self.end)

    def _key(self, reader: ToolCallReader) -> Read:
        """An argument's name, and what goes before its value."""
        yield from reader.need(self.key[0])
        key = ""
        while not (yield from reader.follows(self.key[1])):
            if key and self.value[0] and ((yield from reader.ahead(self.value[0])) or (yield from reader.follows("\n"))):
                break  # its closing tag is missing
            char = yield from reader.take()
            if char in ("", "\n", "<") or len(key) == MAX_NAME:
                raise NoCall
            key += char
        if self.value[0]:
            yield from reader.skip_space()
            yield from reader.need(self.value[0])
        return key.strip()

    def _value(self, reader: ToolCallReader, types: Types) -> Reading:
        """Takes a value and its closing tag. Where that is missing, the value ends before the next tag."""
        closing = self.value[1]
        # A line break before any of the others is no part of the value.
        ends = [end for tag in self.tags for end in ("\n" + tag, tag) if self.lines or end != "\n" + closing]
        if self.lines:
            yield from reader.follows("\n")
        value, brackets = Value(reader.argue, types), Brackets()

        def add(text: str) -> None:
            value.add(text)
            if not brackets.closed:
                brackets.scan(text, 0, len(text))

        while found := (yield from reader.pass_until(add, *ends)):
            in_string = types is not None and "string" not in types and value.held and brackets.in_string
            if not in_string or found.startswith("\n") or not (yield from reader.is_within_string(found)):
                yield from reader.follows(found if found.endswith(closing) else "\n")
                break
            yield from reader.follows(found)
            add(found)  # it stands in a string within a list, for one
        if not reader.cut_in_call:
            value.end()

    # ---- writing -----------------------------------------------------------------------------------------------------

    def grammar(self, rules: Rules, parallel: bool) -> CallGrammar:
        opening, closing = rules.marker(_OPENING), rules.marker(_CLOSING)
        line = '"\\n"' if self.lines else '("\\n")?'
        key_before, key_after, value_before = (rules.marker(tag) if tag else "" for tag in (*self.key, self.value[0]))

        def argument(given: Argument) -> str:
            key = rules.terminal(r"/[^<>\s]{1,64}/") if given.name is None else literal(plain_name(given.name))
            between = f"{line} {value_before}" if value_before else line
            right = f"{key_before} {key} {key_after} {between} {self._value_rule(rules, given)} {line}"
            return right if given.required else f"({right}){'*' if given.name is None else '?'}"

        def call(function: Function) -> str:
            name = literal(self.name[0] + plain_name(function.name) + self.name[1])
            parts = [line if self.name[0] else "", name, line, *map(argument, function.arguments())]
            return " ".join([*parts, f"{literal(self.end)} {line}" if self.end else "", closing])

        return CallGrammar(opening, f"call ({line} {opening} call)*" if parallel else "call", call)

    def _value_rule(self, rules: Rules, given: Argument) -> str:
        """The value, and the tag that ends it."""
        schema, types = given.schema, types_of(given.schema, given.schema)
        closing = "\n" + self.value[1] if self.lines else self.value[1]
        if types is not None and "string" not in types:
            return f"{rules.json(schema)} {rules.marker(closing)}"
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            either = " | ".join(literal(text) for text in texts if text)
            return f"{f'({either})' if either else ''}{'?' if either and '' in texts else ''} {rules.marker(closing)}"
        least, most = (_length(schema.get(key)) for key in ("minLength", "maxLength"))
        bounded = types == STRING and (least or most)
        return rules.text_before(closing, f"{{{least or 0},{most}}}" if bounded else "*", never=self.tags)


def _length(given: object) -> int | str:
    return given if isinstance(given, int) and 0 <= given <= _MAX_COUNTED else ""


_QWEN3_CODER = _Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", lines=True)
_GLM45 = _Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"))

_TOKENS = (_OPENING, _CLOSING)
QWEN3_CODER = ToolCallFormat(
    "qwen3_coder",
    _TOKENS,
    _QWEN3_CODER.read,
    _QWEN3_CODER.grammar,
    told_by=(_OPENING, "<function="),
    aliases=("qwen3_xml",),
)
GLM45 = ToolCallFormat(
    "glm45",
    (*_TOKENS, *_GLM45.key, *_GLM45.value),
    _GLM45.read,
    _GLM45.grammar,
    told_by=(_OPENING, "<arg_key>"),
    aliases=("glm47",),
)
