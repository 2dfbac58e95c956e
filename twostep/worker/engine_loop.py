"""The thread that steps the engine, and where it puts what comes of it."""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from twostep.engine.engine import Engine
from twostep.engine.step_launcher import MarkedStep
from twostep.engine.types import FailureKind, LayerProgress, StepOutput
from twostep.errors import InternalError
from twostep.worker.engine_port import EngineEvents

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Steps whose output the event loop has not taken yet; the thread waits when the loop lags further behind.
_MAX_UNDELIVERED = 64
_POLL_S = 0.1
_MAX_FAILED_STEPS = 3
# How long another thread may keep the interpreter when this one's step is done. Python's own 5 ms would be gaps between tokens. With
# 0.1 ms, beside threads that copy KV, the event loop has its turns later: 7 to 10 ms at p99, not 4 to 6 (benchmarks/RESULTS.md).
_SWITCH_S = 0.0005


class StepSink(Protocol):
    """Takes what the engine's threads have, in order."""

    def step(self, output: StepOutput, stopped: Callable[[], bool]) -> None:
        """Waits while the reader lags too far behind, until `stopped`."""
        ...

    def layers(self, progress: Sequence[LayerProgress]) -> None:
        """Is called while a step runs, where the runner tells how far that is."""
        ...

    def failed(self, error: Exception) -> None:
        """Is called when the engine can go on no more."""
        ...


class LoopSink:
    """Calls events on the event loop on which it was made: one wake-up for each step."""

    def __init__(self, events: EngineEvents) -> None:
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._room = threading.Semaphore(_MAX_UNDELIVERED)

    def step(self, output: StepOutput, stopped: Callable[[], bool]) -> None:
        while not self._room.acquire(timeout=_POLL_S):
            if stopped():
                return
        self._call(self._deliver, output)

    def layers(self, progress: Sequence[LayerProgress]) -> None:
        self._call(self._events.on_layers, progress)

    def failed(self, error: Exception) -> None:
        self._call(self._events.on_failure, error)

    def _deliver(self, output: StepOutput) -> None:
        self._room.release()
        self._events.on_step(output)

    def _call(self, function: Callable[[_T], None], argument: _T) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            log.debug("the event loop is closed: the process is on its way out")


class EngineLoop:
    """Steps `engine` while there is work and gives what comes of it to `sink`.

    A step that fails ends its sequences and the engine goes on; after several in a row, or if the engine itself raises, the thread ends:
    nothing it holds can be trusted any more. `failure` is then set and the sink told; whoever owns the process tells the callers and exits.
    """

    def __init__(self, engine: Engine, sink: StepSink) -> None:
        self._engine = engine
        self._sink = sink
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: Exception | None = None
        # Of launched steps, two at most, and those just settled.
        self._marked: queue.SimpleQueue[MarkedStep | None] = queue.SimpleQueue()
        self._follower: threading.Thread | None = None
        if engine.runner.marks_layers:
            self._follower = threading.Thread(target=self._follow_layers, name="engine-layers", daemon=True)
            engine.follow_layers(self._marked.put)

    def start(self) -> None:
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()
        self._engine.host_copies.start()
        if self._follower is not None:
            self._follower.start()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Lets the launched steps finish. Idempotent; a step longer than `timeout_s` is left behind and said so."""
        self._stop.set()
        if self._thread.ident is None:
            return
        await asyncio.to_thread(self._thread.join, timeout_s)
        await asyncio.to_thread(self._engine.host_copies.stop, timeout_s)
        if self._thread.is_alive():
            log.warning("the engine's step did not finish within %g s; leaving it behind", timeout_s)
        elif self._follower is not None:
            self._marked.put(None)
            await asyncio.to_thread(self._follower.join, timeout_s)

    def alive(self, stall_timeout_s: float) -> bool:
        """Returns False once the thread has ended by itself, or the oldest work has seen no step for `stall_timeout_s`."""
        if self.failure is not None:
            return False
        return self._stop.is_set() or self._engine.stats().stalled_s < stall_timeout_s

    def fail(self, error: Exception) -> None:
        """Ends the engine, from any thread: it can go on no more, whatever its thread waits for."""
        self._stop.set()
        self.failure = error
        self._sink.failed(error)

    def _run(self) -> None:
        num_failed = 0
        try:
            while not self._stop.is_set():
                if not self._engine.wait_for_work(_POLL_S):
                    continue
                output = self._engine.step()
                num_failed = num_failed + 1 if any(f.kind is FailureKind.STEP for f in output.failures) else 0
                self._hand_over(output)
                if num_failed >= _MAX_FAILED_STEPS:
                    raise InternalError(f"{num_failed} steps in a row failed; see the log above, and restart the worker")
            for output in self._engine.settle_launched():
                self._hand_over(output)
        except Exception as error:
            log.exception("the engine stopped")
            self.fail(error)

    def _follow_layers(self) -> None:
        while (step := self._marked.get()) is not None:
            for mark in step.marks:
                try:
                    mark.wait()
                except Exception as error:  # noqa: BLE001 - the step's own result says so too, and ends its sequences
                    log.debug("a step failed before its layer %d: %s", mark.num_layers, error)
                    break
                self._sink.layers(step.at(mark))

    def _hand_over(self, output: StepOutput) -> None:
        if output.tokens or output.progress or output.failures:
            self._sink.step(output, self._stop.is_set)
