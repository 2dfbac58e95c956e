"""A worker as a process: flags, the engine's process, and then all the rest (serving.py).

What takes a second to import is imported once the engine's process has begun: that one takes longer still."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from twostep.errors import SetupError
from twostep.keys.secret import load_secret
from twostep.process.files import check_files
from twostep.process.log import setup_logging
from twostep.process.ports import check_ports
from twostep.process.startup import process_start, start_up
from twostep.worker.config import WorkerConfig, parse_config
from twostep.worker.cuda_driver import has_driver
from twostep.worker.engine_child import EngineChild

if TYPE_CHECKING:
    from twostep.worker.edge import Edge, EdgeParts

log = logging.getLogger(__name__)

EXIT_CANNOT_START = 2


def run_worker(role: str, argv: Sequence[str] | None, load_edge: Callable[[], Callable[[EdgeParts], Edge]], engine_module: str) -> int:
    """Returns the exit code: 0 after a drain, 1 if the engine failed, 2 if the worker cannot start (the log says what to change).
    `load_edge` imports what makes its edge; `engine_module` is the inside of an engine's process."""
    begun = process_start() if argv is None else time.monotonic()
    config = parse_config(role, argv)
    setup_logging(level=config.log_level, json_lines=config.log_json, process=f"{role}-{config.grpc_port}")
    # As in kv_transfer/engine_process.py.
    gc.disable()
    try:
        secret = load_secret(config.secret_file, former=config.former_secret_file)
        check_files(config)
        check_ports(config)
        starting = start_up(since=begun, json_lines=config.log_json)
        child = EngineChild.start(engine_module) if _apart(config) else None
        from twostep.worker.serving import serve  # noqa: PLC0415

        return serve(config, child, secret, load_edge(), starting)
    except SetupError as error:
        log.error("cannot start: %s", error.message)
        return EXIT_CANNOT_START
    except KeyboardInterrupt:
        # While loading, before there was anything to drain.
        return 130
    finally:
        gc.enable()


def _apart(config: WorkerConfig) -> bool:
    """Returns whether the engine gets a process of its own. Without torch, which takes seconds to find out whether a GPU can be used."""
    if config.engine_process != "auto":
        return config.engine_process == "on"
    return config.runner == "model" and config.device != "cpu" and has_driver()
