"""Draws what requests ask for: seeded sequences of sessions, and prompts of token ids, most of which begin differently. Pure.

A *session* is one conversation: its turns follow one another, each after the answer to the one before and a time to think; each turn's
prompt is everything said so far and something new. Most workloads' sessions have one turn.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.lengths import Lengths, Normal
from twostep.lab.bench.serve.quoting import BEGUN, Frame, Quotations

MAX_TURNS = 180
MOONCAKE_BLOCK = 512  # tokens that one hash id stands for
_POOL = 1 << 17
# So many tokens at a prompt's beginning are drawn one by one, so that no two prompts begin alike.
_HEAD = 8


class PromptContent:
    """Draws from an alphabet: ids that the model has and that mean nothing special; and questions about a text, if there is one.

    A long prompt is a slice, at a random place, of a pool drawn once: drawing each of its thousands of tokens would take the load
    generator longer than sending them."""

    def __init__(self, seed: str, alphabet: Sequence[int], quotations: Quotations | None = None) -> None:
        if len(alphabet) < 2:
            raise InvalidRequest("prompts need an alphabet of at least two token ids")
        self._seed = seed
        self._alphabet = alphabet
        self.quotations = quotations
        self._rng = random.Random(f"prompts/{seed}")
        self._pool: array[int] = array("I", random.Random(f"pool/{seed}").choices(alphabet, k=_POOL))

    def draw(self, num_tokens: int) -> array[int]:
        """The next random tokens. Lengths are drawn elsewhere, so that runs of different seeds can have the same."""
        return self._draw(self._rng, num_tokens)

    def block(self, name: str, num_tokens: int) -> array[int]:
        """Always the same for the same name; of two lengths, the shorter is a beginning of the longer."""
        return self._draw(random.Random(f"block/{self._seed}/{name}"), num_tokens)

    def quotes(self, quotations: Quotations) -> Iterator[tuple[Frame, Sequence[int]]]:
        """Yields endlessly a question and the passage that it is about."""
        return quotations.drawn(random.Random(f"quotes/{self._seed}"))

    def _draw(self, rng: random.Random, num_tokens: int) -> array[int]:
        out: array[int] = array("I", rng.choices(self._alphabet, k=min(num_tokens, _HEAD)))
        while len(out) < num_tokens:
            start = rng.randrange(_POOL)
            out.extend(self._pool[start : start + num_tokens - len(out)])
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    prompt: array[int]  # the new part of it
    output_tokens: int
    think_s: float = 0.0  # after the answer to the turn before


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSession:
    turns: tuple[SessionTurn, ...]
    arrival_s: float = 0.0  # its time in the trace it is from

    def fitted(self, max_model_len: int) -> BenchSession:
        """Cut to a context: an answer to the half of it, then prompts to what is left, then turns that no longer fit. 0: nothing is
        cut."""
        if not max_model_len:
            return self
        turns: list[SessionTurn] = []
        total = 0
        for turn in self.turns:
            output = min(turn.output_tokens, max_model_len // 2)
            room = max_model_len - output - total
            if len(turn.prompt) > room and turns:
                break
            turns.append(replace(turn, prompt=turn.prompt[:room], output_tokens=output))
            total += len(turns[-1].prompt) + output
        return replace(self, turns=tuple(turns))


class Workload(Protocol):
    """A pure function of seed and content."""

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
            yield _one_turn(content.draw(prompt), output)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixPrompts:
    """Each prompt begins with one of `num_prefixes` texts, all equally likely, and goes on with one of its own."""

    prefix_tokens: int
    num_prefixes: int
    suffix: Lengths
    output: Lengths

    def sessions(self, content: PromptContent, rng: random.Random) -> Iterator[BenchSession]:
        prefixes = [content.block(f"prefix/{i}", self.prefix_tokens) for i in range(self.num_prefixes)]
        while True:
            prefix = rng.choice(prefixes)
            suffix, output = self.suffix.draw(rng), self.output.draw(rng)
            yield _one_turn(prefix + content.draw(suffix), output)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotingPrompts:
    """Chats that ask for a passage of a text again, word for word or with one word replaced."""

    passage: Normal
    output: Lengths | None = None  # None: what is left of the passage

    def sessions(self, content: PromptContent, rng: random.Random) -> Iterator[BenchSession]:
        """Raises InvalidRequest where the text, or half of the context, is shorter than passages are to be."""
        quotations = content.quotations
        assert quotations is not None, "the target was opened without a text"
        if (most := quotations.longest) < self.passage.high:
            raise InvalidRequest(
                f"passages have up to {self.passage.high:.0f} tokens, and the text or half of the context has {most}: give fewer "
                "--input-tokens, less --spread or a longer --dataset-path"
            )
        return self._sessions(content.quotes(quotations), rng)

    def _sessions(self, quotes: Iterator[tuple[Frame, Sequence[int]]], rng: random.Random) -> Iterator[BenchSession]:
        for frame, passage in quotes:
            length = self.passage.draw(rng)
            yield _one_turn(frame.around(passage[:length]), self.output.draw(rng) if self.output else max(1, length - BEGUN))


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurn:
    """Conversations: a system prompt (shared by all), then turns that each say something new. Times to think are exponential."""

    turns: Lengths
    message: Lengths
    output: Lengths
    system_tokens: int = 0
    think_s: float = 0.0

    def sessions(self, content: PromptContent, rng: random.Random) -> Iterator[BenchSession]:
        system = content.block("system", self.system_tokens)
        while True:
            turns: list[SessionTurn] = []
            for i in range(min(MAX_TURNS, self.turns.draw(rng))):
                message, output = self.message.draw(rng), self.output.draw(rng)
                think = rng.expovariate(1 / self.think_s) if i and self.think_s else 0.0
                ids = content.draw(message) if i else system + content.draw(message)
                turns.append(SessionTurn(prompt=ids, output_tokens=output, think_s=think))
            yield BenchSession(turns=tuple(turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One line of a trace."""

    arrival_s: float  # from the trace's first request
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[
        int, ...
    ] = ()  # one for each block of 512 tokens of the prompt, the last, maybe partial, included; equal ids: equal text

    def prompt(self, content: PromptContent) -> array[int]:
        """Blocks by their hash ids; what has none is of its own."""
        prompt: array[int] = array("I")
        for hash_id in self.hash_ids:
            prompt.extend(content.block(f"{hash_id}", min(MOONCAKE_BLOCK, max(0, self.input_tokens - len(prompt)))))
        prompt.extend(content.draw(self.input_tokens - len(prompt)))
        return prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """Each request once, in the order of their times."""

    requests: tuple[TraceRequest, ...] = field(repr=False)

    def sessions(self, content: PromptContent, rng: random.Random) -> Iterator[BenchSession]:
        for request in self.requests:
            yield _one_turn(request.prompt(content), request.output_tokens, request.arrival_s)


def read_trace(path: Path) -> RequestTrace:
    """Mooncake's form: JSONL of timestamp (ms), input_length, output_length, hash_ids. Raises InvalidRequest naming the line."""
    found: list[TraceRequest] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read ({error}); give a trace as --dataset-path") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found.append(
                TraceRequest(
                    arrival_s=float(row["timestamp"]) / 1e3,
                    # Real traces have a few lines of 0 tokens: failed requests, which still came.
                    input_tokens=max(1, int(row["input_length"])),
                    output_tokens=max(1, int(row["output_length"])),
                    hash_ids=tuple(int(i) for i in row.get("hash_ids") or ()),
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest(
                f"{path}, line {number}: {error!r}; a mooncake trace has JSON of timestamp, input_length, output_length, hash_ids"
            ) from error
    if not found:
        raise InvalidRequest(f"{path} has no requests; give a mooncake trace")
    found.sort(key=lambda r: r.arrival_s)
    return RequestTrace(requests=tuple(replace(r, arrival_s=r.arrival_s - found[0].arrival_s) for r in found))


def _one_turn(prompt: array[int], output_tokens: int, arrival_s: float = 0.0) -> BenchSession:
    return BenchSession(turns=(SessionTurn(prompt=prompt, output_tokens=output_tokens),), arrival_s=arrival_s)
