"""Chats whose answers quote their prompts: a passage of a text, to be said again word for word or with one word replaced. Pure.

    |<- frame.before ------------------------->|<- passage ------>|<- frame.after ------------>|<- BEGUN ->|
     <|im_start|>user Repeat the following …:   Twice a day the …  <|im_end|> <|im_start|>assistant Twice a day

The answer is begun with the passage's first tokens: small models, which were told to quote, would often paraphrase.

Only the served model's tokenizer and chat template know the ids. A target has `questions` tokenized once, and `Quotations.of` takes the
ids apart; after that, a passage of any length is a beginning of one that is there.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from random import Random

from twostep.errors import InvalidRequest

_REPEAT = "Repeat the following text word for word, and nothing else:"
_EDITS = (("the", "this"), ("and", "or"), ("is", "was"), ("a", "one"))
# What is asked for, of which the first is every second question.
ASKED = (_REPEAT, *(f'Replace every "{word}" with "{other}" in this text, and change nothing else:' for word, other in _EDITS))
# Two passages that have nothing in common: what two chats with them share is the frame.
_MARKS = ("1", "x")
# Tokens of the passage with which its answer is begun.
BEGUN = 8
_MAX_PASSAGES = 64
# Left of the context for what is around a passage, where its characters are counted, not its tokens.
_MARGIN = 512
_SENTENCE = re.compile(r"\n\n|(?<=[.!?]) ")


def questions(text: str, max_model_len: int) -> list[str]:
    """Returns what a user says, for each of which `Quotations.of` wants the ids of the chat. Raises InvalidRequest for a text without
    two sentences."""
    # Few texts have more tokens than characters: a router refuses none of these for its length.
    longest = max(1, max_model_len - _MARGIN)
    asked = [_said(what, mark) for what in ASKED for mark in _MARKS]
    return asked + [_said(_REPEAT, passage) for passage in _passages(text, longest)]


@dataclass(frozen=True, slots=True)
class Frame:
    """A chat's ids around a passage."""

    before: Sequence[int]
    after: Sequence[int]

    def around(self, passage: Sequence[int]) -> array[int]:
        """Returns the whole prompt: the chat, and the answer's beginning."""
        return array("I", chain(self.before, passage, self.after, passage[:BEGUN]))


@dataclass(frozen=True, slots=True)
class Quotations:
    """A text as a served model reads it."""

    frames: tuple[Frame, ...] = field(repr=False)  # one for each of ASKED
    passages: tuple[Sequence[int], ...] = field(repr=False)  # from each of the text's sentences on

    @classmethod
    def of(cls, ids: Mapping[str, Sequence[int]], max_model_len: int) -> Quotations:
        """`ids`: of the chat in which a user says each of `questions`. Chats have half of the context at most: the other is for answers
        (BenchSession.fitted)."""
        frames = tuple(_frame(*(ids[_said(what, mark)] for mark in _MARKS)) for what in ASKED)
        marks = {_said(what, mark) for what in ASKED for mark in _MARKS}
        before, after = len(frames[0].before), len(frames[0].after)
        most = max_model_len // 2 - BEGUN - max(len(frame.before) + len(frame.after) for frame in frames)
        passages = (chat[before : len(chat) - after] for said, chat in ids.items() if said not in marks)
        return cls(frames, tuple(passage[: max(0, most)] for passage in passages))

    @property
    def longest(self) -> int:
        """Tokens that every passage has."""
        return min(map(len, self.passages))

    def drawn(self, rng: Random) -> Iterator[tuple[Frame, Sequence[int]]]:
        """Yields endlessly what to ask, and of which passage: every second time for the passage as it is. None comes twice before all
        have come."""
        edits = self.frames[1:]
        while True:
            for i, passage in enumerate(rng.sample(self.passages, len(self.passages))):
                yield rng.choice(edits) if i % 2 else self.frames[0], passage


def _said(what: str, passage: str) -> str:
    return f"{what}\n\n{passage}"


def _passages(text: str, longest: int) -> list[str]:
    """Returns the text from each of its sentences on, around its end to its beginning, as far as `longest` characters go; of 64 sentences
    at most."""
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.strip()))
    starts = [0, *(match.end() for match in _SENTENCE.finditer(text))] if text else []
    if len(starts) < 2:
        raise InvalidRequest("a text to quote has two sentences at least; give a longer one as --dataset-path")
    step = max(1.0, len(starts) / _MAX_PASSAGES)
    twice, length = f"{text}\n\n{text}", min(longest, len(text))
    return [twice[start : start + length] for start in (starts[int(i * step)] for i in range(min(len(starts), _MAX_PASSAGES)))]


def _frame(one: Sequence[int], other: Sequence[int]) -> Frame:
    before = _num_shared(one, other)
    after = _num_shared(one[before:][::-1], other[before:][::-1])
    return Frame(one[:before], one[len(one) - after :])


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many ids both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
