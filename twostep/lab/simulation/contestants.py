"""Who is compared, as text: so that settings can be named on a command line, in a table, and in another process.

joint                                   the autoscaler's policy with its configuration
joint,spare=0                           the same with a field of PolicyConfig changed
hpas,prefill=busy:0.6,decode=seats:0.2  two independent HPAs, metric and target of each
ratio,share=0.6,prefill=busy:0.6,decode=seats:0.2
fleet,prefill=7,decode=5
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from twostep.autoscaler.model import Decision, Observation, PolicyConfig, Role
from twostep.errors import InvalidRequest
from twostep.lab.simulation.scalers import METRICS, FixedFleet, FixedRatio, JointPolicy, Scaler, Target, TwoHpas

# What each HPA is tried with. A decode worker of the preset misses 10 ms a token from 26 % of its seats on where prompts are long, and from
# 45 % on where answers are; from about 19 % of its KV pool in both cases.
PREFILL_GRID = tuple(Target("busy", percent / 100) for percent in (50, 60, 70, 80))
DECODE_GRID = (
    *(Target("seats", percent / 100) for percent in (8, 12, 16, 20, 25, 30)),
    *(Target("pool", percent / 100) for percent in (6, 8, 10, 12, 14, 16)),
)


def hpa_grid(prefill: Sequence[Target] = PREFILL_GRID, decode: Sequence[Target] = DECODE_GRID) -> Iterator[str]:
    """Every pair."""
    for one, other in product(prefill, decode):
        yield f"hpas,prefill={one.metric}:{one.value:g},decode={other.metric}:{other.value:g}"


def contestant(text: str, policy: PolicyConfig, *, on_decision: Callable[[Observation, Decision], None] | None = None) -> Scaler:
    """Raises InvalidRequest with what is wrong."""
    kind, *parts = text.split(",")
    fields = dict(part.partition("=")[::2] for part in parts)
    if kind == "joint":
        config = _changed(policy, fields)
        name = "joint policy" + "".join(f", {key} {value}" for key, value in fields.items())
        return JointPolicy(config, name=name, on_decision=on_decision)
    if kind == "fleet":
        return FixedFleet({"prefill": int(_number(fields, "prefill")), "decode": int(_number(fields, "decode"))})
    if kind not in ("hpas", "ratio"):
        raise InvalidRequest(f"{text!r} begins with none of joint, hpas, ratio, fleet")
    targets: Mapping[Role, Target] = {"prefill": _target(fields, "prefill"), "decode": _target(fields, "decode")}
    if kind == "hpas":
        return TwoHpas(policy, targets)
    share = _number(fields, "share")
    if not 0 < share < 1:
        raise InvalidRequest(f"share={share:g} is no share between 0 and 1")
    return FixedRatio(policy, targets, share)


def _changed(policy: PolicyConfig, fields: Mapping[str, str]) -> PolicyConfig:
    changes: dict[str, Any] = {}
    for key in fields:
        before = getattr(policy, key, None)
        if not isinstance(before, int | float):
            raise InvalidRequest(f"{key} is no number in the policy's configuration")
        changes[key] = type(before)(_number(fields, key))
    return replace(policy, **changes)


def _target(fields: Mapping[str, str], role: str) -> Target:
    metric, _, value = fields.get(role, "").partition(":")
    if metric not in METRICS:
        raise InvalidRequest(f"{role}={metric}: the metrics are {', '.join(METRICS)}; give for example {role}=busy:0.6")
    target = _number({role: value}, role)
    if not target > 0:
        raise InvalidRequest(f"{role}={metric}:{value}: a target is above 0")
    return Target(metric, target)


def _number(fields: Mapping[str, str], name: str) -> float:
    try:
        return float(fields[name])
    except (KeyError, ValueError) as error:
        raise InvalidRequest(f"{name} is missing or no number in {dict(fields)}") from error
