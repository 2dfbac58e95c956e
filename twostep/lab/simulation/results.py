"""Outcomes kept in a file, so that a long comparison can be taken up again: one JSON object a line, under what it was made from.

The joint policy's own are not kept: they change with its code, which no setting tells. Nor does any tell of the simulation's own:
delete the file after a change to it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostep.lab.simulation.outcome import Moment, Outcome
from twostep.lab.simulation.run import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One simulation. All of it is text and numbers, for another process."""

    trace: str
    peak: float
    shorten: float
    seed: int
    who: str

    @property
    def kept(self) -> bool:
        return not self.who.startswith("joint")


def read_results(path: Path, setting: Setting) -> dict[Job, Outcome]:
    """Those of this setting. Nothing where there is no file."""
    if not path.exists():
        return {}
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        raw = json.loads(line)
        if raw["setting"] == _fingerprint(setting):
            found[Job(**raw["job"])] = _outcome(raw["outcome"])
    return found


def write_result(path: Path, setting: Setting, job: Job, outcome: Outcome) -> None:
    if not job.kept:
        return
    line = json.dumps({"setting": _fingerprint(setting), "job": dataclasses.asdict(job), "outcome": dataclasses.asdict(outcome)})
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _fingerprint(setting: Setting) -> str:
    """Of what the others depend on: the cluster, the targets and the pools."""
    policy = setting.policy
    parts = (setting.cluster, policy.prefill, policy.decode, policy.ttft_ms, policy.tpot_ms, policy.interval_s, policy.cool_down_s)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _outcome(raw: dict[str, Any]) -> Outcome:
    moments = [Moment(**moment) for moment in raw["moments"]]
    losses = tuple((at, role) for at, role in raw["losses"])
    return Outcome(**{**raw, "moments": moments, "losses": losses, "recoveries": tuple(raw["recoveries"])})
