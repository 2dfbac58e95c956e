"""A planned step on the device: its blocks made ready, its batch launched, its result collected.

launch    the batch is made and queued
collect   what the runner sampled, or why there is nothing: a step that fails, here or there, costs its sequences, not the engine

A step of prompts that are handed over is marked after some of its layers, so that their KV can leave before the step's end:

device   │ layer 0 │ layer 1 │ layer 2 │ … │ layer L-1 │ logits, sample │
marks              1         2         3               L
others                copy 0    copy 1    copy 2            copy L-1       what was exposed is one group's copy, not the prompt's
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostep.engine.batch import InFlight, KvShape, LayerMark, Runner, Sampled
from twostep.engine.block_tables import BlockTables
from twostep.engine.step_work import StepWork, build_batch
from twostep.engine.types import LayerProgress
from twostep.errors import InternalError
from twostep.step_curve import StepWorkload

log = logging.getLogger(__name__)

# Between two marks about so many bytes of KV are written: less costs more calls than it hides.
MARK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class MarkedStep:
    """A launched step that says how far it is. `ends`: (seq_id, its tokens with KV when the step is done) of what is handed over."""

    ends: Sequence[tuple[str, int]]
    marks: Sequence[LayerMark]

    @classmethod
    def of(cls, work: StepWork, marks: Sequence[LayerMark]) -> MarkedStep:
        chunks = list(zip(work.sequences, work.starts, work.num_tokens, strict=True))[work.num_decodes :]
        return cls([(sequence.seq_id, start + count) for sequence, start, count in chunks if sequence.hold], marks)

    def at(self, mark: LayerMark) -> Sequence[LayerProgress]:
        """Returns what can be said once the mark is reached."""
        return [LayerProgress(seq_id=name, num_computed_tokens=end, num_layers=mark.num_layers) for name, end in self.ends]


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """A step on its way, planned at `since` by the engine's clock. An Exception as `in_flight`: it was never launched, for that reason."""

    step: int
    work: StepWork
    workload: StepWorkload
    since: float
    in_flight: InFlight | Exception
    # What the launch took the host, planning included; 0 until that is over.
    launch_s: float = 0.0

    @property
    def failed(self) -> bool:
        return isinstance(self.in_flight, Exception)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedStep:
    """The result of a step. `sampled` None: it failed, and `message` says why. `ended_at`: when the host saw its end; `blocked_s`: how long
    it had waited for that. What the host then made of the result is in neither."""

    sampled: Sampled | None
    ended_at: float
    message: str = ""
    blocked_s: float = 0.0


class StepLauncher:
    """Launches and collects on one engine's thread, without its lock: nothing else changes sequences and blocks of a planned step."""

    def __init__(self, runner: Runner, tables: BlockTables, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._tables = tables
        self._clock = clock
        # Gets each step that says how far its layers are; None: nothing asks.
        self.on_marked: Callable[[MarkedStep], None] | None = None

    def launch(self, work: StepWork, *, step: int, since: float) -> LaunchedStep:
        """Returns when the step is queued, or done where the runner does not overlap. Never raises: see LaunchedStep."""
        in_flight: InFlight | Exception
        try:
            in_flight = self._launch(work)
        except Exception as error:  # noqa: BLE001 - collect raises it
            in_flight = error
        return LaunchedStep(step=step, work=work, workload=work.workload, since=since, in_flight=in_flight)

    def collect(self, launched: LaunchedStep) -> CollectedStep:
        """Blocks until the step is done. Once, in the order of the launches. A failure is logged."""
        asked = self._clock()
        try:
            if isinstance(launched.in_flight, Exception):
                raise launched.in_flight
            sampled = launched.in_flight.result()
            ended_at = self._clock() if sampled.ready_at is None else sampled.ready_at
            num_rows = sum(launched.work.sampled)
            if not len(sampled.token_ids) == len(sampled.logprobs) == len(sampled.top_logprobs) == num_rows:
                raise InternalError(f"the runner returned {len(sampled.token_ids)} tokens for {num_rows} rows")
        except Exception as error:
            log.exception("step %d failed: its %d sequences are given up", launched.step, len(launched.work.sequences))
            message = f"the device failed in this step: {type(error).__name__}: {error}"
            return CollectedStep(sampled=None, ended_at=self._clock(), message=message)
        return CollectedStep(sampled=sampled, ended_at=ended_at, blocked_s=ended_at - asked)

    def _launch(self, work: StepWork) -> InFlight:
        shape = self._runner.kv_shape
        mark_layers = layers_to_mark(work, shape) if self.on_marked is not None and self._runner.marks_layers else ()
        batch = build_batch(work, self._tables, block_size=shape.block_size, mark_layers=mark_layers)
        if mark_layers:
            for sequence in work.sequences:
                sequence.leaves_early = sequence.leaves_early or sequence.hold
        in_flight = self._runner.launch(batch)
        if self.on_marked is not None and mark_layers and (marks := in_flight.layer_marks):
            self.on_marked(MarkedStep.of(work, marks))
        return in_flight


def layers_to_mark(work: StepWork, shape: KvShape) -> Sequence[int]:
    """Returns after how many layers to mark a planned step, ascending and up to all of them; none where the step's end says it soon
    enough."""
    num_tokens = sum(
        count for sequence, count in list(zip(work.sequences, work.num_tokens, strict=True))[work.num_decodes :] if sequence.hold
    )
    every = -(-MARK_BYTES * shape.block_size // max(1, num_tokens * shape.layer_bytes))
    if not num_tokens or 2 * every > shape.num_layers:
        return ()
    return (*range(every, shape.num_layers, every), shape.num_layers)
