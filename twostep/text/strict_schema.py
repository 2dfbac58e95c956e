"""The strict reading of a JSON Schema: objects have no properties but those that it names, and lists no items but those that it lists.

JSON Schema allows any others wherever "additionalProperties" does not stand, so that a model may add them until its time is up. Most
authors of schemas (pydantic's classes among them) mean the strict reading, and xgrammar, vLLM's engine, has it as `strict_mode`. What a
schema says itself holds; an object of which it names nothing may have anything in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from twostep.errors import InvalidRequest
from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.grammar import check_depth, parse_schema

# Schemas by name, schemas in a list or alone, and schemas that hold for the same value as the one that they stand in.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_INNER = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains")
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "if", "then", "else")
_DECLARING = ("properties", "patternProperties")
_STATING = ("additionalProperties", "unevaluatedProperties")
# Names that schemas inherit from one another, counted for each heir: a schema at its longest has some 30,000 names.
_MAX_INHERITED = 1 << 18


def strict(grammar: Grammar) -> Grammar:
    """Returns the same for anything but a schema. Raises InvalidRequest for what is none."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return grammar
    schema = parse_schema(grammar.text)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(closed(schema))) if isinstance(schema, dict) else grammar


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema whose plain reading is the strict one of this. Takes time in proportion to its length and to the names that its
    parts inherit. Raises InvalidRequest if it is nested too deeply, or its parts inherit too many names."""
    check_depth(schema)
    closer = _Closer(schema)
    found: dict[str, Any] = closer.close(schema)
    if open_parts := closer.open_parts():
        found["$defs"] = {**_mapping(found, "$defs"), **open_parts}
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Said:
    """What schemas that hold for the same value say of its members together. `stated`: one of them says which others there may be."""

    names: Mapping[str, None]
    patterns: Mapping[str, None]
    stated: bool

    @classmethod
    def by(cls, schema: Mapping[str, Any]) -> _Said:
        required = schema.get("required")
        names = (*_mapping(schema, "properties"), *(required if isinstance(required, list) else ()))
        return cls(
            dict.fromkeys(name for name in names if isinstance(name, str)),
            dict.fromkeys(_mapping(schema, "patternProperties")),
            any(key in schema for key in _STATING),
        )

    @classmethod
    def together(cls, each: Iterable[_Said]) -> _Said:
        """Returns one of `each` itself where the others add nothing, so that heirs of one schema share what they inherit."""
        several = list({id(said): said for said in each if said.names or said.patterns or said.stated}.values())
        if len(several) < 2:
            return several[0] if several else _NOTHING
        return cls(
            dict.fromkeys(name for said in several for name in said.names),
            dict.fromkeys(pattern for said in several for pattern in said.patterns),
            any(said.stated for said in several),
        )


_NOTHING = _Said({}, {}, False)


class _Closer:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        # Definitions that are left open, since others say more of the same value: their names by their references; those to be written.
        self._names: dict[str, str] = {}
        self._to_open: list[tuple[str, Any]] = []
        self._said: dict[int, _Said] = {}
        self._num_inherited = 0

    def open_parts(self) -> dict[str, Any]:
        """Returns the definitions that what was closed refers to, by their names."""
        found: dict[str, Any] = {}
        while self._to_open:
            name, schema = self._to_open.pop()
            found[name] = self._opened(schema)
        return found

    def close(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        declares = any(key in schema for key in _DECLARING)
        num_parts = declares + ("$ref" in schema) + sum(key in schema for key in _SAME_VALUE)
        all_of = schema.get("allOf")
        together = num_parts > 1 or (isinstance(all_of, list) and len(all_of) > 1)
        found = self._rewritten(schema, together=together)
        if "prefixItems" in schema and "items" not in schema:
            found["items"] = False
        if declares or together:
            said = self._said_of(schema)
            if (said.names or said.patterns or declares) and not said.stated:
                own = _mapping(found, "properties")
                found["properties"] = own | {name: True for name in said.names if name not in own}
                found["additionalProperties"] = False
                if said.patterns:
                    found["patternProperties"] = dict.fromkeys(said.patterns, True) | _mapping(found, "patternProperties")
        return found

    def _opened(self, schema: Any) -> Any:
        return self._rewritten(schema, together=True) if isinstance(schema, Mapping) else schema

    def _rewritten(self, schema: Mapping[str, Any], *, together: bool) -> dict[str, Any]:
        """Closes what is in it. Schemas that hold `together` for one value stay open: each by itself would rule out what others name."""
        change = {
            **dict.fromkeys(_INNER, self.close),
            **dict.fromkeys(_SAME_VALUE, self._opened if together else self.close),
        }
        found = dict(schema)
        for key, value in schema.items():
            if key in _NAMED and isinstance(value, Mapping):
                found[key] = {name: self.close(each) for name, each in value.items()}
            elif key in change:
                found[key] = [change[key](each) for each in value] if isinstance(value, list) else change[key](value)
            elif key == "$ref" and together:
                found[key] = self._opened_ref(value)
        return found

    def _opened_ref(self, ref: Any) -> Any:
        target = self._target(ref)
        if target is None:
            return ref
        if ref not in self._names:
            name = self._names[ref] = f"open-{len(self._names)}"
            self._to_open.append((name, target))
        return f"#/$defs/{self._names[ref]}"

    def _said_of(self, schema: Mapping[str, Any]) -> _Said:
        """Returns what this schema and all that hold for the same value say. Each schema is visited once, whoever asks: schemas that refer
        to each other in a circle say the same (Tarjan's strongly connected components). A long chain of references needs no recursion."""
        entered: dict[int, int] = {}  # those not known yet: by their turn
        lowest: dict[int, int] = {}
        open_ones: list[Mapping[str, Any]] = []
        path: list[tuple[Mapping[str, Any], Iterator[Mapping[str, Any]]]] = []

        def enter(each: Mapping[str, Any]) -> None:
            entered[id(each)] = lowest[id(each)] = len(entered)
            open_ones.append(each)
            path.append((each, iter(self._same_value(each))))

        if id(schema) not in self._said:
            enter(schema)
        while path:
            current, parts = path[-1]
            part = next((part for part in parts if id(part) not in self._said), None)
            if part is not None and id(part) not in entered:
                enter(part)
            elif part is not None:
                lowest[id(current)] = min(lowest[id(current)], entered[id(part)])
            else:
                path.pop()
                if path:
                    before = id(path[-1][0])
                    lowest[before] = min(lowest[before], lowest[id(current)])
                if lowest[id(current)] == entered[id(current)]:
                    start = next(i for i in range(len(open_ones) - 1, -1, -1) if open_ones[i] is current)
                    self._learn(open_ones[start:])
                    del open_ones[start:]
        return self._said[id(schema)]

    def _learn(self, circle: list[Mapping[str, Any]]) -> None:
        """Notes what schemas say that refer to each other; what else they refer to is known. Raises InvalidRequest."""
        inherited = (self._said[id(part)] for each in circle for part in self._same_value(each) if id(part) in self._said)
        said = _Said.together((*map(_Said.by, circle), *inherited))
        self._num_inherited += len(said.names) + len(said.patterns)
        if self._num_inherited > _MAX_INHERITED:
            raise InvalidRequest(
                "grammar: too many parts of the json_schema inherit the names of others; send strict: false, and write "
                "additionalProperties: false where objects are to have no others"
            )
        self._said |= {id(each): said for each in circle}

    def _same_value(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns the schemas that it names for its own value."""
        found: list[Any] = []
        for key in _SAME_VALUE:
            value = schema.get(key)
            found += value if isinstance(value, list) else [value]
        found.append(self._target(schema.get("$ref")))
        return [each for each in found if isinstance(each, Mapping)]

    def _target(self, ref: Any) -> Any:
        """None: it is not found here."""
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        found: Any = self._root
        for part in ref.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, Mapping) else None
        return found


def _mapping(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the member if it is an object, as it is in a good schema; else an empty one."""
    found = schema.get(key)
    return dict(found) if isinstance(found, Mapping) else {}
