"""Which layers of a step are worth telling of while it runs: KV that is handed over can leave before the step's end.

device   │ layer 0 │ layer 1 │ layer 2 │ … │ layer L-1 │ logits, sample │
marks              1         2         3               L
others                copy 0    copy 1    copy 2            copy L-1       what was exposed is one group's copy, not the prompt's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostep.engine.batch import KvShape, LayerMark
from twostep.engine.step_work import StepWork
from twostep.engine.types import LayerProgress

# Between two marks about so many bytes of KV are written: less costs more calls than it hides.
MARK_BYTES = 8 << 20


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
