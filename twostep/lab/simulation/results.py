"""Outcomes as tables, and the choice among HPAs that the joint policy is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from twostep.lab.simulation.outcome import ScalingOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationJob:
    """One simulation. All of it is text and numbers, for another process."""

    trace: str
    peak: float
    shorten: float
    seed: int
    who: str


_COLUMNS = (
    "",
    "attainment",
    "worst minute",
    "GPU-hours",
    "cost",
    "GPUs mean / peak",
    "changes",
    "reversals per cool-down",
    "recovery, intervals",
    "refused",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRow:
    """One contestant over all seeds: means, but the worst minute, reversal count and recoveries, which are the worst there were."""

    name: str
    attainment: float
    least_attainment: float
    worst_minute: float
    gpu_hours: float
    cost: float
    mean_gpus: float
    peak_gpus: int
    num_changes: float
    reversals: int
    recoveries: Sequence[int]
    refused: int

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.name,
            f"{self.attainment:.2%}",
            f"{self.worst_minute:.0%}",
            f"{self.gpu_hours:.2f}",
            f"{self.cost:.2f}",
            f"{self.mean_gpus:.1f} / {self.peak_gpus}",
            f"{self.num_changes:.0f}",
            str(self.reversals),
            ", ".join(map(str, self.recoveries)) or "–",
            str(self.refused),
        )


def line_of(outcomes: Sequence[ScalingOutcome]) -> OutcomeRow:
    """Sums up one contestant's outcomes, a seed each."""
    num = len(outcomes)
    requests = sum(one.num_requests for one in outcomes)
    return OutcomeRow(
        name=outcomes[0].name,
        attainment=sum(one.attainment * one.num_requests for one in outcomes) / requests if requests else 1.0,
        least_attainment=min(one.attainment for one in outcomes),
        worst_minute=min(one.worst_minute for one in outcomes),
        gpu_hours=sum(one.gpu_hours for one in outcomes) / num,
        cost=sum(one.cost for one in outcomes) / num,
        mean_gpus=sum(one.mean_gpus for one in outcomes) / num,
        peak_gpus=max(one.peak_gpus for one in outcomes),
        num_changes=sum(one.num_changes for one in outcomes) / num,
        reversals=max(one.reversals for one in outcomes),
        recoveries=[intervals for one in outcomes for intervals in one.recoveries],
        refused=sum(one.refused for one in outcomes),
    )


def lines_of(outcomes: Iterable[ScalingOutcome]) -> list[OutcomeRow]:
    """In the order in which names come first."""
    found: dict[str, list[ScalingOutcome]] = {}
    for one in outcomes:
        found.setdefault(one.name, []).append(one)
    return [line_of(several) for several in found.values()]


def markdown(lines: Sequence[OutcomeRow]) -> str:
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *(line.cells for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def peers(lines: Iterable[OutcomeRow], target: float) -> Mapping[str, OutcomeRow]:
    """Picks among the HPAs who kept most, with the fewest GPU-hours among equals, and the cheapest one that kept `target` with every
    seed."""
    there = list(lines)
    found = {}
    if there:
        found["highest attainment"] = max(there, key=lambda line: (round(line.attainment, 4), -line.gpu_hours))
    if kept := [line for line in there if line.least_attainment >= target]:
        found["cheapest that keeps the target"] = min(kept, key=lambda line: line.gpu_hours)
    return found


def cheapest_as_good(lines: Iterable[OutcomeRow], ours: OutcomeRow) -> OutcomeRow | None:
    """The HPAs with the fewest GPU-hours among those that kept at least as much as `ours`; None: there are none."""
    return min((line for line in lines if line.attainment >= ours.attainment), key=lambda line: line.gpu_hours, default=None)
