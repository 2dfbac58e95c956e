"""Computes what the HorizontalPodAutoscaler makes of a metric, and the metric that makes it do what was decided. Pure.

For an external metric with AverageValue it reckons, with `usage` the metric's sum and `current` the Deployment's pods,

    ratio   = usage / (target * current)
    desired = current if 1 - tolerance <= ratio <= 1 + tolerance else ceil(usage / target)

The tolerance (0.1 unless the cluster or the HPA's `behavior` says otherwise) swallows small steps: at 11 pods it does nothing for 12, since
12 / 11 lies within it. With a target of 1 and a metric of the pods that are wanted:

- Less is reachable while pods are few: the metric may be any number above wanted - 1, since the HPA rounds up. At 11 pods, 10 is given as
  9.898, which lies outside. Where even the least such number lies within the tolerance (19 of 20), the HPA keeps what there is.
- More is not: no number up to 12 lies outside at 11 pods. The least that is acted on is asked for, 13, so that there are never too few.
  What was asked for beyond the wish stays asked for until the wish falls, or every such step would be taken back at once.

Where what comes about would cost more than may be spent, a Deployment gets the nearest number below its wish that its HPA goes to or stays
at, the one of the two that lacks the smaller share then; never one below its least. The HPA counts in thousandths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from twostep.autoscaler.model import ROLES, PolicyConfig, Role

_MILLI = 1000
# The HPA compares binary fractions: 11 / 10 is within 0.1 for some versions of it and not for others. Nothing is told that lies so near.
_CLEAR = 1e-6


@dataclass(frozen=True, slots=True)
class Asked:
    """`pods` that are asked for because `wish` were wanted: more than that where the HPA would not have moved for less, or fewer where
    more cannot be paid."""

    pods: int
    wish: int

    @property
    def more(self) -> int:
        return self.pods - self.wish


def ask(wish: int, pods: int, before: Asked | None, tolerance: float) -> Asked:
    """Returns what to ask for while there are `pods`. `before`: what was asked for last."""
    if before is not None and before.more > 0 and before.wish <= wish <= before.pods:
        kept = Asked(before.pods, before.wish)
        return kept if pods >= wish else Asked(max(kept.pods, _acted_on(wish, pods, tolerance)), before.wish)
    return Asked(_acted_on(wish, pods, tolerance), wish)


def _acted_on(wish: int, pods: int, tolerance: float) -> int:
    """The least number from `wish` up that an HPA with fewer `pods` acts on."""
    if pods <= 0 or wish <= pods:
        return wish
    return max(wish, math.floor(pods * (1 + tolerance) + _CLEAR) + 1)


def metric(asked: int, pods: int, tolerance: float) -> float:
    """Returns the metric that makes an HPA with `pods` go to `asked`, in whole thousandths, as the HPA counts."""
    if asked >= pods or asked <= 0:
        return float(asked)
    # Below this it acts; above one less than asked it rounds up.
    outside = math.floor((pods * (1 - tolerance) - _CLEAR) * _MILLI) - 1
    milli = min(asked * _MILLI, outside)
    # Whoever multiplies by a thousand again and cuts off may lose one.
    return milli / _MILLI if milli > (asked - 1) * _MILLI + 1 else float(asked)


def comes_to(asked: int, pods: int, tolerance: float) -> int:
    """Pods that an HPA with `pods` has when it was told the metric for `asked`."""
    told = metric(asked, pods, tolerance)
    within = pods * (1 - tolerance) - _CLEAR <= told <= pods * (1 + tolerance) + _CLEAR
    return pods if within else math.ceil(told)


def replicas_asked(
    replicas: Mapping[str, int],
    pods: Mapping[str, int],
    before: Mapping[str, Asked],
    tolerance: float,
    config: PolicyConfig | None = None,
) -> dict[str, Asked]:
    """`ask` for each Deployment, within the budget of `config`, if there is one."""
    there = {role: pods.get(role, wish) for role, wish in replicas.items()}
    asked = {role: ask(wish, there[role], before.get(role), tolerance) for role, wish in replicas.items()}
    if config is None or (config.max_cost is None and config.max_workers is None):
        return asked
    return _affordable(config, asked, there, tolerance)


def _affordable(config: PolicyConfig, asked: Mapping[str, Asked], pods: Mapping[str, int], tolerance: float) -> dict[str, Asked]:
    """Returns the best way to ask for each Deployment's number or less: within the budget, the one that lacks least of what is wished for;
    if the least numbers of workers leave none within it, the cheapest."""
    ways: list[tuple[tuple[float, float, float], int, dict[str, Asked]]] = []
    for told in itertools.product(*(_or_less(asked[role], pods[role], config.pool(role).min_workers, tolerance) for role in ROLES)):
        way: dict[str, Asked] = dict(zip(ROLES, told, strict=True))
        # The HPA has the same bound.
        come: dict[Role, int] = {
            role: min(config.pool(role).max_workers, comes_to(way[role].pods, pods[role], tolerance)) for role in ROLES
        }
        lacks = [max(0, way[role].wish - come[role]) / max(1, way[role].wish) for role in ROLES]
        rank = (0.0, max(lacks), sum(lacks)) if config.affordable(come) else (1.0, config.cost(come), 0.0)
        ways.append((rank, len(ways), way))
    # What was asked for comes first, where nothing is better.
    return min(ways)[2]


def _or_less(asked: Asked, pods: int, least: int, tolerance: float) -> list[Asked]:
    """And the most that comes about without being more than the wish, if that is another number."""
    wish = asked.wish
    if comes_to(asked.pods, pods, tolerance) <= wish:
        return [asked]
    below = min(pods, wish)
    while below > least and comes_to(below, pods, tolerance) > wish:
        below -= 1
    return [asked, Asked(below, wish)] if least <= below and comes_to(below, pods, tolerance) <= wish else [asked]
