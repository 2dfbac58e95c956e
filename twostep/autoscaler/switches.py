"""Asks workers to take the other role: one at a time, with the deployment's secret, never the last worker of a role.

The call is the worker's own `SwitchRole` (docs/roles.md), signed for one life: a second leader that asks the same life comes too late, and
a call that is given up goes on at the worker's end. So a change of leaders in between does no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from twostep.autoscaler.model import Role, Switch
from twostep.cluster.records import WorkerRecord
from twostep.errors import Incompatible, TwostepError, Unavailable
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.call_signing import channel_to_worker
from twostep.rpc.worker_role import switch_role, who_is
from twostep.settings.tls import PLAINTEXT, TlsFiles

log = logging.getLogger(__name__)

# ok: it serves the other role. refused: it cannot, and is not asked again. failed: it did not, this time. left_out: it is the last of
# its role.
Outcome = Literal["ok", "refused", "failed", "left_out"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "refused", "failed", "left_out")


def last_of_role(record: WorkerRecord, records: Sequence[WorkerRecord]) -> bool:
    """Returns whether no other worker serves its role now."""
    return not any(other.serves and other.role == record.role and other.worker_id != record.worker_id for other in records)


class Switcher:
    """Asks workers to change their roles. Switches wait their turn, since drains take their time. `may` says whether this replica still
    leads; once it does not, the switches that wait are dropped. `on_result` gets the record as it was when the switch was asked for, and
    the outcome."""

    def __init__(
        self,
        secret: DeploymentSecret,
        *,
        drain_s: float,
        tls: TlsFiles = PLAINTEXT,
        on_result: Callable[[WorkerRecord, Role, Outcome], None],
        may: Callable[[], bool] = lambda: True,
    ) -> None:
        self._secret = secret
        self._drain_s = drain_s
        self._tls = tls
        self._on_result = on_result
        self._may = may
        self._task: asyncio.Task[None] | None = None
        self._waiting: dict[str, Switch] = {}
        # As last seen, and as switches since then have made them.
        self._records: dict[str, WorkerRecord] = {}

    @property
    def busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, switches: Sequence[Switch], records: Sequence[WorkerRecord], standing: Mapping[str, Role] | None = None) -> None:
        """Asks for these, after those that wait. Returns at once. `standing`: by worker id, switches that are still wanted; those that wait
        and are none of them are dropped. None: all are."""
        self._records = {record.worker_id: record for record in records}
        if standing is not None:
            self._waiting = {name: switch for name, switch in self._waiting.items() if standing.get(name) == switch.to}
        for switch in switches:
            self._waiting[switch.worker_id] = switch
        if self._waiting and not self.busy:
            self._task = asyncio.create_task(self._ask_all(), name="role switches")

    async def close(self) -> None:
        """Gives up the call; the worker goes on with it."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _ask_all(self) -> None:
        while self._waiting:
            switch = self._waiting.pop(next(iter(self._waiting)))
            if not self._may():
                self._waiting.clear()
                return
            record = self._records.get(switch.worker_id)
            if record is None or record.role == switch.to or record.draining or not record.ready:
                continue
            if last_of_role(record, list(self._records.values())):
                log.warning("%s is not asked to take the %s role: it is the last %s worker", record.worker_id, switch.to, record.role)
                self._on_result(record, switch.to, "left_out")
                continue
            await self._ask(record, switch.to)

    async def _ask(self, record: WorkerRecord, to: Role) -> None:
        outcome: Outcome = "failed"
        try:
            async with channel_to_worker(record.address, self._secret, caller="autoscaler", tls=self._tls) as channel:
                worker = await who_is(channel)
                if worker.worker_id != record.worker_id:
                    raise Unavailable(f"{worker.worker_id} answers at {record.address}, which was its address")
                change = await switch_role(channel, self._secret, role=to, drain_timeout_s=self._drain_s, worker=worker)
            outcome = "ok"
            # Until the next look: its new life is not known yet, and does not count as one that serves.
            self._records[record.worker_id] = replace(record, role=to, ready=False)
            log.info("%s is a %s worker now: drained in %.2f s, switched in %.2f s", record.worker_id, to, change.drain_s, change.switch_s)
        except Incompatible as error:
            outcome = "refused"
            log.warning("%s cannot take the %s role and is not asked again: %s", record.worker_id, to, error.message)
        except TwostepError as error:
            log.warning("%s has not taken the %s role: %s", record.worker_id, to, error.message)
        finally:
            self._on_result(record, to, outcome)
