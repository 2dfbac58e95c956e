"""Draws what requests ask for: endless, seeded sequences of sessions. Pure.

A *session* is one conversation: its turns follow one another, each after the answer to the one before and a time to think; each turn's
prompt is everything said so far and something new. Most workloads' sessions have one turn.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Protocol

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.content import PromptContent
from twostep.lab.bench.serve.lengths import Lengths

MAX_TURNS = 180


@dataclass(frozen=True, slots=True)
class Text:
    """A text out of a file."""

    text: str
    token_ids: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    prompt: array[int] | Text  # the new part of it: ids of the workload's alphabet, or a text
    output_tokens: int
    think_s: float = 0.0  # after the answer to the turn before
    passage_tokens: int | None = None
    """The prompt says a passage of so many tokens again and again, and the answer is expected to go on with it."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids if isinstance(self.prompt, Text) else self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSession:
    turns: tuple[SessionTurn, ...]
    arrival_s: float | None = None  # its time in the trace it is from, from 0


class Workload(Protocol):
    """A pure function of seed and alphabet."""

    def sessions(self, content: PromptContent, rng: random.Random) -> Iterator[BenchSession]:
        """Endless, but for a trace."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPrompts:
    """Independent requests that share nothing. `fixed`, `normal`, `sharegpt`, `document`, by what their lengths are."""

    prompt: Lengths
    output: Lengths

    def sessions(self, content: PromptContent, rng: random.Random) -> Iterator[BenchSession]:
        while True:
            prompt, output = self.prompt.draw(rng), self.output.draw(rng)
            yield one_turn(content.draw(prompt), output)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrompts:
    """Long and short prompts side by side: a `long_share` of them is long."""

    long: Lengths
    short: Lengths
    output: Lengths
    long_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.long_share <= 1:
            raise InvalidRequest(f"the share of long prompts is {self.long_share:g}; give 0 to 1")

    def sessions(self, content: PromptContent, rng: random.Random) -> Iterator[BenchSession]:
        while True:
            lengths = self.long if rng.random() < self.long_share else self.short
            prompt, output = lengths.draw(rng), self.output.draw(rng)
            yield one_turn(content.draw(prompt), output)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixPrompts:
    """Each prompt begins with one of `num_prefixes` texts, the k-th chosen with a weight of 1/k^zipf, and goes on with one of its own."""

    prefix_tokens: int
    num_prefixes: int
    suffix: Lengths
    output: Lengths
    zipf: float = 0.0

    def __post_init__(self) -> None:
        if self.prefix_tokens < 1 or self.num_prefixes < 1 or self.zipf < 0:
            raise InvalidRequest("a shared prefix has at least one token, there is at least one, and its Zipf exponent is 0 or more")

    def sessions(self, content: PromptContent, rng: random.Random) -> Iterator[BenchSession]:
        prefixes = [content.block(f"prefix/{i}", self.prefix_tokens) for i in range(self.num_prefixes)]
        weights = list(accumulate((k + 1) ** -self.zipf for k in range(self.num_prefixes)))
        while True:
            prefix = rng.choices(prefixes, cum_weights=weights)[0]
            suffix, output = self.suffix.draw(rng), self.output.draw(rng)
            yield one_turn(prefix + content.draw(suffix), output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quoting:
    """Answers that repeat the prompt, as those of editing and of retrieval do: the prompt is a passage, said again and again and broken
    off in the middle, and a language model goes on with it. What speculation by prompt look-up lives on."""

    prompt: Lengths
    output: Lengths

    def sessions(self, content: PromptContent, rng: random.Random) -> Iterator[BenchSession]:
        while True:
            prompt, output = self.prompt.draw(rng), self.output.draw(rng)
            # Said at least once and a half, so that there is something to go by.
            passage = content.draw(max(1, prompt * 2 // 3))
            ids = (passage * (prompt // len(passage) + 1))[:prompt]
            yield BenchSession(turns=(SessionTurn(prompt=ids, output_tokens=output, passage_tokens=len(passage)),))


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurn:
    """Conversations: a system prompt (shared by all), then turns that each say something new. Times to think are exponential."""

    turns: Lengths
    message: Lengths
    output: Lengths
    system_tokens: int = 0
    think_s: float = 0.0
    max_total_tokens: int = 0  # A conversation ends before it would outgrow this; 0: no limit

    def __post_init__(self) -> None:
        if self.system_tokens < 0 or self.think_s < 0:
            raise InvalidRequest("the system prompt's tokens and the time to think are 0 or more")

    def sessions(self, content: PromptContent, rng: random.Random) -> Iterator[BenchSession]:
        system = content.block("system", self.system_tokens)
        while True:
            turns: list[SessionTurn] = []
            total = 0
            for i in range(min(MAX_TURNS, self.turns.draw(rng))):
                message, output = self.message.draw(rng), self.output.draw(rng)
                think = rng.expovariate(1 / self.think_s) if i and self.think_s else 0.0
                ids = content.draw(message) if i else system + content.draw(message)
                total += len(ids) + output
                if turns and self.max_total_tokens and total > self.max_total_tokens:
                    break
                turns.append(SessionTurn(prompt=ids, output_tokens=output, think_s=think))
            yield BenchSession(turns=tuple(turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedSessions:
    """Sessions that are known beforehand, out of a file."""

    items: Sequence[BenchSession] = field(repr=False)
    repeat: bool = False  # begin again after the last. Never with the file's own arrival times.

    def sessions(self, content: PromptContent, rng: random.Random) -> Iterator[BenchSession]:
        while True:
            yield from self.items
            if not self.repeat or not self.items:
                return


def one_turn(prompt: array[int] | Text, output_tokens: int, arrival_s: float | None = None) -> BenchSession:
    return BenchSession(turns=(SessionTurn(prompt=prompt, output_tokens=output_tokens),), arrival_s=arrival_s)


def num_quoted(turn: SessionTurn, answer: Sequence[int]) -> int:
    """Tokens of an answer, from its first on, that go on with the passage that the prompt says again and again."""
    if isinstance(turn.prompt, Text) or turn.passage_tokens is None:
        return 0
    start = len(turn.prompt)
    expected = (turn.prompt[(start + i) % turn.passage_tokens] for i in range(len(answer)))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer, expected, strict=True)))


def fitted(session: BenchSession, max_model_len: int) -> BenchSession:
    """Cut to a context: an answer to the half of it, then prompts to what is left, then turns that no longer fit. 0: nothing is cut."""
    if not max_model_len:
        return session
    turns: list[SessionTurn] = []
    total = 0
    for turn in session.turns:
        output = min(turn.output_tokens, max_model_len // 2)
        room = max_model_len - output - total
        if turn.num_tokens > room and turns:
            break
        prompt = turn.prompt
        if turn.num_tokens > room:
            if isinstance(prompt, Text):
                return BenchSession(turns=(), arrival_s=session.arrival_s)
            prompt = prompt[:room]
        fits = SessionTurn(prompt=prompt, output_tokens=output, think_s=turn.think_s, passage_tokens=turn.passage_tokens)
        total += fits.num_tokens + output
        turns.append(fits)
    return BenchSession(turns=tuple(turns), arrival_s=session.arrival_s)
