"""Holds what one decision leaves for the next: a frozen value that goes to Redis as JSON, so that a new leader goes on where the old one
was."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twostep.autoscaler.forecast import Forecast, Holt
from twostep.autoscaler.model import Role
from twostep.autoscaler.sizing import WorkerSpec
from twostep.errors import InvalidRequest
from twostep.step_curve import StepCurve

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How a number has been going: the way it moved last (+1 up, -1 down, 0 never), and when it last turned round."""

    way: int = 0
    turned_s: float | None = None


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
    unheard_s: float | None = None  # instant at which the load was known last to be more than routers told

    def to_json(self) -> str:
        return json.dumps({"form": FORM, **dataclasses.asdict(self)}, separators=(",", ":"), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Memory:
        """Raises InvalidRequest for anything that is not a memory of this form; whoever has none begins with `Memory()`."""
        try:
            raw: dict[str, Any] = json.loads(text, parse_constant=_refuse)
            if raw.pop("form") != FORM:
                raise ValueError("another form")
            return cls(
                began_s=_instant(raw["began_s"]),
                at_s=_instant(raw["at_s"]),
                forecast=_forecast(raw["forecast"]),
                needs=tuple(Need(**need) for need in raw["needs"]),
                wanted=Wanted(**raw["wanted"]) if raw["wanted"] else None,
                courses={name: Course(**course) for name, course in raw["courses"].items()},
                corrections={_role(role): Correction(**correction) for role, correction in raw["corrections"].items()},
                specs={_role(role): _spec(spec) for role, spec in raw["specs"].items()},
                busy_s=_instant(raw["busy_s"]),
                switching={worker: (_role(role), float(at)) for worker, (role, at) in raw["switching"].items()},
                victims=tuple(str(worker) for worker in raw["victims"]),
                # Of a leader of an older version: it did not look.
                unheard_s=_instant(raw.get("unheard_s")),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"not a memory of this autoscaler: {error!r:.80}; begin without one") from error


def _instant(value: float | None) -> float | None:
    return None if value is None else float(value)


def _role(name: str) -> Role:
    if name == "prefill":
        return "prefill"
    if name == "decode":
        return "decode"
    raise ValueError(f"{name!r:.20} is no role")


def _forecast(raw: dict[str, Any] | None) -> Forecast | None:
    if raw is None:
        return None
    holts = {name: Holt(**raw[name]) for name in ("requests", "prompt", "uncached", "output", "decoded")}
    if not all(math.isfinite(holt.level) and math.isfinite(holt.trend) and math.isfinite(holt.least) for holt in holts.values()):
        raise ValueError("a forecast that is not finite")
    return Forecast(**holts, prompt_scv=float(raw["prompt_scv"]))


def _spec(raw: dict[str, Any]) -> WorkerSpec:
    return WorkerSpec(**{**raw, "curve": StepCurve(**raw["curve"]) if raw["curve"] else None})


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number")
