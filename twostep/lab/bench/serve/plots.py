"""Draws one page, a PNG file for people. Needs matplotlib; draws without a display."""

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
_LATENCIES = (("TTFT", "ttft_s", "ttft_ms"), ("TPOT", "tpot_s", "tpot_ms"), ("longest gap", "longest_gap_s", "gap_ms"))


def draw(points: Sequence[Point], knee: Point | None, targets: LatencyTargets, folder: Path, *, title: str, attainment: float) -> Path:
    """Writes load.png: of several rates percentiles and goodput against them, of one run the distributions. Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rated = sorted((p for p in points if p.rate is not None and math.isfinite(p.rate)), key=lambda p: p.rate or 0.0)
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(2, 2)
    *axes, last = panels.flat
    figure.suptitle(f"{title}: {points[-1].label if len(rated) < 2 else 'against the rate offered, requests/s'}", x=0.01, ha="left")
    for ax, (name, field, limit) in zip(axes, _LATENCIES, strict=True):
        (_against_rate if len(rated) > 1 else _distribution)(ax, rated or points, field, getattr(targets, limit))
        _style(ax, f"{name}, ms")
    if len(rated) > 1:
        rates, goods = [p.rate or 0.0 for p in rated], [p.summary.goodput for p in rated]
        last.plot(rates, [math.nan if g is None else 100 * g.attainment for g in goods], color=_GREEN, marker="o", label="kept all targets")
        last.axhline(attainment * 100, color=_GREY, ls=":", label=f"{attainment:.0%}")
        if knee is not None and knee.rate is not None:
            last.axvline(knee.rate, color=_RED, label=f"knee: {knee.rate:.3g} requests/s")
        _style(last, f"% of the requests that kept {targets}" if targets else "no targets were given")
    else:
        _distribution(last, points, "e2e_s", targets.e2e_ms)
        _style(last, "end to end, ms")
    path = folder / "load.png"
    figure.savefig(path, dpi=130, facecolor="white")
    return path


def _against_rate(ax: Axes, points: Sequence[Point], field: str, limit_ms: float | None) -> None:
    values: list[Distribution] = [getattr(p.summary, field) for p in points]
    for share, colour in _SHARES:
        ax.plot([p.rate or 0.0 for p in points], [getattr(v, share) * 1e3 for v in values], color=colour, marker="o", label=share)
    if limit_ms is not None:
        ax.axhline(limit_ms, color=_GREY, ls="--", label=f"target: {limit_ms:g}")


def _distribution(ax: Axes, points: Sequence[Point], field: str, limit_ms: float | None) -> None:
    """Shares of the last point's requests that were at least as fast, in percent."""
    latencies = [latency for r in points[-1].result.records if r.measured and (latency := latency_of(r)) is not None]
    values = sorted(value * 1e3 for x in latencies if (value := getattr(x, field)) is not None)
    ax.step(values, [100 * (i + 1) / len(values) for i in range(len(values))], where="post", color=_BLUE)
    if limit_ms is not None:
        ax.axvline(limit_ms, color=_GREY, ls="--", label=f"target: {limit_ms:g}")


def _style(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=10)
    ax.grid(True, color="#E5E5E5", lw=0.7)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=9, framealpha=0.85, edgecolor="none")
