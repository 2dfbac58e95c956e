"""What arrives: how long prompts and answers are, and how requests are spaced. Seeded: the same workload, rate and seed give the same
requests.

prompts=2600+-30%,outputs=128+-30%              evenly spread over 1820 to 3380, and 90 to 166
prompts=1200..2600,outputs=128,cached=0.5       evenly spread over a range; half of every prompt's tokens are cached
prompts=512,outputs=64,burstiness=2             gaps with twice the standard deviation of a Poisson process's
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from twostep.errors import InvalidRequest

_LARGEST = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a simulation. `arrival_s` counts from the start; of the prompt, the first `num_cached` tokens need not be computed."""

    arrival_s: float
    num_prompt: int
    num_output: int
    num_cached: int = 0

    @property
    def num_uncached(self) -> int:
        """Tokens to compute: one at least, for its logits."""
        return max(1, self.num_prompt - self.num_cached)


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers of tokens, evenly spread from `low` to `high`, both included."""

    low: int
    high: int

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`cached` is the share of each prompt's tokens that a worker holds already. `burstiness` is the coefficient of variation of the gaps
    between arrivals, which have a gamma distribution: 1 is Poisson, 0 a metronome."""

    prompts: Span
    outputs: Span
    cached: float = 0.0
    burstiness: float = 1.0

    def requests(self, rate: float, seconds: float, *, seed: int = 0) -> list[Request]:
        """All that arrive within `seconds` at `rate` requests a second, in order. Another rate with the same seed has the same requests,
        nearer to each other or further apart: rates can be compared."""
        gaps, lengths = random.Random(f"{seed} gaps"), random.Random(f"{seed} lengths")
        now, requests = 0.0, []
        while (now := now + self._gap(gaps) / rate) <= seconds:
            num_prompt = lengths.randint(self.prompts.low, self.prompts.high)
            num_output = lengths.randint(self.outputs.low, self.outputs.high)
            num_cached = min(num_prompt - 1, int(self.cached * num_prompt))
            requests.append(Request(arrival_s=now, num_prompt=num_prompt, num_output=num_output, num_cached=num_cached))
        return requests

    def _gap(self, source: random.Random) -> float:
        if self.burstiness == 0:
            return 1.0
        if self.burstiness == 1:
            return source.expovariate(1.0)
        shape = 1 / self.burstiness**2
        return source.gammavariate(shape, 1 / shape)

    def __str__(self) -> str:
        text = f"prompts={self.prompts},outputs={self.outputs}"
        text += f",cached={self.cached:g}" if self.cached else ""
        return text + (f",burstiness={self.burstiness:g}" if self.burstiness != 1 else "")


def parse_workload(text: str) -> Workload:
    """Raises InvalidRequest with what is wrong and an example."""
    fields = fields_of(text, ("prompts", "outputs", "cached", "burstiness"), "a workload")
    missing = [name for name in ("prompts", "outputs") if name not in fields]
    if missing:
        raise InvalidRequest(f"the workload {text!r} lacks {' and '.join(missing)}; give for example prompts=2600+-30%,outputs=128+-30%")
    cached = number_of("cached", fields.get("cached", "0"))
    burstiness = number_of("burstiness", fields.get("burstiness", "1"))
    if not 0 <= cached <= 1:
        raise InvalidRequest(f"cached={cached:g} is no share of a prompt; give 0 to 1")
    if not 0 <= burstiness <= 10:
        raise InvalidRequest(f"burstiness={burstiness:g} is out of range; give 0 (a metronome), 1 (Poisson), up to 10")
    return Workload(prompts=parse_span(fields["prompts"]), outputs=parse_span(fields["outputs"]), cached=cached, burstiness=burstiness)


def parse_span(text: str) -> Span:
    """`512`, `2600+-30%` (also ±) or `1200..2600`. Raises InvalidRequest."""
    if match := re.fullmatch(r"(\d+)", text):
        span = Span(int(match[1]), int(match[1]))
    elif match := re.fullmatch(r"(\d+)(?:\+-|±)(\d+(?:\.\d+)?)%", text):
        middle, share = int(match[1]), float(match[2]) / 100
        span = Span(round(middle * (1 - share)), round(middle * (1 + share)))
    elif match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        span = Span(int(match[1]), int(match[2]))
    else:
        raise InvalidRequest(f"{text!r} is no number of tokens; give 512, 2600+-30% or 1200..2600")
    if not 1 <= span.low <= span.high <= _LARGEST:
        raise InvalidRequest(f"{text} spans {span.low} to {span.high} tokens; it must begin at 1 at least and not end before it begins")
    return span


def fields_of(text: str, known: Sequence[str], what: str) -> dict[str, str]:
    """`a=1,b=2` as a dict. Raises InvalidRequest for unknown, repeated or malformed ones."""
    fields: dict[str, str] = {}
    for part in text.replace(" ", "").split(","):
        name, equals, value = part.partition("=")
        if not equals or not value or name not in known or name in fields:
            raise InvalidRequest(
                f"{part!r} is no part of {what}; give some of {', '.join(f'{k}=…' for k in known)}, each once, with commas"
            )
        fields[name] = value
    return fields


def number_of(name: str, text: str) -> float:
    """Raises InvalidRequest unless it is a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value or abs(value) == float("inf"):
        raise InvalidRequest(f"{name}={text} is not a number; give one such as {name}=0.5")
    return value
