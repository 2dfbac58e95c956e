"""Calls of gpt-oss. What reads its messages (twostep/text/harmony.py) leaves of a call its name and its arguments; a grammar holds the
model to the header that it writes itself.

openai    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

from collections.abc import Iterator

from twostep.text.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE
from twostep.text.tool_formats.format import CallGrammar, Function, Rules, ToolCallFormat, literal, plain_name
from twostep.text.tool_formats.reader import Reading, ToolCallReader


def _read(reader: ToolCallReader) -> Iterator[None]:
    def call(opening: str) -> Reading:
        name = yield from reader.word()
        yield from reader.need(MESSAGE)
        yield from reader.skip_space()
        yield from reader.arguments(name)
        yield from reader.skip_space()
        yield from reader.follows(END)

    return reader.calls_behind([CALL], call)


def _grammar(rules: Rules, parallel: bool) -> CallGrammar:
    """One call: the model ends its answer with each."""

    def call(function: Function) -> str:
        header = literal(f"commentary to=functions.{plain_name(function.name)} ")
        json = f'{rules.marker(CONSTRAIN)} "json" {rules.marker(MESSAGE)} {rules.json(function.schema)}'
        return f"{rules.marker(CHANNEL)} {header} {json}"

    # Text before a call is a message of its own: none tells where free text ends.
    return CallGrammar("", "call", call)


HARMONY = ToolCallFormat("openai", (CALL, MESSAGE, END), _read, _grammar, told_by=(CHANNEL, MESSAGE, "functions."))
