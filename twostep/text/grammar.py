"""Grammars for llguidance: how ours are written for it, what it may spend on them, what is wrong with one.

Neither torch nor numpy is needed, so that the router looks at grammars as the workers do. llguidance itself is loaded when the first
grammar comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from twostep.errors import InvalidRequest, SetupError
from twostep.extras import install
from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.tokenizer import TokenBytes, Tokenizer

# What llguidance may spend on one grammar, and on one token of an answer: about 20 ms and 15 ms. Beyond it the grammar is refused, or the
# answer ends with an error.
_INITIAL_FUEL = 1_000_000
_STEP_FUEL = 200_000
_STEP_ITEMS = 50_000
_ROW_ITEMS = 2_000
# Of 1 to 2 kB each.
_LEXER_STATES = 50_000
_GRAMMAR_SIZE = 500_000
# Of one grammar as it is compiled, at the beginning of an answer.
MAX_COMPILED_BYTES = 64 << 20
# Between two tokens of JSON: room for a line and its indentation, but not for a model that writes blanks until its time is up.
_JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
_MAX_DEPTH = 100
_MAX_MESSAGE_CHARS = 500
# What llguidance adds to an error where it is asked to tell all.
_DETAILS = "\n<state>"
_WORK = re.compile(r'"lexer_cost": (\d+)')
_NO_TOKEN = (1 << 32) - 1
# What llguidance says where the vocabulary has no token that goes on.
_UNWRITABLE = ("NoExtensionBias", "satisfy the grammar; forced bytes")

# A schema or a regular expression within a grammar that the client did not write (rule_of), and the excerpt of that grammar.
_INNER = re.compile(r"at \d+\(\d+\): (?:(?P<schema>failed to compile JSON schema: )|(?=invalid regex ))")
_EXCERPT = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
# llguidance makes regular expressions of schemas and reports those. What it reports, and what that means in a schema.
_OF_SCHEMAS = (
    (
        re.compile(r"Regex is empty: .*", re.DOTALL),
        'no text meets "pattern", "format", "enum", "minLength" and "maxLength" of one of its strings together',
    ),
    (
        re.compile(r"Failed to generate regex for (\w+) range: .*", re.DOTALL),
        r'"minimum" or "maximum" of one of its \1s is too far from 0; give a bound with fewer digits, or none',
    ),
    (
        re.compile(r"patternProperty regexes (.*) are not disjoint"),
        r'one name can match \1 of its "patternProperties"; make them exclusive',
    ),
    (re.compile(r"regex parse error:"), 'a "pattern", or a name in "patternProperties", has a mistake:'),
    (
        re.compile(r"lookarounds not supported yet; \w+ in regex (.*)"),
        r'the "pattern" \1 looks around, or has a word boundary; write it without',
    ),
)


def library() -> ModuleType:
    """llguidance. Raises SetupError where it is not installed."""
    try:
        import llguidance  # noqa: PLC0415 - most deployments never see a grammar
    except ImportError as error:
        raise SetupError(f"answers in a grammar need the package llguidance, which is not installed here: {install('router')}") from error
    return llguidance


def limits(*, details: bool = False) -> Any:
    """An LLParserLimits. Messages say nothing of the grammar, since they go into logs, but with `details`: see error_of(), work_of()."""
    return library().LLParserLimits(
        max_items_in_row=_ROW_ITEMS,
        initial_lexer_fuel=_INITIAL_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=_LEXER_STATES,
        max_grammar_size=_GRAMMAR_SIZE,
        verbose_errors=details,
    )


def error_of(matcher: Any) -> str:
    """Returns what is wrong, without details; empty: nothing is."""
    return str(matcher.get_error()).partition(_DETAILS)[0].replace("<non-verbose/>", "").strip()


def work_of(matcher: Any) -> int | None:
    """Returns how much work the automaton of a matcher, made with `details`, has been so far, those of its copies included, in units of
    llguidance's fuel: the nodes of its expressions. None: this release does not tell it. Takes some 0.2 ms."""
    asked = matcher.deep_copy()
    asked.compute_bitmask()
    # There is no way to ask but by an error.
    asked.consume_token(_NO_TOKEN)
    found = _WORK.search(asked.get_error())
    return None if found is None else int(found.group(1))


def source_of(grammar: Grammar) -> str:
    """The grammar as llguidance takes it. Raises InvalidRequest for what is no JSON Schema by its form; the rest shows when it is
    compiled."""
    matcher = library().LLMatcher
    source: str
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_OBJECT:
            source = matcher.grammar_from_json_schema(schema_of(grammar))
        case GrammarKind.REGEX:
            source = matcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            source = matcher.grammar_from_lark(grammar.text)
    return source


def rule_of(grammar: Grammar) -> str:
    """The right side of a rule of Lark that stands for it, within a larger grammar. Raises InvalidRequest as `source_of` does."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_OBJECT:
            return f"%json {schema_of(grammar)}"
        case GrammarKind.REGEX:
            return f"/{_within_slashes(grammar.text)}/"
        case GrammarKind.LARK:
            return f"%lark {{\n{grammar.text}\n}}"


def _within_slashes(regex: str) -> str:
    written, escaped = "", False
    for char in regex:
        if char == "\n":
            char = "n" if escaped else "\\n"
        written += "\\/" if char == "/" and not escaped else char
        escaped = char == "\\" and not escaped
    return written


def schema_of(grammar: Grammar) -> str:
    """Returns the schema of a grammar of JSON as llguidance is given it, wherever in a grammar it stands. What it says under "x-guidance"
    itself holds. Raises InvalidRequest."""
    schema = parse_schema(grammar.text) if grammar.kind is GrammarKind.JSON_SCHEMA else {"type": "object"}
    if schema is False:
        raise refused(grammar, "nothing is valid under the schema false")
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise refused(grammar, 'its "x-guidance" is no object')
    return json.dumps(schema | {"x-guidance": {"whitespace_pattern": _JSON_SPACE} | own})


def refused(grammar: Grammar, why: str) -> InvalidRequest:
    """Returns what a client is told of a grammar that llguidance does not take."""
    hint, kind = "", grammar.kind
    if inner := _INNER.match(why):
        kind = GrammarKind.JSON_SCHEMA if inner["schema"] else GrammarKind.REGEX
        why = _EXCERPT.sub("", why[inner.end() :])
    if any(sign in why for sign in _UNWRITABLE):
        why = "no answer is a sentence of it, in the tokens of this model"
    if kind is GrammarKind.JSON_SCHEMA:
        for said, meant in _OF_SCHEMAS:
            why = said.sub(meant, why)
    if kind is GrammarKind.JSON_SCHEMA and "Unimplemented" in why:
        hint = '; leave them out, or add "x-guidance": {"lenient": true} to the schema to have them ignored'
    if "coerce_one_of" in why:
        hint = '; write anyOf, or add "x-guidance": {"coerce_one_of": true} to the schema'
    return InvalidRequest(f"grammar: the {kind.value} cannot be used: {_short(why)}{hint}")


def _short(why: str) -> str:
    text = " ".join(why.split())
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]} ..."


def parse_schema(text: str) -> Any:
    """Reads a schema, to write it anew for llguidance, which puts the text into a larger document as it is. Raises InvalidRequest."""
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise InvalidRequest(f"grammar: the json_schema is not JSON: {_short(str(error))}") from error
    if schema is True:
        return {}
    if schema is not False and not isinstance(schema, dict):
        raise InvalidRequest(f"grammar: the json_schema is a {type(schema).__name__}; a schema is an object, or true")
    check_depth(schema)
    return schema


def check_depth(schema: Any) -> None:
    """Raises InvalidRequest for what would be too deep for functions that call themselves."""
    if _depth(schema) > _MAX_DEPTH:
        raise _too_deep()


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"grammar: the json_schema is nested deeper than {_MAX_DEPTH}; make it flatter, with $defs and $ref")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _depth(value: Any) -> int:
    """Level by level, without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [inner for each in level if isinstance(each, dict | list) for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def grammar_tokenizer(model_dir: Path, eos_token_ids: Iterable[int] = ()) -> Any:
    """An LLTokenizer. Takes a second for 100,000 tokens. Raises SetupError, and InvalidRequest for a model that knows no grammars."""
    tokenizer = Tokenizer.load(model_dir)
    if tokenizer.anchor is None or tokenizer.spaces_words:
        raise InvalidRequest(
            "grammar: answers of this model cannot be held to one: its tokens are words, between which its decoder (tokenizer.json) puts "
            "spaces; leave the grammar out"
        )
    try:
        return _made_for(tokenizer, eos_token_ids)
    except ValueError as error:
        raise SetupError(f"{model_dir} cannot be used for grammars: {error}") from error


def _made_for(tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> Any:
    vocabulary = _Vocabulary(tokenizer)
    # The ends only have to be among those of the model that have no text: which of them come is the engine's business.
    ends = sorted(i for i in eos_token_ids if 0 <= i < tokenizer.vocab_size)
    return library().LLTokenizer(vocabulary, eos_token=ends or [tokenizer.vocab_size])


class _Vocabulary:
    """Answers what llguidance asks for, by the names that it has for it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        token_bytes = TokenBytes(tokenizer)
        self._tokenizer = tokenizer
        # The last one stands for the end where the model has none.
        self.tokens: Sequence[bytes] = [*map(token_bytes.of, range(tokenizer.vocab_size)), b"<end>"]
        self.eos_token_id = tokenizer.vocab_size
        self.special_token_ids = sorted((*tokenizer.special_ids, tokenizer.vocab_size))
        plain = ((token, i) for i, token in enumerate(self.tokens) if i not in tokenizer.added_ids and i < tokenizer.vocab_size)
        self._ids = {token: i for token, i in reversed(list(plain)) if token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> Sequence[int]:
        """As the model has read such a text where one goes before it."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        wanted, got = text.encode(), b"".join(self.tokens[i] for i in ids)
        if got == wanted:
            return ids
        if ids and got == b" " + wanted:
            # The space that the tokenizer puts before a text.
            return [*self._greedy(self.tokens[ids[0]][1:]), *ids[1:]]
        return self._greedy(wanted)

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token first; what none begins with is left out."""
        found, start = [], 0
        while start < len(text):
            sizes = range(min(self._longest, len(text) - start), 0, -1)
            size = next((n for n in sizes if text[start : start + n] in self._ids), 0)
            if not size:
                break
            found.append(self._ids[text[start : start + size]])
            start += size
        return found
