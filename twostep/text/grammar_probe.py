"""A process that tries grammars of strangers, so that the router survives them (started by router/prompting/grammar_check.py).

Most of what a grammar may cost is bounded by llguidance's own limits, but not all: conjunctions of a dozen regular expressions take more
memory than there is, and a library that gets none ends its process.

It is asked in JSON: first `model`, the path of a model's directory, and `memory_bytes`, how much a grammar may take beside it; then
grammars: `kind`, `text`, which it answers with `error`: what is wrong, or null.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from twostep.errors import InvalidRequest
from twostep.process.helper_service import limit_memory, serve
from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.grammar import grammar_tokenizer, library, limits, refused, source_of

# Of an answer that is made up: what grows, as a rule grows soon.
_NUM_TOKENS = 24


def main() -> None:
    def begin(question: bytes) -> Callable[[bytes], bytes]:
        setup = json.loads(question)
        try:
            tokenizer = grammar_tokenizer(Path(setup["model"]))
        except InvalidRequest as error:
            refusal = json.dumps({"error": error.message}).encode()
            return lambda question: refusal
        limit_memory(setup["memory_bytes"])
        return partial(_answer, tokenizer)

    serve(begin)


def _answer(tokenizer: Any, question: bytes) -> bytes:
    asked = json.loads(question)
    return json.dumps({"error": trouble(tokenizer, asked["kind"], asked["text"])}).encode()


def trouble(tokenizer: Any, kind: str, text: str) -> str | None:
    """Says what is wrong with a grammar; None: nothing was found in the beginning of an answer."""
    try:
        grammar = Grammar(GrammarKind(kind), text)
        matcher = library().LLMatcher(tokenizer, source_of(grammar), log_level=0, limits=limits())
        for i in range(_NUM_TOKENS):
            if matcher.is_error():
                raise refused(grammar, matcher.get_error())
            token = _some_token(matcher.compute_bitmask(), i)
            if matcher.is_error():
                raise refused(grammar, matcher.get_error())
            if token is None and not i and not matcher.is_accepting():
                raise refused(grammar, "no answer is a sentence of it, in the tokens of this model")
            if token is None or matcher.is_stopped() or token in tokenizer.eos_tokens:
                break
            matcher.consume_token(token)
    except InvalidRequest as error:
        return error.message
    except MemoryError:
        return f"grammar: the {kind} takes too much memory; make it simpler"
    return None


def _some_token(mask: bytes, seed: int) -> int | None:
    """One of those allowed, another one each time."""
    start = seed * 2654435761 % len(mask)
    place = next((i for i in (*range(start, len(mask)), *range(start)) if mask[i]), None)
    return None if place is None else place * 8 + next(bit for bit in range(8) if mask[place] >> bit & 1)


if __name__ == "__main__":
    main()
