"""A worker's life from its configuration to its exit code: load, serve until a signal, drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from twostep.cluster.epochs import first_epoch
from twostep.keys.secret import DeploymentSecret
from twostep.process.startup import StartUp
from twostep.rpc import event_loop
from twostep.rpc.collector import collect_in_quiet_moments
from twostep.rpc.lifecycle import stop_event, watch_loop
from twostep.worker.config import WorkerConfig
from twostep.worker.edge import Edge, EdgeParts
from twostep.worker.engine_child import EngineChild
from twostep.worker.engine_port import EnginePort
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import at_knee, load_model, resolve_config
from twostep.worker.remote_engine import EngineEnded, RemoteEngine
from twostep.worker.worker import Worker

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_ENGINE_FAILED = 1


def serve(
    config: WorkerConfig, child: EngineChild | None, secret: DeploymentSecret, make_edge: Callable[[EdgeParts], Edge], starting: StartUp
) -> int:
    """Returns the exit code: 0 after a drain, 1 if the engine failed. `child`: the engine's process; None: the engine is in this one.
    Raises SetupError."""
    try:
        # A directory not before it is needed: who is ended while it loads leaves nothing behind.
        with (
            _loaded(config, child, starting) as (config, engine),
            nullcontext(config.run_dir) if config.run_dir else TemporaryDirectory(prefix="ts-") as run_dir,
        ):
            starting.phase("service")
            code = event_loop.run(_serve(replace(config, run_dir=Path(run_dir)), engine, secret, make_edge, starting))
    except EngineEnded as error:
        log.error("%s", error.message)
        return EXIT_ENGINE_FAILED
    if isinstance(engine, LocalEngine) and engine.has_ranks:
        # Libraries and devices that wait for ranks that are gone would keep the interpreter from ending.
        logging.shutdown()
        os._exit(code)
    return code


@contextmanager
def _loaded(config: WorkerConfig, child: EngineChild | None, starting: StartUp) -> Iterator[tuple[WorkerConfig, EnginePort]]:
    """Gives the configuration with all settled, and an engine to be started. Raises SetupError and EngineEnded."""
    if child is not None:
        gc.enable()
        remote = RemoteEngine.launch(config, child, starting)
        try:
            yield remote.config, remote
        finally:
            remote.close()
        return
    config = resolve_config(config)
    # All is imported.
    gc.enable()
    model = load_model(config, starting)
    config = at_knee(config, model.curve, whole_prompts=model.runner.kv_shape.has_encoder)
    # What is loaded is never garbage: a full collection that looked at all of it would hold up all streams for a tenth of a second.
    gc.collect()
    gc.freeze()
    try:
        yield config, LocalEngine(config, model)
    finally:
        if model.ranks is not None:
            model.ranks.close()


async def _serve(
    config: WorkerConfig, engine: EnginePort, secret: DeploymentSecret, make_edge: Callable[[EdgeParts], Edge], start: StartUp
) -> int:
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
        watching = asyncio.create_task(watch_loop(stop, config.hung_after, lambda: worker.engine.alive(config.stall_timeout)))
        collecting = asyncio.create_task(collect_in_quiet_moments(lambda: worker.engine.stats().steps), name="collector")
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        collecting.cancel()
        watching.cancel()
        await worker.stop(config.drain_timeout if stopping.done() else 0.0)
    finally:
        stopping.cancel()
        if failing is not None:
            failing.cancel()
    log.info("stopped")
    return EXIT_ENGINE_FAILED if worker.engine_failed.is_set() else EXIT_OK


async def _started(config: WorkerConfig, engine: EnginePort, secret: DeploymentSecret, make_edge: Callable[[EdgeParts], Edge]) -> Worker:
    """Returns a worker that is ready and registered. Raises SetupError."""
    worker = Worker(config, engine, secret, make_edge, await first_epoch(config.redis_url))
    await worker.start()
    return worker
