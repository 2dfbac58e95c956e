"""`python -P -m twostep.autoscaler`: the autoscaler process."""

from __future__ import annotations

import asyncio
import logging
import sys

from twostep.autoscaler.config import AutoscalerConfig, parse_config
from twostep.autoscaler.server import Autoscaler
from twostep.errors import SetupError
from twostep.process.files import check_files
from twostep.process.log import setup_logging
from twostep.process.ports import check_ports
from twostep.rpc import event_loop
from twostep.rpc.lifecycle import stop_event, watch_loop

log = logging.getLogger("autoscaler")

# Calls are answered from memory: whoever is being answered is done by then.
_GRACE_S = 2.0


async def _serve(config: AutoscalerConfig) -> None:
    stop = stop_event(_GRACE_S)
    autoscaler = Autoscaler(config)
    await autoscaler.start()
    watching = asyncio.create_task(watch_loop(stop, config.hung_after))
    await stop.wait()
    watching.cancel()
    await autoscaler.drain(_GRACE_S)
    log.info("drained")


def main() -> int:
    """Exit status: 0 after a drain, 2 for a setup that cannot work."""
    config = parse_config()
    setup_logging(level=config.log_level, json_lines=config.log_json, process="autoscaler")
    try:
        check_files(config)
        check_ports(config)
        event_loop.run(_serve(config))
    except SetupError as error:
        log.error("%s", error.message)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
