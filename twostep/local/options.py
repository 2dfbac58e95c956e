"""Options of a local system."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from twostep.local.capacity import num_cores
from twostep.settings.autoscaler import AutoscalerSettings
from twostep.settings.reading import Given, build
from twostep.settings.router import RouterSettings
from twostep.settings.up import FORWARDED, UpSettings
from twostep.settings.worker import WorkerSettings

_LEAST_STORE_BYTES = 512 << 20
_MAX_WORKERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions(UpSettings):
    """Everything `twostep up` was told: its own settings, and those of the processes, who read them again from `variables`, besides their
    environment. `given`: names of those that were told at all. `aggregated`: no prefill workers, and so no hand-overs and no Ray; every
    decode worker computes its prompts itself."""

    worker: WorkerSettings = field(default_factory=WorkerSettings)
    router: RouterSettings = field(default_factory=lambda: RouterSettings(model=Path()))
    autoscaler: AutoscalerSettings = field(default_factory=AutoscalerSettings)
    variables: Mapping[str, str] = field(default_factory=dict)
    given: frozenset[str] = frozenset()

    @classmethod
    def of(cls, texts: Mapping[str, Given]) -> LocalOptions:
        """Returns the options of these texts. Raises SetupError for what makes no sense: here, rather than by a process whose log nobody
        reads."""
        variables = {}
        for each in (each for settings in FORWARDED.values() for each in settings):
            if each.name in texts:
                text = texts[each.name].text
                # The processes have a directory of their own.
                variables[each.variable] = os.path.abspath(text) if each.read is Path else text
        processes = {
            "worker": build(WorkerSettings, texts),
            "router": build(RouterSettings, texts, {"model": Path()}),
            "autoscaler": build(AutoscalerSettings, texts),
        }
        return build(cls, texts, {**processes, "variables": variables, "given": frozenset(texts)})

    def contradiction(self) -> str:
        """Returns what cannot be a system, and what to change; empty: nothing."""
        if wrong := self._aggregated_wrong() if self.aggregated else self._apart_wrong():
            return wrong
        if self.num_workers > _MAX_WORKERS:
            return f"{self.num_prefill} + {self.decode} workers are too many for one machine; give at most {_MAX_WORKERS}"
        if self.api_keys_file is not None and not self.api_keys_file.is_file():
            return f"--api-keys-file {self.api_keys_file} is no file; make the first key with `twostep keys create --api-keys-file FILE`"
        return self._autoscale_wrong() if self.autoscale else ""

    def _apart_wrong(self) -> str:
        if self.num_prefill < 1 or self.decode < 1:
            return "a system needs at least one prefill and one decode worker; give --prefill and --decode of 1 or more, or --aggregated"
        if self.worker.kv_transfer == "none":
            return "--kv-transfer none leaves prefill workers nothing to do; give --aggregated for a system without them"
        return ""

    def _aggregated_wrong(self) -> str:
        if self.num_prefill:
            return f"--aggregated and --prefill {self.num_prefill} contradict each other; leave one of them out"
        if self.decode < 1:
            return "an aggregated system needs at least one worker; give --decode of 1 or more"
        if not self.worker.local_prefill:
            return "--aggregated and --no-local-prefill contradict each other: nobody would compute prompts; leave one of them out"
        if self.worker.kv_transfer not in ("auto", "none") or self.ray_address:
            return "with --aggregated no KV is handed over; leave --kv-transfer and --ray-address out"
        return ""

    def _autoscale_wrong(self) -> str:
        if self.aggregated:
            return "--autoscale holds the ratio of prefill to decode workers; with --aggregated there are none of the first: leave one out"
        for role, first in (("prefill", self.num_prefill), ("decode", self.decode)):
            least, most = self.least(role), self.most(role)
            if not 1 <= least <= first:
                return f"--{role}-min-workers {least} and --{role} {first}: give 1 at least, and start with no fewer than that"
            if most is not None and not first <= most <= _MAX_WORKERS:
                return f"--{role} {first} and --{role}-max-workers {most}: start with no more than that, and give {_MAX_WORKERS} at most"
        return ""

    def least(self, role: str) -> int:
        """Returns how few workers of a role an autoscaler may leave."""
        return (self.autoscaler.prefill if role == "prefill" else self.autoscaler.decode).min_workers

    def most(self, role: str) -> int | None:
        """Returns how many it may have; None: as many as the machine has room for."""
        pool = self.autoscaler.prefill if role == "prefill" else self.autoscaler.decode
        return pool.max_workers if f"{role}-max-workers" in self.given else None

    @property
    def num_prefill(self) -> int:
        """As told; if not, one, and in an aggregated system none."""
        return self.prefill if self.prefill is not None else 0 if self.aggregated else 1

    @property
    def api_keys_file(self) -> Path | None:
        return self.router.api_keys_file

    @property
    def asks_for_keys(self) -> bool:
        return self.api_keys_file is not None or bool(self.router.api_keys)

    @property
    def uses_ray(self) -> bool:
        """Returns whether a Ray is needed, of its own or of --ray-address."""
        return not self.aggregated

    @property
    def store_bytes(self) -> int:
        """Size of the object store that KV caches travel through; it takes memory only as it is used."""
        if self.ray_store_bytes:
            return self.ray_store_bytes
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        wanted = max(_LEAST_STORE_BYTES, memory // 8)
        try:
            shared = os.statvfs("/dev/shm")
        except OSError:
            return wanted
        return max(_LEAST_STORE_BYTES, min(wanted, shared.f_bavail * shared.f_frsize // 2))

    def budget_bytes(self, num_workers: int) -> int:
        """Returns the bytes that each of so many workers may keep published while it has the prefill role, which all but one may come to
        have: their shares leave room for what is being copied."""
        return self.store_bytes * 7 // 10 // max(1, num_workers - 1)

    def threads_of_each(self, num_workers: int) -> int:
        """This machine's cores shared out to so many workers, at least one each."""
        return self.worker.cpu_threads if "cpu-threads" in self.given else max(1, num_cores() // num_workers)

    @property
    def num_workers(self) -> int:
        """At the start."""
        return self.num_prefill + self.decode
