"""Moves the blocks of sequences that gave way to host memory and back, on the engine's thread (preemptor.py decides which).

step n, they were in it │ save ── save │ plan, launch n+1 ──▶            a save waits for the copy: the blocks are given to others next
                                       │ load ── load ── batch ──▶       a load is queued before the step that reads it
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from twostep.engine.batch import Runner
from twostep.engine.host_blocks import HostSlabs
from twostep.engine.preemption import PreemptionMode
from twostep.engine.preemptor import Preemptor
from twostep.engine.step_work import BlockLoad, BlockSave

log = logging.getLogger(__name__)

# How much is copied out and back for a trial.
_PROBE_BYTES = 32 << 20


class SwapCopies:
    """Of one engine's thread; `resize` also of whoever makes or reconfigures the engine, while nothing is in it."""

    def __init__(
        self,
        runner: Runner,
        preemptor: Preemptor,
        changed: threading.Condition,
        on_saved: Callable[[BlockSave, float | None], None],
        *,
        mode: PreemptionMode,
        swap_bytes: int,
    ) -> None:
        """`changed` is the engine's lock, over the preemptor too. `on_saved(save, seconds)` is called under it; None: the copy failed."""
        self._runner = runner
        self._preemptor = preemptor
        self._changed = changed
        self._on_saved = on_saved
        self._mode = mode
        self.resize(swap_bytes)

    def resize(self, swap_bytes: int) -> None:
        """Room for so many bytes; nothing of what was saved before is wanted any more. Some milliseconds on a GPU: copies are tried."""
        self._slabs = HostSlabs(self._runner.kv_shape.block_bytes, self._runner.new_host_blocks)
        if swap_bytes and self._mode is not PreemptionMode.RECOMPUTE:
            self._measure(swap_bytes)

    def save_all(self) -> bool:
        """Copies out the blocks of those that gave way; steps that wrote them are settled. False: there are none."""
        with self._changed:
            saves = self._preemptor.take_saves()
        for save in saves:
            started = time.monotonic()
            seconds: float | None = None
            try:
                for place, memory in self._slabs.parts(save.saved.rows):
                    self._runner.read_blocks(save.blocks[place : place + len(memory)], memory)
                seconds = time.monotonic() - started
            except Exception:
                log.exception("the KV of %s could not be copied out; it is computed again", save.sequence.seq_id)
            with self._changed:
                self._on_saved(save, seconds)
        return bool(saves)

    def load(self, load: BlockLoad) -> None:
        """Copies back what was saved, for the step that is launched next. Raises what copying raises."""
        started = time.monotonic()
        for place, memory in self._slabs.parts(load.rows):
            self._runner.write_blocks(load.blocks[place : place + len(memory)], memory)
        with self._changed:
            self._preemptor.copied(len(load.blocks), time.monotonic() - started)

    def _measure(self, swap_bytes: int) -> None:
        """Copies some blocks to the host and back, while nobody writes them: the first slab of host memory is made now, which takes a
        moment, and the first choice of a way to give way is an informed one."""
        shape = self._runner.kv_shape
        count = min(shape.num_blocks, swap_bytes // shape.block_bytes, max(1, _PROBE_BYTES // shape.block_bytes))
        try:
            for _ in range(2 if count else 0):
                started = time.monotonic()
                for place, memory in self._slabs.parts(range(count)):
                    blocks = list(range(place, place + len(memory)))
                    self._runner.read_blocks(blocks, memory)
                    self._runner.write_blocks(blocks, memory)
                self._preemptor.start_rates(2 * count, time.monotonic() - started)
        except Exception:
            log.exception("KV blocks cannot be copied to the host: sequences that give way will be computed again")
