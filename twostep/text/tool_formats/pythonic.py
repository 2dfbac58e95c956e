"""Calls as a list in Python.

pythonic    [f(a=1, b="x"), g()]        Llama 4 and 3.2 with such a template: all of the answer, or after <|python_start|>
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from twostep.text.tool_formats.format import Argument, CallGrammar, Function, Rules, ToolCallFormat, literal, plain_name
from twostep.text.tool_formats.json_calls import PYTHON_END, PYTHON_START, PYTHON_TAG
from twostep.text.tool_formats.reader import NoCall, Read, Reading, ToolCallReader
from twostep.text.tool_formats.values import ANY, ESCAPE, ESCAPE_BEGUN, STRING, Types, Value, quoted, types_of, unescaped


def _read(reader: ToolCallReader) -> Iterator[None]:
    def calls(tagged: bool) -> Reading:
        yield from reader.skip_space()
        yield from reader.call_list(lambda: _call(reader, tagged))
        yield from reader.drop(PYTHON_END)

    return reader.calls_from_the_start("[", [PYTHON_START, PYTHON_TAG], calls)


def _call(reader: ToolCallReader, tagged: bool) -> Reading:
    """f(a=1, b="x"). Raises NoCall, only before the call has begun."""
    name = yield from reader.word()
    if not (tagged or reader.may_be(name)):
        raise NoCall
    yield from reader.skip_space()
    yield from reader.need("(")
    reader.suspect(name)
    key = ""
    try:
        if (yield from reader.skip_space()) != ")":
            key = yield from _keyword(reader)
    except NoCall:
        if not reader.cut_in_call:
            raise
    reader.begin_call(name)
    reader.release()
    before = "{"
    while key:
        reader.argue(f"{before}{quoted(key)}: ")
        yield from _value(reader, reader.types(name).of(key))
        before = ", "
        reader.mark()
        try:
            key = ""
            if (yield from reader.skip_space()) == ",":
                yield from reader.take()
                if (yield from reader.skip_space()) != ")":
                    key = yield from _keyword(reader)
        except NoCall:
            reader.rewind()
            break
        reader.release()
    if not reader.cut_in_call:
        reader.end_call("{}" if before == "{" else "}")
    yield from reader.follows(")")


def _keyword(reader: ToolCallReader) -> Read:
    key = yield from reader.word()
    yield from reader.skip_space()
    yield from reader.need("=")
    yield from reader.skip_space()
    return key


# ---- values ----------------------------------------------------------------------------------------------------------

_ENDS = tuple("\"'()[]{},")
_QUOTES = ("'", '"')


def _value(reader: ToolCallReader, types: Types) -> Reading:
    if (char := (yield from reader.peek())) in _QUOTES:
        value = Value(reader.argue, STRING if types is None or "string" in types else types)
        while char in _QUOTES:
            yield from _string(reader, char, value.add)
            char = yield from _next_string(reader)
    else:
        value = Value(reader.argue, (types or ANY) - STRING)
        yield from _literal(reader, value.add)
    if not reader.cut_in_call:
        value.end()


def _next_string(reader: ToolCallReader) -> Read:
    """Returns the quote of another string behind one, which Python joins with it; empty: something else follows, and nothing is taken."""
    reader.mark()
    try:
        if (char := (yield from reader.skip_space())) and char in _QUOTES:
            reader.release()
            return char
    except NoCall:
        pass
    reader.rewind()
    return ""


def _string(reader: ToolCallReader, quote: str, add: Callable[[str], None]) -> Reading:
    """Adds the text between the quotes, one or three of them on either side."""
    if (yield from reader.follows(3 * quote)):
        quote = 3 * quote
    else:
        yield from reader.take()
    while (yield from reader.pass_until(add, quote, "\\", *reader.markers)) == "\\":
        add(unescaped((yield from reader.matching(ESCAPE, ESCAPE_BEGUN)) or (yield from reader.take())))
    yield from reader.follows(quote)


def _literal(reader: ToolCallReader, add: Callable[[str], None]) -> Reading:
    """Up to the comma or the bracket behind it."""
    depth = 0
    while (found := (yield from reader.pass_until(add, *_ENDS, *reader.markers))) and found not in reader.markers:
        if found in _QUOTES:
            yield from _quoted(reader, found, add)
            continue
        if depth == 0 and found in ",)]}":
            return
        depth += (found in "([{") - (found in ")]}")
        add((yield from reader.take()))


def _quoted(reader: ToolCallReader, quote: str, add: Callable[[str], None]) -> Reading:
    """A string within a list, for one: as it is written."""
    add((yield from reader.take()))
    while (found := (yield from reader.pass_until(add, quote, "\\", *reader.markers))) == "\\":
        add((yield from reader.take()))
        add((yield from reader.take()))
    if found == quote:
        add((yield from reader.take()))


# ---- writing ---------------------------------------------------------------------------------------------------------


def _grammar(rules: Rules, parallel: bool) -> CallGrammar:
    def argument(given: Argument) -> str:
        key = rules.terminal("/[A-Za-z_][A-Za-z0-9_]{0,63}/") if given.name is None else literal(plain_name(given.name))
        schema = given.schema
        plain = types_of(schema, schema) == frozenset({"boolean"}) and "enum" not in schema and "const" not in schema
        # JSON is read as well, and holds a value to all of its schema.
        value = '("True" | "False")' if plain else rules.json(schema)
        return rules.rule(f'{key} "=" {value}')

    def call(function: Function) -> str:
        given = function.arguments()
        always = [argument(each) for each in given if each.required]
        # Any of the others, in their order; `first`: where there is nothing before the first of them.
        rest, first = "", ""
        for each in reversed([each for each in given if not each.required]):
            one = argument(each)
            more = rules.rule(f'(", " {one}){"*" if each.name is None else "?"} {rest}')
            first = rules.rule(f"{one} {more if each.name is None else rest}" + (f" | {first}" if first else ""))
            rest = more
        among = ' ", " '.join(always) + f" {rest}" if always else f"({first})?" if first else ""
        return f'{literal(plain_name(function.name))} "(" {among} ")"'

    return CallGrammar("", '"[" call (", " call)* "]"' if parallel else '"[" call "]"', call)


_TAGS = (PYTHON_START, PYTHON_END, PYTHON_TAG)
PYTHONIC = ToolCallFormat("pythonic", _TAGS, _read, _grammar, told_by=("func_name1(",), aliases=("llama4_pythonic",))
