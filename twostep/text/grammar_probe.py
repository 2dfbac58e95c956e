"""A process that makes and tries the grammars of strangers, so that the router survives them (router/prompting/grammar_check.py starts it).

Most of what a grammar may cost is bounded by llguidance's own limits, but not all: conjunctions of a dozen regular expressions take more
memory than there is, a multiple of a large number takes seconds, and a library that gets no memory ends its process.

It is asked in JSON: first `model`, the path of a model's directory, `formats`, the names of its ChatFormat, and `memory_bytes`, how much a
grammar may take beside it; then the fields of AnswerTerms. It answers with `error`: what is wrong; or with `kind` and `text`: the grammar
that workers are to get, null for none.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostep.errors import InvalidRequest
from twostep.process.helper_service import limit_memory, serve
from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.answer_grammar import AnswerTerms, grammar_of
from twostep.text.chat_format import ChatFormat
from twostep.text.grammar import MAX_COMPILED_BYTES, error_of, grammar_tokenizer, library, limits, refused, source_of
from twostep.text.reasoning import Begun
from twostep.text.tokenizer import Tokenizer

# Of an answer that is made up: what grows, as a rule grows soon.
_NUM_TOKENS = 24


def main() -> None:
    serve(_begin)


def _begin(question: bytes) -> Callable[[bytes], bytes]:
    setup = json.loads(question)
    model = Path(setup["model"])
    try:
        vocabulary = grammar_tokenizer(model)
    except InvalidRequest as error:
        refusal = json.dumps({"error": error.message}).encode()
        return lambda question: refusal
    probe = Probe(Tokenizer.load(model), vocabulary, ChatFormat.named(*setup["formats"]))
    limit_memory(setup["memory_bytes"])
    return probe.answer


def terms_to_json(terms: AnswerTerms) -> bytes:
    own, begun = terms.own, terms.begun
    fields = {
        "own": None if own is None else {"kind": own.kind.value, "text": own.text},
        "plainly": terms.plainly,
        "tools": list(terms.tools),
        "must": terms.must,
        "parallel": terms.parallel,
        "begun": None if begun is None else begun.value,
    }
    return json.dumps(fields).encode()


def terms_from_json(data: bytes) -> AnswerTerms:
    fields = json.loads(data)
    own, begun = fields["own"], fields["begun"]
    return AnswerTerms(
        **fields
        | {
            "own": None if own is None else Grammar(GrammarKind(own["kind"]), own["text"]),
            "begun": None if begun is None else Begun(begun),
        }
    )


@dataclass(frozen=True, slots=True)
class Probe:
    """`vocabulary`: the tokenizer as llguidance sees it."""

    tokenizer: Tokenizer
    vocabulary: Any
    format: ChatFormat

    def answer(self, question: bytes) -> bytes:
        try:
            grammar = grammar_of(terms_from_json(question), self.format, self.tokenizer)
            if grammar is None:
                answer: dict[str, str | None] = {"kind": None}
            else:
                self.check(grammar)
                answer = {"kind": grammar.kind.value, "text": grammar.text}
        except InvalidRequest as error:
            answer = {"error": error.message}
        except MemoryError:
            answer = {"error": "grammar: it takes too much memory; make it simpler"}
        return json.dumps(answer).encode()

    def check(self, grammar: Grammar) -> None:
        """Compiles a grammar and begins an answer in it. Raises InvalidRequest, MemoryError."""
        source = source_of(grammar)
        before = _allocated_bytes()
        matcher = library().LLMatcher(self.vocabulary, source, log_level=0, limits=limits())
        for i in range(_NUM_TOKENS):
            if matcher.is_error():
                raise refused(grammar, error_of(matcher))
            token = _some_token(matcher.compute_bitmask(), i)
            if matcher.is_error():
                raise refused(grammar, error_of(matcher))
            if (held := _allocated_bytes() - before) > MAX_COMPILED_BYTES:
                most = MAX_COMPILED_BYTES >> 20
                raise InvalidRequest(f"grammar: the {grammar.kind.value} takes {held >> 20} MiB, and may take {most}; make it simpler")
            if token is None and not i and not matcher.is_accepting():
                raise refused(grammar, "no answer is a sentence of it, in the tokens of this model")
            if token is None or matcher.is_stopped() or token in self.vocabulary.eos_tokens:
                break
            matcher.consume_token(token)


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


def _allocated_bytes() -> int:
    """Returns the bytes that this process has got from the C library and not given back; 0 where the library does not count them (before
    glibc 2.33): then `memory_bytes` alone bounds a grammar. Nothing else allocates while a grammar is compiled."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.uordblks) + int(info.hblkhd)


def _some_token(mask: bytes, seed: int) -> int | None:
    """One of those allowed, another one each time."""
    start = seed * 2654435761 % len(mask)
    place = next((i for i in (*range(start, len(mask)), *range(start)) if mask[i]), None)
    return None if place is None else place * 8 + next(bit for bit in range(8) if mask[place] >> bit & 1)


if __name__ == "__main__":
    main()
