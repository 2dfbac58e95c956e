"""The inside of an engine's process: runner, engine and, by `planes`, how KV travels; its edge is at the other end of a socket.

Configuration comes first; phases of the start go back, then what was loaded. After that the engine's thread writes a record for each step
into the socket, and the event loop does what the edge asks for. The end of the socket is the end of the process, whatever it is doing.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from twostep.engine.types import EngineRequest, LayerProgress, StepOutput
from twostep.errors import InternalError, SetupError, TwostepError
from twostep.process.ending import die_with
from twostep.process.log import setup_logging
from twostep.rpc import event_loop
from twostep.rpc.collector import collect_in_quiet_moments
from twostep.worker.config import WorkerConfig
from twostep.worker.cuda_driver import begin_driver
from twostep.worker.engine_port import EngineLook
from twostep.worker.link import STEP, AnsweredInOrder, Call, Link, Tell
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import at_knee, load_model, resolve_config
from twostep.worker.remote_engine import FIGURES_EVERY_S, FIGURES_LATE_S
from twostep.worker.step_record import encode, ended

log = logging.getLogger(__name__)

# Objects, more than were freed, after which the youngest are collected.
_YOUNG = 10_000


class Plane(NamedTuple):
    """Holds what else this process does for its edge, by the names of messages; `close` when it ends."""

    calls: Mapping[str, Call]
    tells: Mapping[str, Tell]
    close: Callable[[], Awaitable[None]]


class EngineServer:
    """Serves one engine to the other end of a link. A StepSink."""

    def __init__(self, link: Link, engine: LocalEngine) -> None:
        self._link = link
        self._port = engine
        self._engine = engine.engine
        # Under the link's order: the engine's threads look too.
        self._handles: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._held: set[str] = set()
        self.calls: Mapping[str, Call | AnsweredInOrder] = {
            "submit": AnsweredInOrder(self._submit),
            "reserve": AnsweredInOrder(self._reserve),
            "reconfigure": self._reconfigure,
            "generations": engine.generations,
            "look": self._look,
        }
        self.tells: Mapping[str, Tell] = {
            "commit": self._commit,
            "confirm": self._confirm,
            "cancel": self._cancel,
            "mark_layers": self._mark_layers,
            "set_curve": engine.set_curve,
            "serving": engine.serving,
        }

    # ---- the engine's threads -------------------------------------------------------------------------------------------------

    def step(self, output: StepOutput, stopped: Callable[[], bool]) -> None:
        with self._link.order:
            record = encode(output, self._handles)
            for seq_id in ended(output):
                if seq_id not in self._held:
                    self._forget(seq_id)
            for failure in output.failures:
                self._forget(failure.seq_id)
        self._link.send_bounded(STEP, record, stopped)

    def layers(self, progress: Sequence[LayerProgress]) -> None:
        self._link.tell("layers", tuple(progress))

    def failed(self, error: Exception) -> None:
        self._link.tell("failed", error if isinstance(error, TwostepError) else InternalError(repr(error)))

    # ---- the loop: what the edge asks for ---------------------------------------------------------------------------------------

    async def _submit(self, number: int, handle: int, request: EngineRequest, hold: bool, mark_layers: Sequence[int]) -> None:
        request = await self._port.prepared(request)
        # Answered before any step of it.
        with self._link.order:
            self._engine.submit(request, hold=hold, mark_layers=mark_layers)
            self._know(handle, request.seq_id)
            if hold:
                self._held.add(request.seq_id)
            self._link.answer(number)

    async def _reserve(self, number: int, handle: int, request: EngineRequest) -> None:
        request = await self._port.prepared(request)
        with self._link.order:
            reservation = self._engine.reserve(request)
            self._know(handle, request.seq_id)
            self._link.answer(number, reservation)

    async def _reconfigure(self, max_num_batched_tokens: int, max_num_seqs: int) -> bool:
        return await self._port.reconfigure(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)

    async def _look(self, check_integrity: bool) -> EngineLook:
        return await self._port.look(check_integrity=check_integrity)

    def _commit(self, handle: int, output_ids: Sequence[int], exact: bool, confirmed: bool) -> None:
        with self._link.order:
            if (seq_id := self._names.get(handle)) is None:
                return
            failure = self._port.refusal_of(seq_id, output_ids, exact=exact, confirmed=confirmed)
            if failure is not None:
                output = StepOutput(step=self._engine.steps, failures=[failure])
                self._link.send(STEP, encode(output, self._handles))
                self._forget(seq_id)

    def _confirm(self, handle: int) -> None:
        if (seq_id := self._names.get(handle)) is not None:
            self._engine.confirm(seq_id)

    def _mark_layers(self, handle: int, mark_layers: Sequence[int]) -> None:
        if (seq_id := self._names.get(handle)) is not None:
            self._engine.mark_layers(seq_id, mark_layers)

    def _cancel(self, handle: int) -> None:
        with self._link.order:
            if (seq_id := self._names.get(handle)) is not None:
                self._forget(seq_id)
                self._engine.cancel(seq_id)

    def _know(self, handle: int, seq_id: str) -> None:
        self._handles[seq_id], self._names[handle] = handle, seq_id

    def _forget(self, seq_id: str) -> None:
        handle = self._handles.pop(seq_id, None)
        if handle is not None:
            del self._names[handle]
            self._held.discard(seq_id)

    async def tell_figures(self) -> None:
        """Sends the engine's figures to the edge as they change. Never returns."""
        last_steps, waited_s = -1, FIGURES_LATE_S
        while True:
            steps = self._engine.steps
            if steps != last_steps or waited_s >= FIGURES_LATE_S / 2:
                delta = self._engine.take_prefix_delta()
                changed = delta.added or delta.removed or delta.host_added or delta.host_removed
                self._link.tell("figures", self._engine.stats(), delta if changed else None)
                last_steps, waited_s = steps, 0.0
            await asyncio.sleep(FIGURES_EVERY_S)
            waited_s += FIGURES_EVERY_S


class _Told:
    """A Progress at the other end of the link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def phase(self, name: str) -> None:
        self._link.tell("phase", name)

    def advance(self, done: int, total: int, unit: str = "") -> None:
        self._link.tell("advance", done, total, unit)

    def say(self, line: str) -> None:
        self._link.tell("say", line)


def main(planes: Callable[[LocalEngine, Link], Plane]) -> int:
    """Arguments: the socket's descriptor, and the process id of the edge, whose thread's end the kernel makes this process' own."""
    descriptor, parent = map(int, sys.argv[1:3])
    die_with(parent)
    # Who is asked to end is the edge; it ends this process when it has drained.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = Link(socket.socket(fileno=descriptor))
    message = link.receive()
    if message is None:
        return 1
    _, (config,) = message
    assert isinstance(config, WorkerConfig)
    if config.runner == "model" and config.device != "cpu":
        # Beside the import of what uses it.
        begin_driver()
    setup_logging(level=config.log_level, json_lines=config.log_json, process=f"{config.role}-{config.grpc_port}-engine")
    try:
        config = resolve_config(config)
        # All is imported.
        gc.enable()
        model = load_model(config, _Told(link))
        config = at_knee(config, model.curve, whole_prompts=model.runner.kv_shape.has_encoder)
        engine = LocalEngine(config, model)
        plane = planes(engine, link)
    except SetupError as error:
        link.tell("cannot_start", error)
        return 2
    gc.collect()
    gc.freeze()
    # A launch makes hundreds of objects: Python's 700 are reached in the midst of one now and then, and what came with new prompts is
    # looked at, for up to a millisecond. What is new is collected every few seconds all the same (collector.py).
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
    link.tell("loaded", config, engine.facts)
    event_loop.run(_serve(link, engine, plane))
    if model.ranks is not None:
        model.ranks.close()
    logging.shutdown()
    # Libraries and devices that wait for what is gone would keep the interpreter from ending.
    os._exit(0)


async def _serve(link: Link, engine: LocalEngine, plane: Plane) -> None:
    server, stopped = EngineServer(link, engine), asyncio.Event()

    async def stop() -> None:
        await plane.close()
        await engine.stop()
        stopped.set()

    def lost() -> None:
        if not stopped.is_set():
            # Nobody can be told of anything any more.
            os._exit(1)

    link.start(tells={**server.tells, **plane.tells}, calls={**server.calls, **plane.calls, "stop": stop}, on_end=lost)
    engine.run(server)
    telling = asyncio.create_task(server.tell_figures(), name="figures")
    collecting = asyncio.create_task(collect_in_quiet_moments(lambda: engine.engine.steps), name="collector")
    await stopped.wait()
    for task in (telling, collecting):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
