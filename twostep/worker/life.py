"""A worker in one role, from the start of its edge to its end. A change of roles is the end of one life and the beginning of the next."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from twostep.errors import SetupError, TwostepError
from twostep.worker.config import WorkerConfig
from twostep.worker.edge import Edge

log = logging.getLogger(__name__)

_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """`config` is that of its role."""

    config: WorkerConfig
    epoch: int
    edge: Edge

    @property
    def role(self) -> str:
        return self.config.role

    async def wait_for_transport(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Raises SetupError with what to look at."""
        if self.config.kv_transfer == "none":
            return
        if not await until(lambda: bool(self.edge.ready_transports) or interrupted(), self.config.transport_timeout):
            raise SetupError(
                f"no KV transport works after {self.config.transport_timeout:g} s (--kv-transfer {self.config.kv_transfer}); "
                f"is Ray running at --ray-address {self.config.ray_address}?"
            )

    @property
    def why_of_no_use(self) -> str:
        """Why nobody could be served here just now: KV has no way, and it computes no prompts of its own. Empty: it is of use."""
        config = self.config
        alone = config.role == "decode" and config.local_prefill
        if config.kv_transfer == "none" or alone or self.edge.ready_transports:
            return ""
        return f"no KV transport works (--kv-transfer {config.kv_transfer}): {self.edge.why_no_transport}"

    async def drain(self, timeout_s: float, interrupted: Callable[[], bool]) -> None:
        """Waits until nothing runs any more, for `timeout_s` at most, or until it is interrupted."""
        await until(lambda: self.edge.idle or interrupted(), timeout_s)

    def fail_rest(self, error: TwostepError) -> None:
        """Ends what still runs."""
        if not self.edge.idle:
            log.warning("ending what still runs")
            self.edge.fail_all(error)


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """False: `timeout_s` passed first."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= give_up:
            return False
        await asyncio.sleep(_POLL_S)
    return True
