"""Asks workers to take the other role: one at a time, with the deployment's secret, never the last worker of a role.

The call is the worker's own `SwitchRole` (docs/roles.md), signed for one life: a second leader that asks the same life comes too late, and
a call that is given up goes on at the worker's end. So a change of leaders in between does no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal

from router.autoscaler.model import Role, Switch
from twostep.cluster.records import WorkerRecord
from twostep.errors import Incompatible, TwostepError, Unavailable
from twostep.rpc.channel import PLAINTEXT, TlsFiles, open_channel
from twostep.rpc.worker_role import switch_role, who_is

log = logging.getLogger(__name__)

# ok: it serves the other role. refused: it cannot, and is not asked again. failed: it did not, this time. left_out: it would have been
# the last of its role, or is not there any more.
Outcome = Literal["ok", "refused", "failed", "left_out"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "refused", "failed", "left_out")


def last_of_role(record: WorkerRecord, records: Sequence[WorkerRecord]) -> bool:
    """Whether no other worker serves its role now."""
    return not any(
        other.role == record.role and other.ready and not other.draining for other in records if other.worker_id != record.worker_id
    )


class Switcher:
    """`on_result` gets the record as it was when it was asked, and what became of it."""

    def __init__(
        self, secret: bytes, *, drain_s: float, tls: TlsFiles = PLAINTEXT, on_result: Callable[[WorkerRecord, Role, Outcome], None]
    ) -> None:
        self._secret = secret
        self._drain_s = drain_s
        self._tls = tls
        self._on_result = on_result
        self._task: asyncio.Task[None] | None = None
        self._busy_with = ""

    @property
    def busy_with(self) -> str:
        """Worker id; "": none."""
        return self._busy_with if self._task is not None and not self._task.done() else ""

    def start(self, switches: Sequence[Switch], records: Sequence[WorkerRecord]) -> None:
        """The first of them that may be asked, if none is being asked: the others are for the next decision. Returns at once."""
        if self.busy_with:
            return
        by_name = {record.worker_id: record for record in records}
        for switch in switches:
            record = by_name.get(switch.worker_id)
            if record is None or record.role == switch.to:
                continue
            if record.draining or not record.ready:
                continue
            if last_of_role(record, records):
                log.warning("%s is not asked to take the %s role: it is the last %s worker", record.worker_id, switch.to, record.role)
                self._on_result(record, switch.to, "left_out")
                continue
            self._busy_with = record.worker_id
            self._task = asyncio.create_task(self._ask(record, switch.to), name=f"switch {record.worker_id}")
            return

    async def close(self) -> None:
        """Gives up the call; the worker goes on with it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _ask(self, record: WorkerRecord, to: Role) -> None:
        outcome: Outcome = "failed"
        try:
            async with open_channel(record.address, tls=self._tls) as channel:
                worker = await who_is(channel)
                if worker.worker_id != record.worker_id:
                    raise Unavailable(f"{worker.worker_id} answers at {record.address}, which was its address")
                change = await switch_role(channel, self._secret, role=to, drain_timeout_s=self._drain_s, worker=worker)
            outcome = "ok"
            log.info("%s is a %s worker now: drained in %.2f s, switched in %.2f s", record.worker_id, to, change.drain_s, change.switch_s)
        except Incompatible as error:
            outcome = "refused"
            log.warning("%s cannot take the %s role and is not asked again: %s", record.worker_id, to, error.message)
        except TwostepError as error:
            log.warning("%s has not taken the %s role: %s", record.worker_id, to, error.message)
        finally:
            self._on_result(record, to, outcome)
