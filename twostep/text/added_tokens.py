"""Where the tokens that a tokenizer cuts out of a text before all others stand in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AddedToken:
    """`control`: it makes what a chat consists of. `single_word`: it is none where a letter or digit stands beside it."""

    content: str
    control: bool
    single_word: bool = False


class AddedTokens:
    """Of one tokenizer; the first in a text is found, of those that begin at one place the longest, as the tokenizer does it."""

    def __init__(self, tokens: Mapping[str, AddedToken]) -> None:
        self._tokens = tokens
        self._pattern = re.compile(_longest_of([token for token in tokens if token])) if any(tokens) else None

    def __iter__(self) -> Iterator[AddedToken]:
        return iter(self._tokens.values())

    @property
    def control(self) -> list[str]:
        return [content for content, token in self._tokens.items() if token.control]

    def control_in(self, text: str) -> Iterator[re.Match[str]]:
        """Where control tokens stand in a text, in order."""
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            token = self._tokens[match.group()]
            if token.control and not (token.single_word and _within_a_word(text, match)):
                yield match


def _within_a_word(text: str, match: re.Match[str]) -> bool:
    beside = text[max(0, match.start() - 1) : match.start()] + text[match.end() : match.end() + 1]
    return any(char.isalnum() or char == "_" for char in beside)


def _longest_of(words: list[str]) -> str:
    """A pattern that takes as long as the longest word at each place, however many words there are: `a(?:bc?|d)`."""
    by_first: dict[str, list[str]] = {}
    for word in sorted(set(words)):
        if word:
            by_first.setdefault(word[0], []).append(word[1:])
    branches = []
    for first, rests in by_first.items():
        # A run without branches is written at once, so that the pattern is no deeper than tokens differ.
        run = ""
        while len(rests) == 1 and rests[0]:
            run, rests = run + rests[0], [""]
        while "" not in rests and len({rest[0] for rest in rests}) == 1:
            run, rests = run + rests[0][0], [rest[1:] for rest in rests]
        more = _longest_of(rests) if any(rests) else ""
        optional = "?" if more and "" in rests else ""
        branches.append(re.escape(first + run) + (f"(?:{more}){optional}" if more else ""))
    return "|".join(branches)
