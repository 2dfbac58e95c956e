"""A panel of the dashboard, and the shapes that its queries take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What every query is of: the deployment that is looked at; `R`, of what has a role.
S = 'namespace=~"$namespace", job=~"$job"'
R = f'{S}, role=~"$role"'
# The window of rates, which Grafana chooses by the scrape interval.
W = "$__rate_interval"
# Colours of shares, from which value on: where high is good, and where low is.
GOOD_HIGH = ((0.0, "red"), (0.95, "orange"), (0.99, "green"))
GOOD_LOW = ((0.0, "green"), (0.01, "orange"), (0.05, "red"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`queries`: PromQL and its legend. `stack`: as areas on top of one another. `thresholds`: of a number, from which value
    on it has which colour."""

    title: str
    about: str
    unit: str
    queries: Sequence[tuple[str, str]]
    width: int = 8
    stat: bool = False
    stack: bool = False
    maximum: float | None = None
    thresholds: Sequence[tuple[float, str]] = ()


def lines(title: str, unit: str, about: str, *queries: tuple[str, str], width: int = 8, maximum: float | None = None) -> Panel:
    return Panel(title=title, about=about, unit=unit, queries=queries, width=width, maximum=maximum)


def areas(title: str, unit: str, about: str, *queries: tuple[str, str], width: int = 8) -> Panel:
    return Panel(title=title, about=about, unit=unit, queries=queries, width=width, stack=True)


def number(title: str, unit: str, about: str, query: str, *, legend: str = "", thresholds: Sequence[tuple[float, str]] = ()) -> Panel:
    return Panel(title=title, about=about, unit=unit, queries=[(query, legend)], width=3, stat=True, thresholds=thresholds)


def rate(metric: str, by: str = "", match: str = S) -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{match}}}[{W}]))"


def quantile(share: float, histogram: str, by: str = "", match: str = S) -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, sum by ({labels}) (rate({histogram}_bucket{{{match}}}[{W}])))"


def percentiles(histogram: str) -> Sequence[tuple[str, str]]:
    return [(quantile(share, histogram), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)]
