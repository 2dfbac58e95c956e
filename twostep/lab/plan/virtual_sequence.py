"""What a virtual engine is made of: its bounds, its sequences, its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from twostep.lab.plan.workload import Request
from twostep.step_curve import StepCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One worker's engine. `num_blocks` of `block_size` tokens; `step_tokens` is the budget of a step, `max_num_seqs` those that run or are
    reserved at once. `mixed` is the curve of steps with prompts in them, where they are another matter than `curve` says: on a GPU, steps
    of decodes alone are replayed graphs. `max_step_s` bounds mixed steps, as TPOT targets do; 0: nothing does. With `look_ahead` a step is
    planned so long before the running one ends (twostep/engine/pacing.py), or at its beginning if it is shorter."""

    curve: StepCurve
    mixed: StepCurve | None = None
    max_step_s: float = 0.0
    min_chunk_tokens: int = 32
    step_tokens: int = 2048
    max_num_seqs: int = 256
    max_waiting: int = 256
    num_blocks: int = 1 << 30
    block_size: int = 16
    look_ahead: bool = False
    ahead_s: float = math.inf

    @property
    def prompt_curve(self) -> StepCurve:
        return self.curve if self.mixed is None else self.mixed


@dataclass(slots=True, eq=False, kw_only=True)
class VirtualSequence:
    """`length` counts the tokens there are, those being sampled included; `planned` those whose KV is there or will be once the launched
    steps are over. `hold`: it ends with its first token and keeps its blocks until it is released."""

    request: Request
    key: int
    hold: bool = False
    length: int = 0
    max_length: int = 0
    planned: int = 0
    num_blocks: int = 0
    room: int = 0  # tokens that its blocks hold
    end_blocks: int = 0  # blocks that it has in the end
    arrival: int = 0
    times: list[float] = field(default_factory=list)  # of its sampled tokens

    @property
    def remaining(self) -> int:
        return self.length - self.planned


@dataclass(slots=True, eq=False)
class Step:
    """A launched step: over at `end_s`. Decodes are sampled, and so are `completed` prompts; `ended` have no more to come here."""

    end_s: float
    duration_s: float
    decodes: Sequence[VirtualSequence]
    prompts: Sequence[VirtualSequence]
    completed: Sequence[VirtualSequence]
    ended: Sequence[VirtualSequence]
    num_prompt_tokens: int
