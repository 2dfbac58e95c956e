"""A worker as a process: flags, model, serve until a signal, drain, exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from twostep.cluster.epochs import first_epoch
from twostep.errors import SetupError
from twostep.keys.secret import load_secret
from twostep.process.log import setup_logging
from twostep.process.ports import check_ports
from twostep.process.startup import StartUp, process_start, start_up
from twostep.rpc import event_loop
from twostep.rpc.collector import collect_in_quiet_moments
from twostep.rpc.lifecycle import stop_event
from twostep.worker.config import WorkerConfig, parse_config
from twostep.worker.edge import Edge, EdgeParts
from twostep.worker.engine_port import EnginePort
from twostep.worker.gpu_meter import has_driver
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import at_knee, load_model, settle
from twostep.worker.remote_engine import EngineEnded, RemoteEngine
from twostep.worker.worker import Worker

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_ENGINE_FAILED = 1
EXIT_CANNOT_START = 2


def run_worker(role: str, argv: Sequence[str] | None, make_edge: Callable[[EdgeParts], Edge], engine_module: str) -> int:
    """Returns the exit code: 0 after a drain, 1 if the engine failed, 2 if the worker cannot start (the log says what to change).
    `engine_module` is the inside of an engine's process."""
    begun = process_start() if argv is None else time.monotonic()
    config = parse_config(role, argv)
    setup_logging(level=config.log_level, json_lines=config.log_json, process=f"{role}-{config.port}")
    try:
        secret = load_secret(config.secret_file)
        check_ports(config)
        starting = start_up(since=begun, json_lines=config.log_json)
        # A directory not before it is needed: who is ended while it loads leaves nothing behind.
        with (
            _loaded(config, engine_module, starting) as (config, engine),
            nullcontext(config.run_dir) if config.run_dir else TemporaryDirectory(prefix="ts-") as run_dir,
        ):
            starting.phase("service")
            code = event_loop.run(_serve(replace(config, run_dir=Path(run_dir)), engine, secret, make_edge, starting))
        if isinstance(engine, LocalEngine) and engine.has_ranks:
            # Libraries and devices that wait for ranks that are gone would keep the interpreter from ending.
            logging.shutdown()
            os._exit(code)
        return code
    except EngineEnded as error:
        log.error("%s", error.message)
        return EXIT_ENGINE_FAILED
    except SetupError as error:
        log.error("cannot start: %s", error.message)
        return EXIT_CANNOT_START
    except KeyboardInterrupt:
        # While loading, before there was anything to drain.
        return 130


@contextmanager
def _loaded(config: WorkerConfig, engine_module: str, starting: StartUp) -> Iterator[tuple[WorkerConfig, EnginePort]]:
    """Gives the configuration with all settled, and an engine to be started. Raises SetupError and EngineEnded."""
    if _apart(config):
        remote = RemoteEngine.launch(config, engine_module, starting)
        try:
            yield remote.config, remote
        finally:
            remote.close()
        return
    config = settle(config)
    model = load_model(config, starting)
    config = at_knee(config, model.curve)
    # What is loaded is never garbage: a full collection that looked at all of it would hold up all streams for a tenth of a second.
    gc.collect()
    gc.freeze()
    try:
        yield config, LocalEngine(config, model)
    finally:
        if model.ranks is not None:
            model.ranks.close()


def _apart(config: WorkerConfig) -> bool:
    """Returns whether the engine gets a process of its own. Without torch, which takes seconds to find out whether a GPU can be used."""
    if config.engine_process != "auto":
        return config.engine_process == "on"
    return config.runner == "model" and config.device != "cpu" and has_driver()


async def _serve(config: WorkerConfig, engine: EnginePort, secret: bytes, make_edge: Callable[[EdgeParts], Edge], start: StartUp) -> int:
    stop = stop_event(config.drain_timeout)
    starting = asyncio.create_task(_started(config, engine, secret, make_edge))
    stopping = asyncio.create_task(stop.wait())
    failing: asyncio.Task[bool] | None = None
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return EXIT_OK
        worker = starting.result()
        failing = asyncio.create_task(worker.engine_failed.wait())
        log.info(start.finish())
        engine.serving()
        collecting = asyncio.create_task(collect_in_quiet_moments(lambda: worker.engine.stats().steps), name="collector")
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        collecting.cancel()
        await worker.stop(config.drain_timeout if stopping.done() else 0.0)
    finally:
        stopping.cancel()
        if failing is not None:
            failing.cancel()
    log.info("stopped")
    return EXIT_ENGINE_FAILED if worker.engine_failed.is_set() else EXIT_OK


async def _started(config: WorkerConfig, engine: EnginePort, secret: bytes, make_edge: Callable[[EdgeParts], Edge]) -> Worker:
    """A worker that is ready and registered. Raises SetupError."""
    worker = Worker(config, engine, secret, make_edge, await first_epoch(config.redis_url))
    await worker.start()
    return worker
