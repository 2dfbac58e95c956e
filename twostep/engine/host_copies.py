"""Copies blocks between the pool and host memory: what host_tier.py says.

On a thread of its own, so that no step waits for a copy; without one, between steps:

    thread   load ── load ── save ── save ── load ──▶      what a sequence waits for goes first, the rest in small batches
    steps    ──── n ──── n+1 ──── n+2 ──── n+3 ──────▶      the sequence joins the first step after its load

The memory is rows in slabs, which are made when they are first needed and then kept:

    slab 0 |row 0|row 1|row 2| … |      slab 1 |row n|row n+1| …
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from twostep.engine.batch import Runner
from twostep.engine.host_tier import HostLoad, HostTier

# Making pinned memory holds up the thread that launches kernels, a few milliseconds for this.
_SLAB_BYTES = 16 << 20
# A batch that is saved has so many bytes and blocks at most: a sequence that comes to wait for a load waits no longer than for this; and
# a thread that wants the engine's lock, no longer than choosing so many blocks takes.
_BATCH_BYTES = 32 << 20
_BATCH_BLOCKS = 128
_POLL_S = 0.5

log = logging.getLogger(__name__)


class HostSlabs:
    """Holds the rows' memory, and copies between it and the runner's blocks. Copies raise what allocating or copying raises."""

    def __init__(self, runner: Runner, *, rows_per_slab: int = 0) -> None:
        """`rows_per_slab` 0: as many as fit a slab's usual size."""
        self._runner = runner
        self._rows_per_slab = rows_per_slab or max(1, _SLAB_BYTES // runner.kv_shape.block_bytes)
        self._slabs: dict[int, npt.NDArray[np.uint8]] = {}

    def copy_out(self, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """Copies the device's blocks to as many rows."""
        for place, memory in self._parts(rows):
            self._runner.read_blocks(blocks[place : place + len(memory)], memory)

    def copy_back(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies rows to as many of the device's blocks."""
        for place, memory in self._parts(rows):
            self._runner.write_blocks(blocks[place : place + len(memory)], memory)

    def _parts(self, rows: Sequence[int]) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Yields (place in `rows`, memory [n, block_bytes]) of each run of n neighbouring rows, in order."""
        place = 0
        while place < len(rows):
            slab, first = divmod(rows[place], self._rows_per_slab)
            count = 1
            while place + count < len(rows) and rows[place + count] == rows[place] + count and first + count < self._rows_per_slab:
                count += 1
            if slab not in self._slabs:
                self._slabs[slab] = self._runner.new_host_blocks(self._rows_per_slab)
            yield place, self._slabs[slab][first : first + count]
            place += count


class HostCopies:
    """Between start() and stop() a thread copies; otherwise the thread that steps the engine calls `copy_all` between steps."""

    def __init__(self, runner: Runner, tier: HostTier, changed: threading.Condition, on_loaded: Callable[[HostLoad, bool], None]) -> None:
        """`changed` is the engine's lock, notified when there may be something to copy. `on_loaded(load, ok)` is called under it."""
        self._tier = tier
        self._changed = changed
        self._on_loaded = on_loaded
        self._slabs = HostSlabs(runner)
        self._max_blocks = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // runner.kv_shape.block_bytes))
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failing = False
        # What ended the thread before its time: the books cannot be trusted, and what waits for a copy would wait for ever.
        self.failure: Exception | None = None

    @property
    def by_itself(self) -> bool:
        """Returns whether a thread copies."""
        return self._thread is not None

    def start(self) -> None:
        """Does nothing where the tier has no room."""
        if self._tier.num_rows and self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="engine-host-cache", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after the copy under way. Idempotent; what is still to be copied is left to `copy_all`."""
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        thread.join(timeout_s)
        if thread.is_alive():
            log.warning("a copy between the KV pool and host memory did not finish within %g s; leaving it behind", timeout_s)
        else:
            self._thread = None

    def copy_all(self) -> bool:
        """Copies all there is, where no thread does it, and returns whether that was anything."""
        copied = False
        while self._thread is None and self._copy_next():
            copied = True
        return copied

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or self._tier.has_copies, _POLL_S)
                    if self._stopping:
                        return
                self._copy_next()
        except Exception as error:  # a failing copy is none: see _tried
            log.exception("the thread that copies prefixes to the host and back ended")
            with self._changed:
                self.failure = error
                self._changed.notify_all()

    def _copy_next(self) -> bool:
        """Makes the copies of one load or of a batch of saves. Returns False where there is nothing."""
        if not self._tier.num_rows:
            return False
        with self._changed:
            load = self._tier.take_load()
            saves = self._tier.take_saves(self._max_blocks) if load is None else ()
        if load is not None:
            ok = self._tried(lambda: self._slabs.copy_back(load.rows, load.blocks))
            with self._changed:
                self._on_loaded(load, ok)
        elif saves:
            ok = self._tried(lambda: self._slabs.copy_out([save.block for save in saves], [save.row for save in saves]))
            with self._changed:
                self._tier.saved(saves, ok=ok)
        return load is not None or bool(saves)

    def _tried(self, copy: Callable[[], None]) -> bool:
        """Returns whether it succeeded; the first of several failures in a row is logged."""
        try:
            copy()
        except Exception:
            if not self._failing:
                log.exception("KV blocks cannot be copied between the pool and host memory: prefixes are computed again instead")
            self._failing = True
            return False
        self._failing = False
        return True
