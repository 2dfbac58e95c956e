"""Grammars of whole answers, in llguidance's dialect of Lark: tool calls as a model writes them, and reasoning before what is asked for.

Markers that are tokens of their own stand in them as tokens, `<[17]>`: text never matches those, so that free text ends where one comes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.grammar import rule_of
from twostep.text.reasoning import Begun, ReasoningFormat
from twostep.text.tokenizer import Tokenizer
from twostep.text.tool_calls import HERMES, LLAMA3_JSON, MISTRAL, ToolCallFormat

# As `json.dumps` writes it, which is what models have read; schemas that ask for what no grammar can hold are held to the rest.
_GUIDANCE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
_NOTHING: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Function:
    """`parameters`: the JSON Schema of its arguments, None: it has none."""

    name: str
    parameters: Mapping[str, Any] | None = None


def tool_call_grammar(format: ToolCallFormat, functions: Sequence[Function], tokenizer: Tokenizer, *, parallel: bool) -> Grammar:
    """An answer of nothing but calls, of these functions: one, or with `parallel` one or more."""
    assert functions, "an answer that must call needs something to call"
    marker = _Markers(tokenizer)
    if format is HERMES:
        opening, closing = marker("<tool_call>"), marker("</tool_call>")
        call, more = f'{opening} "\\n" object "\\n" {closing}', 'call ("\\n" call)*'
    elif format is MISTRAL and tokenizer.added_id("[ARGS]") is not None:
        call, more = f"{marker('[TOOL_CALLS]')} named", "call+"
    elif format is MISTRAL:
        call, more = f'{marker("[TOOL_CALLS]")} "[" object "]"', f'{marker("[TOOL_CALLS]")} "[" object (", " object)* "]"'
    else:
        # Llama's chat templates refuse messages with several calls.
        assert format is LLAMA3_JSON, "every format has a grammar"
        call, more = "object", "object"
    rules = [f"start: {more if parallel else 'call'}", f"call: {call}"]
    rules.append("object: " + " | ".join(f"object_{i}" for i in range(len(functions))))
    if "named" in call:
        rules.append("named: " + " | ".join(f"named_{i}" for i in range(len(functions))))
    key = "parameters" if format is LLAMA3_JSON else "arguments"
    for i, function in enumerate(functions):
        name = json.dumps(function.name, ensure_ascii=False)
        rules.append(f'object_{i}: {_literal(_head(name, key))} arguments_{i} "}}"')
        if "named" in call:
            rules.append(f"named_{i}: {_literal(function.name)} {marker('[ARGS]')} arguments_{i}")
        rules.append(f"arguments_{i}: %json {json.dumps(_schema(function.parameters))}")
    return Grammar(GrammarKind.LARK, "\n".join(rules) + "\n")


def _head(name: str, key: str) -> str:
    return '{"name": ' + name + ', "' + key + '": '


def _schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Its references keep their meaning: it is a document of its own."""
    return {**(parameters or _NOTHING), "type": "object", "x-guidance": _GUIDANCE}


def after_reasoning(grammar: Grammar, format: ReasoningFormat, tokenizer: Tokenizer, begun: Begun) -> Grammar:
    """`grammar` is of the answer, not of what the model thinks before it."""
    if begun is Begun.OVER:
        return grammar
    marker = _Markers(tokenizer)
    if tokenizer.added_id(format.closing) is not None:
        rest = f"rest: FREE {marker(format.closing)} BREAKS"
    else:
        rest = f"rest: until BREAKS\nuntil[lazy]: FREE {marker(format.closing)}"
    start = "rest body" if begun is Begun.YES else f"({marker(format.opening)} rest)? body"
    return Grammar(GrammarKind.LARK, f"start: {start}\n{rest}\nFREE: /(?s:.*)/\nBREAKS: /\\n{{0,2}}/\nbody: {rule_of(grammar)}\n")


def either(one: Grammar, other: Grammar) -> Grammar:
    """An answer that is a sentence of one of them."""
    return Grammar(GrammarKind.LARK, f"start: one | other\none: {rule_of(one)}\nother: {rule_of(other)}\n")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Markers:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> str:
        token_id = self._tokenizer.added_id(text)
        return _literal(text) if token_id is None else f"<[{token_id}]>"
