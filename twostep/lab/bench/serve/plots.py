"""Draws figures as PNG files for people. Needs matplotlib; draws without a display."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from twostep.lab.bench.serve.metrics import Distribution, LatencyTargets, latency_of
from twostep.lab.bench.serve.report import Point

# Blue, orange, green, red: apart for colour-blind readers as well (Okabe and Ito, 2008).
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#767676"
_SHARES = (("p50", _BLUE), ("p95", _ORANGE), ("p99", _RED))
_LATENCIES = (
    ("time to first token (TTFT)", "ttft"),
    ("time per output token (TPOT)", "tpot"),
    ("longest gap between tokens", "gap"),
    ("end to end (E2E)", "e2e"),
)
_FIELDS = {"ttft": "ttft_s", "tpot": "tpot_s", "gap": "longest_gap_s", "e2e": "e2e_s"}


def draw(
    points: Sequence[Point], knee: Point | None, targets: LatencyTargets, folder: Path, *, title: str, attainment: float = 0.95
) -> list[Path]:
    """Writes what the points have to show and returns the files: latency.png and goodput.png of several rates; cdf.png of the knee, or else
    of the last point. Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    rated = sorted((p for p in points if p.rate is not None and math.isfinite(p.rate)), key=lambda p: p.rate or 0.0)
    if len(rated) > 1:
        figures["latency"] = _latency(rated, targets, title)
        if targets:
            figures["goodput"] = _goodput(rated, knee, targets, title, attainment)
    shown = knee or points[-1]
    if shown.summary.num_completed:
        figures["cdf"] = _cdf(shown, targets, title)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=130, facecolor="white")
    return [folder / f"{name}.png" for name in figures]


def _latency(points: Sequence[Point], targets: LatencyTargets, title: str) -> Figure:
    """TTFT, TPOT, longest gap and E2E against the rate: median, 95th and 99th percentile, each with its target."""
    figure, axes = _panels(f"{title}: latency against rate", 2, 2)
    for ax, (name, key) in zip(axes, _LATENCIES, strict=True):
        values: list[Distribution] = [getattr(p.summary, _FIELDS[key]) for p in points]
        for share, colour in _SHARES:
            ax.plot([p.rate or 0.0 for p in points], [getattr(v, share) * 1e3 for v in values], color=colour, marker="o", label=share)
        if (limit := getattr(targets, f"{key}_ms")) is not None:
            ax.axhline(limit, color=_GREY, ls="--", label=f"target: {limit:g} ms")
        high, low = max((v.p99 for v in values), default=0.0), min((v.p50 for v in values), default=0.0)
        if high > 30 * low > 0:
            ax.set_yscale("log")
        _style(ax, name, "requests per second offered", "ms")
    return figure


def _goodput(points: Sequence[Point], knee: Point | None, targets: LatencyTargets, title: str, attainment: float) -> Figure:
    """Above: requests that kept all targets per second. Below: their share, with the share asked for, and which target was missed."""
    figure, (above, below) = _panels(f"{title}: goodput against rate, {targets}", 2, 1)
    rates = [p.rate or 0.0 for p in points]
    goods = [p.summary.goodput for p in points]
    above.plot([0, max(rates)], [0, max(rates)], color=_GREY, ls=":", label="all requests offered")
    above.plot(rates, [math.nan if g is None else g.per_s for g in goods], color=_GREEN, marker="o", label="kept all targets")
    shares = [math.nan if g is None else g.attainment * 100 for g in goods]
    below.plot(rates, shares, color=_GREEN, marker="o", label="all targets")
    for key, colour in (("ttft", _BLUE), ("tpot", _ORANGE), ("gap", _RED), ("e2e", _GREY)):
        if getattr(targets, f"{key}_ms") is not None:
            # Who was not answered kept nothing.
            missed = [math.nan if g is None else (g.missed.get(key, 0) + g.missed.get("answer", 0)) / (g.num_requests or 1) for g in goods]
            below.plot(rates, [100 * (1 - share) for share in missed], color=colour, ls="--", label=key.upper())
    below.axhline(attainment * 100, color=_GREY, ls=":", label=f"{attainment:.0%}")
    if knee is not None and knee.rate is not None:
        for ax in (above, below):
            ax.axvline(knee.rate, color=_RED, alpha=0.7, label=f"knee: {knee.rate:.3g} requests/s")
    _style(above, "", "", "requests per second")
    _style(below, "share of the requests that kept", "requests per second offered", "%")
    return figure


def _cdf(point: Point, targets: LatencyTargets, title: str) -> Figure:
    """Shares of the requests that were at least as fast, with the targets."""
    latencies = [latency for r in point.result.records if r.measured and (latency := latency_of(r)) is not None]
    figure, axes = _panels(f"{title}: {point.label}, {len(latencies)} requests", 2, 2)
    for ax, (name, key) in zip(axes, _LATENCIES, strict=True):
        values = sorted(value * 1e3 for x in latencies if (value := getattr(x, _FIELDS[key])) is not None)
        if values:
            ax.step(values, [100 * (i + 1) / len(values) for i in range(len(values))], where="post", color=_BLUE)
            for share, colour in _SHARES:
                at = getattr(Distribution.of(values), share)
                ax.plot([at], [float(share[1:])], "o", color=colour, label=f"{share}: {at:,.3g} ms")
            if (limit := getattr(targets, f"{key}_ms")) is not None:
                ax.axvline(limit, color=_GREY, ls="--", label=f"target: {limit:g} ms")
            if values[-1] > 30 * values[0] > 0:
                ax.set_xscale("log")
        _style(ax, name, "ms", "% of the requests")
    return figure


def _panels(title: str, rows: int, columns: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(5 * columns + 2, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(rows, columns)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure, list(axes.flat)


def _style(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=10)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(True, color="#E5E5E5", lw=0.7)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=9, framealpha=0.85, edgecolor="none")
