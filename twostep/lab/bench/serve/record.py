"""One request as it went: the only thing that all figures are made from."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

REFUSED = "refused"  # kind of a refusal for lack of room (RESOURCE_EXHAUSTED); every other kind is an error


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Times are seconds since the run's start, NaN where it never came to that."""

    index: int
    session: int = 0
    turn: int = 0
    scheduled_s: float  # when it was to be sent: the arrival process's time, or, after an answer, that of its end plus the time to think
    measured: bool = True  # False: it came during warm-up or cool-down, and counts for nothing but what the machine had to do
    prompt_tokens: int
    max_tokens: int
    sent_s: float = math.nan
    ended_s: float = math.nan
    times_s: array[float] = field(default_factory=lambda: array("d"))  # when each message that carried tokens arrived
    num_tokens: array[int] = field(default_factory=lambda: array("I"))  # how many tokens each of them carried
    cached_tokens: int = 0
    finish_reason: str = ""
    phases: Mapping[str, float] | None = None  # the router's own account of where the time went, seconds by name
    gaps: Sequence[Mapping[str, float]] = ()  # likewise, of its longest gaps: the fields of protos' Gap
    error: str = ""  # empty: answered. Else its kind, of which there are few; `message` says the rest.
    message: str = ""
    retry_after_s: float | None = None

    @property
    def completed(self) -> bool:
        return not self.error

    @property
    def output_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def slip_s(self) -> float:
        """How much later than planned it was sent: the generator's own fault."""
        return self.sent_s - self.scheduled_s

    def as_json(self) -> dict[str, Any]:
        """A JSON object: times in seconds, rounded to microseconds; tokens' times count from `sent_s`."""
        out: dict[str, Any] = {
            "index": self.index,
            "session": self.session,
            "turn": self.turn,
            "measured": self.measured,
            "scheduled_s": _rounded(self.scheduled_s),
            "sent_s": _rounded(self.sent_s),
            "ended_s": _rounded(self.ended_s),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "max_tokens": self.max_tokens,
            "output_tokens": self.output_tokens,
            "token_times_s": [_rounded(t - self.sent_s) for t in self.times_s],
            "finish_reason": self.finish_reason,
        }
        if any(n != 1 for n in self.num_tokens):
            out["tokens_per_message"] = list(self.num_tokens)
        if self.phases is not None:
            out["phases"] = {name: _rounded(seconds) for name, seconds in self.phases.items()}
        if self.gaps:
            out["gaps"] = [{name: round(value, 6) for name, value in gap.items() if value} for gap in self.gaps]
        if self.error:
            out |= {"error": self.error, "message": self.message}
        if self.retry_after_s is not None:
            out["retry_after_s"] = self.retry_after_s
        return out

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> RequestRecord:
        """The inverse of as_json, to its rounding: what was saved can be judged by other targets later."""
        sent = _number(saved["sent_s"])
        times = array("d", [sent + t for t in saved["token_times_s"]])
        return cls(
            index=saved["index"],
            session=saved["session"],
            turn=saved["turn"],
            measured=saved["measured"],
            scheduled_s=_number(saved["scheduled_s"]),
            sent_s=sent,
            ended_s=_number(saved["ended_s"]),
            prompt_tokens=saved["prompt_tokens"],
            cached_tokens=saved["cached_tokens"],
            max_tokens=saved["max_tokens"],
            times_s=times,
            num_tokens=array("I", saved.get("tokens_per_message", [1] * len(times))),
            finish_reason=saved["finish_reason"],
            phases=saved.get("phases"),
            gaps=[{"position": 0, "gap_s": 0.0, **gap} for gap in saved.get("gaps", ())],
            error=saved.get("error", ""),
            message=saved.get("message", ""),
            retry_after_s=saved.get("retry_after_s"),
        )


def _rounded(seconds: float) -> float | None:
    return None if math.isnan(seconds) else round(seconds, 6)


def _number(seconds: float | None) -> float:
    return math.nan if seconds is None else seconds
