"""Defines what an edge may ask of an engine, in whichever process that is (docs/decisions/38-engine-process.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostep.cluster.records import LayoutRecord
from twostep.engine.batch import KvShape
from twostep.engine.types import EngineRequest, EngineStats, LayerProgress, PrefixDelta, Reservation, StepOutput
from twostep.step_curve import StepCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Holds what does not change while an engine runs. `curve`: how long its steps take, as measured at the start; None: not measured.
    `gpu_ids`: UUIDs of the GPUs that it computes on, by rank. `captured_bytes`: memory that its CUDA graphs took of each."""

    name: str
    layout: LayoutRecord
    shape: KvShape
    max_model_len: int
    marks_layers: bool
    num_host_blocks: int
    eos_token_ids: frozenset[int]
    curve: StepCurve | None = None
    gpu_ids: tuple[str, ...] = ()
    captured_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvents:
    """Called on the edge's event loop, in the order in which it happened, and in order with answers: whoever awaits one goes on before the
    next step is told. `on_layers` comes while a step runs. `on_failure`, once, when the engine can go on no more."""

    on_step: Callable[[StepOutput], None]
    on_layers: Callable[[Sequence[LayerProgress]], None]
    on_failure: Callable[[Exception], None]


class EnginePort(Protocol):
    """Belongs to one event loop. Nothing here blocks it: what is answered is awaited, and what is not is done in the order of the calls.
    What the engine says afterwards against a call of the latter kind comes as a SequenceFailure of the next step.

    Requests come without `hasher` and `grammar`: what is made of their tokens and of `sampling.grammar` is made where the engine is.
    An awaited call that is cancelled leaves nothing behind."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def pid(self) -> int:
        """Of the process that it has to itself; 0: it has none."""
        ...

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of a step at most."""
        ...

    def start(self, events: EngineEvents) -> None: ...

    def serving(self) -> None:
        """Notes that the start is over: what is compiled from now on holds somebody up, and is said so."""
        ...

    async def stop(self) -> None:
        """Lets launched steps end; the engine's process ends. Idempotent."""
        ...

    def alive(self, stall_timeout_s: float) -> bool:
        """Returns False once it has failed, or its oldest work, or all of it, has not been heard of for so long."""
        ...

    def stats(self) -> EngineStats:
        """Returns the engine's figures as they were a moment ago."""
        ...

    def take_prefix_delta(self) -> PrefixDelta:
        """See Engine.take_prefix_delta."""
        ...

    async def submit(self, request: EngineRequest, *, hold: bool = False, mark_layers: Sequence[int] = ()) -> None:
        """See Engine.submit. Raises InvalidRequest, ResourceExhausted and SetupError of its grammar, too."""
        ...

    async def reserve(self, request: EngineRequest) -> Reservation:
        """See Engine.reserve; raises as `submit` does."""
        ...

    def commit(self, seq_id: str, output_ids: Sequence[int], *, exact: bool = True, confirmed: bool = True) -> None:
        """See Engine.commit. Output ids that the engine does not take end the sequence, of a kind REQUEST."""
        ...

    def confirm(self, seq_id: str) -> None:
        """See Engine.confirm."""
        ...

    def cancel(self, seq_id: str) -> None:
        """See Engine.cancel: of a held sequence, too, whose full blocks stay findable. No output of it is told after this."""
        ...

    def mark_layers(self, seq_id: str, mark_layers: Sequence[int]) -> None:
        """See Engine.mark_layers."""
        ...

    def set_curve(self, curve: StepCurve | None) -> None:
        """See Engine.set_curve."""
        ...

    async def reconfigure(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> bool:
        """See Engine.reconfigure."""
        ...

    async def generations(self, block_ids: Sequence[int]) -> Sequence[int]:
        """See Engine.generations."""
        ...

    async def look(self, *, check_integrity: bool) -> EngineLook:
        """Returns the figures of this moment: after all that was called before."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLook:
    """`integrity_error`: what does not add up in the pool; empty: nothing, or nobody asked."""

    stats: EngineStats
    integrity_error: str = ""
