"""Draws requests: how long prompts and answers are, and when requests come, drawn as `twostep bench serve` draws them. Seeded: the same
workload, rate and seed give the same requests.

    prompts=2600+-30%,outputs=128+-30%              evenly spread over 1820 to 3380, and 90 to 166
    prompts=2600~30%,outputs=128                    normal, with a standard deviation of 30 % of the mean
    prompts=1200..2600,outputs=128,cached=0.5       evenly spread over a range; half of every prompt's tokens are cached
    prompts=sharegpt,outputs=sharegpt               long-tailed, as published (also: document)
    prompts=512,outputs=64,burstiness=0.25          in bursts: gaps of a gamma distribution of this shape (1 is Poisson)
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.arrivals import Arrivals
from twostep.lab.bench.serve.lengths import (
    DOCUMENT_OUTPUT,
    DOCUMENT_PROMPT,
    SHAREGPT_OUTPUT,
    SHAREGPT_PROMPT,
    Fixed,
    Lengths,
    Normal,
    Uniform,
)
from twostep.lab.simulator.cluster import SimulatedRequest

_EXAMPLE = "prompts=2600+-30%,outputs=128+-30%"
_PUBLISHED: dict[str, dict[str, Lengths]] = {
    "prompts": {"sharegpt": SHAREGPT_PROMPT, "document": DOCUMENT_PROMPT},
    "outputs": {"sharegpt": SHAREGPT_OUTPUT, "document": DOCUMENT_OUTPUT},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorkload:
    """`cached` is the share of each prompt's tokens that the worker which computes it holds already. `text` is what it was parsed from."""

    prompts: Lengths
    outputs: Lengths
    cached: float = 0.0
    burstiness: float = 1.0
    text: str = ""

    def requests(self, rate: float, seconds: float, *, seed: int = 0) -> list[SimulatedRequest]:
        """All that arrive within `seconds` at `rate` requests a second, in order. Another rate with the same seed has the same requests,
        nearer to each other or further apart: rates can be compared."""
        lengths = random.Random(f"lengths/{seed}")
        arrivals = Arrivals(rate=rate, burstiness=self.burstiness)
        return [self._request(at, lengths) for at in arrivals.until(str(seed), seconds)]

    def sample(self, count: int = 2000) -> list[SimulatedRequest]:
        """Some of its requests, to reckon averages from."""
        lengths = random.Random("lengths/sample")
        return [self._request(float(i), lengths) for i in range(count)]

    def _request(self, arrival_s: float, lengths: random.Random) -> SimulatedRequest:
        num_prompt = self.prompts.draw(lengths)
        num_output = self.outputs.draw(lengths)
        num_cached = min(num_prompt - 1, int(self.cached * num_prompt))
        return SimulatedRequest(arrival_s=arrival_s, num_prompt=num_prompt, num_output=num_output, num_cached=num_cached)

    def __str__(self) -> str:
        return self.text or f"prompts {self.prompts}, outputs {self.outputs}"


def parse_workload(text: str) -> PlannedWorkload:
    """Raises InvalidRequest with what is wrong and an example."""
    fields: dict[str, str] = {}
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition("=")
        if not value or name not in ("prompts", "outputs", "cached", "burstiness") or name in fields:
            raise InvalidRequest(
                f"{part!r} is no part of a workload; give prompts=…, outputs=…, and perhaps cached=… and burstiness=…, each once"
            )
        fields[name] = value
    missing = [name for name in ("prompts", "outputs") if name not in fields]
    if missing:
        raise InvalidRequest(f"the workload {text!r} lacks {' and '.join(missing)}; give for example {_EXAMPLE}")
    return PlannedWorkload(
        prompts=_lengths("prompts", fields["prompts"]),
        outputs=_lengths("outputs", fields["outputs"]),
        cached=_number("cached", fields.get("cached", "0"), 0, 1, "a share of each prompt"),
        burstiness=_number("burstiness", fields.get("burstiness", "1"), 0.01, 1000, "1 is Poisson, less comes in bursts, more evenly"),
        text=text,
    )


def _lengths(name: str, text: str) -> Lengths:
    if (published := _PUBLISHED[name].get(text)) is not None:
        return published
    if match := re.fullmatch(r"\d+", text):
        return Fixed(int(text))
    if match := re.fullmatch(r"(\d+)(?:\+-|±)(\d+(?:\.\d+)?)%", text):
        middle, share = int(match[1]), float(match[2]) / 100
        return Uniform(max(1, round(middle * (1 - share))), round(middle * (1 + share)))
    if match := re.fullmatch(r"(\d+)~(\d+(?:\.\d+)?)%", text):
        return Normal(int(match[1]), float(match[2]) / 100)
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        return Uniform(int(match[1]), int(match[2]))
    known = ", ".join(_PUBLISHED[name])
    raise InvalidRequest(f"{name}={text} is no length in tokens; give 512, 2600+-30%, 2600~30%, 1200..2600, or one of {known}")


def _number(name: str, text: str, least: float, most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise InvalidRequest(f"{name}={text}: give a number from {least:g} to {most:g}; it is {what}")
    return value
