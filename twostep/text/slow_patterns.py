"""Regular expressions of a tokenizer that take time without end: a repetition of what repeats, `(x+)+y`.

Twice as many characters of some text take four billion times as long to match, and nothing stops a match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

# What a pattern is made of, as far as it matters: escapes, sets of characters, groups and repetitions.
_PART = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|\(\?<?[=!>]|\(|\)|(?:[*+]|\{\d*,\})|.", re.DOTALL)
_ENDLESS = re.compile(r"[*+]|\{\d*,\}")


def slow_pattern(tokenizer: tokenizers.Tokenizer) -> str | None:
    """The first one that a text is cut or rewritten with; None: there is none."""
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer):
        if part is not None:
            found = next((pattern for pattern in _patterns(json.loads(part.__getstate__())) if repeats_repetitions(pattern)), None)
            if found is not None:
                return found
    return None


def _patterns(value: Any) -> Iterator[str]:
    """{"Regex": "..."} wherever it stands."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "Regex" and isinstance(each, str):
                yield each
            else:
                yield from _patterns(each)
    elif isinstance(value, list):
        for each in value:
            yield from _patterns(each)


def repeats_repetitions(pattern: str) -> bool:
    """Whether a group that is repeated without end has something in it that is."""
    # Of each group that is open: whether something in it is repeated so.
    endless = [False]
    closed = False  # the part before was a group, and one such
    for part in _PART.findall(pattern):
        if part.startswith("("):
            endless.append(False)
            closed = False
        elif part == ")":
            closed = endless.pop() if len(endless) > 1 else False
            endless[-1] |= closed
        elif _ENDLESS.fullmatch(part):
            if closed:
                return True
            endless[-1], closed = True, False
        else:
            closed = False
    return False
