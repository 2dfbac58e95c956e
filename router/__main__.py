"""`python -P -m router`: the router process."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from dataclasses import replace

from router.config import RouterConfig, parse_config
from router.server import Router
from twostep.checkpoint.model_name import directory_of
from twostep.errors import SetupError
from twostep.process.files import check_files
from twostep.process.log import setup_logging
from twostep.process.ports import check_ports
from twostep.process.startup import process_start, start_up
from twostep.rpc import event_loop
from twostep.rpc.lifecycle import stop_event, watch_loop

log = logging.getLogger("router")


async def _serve(config: RouterConfig) -> None:
    stop = stop_event(config.drain_timeout)
    router = Router(config)
    await router.start()
    watching = asyncio.create_task(watch_loop(stop, config.hung_after, router.alive))
    await router.warm()
    asked = [asyncio.create_task(event.wait()) for event in (stop, router.drain_asked)]
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    if not stop.is_set():
        # As a supervisor asks for it, so that there is one way out.
        signal.raise_signal(signal.SIGTERM)
        await stop.wait()
    watching.cancel()
    await router.drain(config.drain_timeout)
    log.info("drained")


def main() -> int:
    """Exit status: 0 after a drain, 2 for a setup that cannot work, 130 if it was interrupted before it served."""
    config = parse_config()
    setup_logging(level=config.log_level, json_lines=config.log_json, process="router")
    try:
        check_files(config)
        check_ports(config)
        starting = start_up(since=process_start(), json_lines=config.log_json)
        model = directory_of(config.model, config.model_revision, weights=config.load_format != "dummy", progress=starting)
        starting.finish()
        event_loop.run(_serve(replace(config, model=model)))
    except SetupError as error:
        log.error("%s", error.message)
        return 2
    except KeyboardInterrupt:
        # While downloading, before there was anything to drain.
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
