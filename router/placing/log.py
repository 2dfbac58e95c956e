"""A file of decisions, one JSON object a line, from which each can be made again (router/placing/replay.py).

    {"worker": 3, "record": {...}}                                     a worker's record, before the first decision that looks at it
    {"at": 1763740000.1, "demand": {...}, "prefill": [[3, 512, ...], ...], "decode": [...], "choice": {...},
     "ground": "near", "why": "...", "compared": [{...}, ...]}

Of a snapshot only what is not in the records stands in the decision's own line. Prompts do not: requests are known by name and length.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import queue
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from router.placing.placement import NoPlacement, Placement, place
from twostep.cluster.prediction import Candidate, PlacementRequest, Snapshot
from twostep.errors import SetupError

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
# Decisions that the disk has not taken yet; more are left out and counted.
_MAX_QUEUED = 1024
# What a line has of a candidate, in order, behind its record's number.
CANDIDATE_FIELDS = (
    "cached_tokens",
    "host_cached_tokens",
    "queued_tokens",
    "batch_tokens",
    "recent_tokens",
    "num_attempts",
    "excluded",
    "no_prompts",
)


@dataclasses.dataclass(frozen=True, slots=True)
class LoggedPlacement:
    at: float  # Unix time
    snapshot: Snapshot
    demand: PlacementRequest
    result: Placement | NoPlacement


class PlacementLog:
    """`place` decides and remembers; a thread writes. A full file becomes FILE.1, so that there are two of `max_bytes` at most."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Raises SetupError if the file cannot be written."""
        self._path, self._max_bytes = path, max_bytes
        self._queue: queue.Queue[LoggedPlacement | None] = queue.Queue(_MAX_QUEUED)
        self.num_left_out = 0  # decisions that came faster than the disk took them
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise SetupError(f"--placement-log {path} cannot be written ({error}); give another file") from error
        self._encoder = PlacementEncoder()
        self._thread = threading.Thread(target=self._write_all, name="placement-log", daemon=True)
        self._thread.start()

    def place(self, snapshot: Snapshot, demand: PlacementRequest) -> Placement | NoPlacement:
        result = place(snapshot, demand)
        try:
            self._queue.put_nowait(LoggedPlacement(time.time(), snapshot, demand, result))
        except queue.Full:
            self.num_left_out += 1
        return result

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what is there. Blocks up to `timeout_s`."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            log.warning("the disk does not take the placement log; its end is lost")
            return
        self._thread.join(timeout_s)
        if self.num_left_out:
            log.warning("%d decisions are missing from %s: the disk was slower than they came", self.num_left_out, self._path)

    def _write_all(self) -> None:
        try:
            while (decision := self._queue.get()) is not None:
                self._write(decision)
        except OSError as error:
            log.error("%s cannot be written any more (%s); placement goes on without it", self._path, error)
        finally:
            _close(self._file)

    def _write(self, decision: LoggedPlacement) -> None:
        if self._file.tell() >= self._max_bytes:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("w", encoding="utf-8")
            # The new file must be readable without the old one.
            self._encoder = PlacementEncoder()
        self._file.writelines(self._encoder.lines(decision))
        if self._queue.empty():
            self._file.flush()


class PlacementEncoder:
    """Decisions as lines. Keeps which records stand in the file already."""

    def __init__(self) -> None:
        self._numbers: dict[str, tuple[int, Any]] = {}
        self._next = 0

    def lines(self, decision: LoggedPlacement) -> list[str]:
        """Returns lines with their ends; records first."""
        lines: list[str] = []
        sides = {side: [self._candidate(c, lines) for c in getattr(decision.snapshot, side)] for side in ("prefill", "decode")}
        demand = dataclasses.asdict(decision.demand)
        line = {"at": decision.at, "demand": demand, **sides, "choice": choice_of(decision.result)}
        if isinstance(decision.result, Placement):
            result = decision.result
            line |= {"ground": result.ground.value, "why": result.why, "compared": [dataclasses.asdict(way) for way in result.compared]}
        lines.append(_line(line))
        return lines

    def _candidate(self, candidate: Candidate, lines: list[str]) -> list[Any]:
        record = candidate.record
        number, known = self._numbers.get(record.worker_id, (-1, None))
        # Records are replaced, never changed.
        if known is not record:
            number, self._next = self._next, self._next + 1
            self._numbers[record.worker_id] = number, record
            lines.append(_line({"worker": number, "record": dataclasses.asdict(record)}))
        mean = None if candidate.mean is None else list(dataclasses.astuple(candidate.mean))
        return [number, *(getattr(candidate, name) for name in CANDIDATE_FIELDS), mean]


def choice_of(result: Placement | NoPlacement) -> dict[str, Any]:
    """Returns what is compared when a decision is made again."""
    if isinstance(result, NoPlacement):
        return {"shortage": result.shortage.value, "reason": result.reason}
    return {
        "prefill": None if result.prefill is None else result.prefill.worker_id,
        "decode": result.decode.worker_id,
        "cost": result.cost,
        "ttft_s": result.predicted_ttft_s,
        "tpot_s": result.predicted_tpot_s,
        "gap_s": result.predicted_gap_s,
        "meets_targets": result.meets_targets,
    }


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _close(file: TextIO) -> None:
    try:
        file.close()
    except OSError as error:
        log.warning("the end of the placement log is lost: %s", error)
