"""Holds what one decision leaves for the next: a frozen value that goes to Redis as JSON, so that a new leader goes on where the old one
was."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from twostep.autoscaler.forecast import Forecast
from twostep.autoscaler.model import Role
from twostep.autoscaler.sizing import WorkerSpec
from twostep.cluster.stored import read_stored
from twostep.errors import InvalidRequest

# A memory of another form is forgotten, not guessed at.
FORM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Workers that were to be kept at an instant: of each role, and of both together."""

    at_s: float
    prefill: int
    decode: int
    total: int

    def of(self, role: Role) -> int:
        return self.prefill if role == "prefill" else self.decode

    def outdoes(self, other: Need) -> bool:
        return self.prefill >= other.prefill and self.decode >= other.decode and self.total >= other.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How a number has been going: the way it moved last (+1 up, -1 down, 0 never), and when it last turned round."""

    way: int = 0
    turned_s: float | None = None

    def may_move(self, before: int, after: int, now_s: float, cool_down_s: float) -> bool:
        """Returns whether the number may go from `before` to `after` now: not if it turned round within the cool-down, and would again."""
        way = (after > before) - (after < before)
        return not way or self.way in (0, way) or self.turned_s is None or now_s - self.turned_s >= cool_down_s

    def moved(self, before: int, after: int, now_s: float) -> Course:
        """Returns how it has been going after that move."""
        way = (after > before) - (after < before)
        if not way or way == self.way:
            return self
        return Course(way=way, turned_s=now_s if self.way else self.turned_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Workers are slower than their curves by so much; 1: they are not. `raised_s`: when it was raised last; `enough_s`: since when there
    have been as many as sizing asks for."""

    factor: float = 1.0
    raised_s: float | None = None
    enough_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The numbers that were decided on last: workers of each role, pods of each Deployment."""

    prefill: int
    decode: int
    prefill_pods: int
    decode_pods: int

    @property
    def pods(self) -> int:
        return self.prefill_pods + self.decode_pods

    def workers(self, role: Role) -> int:
        return self.prefill if role == "prefill" else self.decode

    def pods_of(self, owner: Role) -> int:
        return self.prefill_pods if owner == "prefill" else self.decode_pods


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The first decision has an empty one: `Memory()`."""

    began_s: float | None = None  # instant of the first decision, and of the last
    at_s: float | None = None
    forecast: Forecast | None = None
    needs: tuple[Need, ...] = ()  # of the last cool-down, oldest first
    wanted: Wanted | None = None
    courses: Mapping[str, Course] = field(default_factory=dict)  # of the pods of each Deployment, and of role switches
    corrections: Mapping[Role, Correction] = field(default_factory=dict)
    specs: Mapping[Role, WorkerSpec] = field(default_factory=dict)  # of workers seen last, for when there are none
    busy_s: float | None = None  # instant at which there was a request last
    switching: Mapping[str, tuple[Role, float]] = field(default_factory=dict)  # by worker id: the role it was told to take, and when
    victims: tuple[str, ...] = ()
    missed: float | None = None  # share of answers of the last hour or so that missed a target; None: nothing is known
    unheard_s: float | None = None  # instant at which the load was known last to be more than routers told

    def to_json(self) -> str:
        return json.dumps({"form": FORM, **dataclasses.asdict(self)}, separators=(",", ":"), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Memory:
        """Raises InvalidRequest for anything that is not a memory of this form; whoever has none begins with `Memory()`. Fields of newer
        versions are left out."""
        try:
            if json.loads(text)["form"] != FORM:
                raise ValueError("another form")
            memory = read_stored(cls, text)
            memory.to_json()  # raises for what is not finite
            return memory
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"not a memory of this autoscaler: {error!r:.80}; begin without one") from error
