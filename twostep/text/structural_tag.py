"""Structural tags, as vLLM, SGLang and xgrammar have them, as a grammar: free text, and structures in it that a trigger or a tag begins.

Both forms are read: `structures` with `triggers`, and the tree of `format`. Text ends at the first trigger, so that no structure can be
written that is none of the tags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twostep.errors import InvalidRequest
from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.grammar import rule_of

_MAX_DEPTH = 16


def structural_tag_grammar(given: Mapping[str, Any]) -> str:
    """Returns the grammar in llguidance's dialect of Lark. Raises InvalidRequest for what has no such form."""
    maker = _Maker()
    if given.get("format") is not None:
        start = maker.node(given["format"], "format", 0)
    else:
        tags = [
            {"begin": each.get("begin"), "content": {"type": "json_schema", "json_schema": each.get("schema")}, "end": each.get("end", "")}
            for each in _objects(given.get("structures"), "structures")
        ]
        start = maker.triggered({"tags": tags, "triggers": given.get("triggers")}, "structures", 0)
    return "\n".join((f"start: {start}", "TEXT: /(?s:.*)/", *maker.rules)) + "\n"


class _Maker:
    """`rules`: beside the start."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def node(self, node: Any, path: str, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise InvalidRequest(f"{path} is nested beyond a depth of {_MAX_DEPTH}; make it flatter")
        if not isinstance(node, dict):
            raise InvalidRequest(f"{path} is no object; give one with a type")
        match node.get("type"):
            case "const_string":
                return _literal(node.get("value"), f"{path}.value")
            case "any_text":
                return "TEXT"
            case "json_schema":
                if not isinstance(schema := node.get("json_schema"), dict | bool):
                    raise InvalidRequest(f"{path}.json_schema is no JSON Schema; give an object")
                return rule_of(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
            case "regex":
                return rule_of(Grammar(GrammarKind.REGEX, _text(node.get("pattern"), f"{path}.pattern")))
            case "sequence":
                return self._sequence(_objects(node.get("elements"), f"{path}.elements"), path, depth)
            case "or":
                elements = _objects(node.get("elements"), f"{path}.elements")
                return f"({' | '.join(self.node(each, f'{path}.elements[{i}]', depth + 1) for i, each in enumerate(elements))})"
            case "tag":
                return f"({_literal(node.get('begin'), f'{path}.begin')} {self._inside(node, path, depth)})"
            case "triggered_tags":
                return self.triggered(node, path, depth)
            case "tags_with_separator":
                each = self._either([self.node({**tag, "type": "tag"}, f"{path}.tags[{i}]", depth + 1) for i, tag in _tags(node, path)])
                more = "" if node.get("stop_after_first") else f" ({_literal(node.get('separator'), f'{path}.separator')} {each})*"
                return f"({each}{more}){'' if node.get('at_least_one') else '?'}"
            case kind:
                raise InvalidRequest(
                    f"{path}.type is {kind!r:.64}; give const_string, any_text, json_schema, regex, sequence, or, tag, triggered_tags or "
                    "tags_with_separator"
                )

    def triggered(self, node: Mapping[str, Any], path: str, depth: int) -> str:
        """Free text with any number of tags in it, each begun by one of the triggers."""
        triggers = node.get("triggers")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(each, str) and each for each in triggers):
            raise InvalidRequest(f"{path}: triggers is no list of texts; give how tags begin")
        by_trigger: dict[str, list[str]] = {}
        for i, tag in _tags(node, path):
            where = f"{path}.tags[{i}]"
            begin = _text(tag.get("begin"), f"{where}.begin")
            trigger = max((each for each in triggers if begin.startswith(each)), key=len, default=None)
            if trigger is None:
                raise InvalidRequest(f"{where}.begin is {begin!r:.64}, which none of the triggers begins; add one")
            rest = _literal(begin[len(trigger) :], where)
            by_trigger.setdefault(trigger, []).append(f"{rest} {self._inside(tag, where, depth)}")
        tagged = self._either([f"{self._until(trigger)} {self._either(bodies)}" for trigger, bodies in by_trigger.items()])
        if node.get("stop_after_first"):
            return tagged if node.get("at_least_one") else f"({tagged} | TEXT)"
        return f"(({tagged}){'+' if node.get('at_least_one') else '*'} TEXT)"

    def _inside(self, tag: Mapping[str, Any], path: str, depth: int) -> str:
        """Returns the rule for the text behind a tag's beginning."""
        content, ends = tag.get("content"), tag.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if isinstance(content, dict) and content.get("type") == "any_text" and any(ends):
            return self._either([self._until(_text(end, f"{path}.end")) for end in ends])
        body = self.node(content, f"{path}.content", depth + 1)
        return f"{body} {self._either([_literal(end, f'{path}.end') for end in ends])}"

    def _sequence(self, elements: Sequence[Mapping[str, Any]], path: str, depth: int) -> str:
        written, i = list[str](), 0
        while i < len(elements):
            where = f"{path}.elements[{i}]"
            if elements[i].get("type") == "any_text" and i + 1 < len(elements):
                following = elements[i + 1]
                if following.get("type") != "const_string":
                    raise InvalidRequest(f"{where} is any text before something else than a const_string; say by one where it ends")
                written.append(self._until(_text(following.get("value"), f"{where}.value")))
                i += 2
                continue
            written.append(self.node(elements[i], where, depth + 1))
            i += 1
        return f"({' '.join(written)})"

    def _until(self, text: str) -> str:
        """Free text up to the first place with this one."""
        if not text:
            raise InvalidRequest("any text of a structural tag ends with an empty text; say how it ends")
        name = f"until_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: TEXT {json.dumps(text)}")
        return name

    @staticmethod
    def _either(options: Sequence[str]) -> str:
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _tags(node: Mapping[str, Any], path: str) -> list[tuple[int, Mapping[str, Any]]]:
    return list(enumerate(_objects(node.get("tags"), f"{path}.tags")))


def _objects(given: Any, path: str) -> list[Mapping[str, Any]]:
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise InvalidRequest(f"{path} is no list of objects; give one at least")
    return given


def _text(given: Any, path: str) -> str:
    if not isinstance(given, str):
        raise InvalidRequest(f"{path} is no text; give one")
    return given


def _literal(given: Any, path: str) -> str:
    text = _text(given, path)
    return json.dumps(text) if text else ""
