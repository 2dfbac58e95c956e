"""Host memory for the blocks of sequences that gave way, and the copies there and back.

step n, they were in it │ save ── save │ plan, launch n+1 ──▶            a save waits for the copy: the blocks are given to others next
                                       │ load ── load ── batch ──▶       a load is queued before the step that reads it
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from twostep.engine.batch import Runner
from twostep.engine.host_memory import HostRows, HostSlabs
from twostep.engine.preemption import PreemptionMode, PreemptionRates, cheaper_to_swap
from twostep.engine.sequence import EngineSequence, SavedBlocks
from twostep.engine.step_work import BlockLoad, BlockSave
from twostep.errors import InternalError

log = logging.getLogger(__name__)

# How much is copied out and back for a trial.
_PROBE_BYTES = 32 << 20
# A step says how fast prompts are computed if it has so many prompt tokens, and so many for each decode.
_TELLING_TOKENS = 32


class SwapSpace:
    """`take` and `release` are bookkeeping under the engine's lock. The copies and `computed` are the engine's thread's, without the lock;
    `resize` also that of the thread that makes or reconfigures the engine, while nothing is in it."""

    def __init__(self, runner: Runner, *, mode: PreemptionMode, num_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rates = PreemptionRates()
        self.swapped_bytes = 0
        self._runner = runner
        self._shape = runner.kv_shape
        self._mode = mode
        self._clock = clock
        self._rows = HostRows(0)
        self.resize(num_bytes)

    def resize(self, num_bytes: int) -> None:
        """Makes room for so many bytes. Nothing may be saved. Some milliseconds on a GPU: copies are tried."""
        assert not self._rows.num_used
        self._rows = HostRows(num_bytes // self._shape.block_bytes)
        self._slabs = HostSlabs(self._runner)
        if num_bytes and self._mode is not PreemptionMode.RECOMPUTE:
            self._measure(num_bytes)

    def take(self, sequence: EngineSequence) -> BlockSave | None:
        """Returns where its blocks are to be copied; None: it is to be computed again."""
        num_blocks = -(-sequence.num_computed // self._shape.block_size)
        if self._mode is PreemptionMode.RECOMPUTE or not num_blocks:
            return None
        num_bytes = num_blocks * self._shape.block_bytes
        if self._mode is PreemptionMode.AUTO and not cheaper_to_swap(
            num_tokens=sequence.num_computed, num_bytes=num_bytes, rates=self.rates
        ):
            return None
        rows = self._rows.take(num_blocks)
        if rows is None:
            return None
        saved = SavedBlocks(rows=rows, num_tokens=sequence.num_computed)
        return BlockSave(sequence=sequence, blocks=sequence.blocks[:num_blocks].tolist(), saved=saved)

    def release(self, saved: SavedBlocks) -> None:
        """Gives back the rows of blocks that were copied back, or that are not wanted any more."""
        self._rows.give(saved.rows)

    def save(self, save: BlockSave) -> bool:
        """Copies the blocks out; steps that wrote them are settled. False: that failed, and they are to be computed again."""
        started = self._clock()
        try:
            self._slabs.copy_out(save.blocks, save.saved.rows)
        except Exception:
            log.exception("the KV of %s could not be copied out; it is computed again", save.sequence.seq_id)
            return False
        self._copied(len(save.blocks), self._clock() - started)
        return True

    def load(self, load: BlockLoad) -> None:
        """Copies back what was saved, for the step that is launched next. Raises what copying raises."""
        started = self._clock()
        self._slabs.copy_back(load.rows, load.blocks)
        self._copied(len(load.blocks), self._clock() - started)

    def computed(self, num_prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Notes how long a step took. Only steps that are prompts for the most part say how fast those are."""
        if num_prompt_tokens >= _TELLING_TOKENS and num_prompt_tokens >= _TELLING_TOKENS * num_decodes:
            self.rates = self.rates.with_prefill(num_prompt_tokens, seconds)

    def check_integrity(self, saved: Sequence[SavedBlocks]) -> None:
        """`saved`: all that is there, or on its way there or back. Raises InternalError."""
        rows = [row for each in saved for row in each.rows]
        if len(set(rows)) != len(rows) or len(rows) != self._rows.num_used:
            raise InternalError(f"{self._rows.num_used} rows of the swap space are taken, and {len(rows)} are accounted for")

    def _copied(self, num_blocks: int, seconds: float) -> None:
        self.swapped_bytes += num_blocks * self._shape.block_bytes
        self.rates = self.rates.with_copy(num_blocks * self._shape.block_bytes, seconds)

    def _measure(self, num_bytes: int) -> None:
        """Copies some blocks to the host and back, while no step writes them: the first slab of host memory is made now, which takes a
        moment, and the first choice of a way to give way is an informed one."""
        count = min(self._shape.num_blocks, num_bytes // self._shape.block_bytes, max(1, _PROBE_BYTES // self._shape.block_bytes))
        blocks = list(range(count))
        try:
            for _ in range(2 if count else 0):
                started = self._clock()
                self._slabs.copy_out(blocks, blocks)
                self._slabs.copy_back(blocks, blocks)
                if (seconds := self._clock() - started) > 0:
                    self.rates = PreemptionRates(copy_bytes_per_s=2 * count * self._shape.block_bytes / seconds)
        except Exception:
            log.exception("KV blocks cannot be copied to the host: sequences that give way will be computed again")
