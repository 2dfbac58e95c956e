"""The workers as the policy sees them: made of their records, and of what only somebody who looks again and again can know.

first seen    a life (worker id and epoch) begins with the first look at it; one that was there at the very first look, with its epoch
pods          a Deployment has those that are registered. Those that were asked for and are not there yet count for twice the cold start;
              after that they are not thought to come any more
cannot switch a worker that has refused a change of its role is not asked again in that life
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import cast

from twostep import __version__
from twostep.autoscaler.model import ROLES, Role, WorkerView, longest_start_s
from twostep.cluster.records import NO_OWNER, WorkerRecord
from twostep.keys.secret import in_common
from twostep.version_skew import why_not

log = logging.getLogger(__name__)

Life = tuple[str, int]
_MAX_REMEMBERED = 4096


def life_of(record: WorkerRecord) -> Life:
    return record.worker_id, record.epoch


def owner_of(record: WorkerRecord) -> Role | None:
    """Returns the role of the Deployment that the worker's pod counts for; None: of neither."""
    if record.pod_owner == NO_OWNER:
        return None
    return cast(Role, record.pod_owner if record.pod_owner in ROLES else record.role)


def begun(record: WorkerRecord, now_s: float) -> float:
    """The instant at which this life began, by its own clock: epochs are microseconds since 1970. What makes no sense as such begins
    now."""
    begun = record.epoch / 1e6
    return begun if 0.0 < begun <= now_s else now_s


class Fleet:
    """Records in, views out. `cold_start_s` by role of the Deployment."""

    def __init__(self, secret_check: str, cold_start_s: Mapping[Role, float]) -> None:
        """An empty `secret_check`: workers of any deployment secret belong here."""
        self._secret_check = secret_check
        self._pending_s = {role: longest_start_s(cold_start_s[role]) for role in ROLES}
        self._first_seen: dict[Life, float] = {}
        self._said: dict[str, str] = {}  # what of whom
        self._unwilling: set[Life] = set()
        # Pods that were asked for and are not there: how many are wanted in all, and since when.
        self._asked: dict[Role, tuple[int, float]] = {}

    def refuse(self, name: str, why: str) -> None:
        """Logged once."""
        self._say(name, f"is not counted: {why}")

    def take(self, name: str, record: WorkerRecord) -> WorkerRecord | None:
        """As it counts here: a pod whose version keeps it from serving is there, and not ready. None: it does not count."""
        if record.role not in ROLES:
            self.refuse(name, f"its role is {record.role!r}; upgrade the autoscaler")
        elif record.worker_id != name:
            self.refuse(name, f"its record says it is {record.worker_id!r}; give every worker a name of its own")
        elif self._secret_check and not in_common(record.secret_check, self._secret_check):
            self.refuse(name, "it has another deployment secret; give all processes the same --secret-file")
        elif why := why_not(__version__, record.version, us="the autoscaler", them="it"):
            self._say(name, f"counts as a pod that serves nobody: {why}")
            return replace(record, ready=False, not_ready_reason=why)
        else:
            self._said.pop(name, None)
            return record
        return None

    def _say(self, name: str, what: str) -> None:
        if self._said.get(name) != what:
            log.warning("worker %s %s", name, what)
            if len(self._said) >= _MAX_REMEMBERED:
                self._said.clear()
            self._said[name] = what

    def would_not_switch(self, record: WorkerRecord) -> None:
        self._unwilling.add(life_of(record))

    def views(self, records: Sequence[WorkerRecord], now_s: float) -> tuple[WorkerView, ...]:
        """By name."""
        lives, first = {life_of(record) for record in records}, not self._first_seen
        for record in records:
            self._first_seen.setdefault(life_of(record), begun(record, now_s) if first else now_s)
        if len(self._first_seen) > _MAX_REMEMBERED:
            self._first_seen = {life: at_s for life, at_s in self._first_seen.items() if life in lives}
        self._unwilling &= lives
        return tuple(self._view(record) for record in sorted(records, key=lambda record: record.worker_id))

    def pods(
        self, records: Sequence[WorkerRecord], asked: Mapping[str, int] | None, now_s: float, *, switching: Collection[str] = ()
    ) -> dict[Role, int]:
        """Counts the pods of each Deployment. `asked`: the numbers that were asked for last; None: none yet. A pod whose worker drains is
        on its way out and is not counted, unless it is one of `switching`, which only change their role."""
        found: dict[Role, int] = {}
        owners = [owner_of(record) for record in records if not record.draining or record.worker_id in switching]
        for role in ROLES:
            here = owners.count(role)
            wanted = here if asked is None else asked.get(role, here)
            if wanted <= here:
                self._asked.pop(role, None)
            elif role not in self._asked or self._asked[role][0] < wanted:
                self._asked[role] = wanted, now_s
            pending = self._asked.get(role)
            found[role] = wanted if pending is not None and now_s - pending[1] <= self._pending_s[role] else here
        return found

    def _view(self, record: WorkerRecord) -> WorkerView:
        load, life = record.load, life_of(record)
        return WorkerView(
            worker_id=record.worker_id,
            role=cast(Role, record.role),
            owner=owner_of(record),
            pod_name=record.pod_name,
            # One that is ready itself and that no KV reaches serves nobody.
            ready=record.ready and not record.not_ready_reason,
            draining=record.draining,
            # Who hands nothing over stays a decode worker.
            can_switch=bool(record.transports) and life not in self._unwilling,
            both_roles=record.both_roles,
            curve=record.curve,
            step_tokens=record.step_tokens,
            max_num_seqs=max(0, record.max_num_seqs),
            # Those of one group of layers: a prompt takes as many of each.
            num_blocks=max(0, record.num_blocks // record.layout.num_groups),
            block_size=record.layout.block_size,
            # Of both roles, those that decode: prompts wait and are computed on every worker.
            num_running=max(0, load.num_running + (-load.num_handing_over if record.both_roles else load.num_reserved)),
            num_waiting=max(0, load.num_waiting),
            queued_tokens=max(0, load.num_queued_tokens),
            context_tokens=max(0, load.num_context_tokens),
            tokens_per_s=max(0.0, load.tokens_per_s),
            started_s=self._first_seen[life],
        )
