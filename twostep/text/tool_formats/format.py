"""A format, and what its grammar is made of, in llguidance's dialect of Lark.

Markers that are tokens of their own stand in grammars as tokens, `<[17]>`: text never matches those, so that free text ends where one
comes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from twostep.errors import InvalidRequest
from twostep.text.strict_schema import closed
from twostep.text.tokenizer import Tokenizer
from twostep.text.tool_formats.reader import MAX_NAME, ToolCallReader
from twostep.text.tool_formats.values import resolved

# As `json.dumps` writes it, which is what models have read; schemas that ask for what no grammar can hold are held to the rest.
_GUIDANCE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
_NOTHING: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}
# What `ToolCallReader.word` reads.
_NAME = re.compile(rf"[\w.:/-]{{1,{MAX_NAME}}}")


class Argument(NamedTuple):
    """`schema`: a document of its own. `name` None: of any other name, as often as it is."""

    name: str | None
    schema: dict[str, Any]
    required: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    """`parameters`: the JSON Schema of its arguments, None: it has none. `strict`: they are held to it also where the model is free to call
    or not; False: it is read as JSON Schema says, and arguments may have other members too."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Function:
        """Reads a tool's function."""
        parameters, strict = given.get("parameters"), given.get("strict")
        return cls(given["name"], parameters if isinstance(parameters, dict) else None, strict if isinstance(strict, bool) else None)

    @property
    def schema(self) -> dict[str, Any]:
        """Its references keep their meaning: it is a document of its own."""
        parameters = self.parameters or _NOTHING
        return {**(parameters if self.strict is False else closed(parameters)), "type": "object"}

    def arguments(self) -> list[Argument]:
        """One by one, in the schema's order. Names that it does not know are among them only where it speaks of such."""
        root = self.schema
        top = resolved(root, root)
        top = top if isinstance(top, dict) else {}
        given, required = top.get("properties"), top.get("required")
        known: dict[str, Any] = dict(given) if isinstance(given, dict) else {}
        always = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        known |= {name: {} for name in always if name not in known}
        shared: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}

        def document(schema: Any) -> dict[str, Any]:
            schema = resolved(schema, root)
            if not isinstance(schema, dict):
                return {}
            return {**shared, **schema} if '"$ref"' in json.dumps(schema) else schema

        found = [Argument(name, document(schema), name in always) for name, schema in known.items()]
        more = top.get("additionalProperties", "properties" not in top)
        return [*found, Argument(None, document(more))] if more is not False else found


class Rules:
    """Writes a grammar's rules down, and gives them names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lines: list[str] = []

    def is_token(self, marker: str) -> bool:
        return self._tokenizer.added_id(marker) is not None

    def marker(self, text: str) -> str:
        token_id = self._tokenizer.added_id(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def rule(self, right: str, *, lazy: bool = False) -> str:
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {right}")
        return name

    def terminal(self, right: str) -> str:
        name = f"TEXT_{len(self.lines)}"
        self.lines.append(f"{name}: {right}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': _GUIDANCE})}")

    def text_before(self, marker: str, most: str = "*", *, never: Sequence[str] = ()) -> str:
        """Any text that ends with the marker, the first one of its kind. `most`: how long it may be, as a quantifier. `never`: what ends
        the text as well when it is read."""
        words = "|".join(map(_in_regex, dict.fromkeys((marker.strip(), *never))))
        body = self.terminal(f"/(?s:.{most})/ & ~/(?s:.*)({words})(?s:.*)/")
        return f"{body} {self.marker(marker)}" if self.is_token(marker) else self.rule(f"{body} {literal(marker)}", lazy=True)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _in_regex(text: str) -> str:
    return re.sub(r"[.*+?()\[\]{}|^$\\/]", r"\\\g<0>", text)


def plain_name(name: str) -> str:
    """Returns it if it can be told where it ends in calls that write names as they are. Raises InvalidRequest."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"tools: calls of this model cannot have the name {name[:64]!r}; use letters, digits, _ and - in it")
    return name


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """`marker`: what tells that there are calls; empty: nothing does. `calls`: what follows it, made of the rule `call`. `call`: the right
    side of a rule for calls of one function."""

    marker: str
    calls: str
    call: Callable[[Function], str]


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """`markers`: tokens that the text has to show, special or not. `read`: its syntax, as a coroutine over a ToolCallReader; `grammar`: the
    same, for one call or with True for one or more. `told_by`: what stands in a chat template that writes it. `aliases`: what vLLM calls
    it besides."""

    name: str
    markers: tuple[str, ...]
    read: Callable[[ToolCallReader], Iterator[None]]
    grammar: Callable[[Rules, bool], CallGrammar]
    told_by: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    new_id: Callable[[], str] = _call_id
