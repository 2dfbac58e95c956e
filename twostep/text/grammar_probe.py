"""A process that tries grammars of strangers, so that whoever asks it survives them.

    python -P -m twostep.text.grammar_probe TOKENIZER_JSON BYTES SECONDS        (started by router/grammar_check.py)

Most of what a grammar may cost is bounded by llguidance's own limits, but not all: conjunctions of a dozen regular expressions take more
memory than there is, and a library that gets none ends its process. Here memory and processor time are limited, by the kernel: nothing
of Python can run while the library does.

BYTES is how much memory a grammar may take, beside the tokenizer's, and SECONDS how much time: SIGPROF ends the process then. A line of
JSON in: kind, text. A line out: `error`, what is wrong with the grammar, or null. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from twostep.errors import InvalidRequest, SetupError
from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.grammar import library, limits, refused, source_of, tokenizer_text

# Of an answer that is made up: what grows, as a rule grows soon.
_NUM_TOKENS = 24
_NICENESS = 5


def main(argv: list[str]) -> None:
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        tokenizer = library().LLTokenizer(tokenizer_text(Path(argv[0])))
    except (SetupError, OSError, ValueError) as error:
        print(json.dumps({"error": str(error)}), flush=True)  # noqa: T201
        return
    limit = _virtual_bytes() + int(argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps({"error": None}), flush=True)  # noqa: T201
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, float(argv[2]))
        wrong = trouble(tokenizer, asked["kind"], asked["text"])
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps({"error": wrong}), flush=True)  # noqa: T201


def trouble(tokenizer: Any, kind: str, text: str) -> str | None:
    """What is wrong with a grammar; None: nothing was found in the beginning of an answer."""
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


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(sys.argv[1:])
