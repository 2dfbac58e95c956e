"""Grammars of whole answers, in llguidance's dialect of Lark: tool calls as a model writes them, and reasoning before what is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.chat_format import ChatFormat
from twostep.text.grammar import rule_of
from twostep.text.harmony import CHANNEL, END, MESSAGE, START, HarmonyFormat
from twostep.text.reasoning import Begun, ReasoningFormat
from twostep.text.strict_schema import strict
from twostep.text.tokenizer import Tokenizer
from twostep.text.tool_formats.format import CallGrammar, Function, Rules, ToolCallFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTerms:
    """What a client asks of an answer's form, as the client wrote it. `own`: a grammar, which is read strictly unless `plainly`. `tools`:
    the functions that may be called, each as JSON; `must`: the answer is nothing but calls, of one or with `parallel` of more. `begun`:
    where the reasoning is; None: the answer has none."""

    own: Grammar | None = None
    plainly: bool = False
    tools: Sequence[str] = ()
    must: bool = False
    parallel: bool = True
    begun: Begun | None = None


def grammar_of(terms: AnswerTerms, format: ChatFormat, tokenizer: Tokenizer) -> Grammar | None:
    """Returns the grammar of the whole answer; None: it is free. What a client's grammar holds an answer to holds where the answer calls
    nothing. Takes what a stranger's schemas take: not for an event loop. Raises InvalidRequest."""
    grammar = terms.own if terms.own is None or terms.plainly else strict(terms.own)
    functions = [Function.of(json.loads(tool)["function"]) for tool in terms.tools]
    if functions:
        assert format.tool_calls is not None, "calls need a format"
        if terms.must or grammar is not None:
            calls = tool_call_grammar(format.tool_calls, functions, tokenizer, parallel=terms.parallel)
            grammar = calls if terms.must or grammar is None else either(calls, grammar)
        else:
            grammar = strict_grammar(format.tool_calls, functions, tokenizer, parallel=terms.parallel)
    if grammar is None or terms.begun is None or format.reasoning is None:
        return grammar
    return after_reasoning(grammar, format.reasoning, tokenizer, terms.begun, is_calls=terms.must)


def tool_call_grammar(format: ToolCallFormat, functions: Sequence[Function], tokenizer: Tokenizer, *, parallel: bool) -> Grammar:
    """An answer of nothing but calls, of these functions: one, or with `parallel` one or more."""
    rules = Rules(tokenizer)
    syntax = format.grammar(rules, parallel)
    return _grammar(f"{syntax.marker} {syntax.calls}", syntax, rules, functions)


def strict_grammar(format: ToolCallFormat, functions: Sequence[Function], tokenizer: Tokenizer, *, parallel: bool) -> Grammar | None:
    """Any text, with calls at its end or without; where there are some, they are of these functions, and arguments of strict ones as
    their schemas say. None: nothing but the answer itself tells a call of this format from text."""
    rules = Rules(tokenizer)
    syntax = format.grammar(rules, parallel)
    if not syntax.marker:
        return None
    anything = {"additionalProperties": True}
    functions = [each if each.strict else Function(each.name, anything) for each in functions]
    free = "FREE: /(?s:.*)/"
    if syntax.marker.startswith("<"):
        return _grammar(f"FREE ({syntax.marker} {syntax.calls})?", syntax, rules, functions, free)
    return _grammar(f"FREE | begun {syntax.calls}", syntax, rules, functions, f"begun[lazy]: FREE {syntax.marker}", free)


def _grammar(start: str, syntax: CallGrammar, rules: Rules, functions: Sequence[Function], *more: str) -> Grammar:
    assert functions, "calls need functions"
    call = "call: " + " | ".join(rules.rule(syntax.call(function)) for function in functions)
    return Grammar(GrammarKind.LARK, "\n".join((f"start: {start}", *more, call, *rules.lines)) + "\n")


def after_reasoning(
    grammar: Grammar, format: ReasoningFormat | HarmonyFormat, tokenizer: Tokenizer, begun: Begun, *, is_calls: bool = False
) -> Grammar:
    """`grammar` is of the answer, not of what the model thinks before it. `is_calls`: it is of calls, as tool_call_grammar makes it."""
    if begun is Begun.OVER:
        return grammar
    marker = Rules(tokenizer).marker
    if isinstance(format, HarmonyFormat):
        header = f'{marker(CHANNEL)} "analysis" {marker(MESSAGE)}'
        thought = f'({header} FREE {marker(END)} {marker(START)} "assistant")?'
        final = "" if is_calls else f'{marker(CHANNEL)} "final" {marker(MESSAGE)}'
        return Grammar(GrammarKind.LARK, f"start: {thought} {final} body\nFREE: /(?s:.*)/\nbody: {rule_of(grammar)}\n")
    if tokenizer.added_id(format.closing) is not None:
        rest = f"rest: FREE {marker(format.closing)} BREAKS"
    else:
        rest = f"rest: until BREAKS\nuntil[lazy]: FREE {marker(format.closing)}"
    start = "rest body" if begun is Begun.YES else f"({marker(format.opening)} rest)? body"
    return Grammar(GrammarKind.LARK, f"start: {start}\n{rest}\nFREE: /(?s:.*)/\nBREAKS: /\\n{{0,2}}/\nbody: {rule_of(grammar)}\n")


def either(one: Grammar, other: Grammar) -> Grammar:
    """An answer that is a sentence of one of them."""
    return Grammar(GrammarKind.LARK, f"start: one | other\none: {rule_of(one)}\nother: {rule_of(other)}\n")
