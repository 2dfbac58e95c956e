"""How long a step of an engine takes: the one formula that placement, admission, planning and the step budget reckon with.

    step = fixed + per_row * max(0, rows - knee) + per_pair * pairs + per_sequence * decodes + per_context * context

rows     tokens computed in the step, of prompts and of decodes; up to the knee the reading of the weights hides them
pairs    query-key pairs of the chunks of prompts: n tokens after m others make n * (m + n / 2)
decodes  sequences that get a token
context  tokens whose KV they read, in sum

A step with both, prompts and decodes, takes `mixed` at least: it is launched kernel by kernel, where one of decodes alone replays what was
captured, and for as long as that takes the host nobody gets a token.

Standard library only: routers have no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Share of the best rate at which the knee of a throughput curve is taken to be.
KNEE_SHARE = 0.95
# Of a promised TPOT, what steps may take on average: the rest is the host's, and that of steps that last longer than foretold. Of a
# promised gap, what a step may; and what it may before and in the first step after a hand-over (twostep/engine/step_bound.py).
PACE_SHARE, GAP_SHARE, FIRST_GAP_SHARE = 0.95, 0.6, 0.42
# Tokens within which a sequence that is late makes up for it.
MADE_UP_WITHIN = 4


def promised_step_s(tpot_s: float | None, gap_s: float | None) -> float:
    """Returns how long steps may take, on the whole, beside a sequence that was promised this; infinity: any time."""
    return min(PACE_SHARE * tpot_s if tpot_s else math.inf, GAP_SHARE * gap_s if gap_s else math.inf)


def chunk_pairs(num_tokens: float, num_before: float) -> float:
    """Query-key pairs of a chunk of so many tokens, after so many others of its sequence."""
    return num_tokens * (num_before + num_tokens / 2)


def _positive_root(a: float, b: float, c: float) -> float:
    """Returns x >= 0 with a x^2 + b x = c, for a, b and c of at least 0; infinity if every x is less."""
    root = b + math.sqrt(b * b + 4 * a * c)
    return 2 * c / root if root else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """One step's work, as the formula counts it."""

    prompt_tokens: int = 0
    pairs: float = 0.0
    decodes: int = 0
    context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """Times in seconds. `knee` in rows. `mixed_s` 0: launches take no time worth mentioning, or none was seen yet."""

    fixed_s: float
    per_row_s: float
    knee: float = 0.0
    per_pair_s: float = 0.0
    per_sequence_s: float = 0.0
    per_context_s: float = 0.0
    mixed_s: float = 0.0

    def step_s(self, work: StepWorkload) -> float:
        rows = work.prompt_tokens + work.decodes
        seconds = (
            self.fixed_s
            + self.per_row_s * max(0.0, rows - self.knee)
            + self.per_pair_s * work.pairs
            + self.per_sequence_s * work.decodes
            + self.per_context_s * work.context
        )
        return max(seconds, self.mixed_s) if work.prompt_tokens and work.decodes else seconds

    def decode_step_s(self, decodes: int, context: int) -> float:
        """A step of so many sequences with so many tokens among them, and no prompt."""
        return self.step_s(StepWorkload(decodes=decodes, context=context))

    def chunk_within(self, bound_s: float, *, decodes: float, context: float, before: float = 0.0) -> float:
        """Returns the most tokens of a prompt, after `before` others of it, that a step with these decodes computes within `bound_s`."""
        hidden = self.knee - decodes
        left = bound_s - self.fixed_s - self.per_sequence_s * decodes - self.per_context_s * context
        if bound_s < self.mixed_s or left < max(0.0, -self.per_row_s * hidden):
            return 0.0
        beyond = _positive_root(self.per_pair_s / 2, self.per_row_s + self.per_pair_s * before, left + self.per_row_s * hidden)
        if beyond >= hidden:
            return beyond
        # So many rows are free: it is the pairs that take the time.
        return min(hidden, _positive_root(self.per_pair_s / 2, self.per_pair_s * before, left))

    def prefill_s(self, num_tokens: int, num_cached: int, budget: int, *, decodes: int = 0, context: int = 0) -> float:
        """A prompt of `num_tokens`, the first `num_cached` of which are there, alone among `decodes` that go on: its chunks fill what the
        budget leaves them."""
        room = max(1, budget - decodes)
        total, done = 0.0, num_cached
        while done < num_tokens:
            count = min(room, num_tokens - done)
            pairs = chunk_pairs(count, done)
            total += self.step_s(StepWorkload(prompt_tokens=count, pairs=pairs, decodes=decodes, context=context))
            done += count
        return total


@dataclass(frozen=True, slots=True)
class ThroughputPoint:
    """A step of `num_tokens` prompt tokens took `seconds`, measured or by a curve."""

    num_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def knee_budget(points: Sequence[ThroughputPoint], *, share: float = KNEE_SHARE) -> int:
    """The token budget of a step at the knee of the throughput curve: the smallest of the measured sizes from which on every larger one
    up to the best reaches `share` of the best tokens/s, so that one lucky small step does not decide. Larger steps than that would
    lengthen everybody's gaps for nothing (DeepSpeed-FastGen, section 3.2: the forward size that saturates the device).

    Raises ValueError without points, or if one has no tokens or took no time."""
    if not points or any(point.num_tokens < 1 or point.seconds <= 0 for point in points):
        raise ValueError(f"a knee needs points of at least one token and some time each; got {list(points)}")
    if not 0 < share <= 1:
        raise ValueError(f"share is above 0 and at most 1, not {share}")
    ordered = sorted(points, key=lambda point: point.num_tokens)
    best = max(ordered, key=lambda point: point.tokens_per_s)
    knee = best.num_tokens
    for point in reversed(ordered[: ordered.index(best)]):
        if point.tokens_per_s < share * best.tokens_per_s:
            break
        knee = point.num_tokens
    return knee


def knee_of(curve: StepCurve, largest: int, *, share: float = KNEE_SHARE) -> int:
    """The budget at the knee for steps that take what `curve` says: of powers of two from 16 on and `largest`, of fresh prompts."""
    sizes = [size for size in (2**i for i in range(4, largest.bit_length())) if size < largest] + [largest]
    works = [StepWorkload(prompt_tokens=size, pairs=chunk_pairs(size, 0)) for size in sizes]
    points = [ThroughputPoint(work.prompt_tokens, curve.step_s(work)) for work in works]
    return knee_budget(points, share=share)
