"""A planned step on the device: its blocks made ready, its batch launched, its result collected.

launch    the batch is made and queued
collect   what the runner sampled, or why there is nothing: a step that fails, here or there, costs its sequences, not the engine

A step of prompts that are handed over is marked after the layers at which chunks of the hand-over end, so that these leave before the
step's end:

device   │ layers 0-14 │ layers 15-28 │ layers 29-31 │ logits, sample │
marks                 15             29             32
others                  chunk 0        chunk 1        chunk 2            what is exposed is the last chunk's copy, not the prompt's
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twostep.engine.batch import InFlight, LayerMark, Runner, Sampled
from twostep.engine.block_tables import BlockTables
from twostep.engine.step_work import StepWork, build_batch
from twostep.engine.types import LayerProgress
from twostep.errors import InternalError
from twostep.step_curve import StepWorkload

log = logging.getLogger(__name__)


class AskedMarks(NamedTuple):
    """A sequence of a step, how many of its tokens have their KV when the step is done, and after how many layers it is to be told."""

    seq_id: str
    end: int
    layers: Sequence[int]


@dataclass(frozen=True, slots=True)
class MarkedStep:
    """A launched step that says how far it is, to those who asked."""

    asked: Sequence[AskedMarks]
    marks: Sequence[LayerMark]

    def at(self, mark: LayerMark) -> Sequence[LayerProgress]:
        """Returns what can be said once the mark is reached."""
        return [
            LayerProgress(seq_id=asked.seq_id, num_computed_tokens=asked.end, num_layers=mark.num_layers)
            for asked in self.asked
            if mark.num_layers in asked.layers
        ]


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
            num_vectors = sum(count > 0 for count in launched.work.pooled)
            if num_vectors != (0 if sampled.pooled is None else len(sampled.pooled)):
                raise InternalError(f"the runner did not return the {num_vectors} vectors that were wanted")
        except Exception as error:
            log.exception("step %d failed: its %d sequences are given up", launched.step, len(launched.work.sequences))
            message = f"the device failed in this step: {type(error).__name__}: {error}"
            return CollectedStep(sampled=None, ended_at=self._clock(), message=message)
        return CollectedStep(sampled=sampled, ended_at=ended_at, blocked_s=ended_at - asked)

    def _launch(self, work: StepWork) -> InFlight:
        asked = _asked_marks(work) if self.on_marked is not None and self._runner.marks_layers else []
        mark_layers = sorted({layer for each in asked for layer in each.layers})
        in_flight = self._runner.launch(
            build_batch(work, self._tables, block_size=self._runner.kv_shape.block_size, mark_layers=mark_layers)
        )
        if self.on_marked is not None and asked and (marks := in_flight.layer_marks):
            self.on_marked(MarkedStep(asked, marks))
        return in_flight


def _asked_marks(work: StepWork) -> list[AskedMarks]:
    """Returns those that are to be told of their layers. From now on their blocks stay what they are: somebody may read them."""
    asked = []
    for i in range(work.num_decodes, len(work.sequences)):
        sequence = work.sequences[i]
        if layers := sequence.mark_layers:
            sequence.leaves_early = True
            asked.append(AskedMarks(sequence.seq_id, work.starts[i] + work.num_tokens[i], layers))
    return asked
