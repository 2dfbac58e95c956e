"""Arguments that a model writes without JSON, to JSON by the types of the tool's schema.

city    {"type": "string"}              Rome      "Rome"
days    {"type": "integer"}             3         3
days    {"type": "integer"}             soon      "soon"         what fits no type is a string
wet     {"type": "boolean"}             True      true           as Python writes it, too
code    {"type": ["string", "null"]}    None      null
other   nothing is known                [1]       [1]            JSON if it is some, else a string
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Of a value that is not known yet; a longer one goes on as it is written.
MAX_HELD = 1 << 16

# None: nothing is known.
Types = frozenset[str] | None
Parameters = Callable[[], Mapping[str, Any] | None]

STRING = frozenset({"string"})
ANY = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_MAX_HOPS = 16

# With what a value that is no string may begin, space before it aside.
_BEGINNINGS = {
    "integer": "-+.0123456789",
    "number": "-+.0123456789",
    "boolean": "tTfF",
    "null": "nN",
    "object": "{",
    "array": "[(",
    "string": "",
}
_ANY_BEGINNING = frozenset("".join(_BEGINNINGS.values()) + '"')
_SPACE = " \t\r\n"


# ---- what a schema says ----------------------------------------------------------------------------------------------


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns what a schema's reference means, if it is one within `root`."""
    for _ in range(_MAX_HOPS):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        path = schema["$ref"].removeprefix("#").split("/")[1:]
        schema = root
        for part in path:
            schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return None


def types_of(schema: Any, root: Mapping[str, Any], seen: dict[int, Types] | None = None, hops: int = _MAX_HOPS) -> Types:
    """Returns the JSON types of what is valid under it, as far as it is easily told. Looks at each of its parts once."""
    schema, seen = resolved(schema, root), {} if seen is None else seen
    if not isinstance(schema, dict) or not hops:
        return None
    if id(schema) not in seen:
        seen[id(schema)] = None
        seen[id(schema)] = _types_of_schema(schema, lambda part: types_of(part, root, seen, hops - 1))
    return seen[id(schema)]


def _types_of_schema(schema: Mapping[str, Any], of: Callable[[Any], Types]) -> Types:
    found: list[frozenset[str]] = []
    given = schema.get("type")
    if isinstance(given, str | list):
        found.append(frozenset(each for each in ([given] if isinstance(given, str) else given) if isinstance(each, str)))
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            found.append(frozenset().union(*map(_types_of_value, values)))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            each = list(map(of, schema[key]))
            if not any(types is None for types in each):
                found.append(frozenset().union(*(types for types in each if types is not None)))
    if isinstance(schema.get("allOf"), list):
        found += [types for part in schema["allOf"] if (types := of(part)) is not None]
    return frozenset.intersection(*found) & ANY or None if found else None


def _types_of_value(value: Any) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"integer", "number"} if value.is_integer() else {"number"})
        case str():
            return STRING
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})


class ArgumentTypes:
    """Knows the types of one function's arguments."""

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        self._root = parameters or {}
        top = resolved(self._root, self._root)
        top = top if isinstance(top, dict) else {}
        self._properties = properties if isinstance(properties := top.get("properties"), dict) else {}
        self._others = top.get("additionalProperties")
        self._known: dict[str | None, Types] = {}
        # Of parts of the schema, by identity: arguments may share definitions.
        self._seen: dict[int, Types] = {}

    def of(self, name: str) -> Types:
        key = name if name in self._properties else None
        if key not in self._known:
            self._known[key] = types_of(self._others if key is None else self._properties[key], self._root, self._seen)
        return self._known[key]


# ---- what a model wrote ----------------------------------------------------------------------------------------------


class Value:
    """One argument in the making. Strings are passed on as they come; of all else it takes the whole to know what it is."""

    def __init__(self, argue: Callable[[str], None], types: Types) -> None:
        self._argue, self._types = argue, types
        self._text: list[str] | None = []
        self._size = 0
        self._write = argue

    @property
    def held(self) -> bool:
        return self._text is not None

    def add(self, text: str) -> None:
        if not text:
            return
        if not self._size and not self._may_be_other(text[0]):
            self._pass_on(as_string=True)
        self._size += len(text)
        if self._text is None:
            self._write(text)
            return
        self._text.append(text)
        if self._size > MAX_HELD:
            held = "".join(self._text)
            # A long list, for one, goes on as it is written.
            self._pass_on(as_string=not (held[0] in "{[" and (self._types is None or self._types & {"object", "array"})))
            self._write(held)

    def end(self) -> None:
        if self._text is not None:
            self._argue(json_of("".join(self._text), self._types))
        elif self._write != self._argue:
            self._argue('"')

    def _may_be_other(self, char: str) -> bool:
        if self._types is None:
            return char in _ANY_BEGINNING or char in _SPACE
        return self._types != STRING and (char in _SPACE or any(char in _BEGINNINGS[each] for each in self._types))

    def _pass_on(self, *, as_string: bool) -> None:
        self._text = None
        if as_string:
            self._argue('"')
            self._write = lambda text: self._argue(quoted(text)[1:-1])


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_of(text: str, types: Types) -> str:
    """Returns JSON, whatever the text."""
    if types != STRING:
        written = text.strip(_SPACE)
        value = _parsed(written)
        if value is None and types is not None:
            # Where a text may be one, a number as only Python writes it ("+49 …", "0x…") is a text.
            written = _in_json(written, numbers="string" not in types) or ""
            value = _parsed(written)
        if value is not None and (types is None or (value <= ANY - STRING and value & types)):
            return written
    return quoted(text)


def _parsed(text: str) -> frozenset[str] | None:
    """The types of a text of JSON."""
    try:
        return _types_of_value(json.loads(text, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


_LITERAL = re.compile(
    r"""(?P<space>\s+)|(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<word>[A-Za-z]+)"""
    r"""|(?P<number>[-+]?\s*(?:0[xXoObB][0-9a-fA-F_]+|[0-9._]+(?:[eE][-+]?[0-9_]+)?))|(?P<sign>[\[\]{}(),:])""",
    re.DOTALL,
)
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_SIGNS = {"(": "[", ")": "]"}
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_BEFORE_VALUES = ("[", "{", ", ", ": ", "")


def _in_json(text: str, *, numbers: bool) -> str | None:
    """A literal of Python's; whether it is whole shows when the result is parsed. Without `numbers`, those are only JSON's."""
    written: list[str] = []
    open_brackets: list[_Bracket] = []
    at = 0
    while at < len(text):
        found = _LITERAL.match(text, at)
        if found is None:
            return None
        at, token, kind = found.end(), found.group(), found.lastgroup
        if kind == "space":
            continue
        if (kind != "sign" or token in _PAIRS) and written and written[-1] not in _BEFORE_VALUES:
            if kind != "string" or not written[-1].startswith('"'):
                return None
            written[-1] = written[-1][:-1] + _string_in_json(token)[1:]  # strings side by side are one
            continue
        match kind:
            case "string":
                token = _string_in_json(token)
            case "word":
                token = _WORDS.get(token.lower(), "")
            case "number":
                token = token if _JSON_NUMBER.fullmatch(token) else _python_number(token) if numbers else ""
            case _ if token in _PAIRS:
                open_brackets.append(_Bracket(token, len(written)))
                token = _SIGNS.get(token, token)
            case _ if token in (",", ":"):
                if token == "," and open_brackets:
                    open_brackets[-1].has_comma = True
                token += " "
            case _:
                bracket = open_brackets.pop() if open_brackets else None
                if bracket is None or _PAIRS[bracket.opening] != token:
                    return None
                if token == ")" and not bracket.has_comma and len(written) > bracket.place + 1:
                    written[bracket.place] = ""  # around one value
                    continue
                if written[-1] == ", ":
                    written.pop()
                token = _SIGNS.get(token, token)
        if not token:
            return None
        written.append(token)
    return "".join(written)


@dataclass(slots=True)
class _Bracket:
    opening: str
    place: int
    has_comma: bool = False


def _string_in_json(token: str) -> str:
    return quoted(ESCAPE.sub(lambda escape: unescaped(escape.group()), token[1:-1]))


def _python_number(token: str) -> str:
    """Returns what Python reads of a number without its sign, and the sign; empty: it is none, or JSON has none like it."""
    sign, digits = ("-" if token[0] == "-" else ""), token.lstrip("-+ \t\r\n")
    try:
        value = float(digits) if re.search(r"\.|^[0-9_]+[eE]", digits) else int(digits, 0)
        return sign + json.dumps(value, allow_nan=False)
    except ValueError:
        return ""


# ---- strings of Python's and of JSON ---------------------------------------------------------------------------------

_HEX = "[0-9a-fA-F]"
ESCAPE = re.compile(
    rf"\\(?:u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}|u{_HEX}{{4}}|U{_HEX}{{8}}|x{_HEX}{{2}}|[0-7]{{1,3}}|\r\n|.)", re.DOTALL
)
# The beginning of one that may go on.
ESCAPE_BEGUN = re.compile(
    rf"\\(?:|u{_HEX}{{0,3}}|u[dD][89abAB]{_HEX}{{2}}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?|U{_HEX}{{0,7}}|x{_HEX}?|[0-7]{{1,2}}|\r)"
)
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "\r\n": ""} | {c: c for c in "\\'\"/"}


def unescaped(escape: str) -> str:
    """Returns what it stands for; one that is none stands for itself."""
    kind = escape[1:]
    if (char := _NAMED.get(kind)) is not None:
        return char
    if kind[:1] in tuple("01234567"):
        return chr(int(kind, 8))
    if len(kind) < 2:
        return escape
    if "\\" in kind:
        return json.loads(f'"{escape}"')  # type: ignore[no-any-return]
    code = int(kind[1:], 16)
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else "\ufffd"
