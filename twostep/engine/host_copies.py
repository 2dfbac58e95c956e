"""Moves blocks between the pool and the host tier: on a thread of its own, so that no step waits for a copy; without one, between steps.

thread   load ── load ── save ── save ── load ──▶      what a sequence waits for goes first, the rest in small batches
steps    ──── n ──── n+1 ──── n+2 ──── n+3 ──────▶      the sequence joins the first step after its load
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from twostep.engine.batch import Runner
from twostep.engine.host_blocks import HostSlabs
from twostep.engine.host_tier import HostLoad, HostSave, HostTier

log = logging.getLogger(__name__)

# Of a batch that is saved: a sequence that comes to wait for a load waits no longer than for this; and whoever wants the engine's lock, no
# longer than choosing so many blocks takes.
_BATCH_BYTES = 32 << 20
_BATCH_BLOCKS = 128
_POLL_S = 0.5


class HostCopies:
    """Between start() and stop() a thread copies; otherwise whoever steps the engine calls `copy_all` between steps."""

    def __init__(self, runner: Runner, tier: HostTier, changed: threading.Condition, on_loaded: Callable[[HostLoad, bool], None]) -> None:
        """`changed` is the engine's lock, notified when there may be something to copy. `on_loaded(load, ok)` is called under it."""
        self._runner = runner
        self._tier = tier
        self._changed = changed
        self._on_loaded = on_loaded
        self._slabs = HostSlabs(runner.kv_shape.block_bytes, runner.new_host_blocks)
        self._max_blocks = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // runner.kv_shape.block_bytes))
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failing = False
        # What ended the thread before its time: the books cannot be trusted, and what waits for a copy would wait for ever.
        self.failure: Exception | None = None

    @property
    def by_itself(self) -> bool:
        """Whether a thread copies."""
        return self._thread is not None

    def start(self) -> None:
        """Does nothing where the tier has no room."""
        if self._tier.num_rows and self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="engine-host-cache", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """After the copy under way. Idempotent; what is still to be copied is left to `copy_all`."""
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
        """Where no thread does it: copies all there is, and returns whether that was anything."""
        if self._thread is not None or not self._copy_next():
            return False
        while self._copy_next():
            pass
        return True

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
        """One load or a batch of saves. False: there is nothing."""
        if not self._tier.num_rows:
            return False
        with self._changed:
            load = self._tier.take_load()
            save = self._tier.take_save(self._max_blocks) if load is None else None
        if load is not None:
            ok = self._tried(lambda: self._copy_back(load))
            with self._changed:
                self._on_loaded(load, ok)
        elif save is not None:
            ok = self._tried(lambda: self._copy_out(save))
            with self._changed:
                self._tier.saved(save, ok=ok)
        return load is not None or save is not None

    def _copy_out(self, save: HostSave) -> None:
        for place, memory in self._slabs.parts(save.rows):
            self._runner.read_blocks(save.blocks[place : place + len(memory)], memory)

    def _copy_back(self, load: HostLoad) -> None:
        for place, memory in self._slabs.parts(load.rows):
            self._runner.write_blocks(load.blocks[place : place + len(memory)], memory)

    def _tried(self, copy: Callable[[], None]) -> bool:
        """Whether it succeeded; the first of several failures in a row is logged."""
        try:
            copy()
        except Exception:
            if not self._failing:
                log.exception("KV blocks cannot be copied between the pool and host memory: prefixes are computed again instead")
            self._failing = True
            return False
        self._failing = False
        return True
