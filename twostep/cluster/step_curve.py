"""How long a step of an engine takes: the one formula that placement, admission, planning and the step budget reckon with.

    step = fixed + per_row * max(0, rows - knee) + per_pair * pairs + per_sequence * decodes + per_context * context

rows     tokens computed in the step, of prompts and of decodes; up to the knee the reading of the weights hides them
pairs    query-key pairs of the chunks of prompts: n tokens after m others make n * (m + n / 2)
decodes  sequences that get a token
context  tokens whose KV they read, in sum

Standard library only: routers have no numpy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """One step's work, as the formula counts it."""

    prompt_tokens: int = 0
    pairs: float = 0.0
    decodes: int = 0
    context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """Times in seconds. `knee` in rows."""

    fixed_s: float
    per_row_s: float
    knee: float = 0.0
    per_pair_s: float = 0.0
    per_sequence_s: float = 0.0
    per_context_s: float = 0.0

    def step_s(self, work: StepWorkload) -> float:
        rows = work.prompt_tokens + work.decodes
        return (
            self.fixed_s
            + self.per_row_s * max(0.0, rows - self.knee)
            + self.per_pair_s * work.pairs
            + self.per_sequence_s * work.decodes
            + self.per_context_s * work.context
        )

    def decode_step_s(self, decodes: int, context: int) -> float:
        """A step of so many sequences with so many tokens among them, and no prompt."""
        return self.step_s(StepWorkload(decodes=decodes, context=context))

    def prefill_s(self, num_tokens: int, num_cached: int, budget: int, *, decodes: int = 0, context: int = 0) -> float:
        """A prompt of `num_tokens`, the first `num_cached` of which are there, alone among `decodes` that go on: its chunks fill what the
        budget leaves them."""
        room = max(1, budget - decodes)
        total, done = 0.0, num_cached
        while done < num_tokens:
            count = min(room, num_tokens - done)
            pairs = count * (done + count / 2)
            total += self.step_s(StepWorkload(prompt_tokens=count, pairs=pairs, decodes=decodes, context=context))
            done += count
        return total
