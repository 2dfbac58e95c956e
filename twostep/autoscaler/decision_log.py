"""A file of decisions, one JSON object a line, from which each can be made again (twostep/autoscaler/replay.py, the simulation).

    {"form": 1, "config": {...}}                                          the policy's configuration, first, and again in a new file
    {"memory": "..."}                                                     of the policy, where it does not follow from the line before:
                                                                          at the beginning of a file, and when another replica has led
    {"observation": {...}, "decision": {...}}                             what was seen, what was decided; in order

Fields are those of twostep/autoscaler/model.py by name; floats are as Python writes them, so that what is read is what was written.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import Decision, Observation, PolicyConfig
from twostep.autoscaler.policy import Step
from twostep.errors import InvalidRequest, SetupError

log = logging.getLogger(__name__)

FORM = 1
MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A decision as it was made, and under which configuration. `memory`: that it was made with; None: the one that the decision before
    left, or an empty one."""

    line: int
    config: PolicyConfig
    memory: Memory | None
    observation: Observation
    decision: Decision


class DecisionLog:
    """A full file becomes FILE.1, so that there are two of `max_bytes` at most. One decision is a few kilobytes every some seconds: written
    where it is made. Disks that fail cost the log, not the decisions."""

    def __init__(self, path: Path, config: PolicyConfig, *, max_bytes: int = MAX_BYTES) -> None:
        """Raises SetupError if the file cannot be written."""
        self._path, self._config, self._max_bytes = path, config, max_bytes
        try:
            self._file = path.open("a", encoding="utf-8")
            self._begin()
        except OSError as error:
            raise SetupError(f"--decision-log {path} cannot be written ({error}); give another file") from error
        self._broken = False
        # What follows from the lines so far; None: nothing does.
        self._memory: Memory | None = None

    def write(self, memory: Memory, observation: Observation, step: Step) -> None:
        """A decision, and the memory that it was made with."""
        if self._broken:
            return
        try:
            if self._file.tell() >= self._max_bytes:
                self._file.close()
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file = self._path.open("w", encoding="utf-8")
                self._begin()
                self._memory = None
            if memory != self._memory:
                self._file.write(_line({"memory": memory.to_json()}))
            self._file.write(line_of(observation, step.decision))
            self._file.flush()
            self._memory = step.memory
        except OSError as error:
            self._broken = True
            log.error("%s cannot be written any more (%s); decisions go on without it", self._path, error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            log.warning("the end of the decision log is lost: %s", error)

    def _begin(self) -> None:
        self._file.write(head_of(self._config))
        self._file.flush()


def head_of(config: PolicyConfig) -> str:
    """The line that stands before decisions of this configuration."""
    return _line({"form": FORM, "config": dataclasses.asdict(config)})


def line_of(observation: Observation, decision: Decision) -> str:
    """The line of a decision."""
    return _line({"observation": dataclasses.asdict(observation), "decision": dataclasses.asdict(decision)})


def read_decisions(lines: Iterable[str]) -> Iterator[Logged]:
    """Raises InvalidRequest with the line that is none of a decision log; a last one that was cut short is left out, and so are fields of
    newer versions."""
    configs, observations, decisions = TypeAdapter(PolicyConfig), TypeAdapter(Observation), TypeAdapter(Decision)
    config: PolicyConfig | None = None
    memory: Memory | None = None
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            return
        try:
            value = json.loads(line)
            if "config" in value:
                if value["form"] != FORM:
                    raise ValueError(f"form {value['form']} is not known here")
                config = configs.validate_python(value["config"])
                continue
            if "memory" in value:
                memory = Memory.from_json(value["memory"])
                continue
            if config is None:
                raise ValueError("no configuration stands before it")
            observation, decision = observations.validate_python(value["observation"]), decisions.validate_python(value["decision"])
            if not math.isfinite(observation.now_s):
                raise ValueError(f"now_s is {observation.now_s}")
            yield Logged(line=number, config=config, memory=memory, observation=observation, decision=decision)
            memory = None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidRequest) as error:
            raise InvalidRequest(f"line {number} is none of a decision log: {error!r:.200}") from error


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"
