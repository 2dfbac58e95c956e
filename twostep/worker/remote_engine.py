"""An engine in a process of its own, as its edge uses it.

start     the edge's process starts it first of all (engine_child.py) and sends its configuration; phases, then what was loaded, come back
serving   commands one way, a record for each step the other (link.py); figures and prefix changes several times a second
end       either process sees the end of the socket when the other is gone, however it went
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from twostep.cluster.records import LayoutRecord
from twostep.engine.batch import KvShape
from twostep.engine.types import EngineRequest, EngineStats, LayerProgress, PrefixDelta, Reservation
from twostep.errors import InternalError, SetupError, TwostepError, Unavailable
from twostep.pooling import Pooling
from twostep.process.ending import how_it_ended, oom_kills
from twostep.process.startup import Progress
from twostep.request_class import RequestClass
from twostep.sampling_params import Grammar, GrammarKind, SamplingParams
from twostep.settings.tls import TlsFiles
from twostep.step_curve import StepCurve
from twostep.worker.config import WorkerConfig
from twostep.worker.engine_child import EngineChild
from twostep.worker.engine_port import EngineEvents, EngineFacts, EngineLook
from twostep.worker.link import Link, Tell
from twostep.worker.serialization import register_types
from twostep.worker.step_record import decode, ended

log = logging.getLogger(__name__)

register_types(EngineFacts, EngineLook, EngineRequest, EngineStats, Grammar, GrammarKind, KvShape, LayoutRecord, PrefixDelta, RequestClass)
register_types(Pooling, Reservation, SamplingParams, StepCurve, TlsFiles, WorkerConfig)

# How often figures come while steps are made.
FIGURES_EVERY_S = 0.1
# Figures are older than that where the process stands still; it tells them half as late at most while it is idle.
FIGURES_LATE_S = 1.0
# An answer takes as long as the engine's lock, or a grammar.
_ANSWER_S = 90.0
# Who looks is told what is known, if the process stands still.
_LOOK_S = 2.0
# Launched steps end, then the process does.
_STOP_S = 15.0
_EXIT_S = 10.0


class EngineEnded(TwostepError):
    """The engine's process has ended before it served."""


class RemoteEngine:
    """See EnginePort. Made by `launch`."""

    def __init__(self, child: EngineChild, link: Link, config: WorkerConfig, facts: EngineFacts) -> None:
        self._process, self.pid = child.process, child.process.pid
        self._link = link
        self._oom_kills = oom_kills()
        self.config = config
        self.facts = facts
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self._events: EngineEvents | None = None
        self._tells: dict[str, Tell] = {}
        self._failed = False
        self._stopping = False
        self._numbers = itertools.count(1)
        # Of live sequences: the number that stands for them on the way, and back.
        self._handles: dict[str, int] = {}
        self._names: dict[int, str] = {}
        # Those whose last token is not their end.
        self._held: set[str] = set()
        self._stats = EngineStats(
            num_running=0,
            num_waiting=0,
            num_reserved=0,
            num_held=0,
            num_blocks=facts.shape.num_blocks,
            num_free_blocks=facts.shape.num_blocks,
            num_cached_blocks=0,
            steps=0,
        )
        self._heard_at = time.monotonic()
        self._delta = UntakenPrefixes()

    @classmethod
    def launch(cls, config: WorkerConfig, child: EngineChild, progress: Progress) -> RemoteEngine:
        """Has the process load, and waits until it has. Raises SetupError with what to change, and EngineEnded."""
        process, link = child.process, Link(child.socket)
        try:
            link.tell("load", config)
            while (message := link.receive()) is not None:
                match message:
                    case "loaded", [WorkerConfig() as settled, EngineFacts() as facts]:
                        return cls(child, link, settled, facts)
                    case "cannot_start", [SetupError() as error]:
                        raise error
                    case name, found:
                        getattr(progress, name)(*found)
            raise EngineEnded(
                f"the engine's process {how_it_ended(process.wait(_EXIT_S), oom_kills_before=child.oom_kills_before)}; its log says more"
            )
        except BaseException:
            process.kill()
            process.wait()
            link.close()
            raise

    def kill(self, number: signal.Signals) -> None:
        """Sends the process a signal."""
        self._process.send_signal(number)

    def start(self, events: EngineEvents) -> None:
        self._events = events
        self._tells |= {"layers": self._on_layers, "failed": self._fail, "figures": self._on_figures}
        self._heard_at = time.monotonic()
        self._link.start(tells=self._tells, calls={}, on_end=self._on_end, on_step=self._on_step)

    def serving(self) -> None:
        self._link.tell("serving")

    async def stop(self) -> None:
        self._stopping = True
        if not self._link.ended and self._events is not None:
            with suppress(TwostepError):
                await self._link.call("stop", deadline=time.monotonic() + _STOP_S)
        self._link.close()
        if await asyncio.to_thread(self._exit_status, _EXIT_S) is None:
            log.warning("the engine's process has not ended within %g s: it is killed", _EXIT_S)
            self._process.kill()
            await asyncio.to_thread(self._exit_status, _EXIT_S)

    def close(self) -> None:
        """Ends the process at once. Idempotent."""
        self._link.close()
        self._process.kill()
        self._exit_status(_EXIT_S)

    def alive(self, stall_timeout_s: float) -> bool:
        return not self._failed and (self._stopping or self._stats.stalled_s + time.monotonic() - self._heard_at < stall_timeout_s)

    def stats(self) -> EngineStats:
        silent_s = time.monotonic() - self._heard_at
        return self._stats if silent_s < FIGURES_LATE_S else replace(self._stats, stalled_s=self._stats.stalled_s + silent_s)

    def take_prefix_delta(self) -> PrefixDelta:
        return self._delta.take()

    async def submit(self, request: EngineRequest, *, hold: bool = False, mark_layers: Sequence[int] = ()) -> None:
        await self._take("submit", request, hold, tuple(mark_layers))
        if hold:
            self._held.add(request.seq_id)

    async def reserve(self, request: EngineRequest) -> Reservation:
        reservation: Reservation = await self._take("reserve", request)
        return reservation

    async def _take(self, how: str, request: EngineRequest, *arguments: object) -> Any:
        handle = next(self._numbers)
        try:
            answer = await self.call(how, handle, request, *arguments)
        except TwostepError as error:
            if isinstance(error, Unavailable):
                self._link.tell("cancel", handle)
            raise
        except asyncio.CancelledError:
            # It may have been taken all the same.
            self._link.tell("cancel", handle)
            raise
        self._handles[request.seq_id], self._names[handle] = handle, request.seq_id
        return answer

    def commit(self, seq_id: str, output_ids: Sequence[int], *, exact: bool = True, confirmed: bool = True) -> None:
        if (handle := self._handles.get(seq_id)) is not None:
            self._link.tell("commit", handle, tuple(output_ids), exact, confirmed)

    def confirm(self, seq_id: str) -> None:
        if (handle := self._handles.get(seq_id)) is not None:
            self._link.tell("confirm", handle)

    def cancel(self, seq_id: str) -> None:
        if (handle := self._forget(seq_id)) is not None:
            self._link.tell("cancel", handle)

    def mark_layers(self, seq_id: str, mark_layers: Sequence[int]) -> None:
        if (handle := self._handles.get(seq_id)) is not None:
            self._link.tell("mark_layers", handle, tuple(mark_layers))

    def set_curve(self, curve: StepCurve | None) -> None:
        self._link.tell("set_curve", curve)

    async def reconfigure(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> bool:
        done: bool = await self.call("reconfigure", max_num_batched_tokens, max_num_seqs)
        if done:
            self.max_num_batched_tokens = max_num_batched_tokens
        return done

    async def generations(self, block_ids: Sequence[int]) -> Sequence[int]:
        found: Sequence[int] = await self.call("generations", tuple(block_ids))
        return found

    async def look(self, *, check_integrity: bool) -> EngineLook:
        try:
            look: EngineLook = await self.call("look", check_integrity, deadline=time.monotonic() + _LOOK_S)
        except Unavailable as error:
            return EngineLook(stats=self.stats(), integrity_error=error.message if check_integrity else "")
        return look

    # ---- for those who have more of their own in that process ------------------------------------------------------------------

    async def call(self, name: str, *arguments: object, deadline: float | None = None, settle: bool = False) -> Any:
        """See Link.call."""
        deadline = time.monotonic() + _ANSWER_S if deadline is None else deadline
        return await self._link.call(name, *arguments, deadline=deadline, settle=settle)

    def tell(self, name: str, *arguments: object) -> None:
        self._link.tell(name, *arguments)

    def on(self, name: str, tell: Callable[..., None]) -> None:
        """Calls `tell` when the engine's process tells this."""
        self._tells[name] = tell

    # ---- what comes -------------------------------------------------------------------------------------------------------------

    def _on_step(self, record: bytes) -> None:
        assert self._events is not None
        output = decode(record, self._names)
        for failure in output.failures:
            self._forget(failure.seq_id)
        self._events.on_step(output)
        for seq_id in ended(output):
            if seq_id not in self._held:
                self._forget(seq_id)

    def _on_layers(self, progress: Sequence[LayerProgress]) -> None:
        assert self._events is not None
        self._events.on_layers([each for each in progress if each.seq_id in self._handles])

    def _on_figures(self, stats: EngineStats, delta: PrefixDelta | None) -> None:
        self._stats, self._heard_at = stats, time.monotonic()
        if delta is not None:
            self._delta.add(delta)

    def _on_end(self) -> None:
        if self._stopping:
            return
        self._fail(InternalError("its process is gone"))
        # In a thread: a device's memory takes its time to be given back.
        threading.Thread(target=self._say_how_it_ended, name="engine-process-end", daemon=True).start()

    def _say_how_it_ended(self) -> None:
        log.error("the engine's process %s", how_it_ended(self._exit_status(_EXIT_S), oom_kills_before=self._oom_kills))

    def _fail(self, error: TwostepError) -> None:
        if not self._failed:
            assert self._events is not None
            self._failed = True
            log.error("the engine can go on no more: %s", error.message)
            self._events.on_failure(error)

    def _forget(self, seq_id: str) -> int | None:
        handle = self._handles.pop(seq_id, None)
        if handle is not None:
            del self._names[handle]
            self._held.discard(seq_id)
        return handle

    def _exit_status(self, timeout_s: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None


class UntakenPrefixes:
    """Adds up what changed in the sets of findable prefixes: net, as Engine.take_prefix_delta tells it."""

    def __init__(self) -> None:
        self._pool, self._host = _Untaken(), _Untaken()

    def add(self, delta: PrefixDelta) -> None:
        self._pool.add(delta.added, delta.removed)
        self._host.add(delta.host_added, delta.host_removed)

    def take(self) -> PrefixDelta:
        pool, host = self._pool, self._host
        self._pool, self._host = _Untaken(), _Untaken()
        return PrefixDelta(
            added=tuple(pool.added), removed=tuple(pool.removed), host_added=tuple(host.added), host_removed=tuple(host.removed)
        )


class _Untaken:
    def __init__(self) -> None:
        # In order; the values say nothing.
        self.added: dict[bytes, None] = {}
        self.removed: dict[bytes, None] = {}

    def add(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for new, theirs, ours in ((added, self.removed, self.added), (removed, self.added, self.removed)):
            for each in new:
                if each in theirs:
                    del theirs[each]
                else:
                    ours[each] = None
