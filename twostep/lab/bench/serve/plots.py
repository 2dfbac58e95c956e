"""Figures to pictures: PNG files for people. Needs matplotlib; draws without a display."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from twostep.lab.bench.serve.metrics import Distribution, Targets, latency_of
from twostep.lab.bench.serve.report import Point

# Blue, orange, green, red: apart for colour-blind readers as well (Okabe and Ito, 2008).
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#767676"
_SHARES = (("p50", _BLUE, "o"), ("p95", _ORANGE, "s"), ("p99", _RED, "^"))
_DPI = 130
_MAX_DOTS = 4000
_MIN_IN_BIN = 5


def draw(
    points: Sequence[Point], knee: Point | None, targets: Targets, folder: Path, *, title: str, attainment: float = 0.95
) -> list[Path]:
    """Writes what the points have to show and returns the files: latency.png and goodput.png of several rates; cdf.png and
    ttft_by_prompt.png of the knee, or else of the last point. Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    rated = sorted((p for p in points if p.rate is not None and math.isfinite(p.rate)), key=lambda p: p.rate or 0.0)
    if len(rated) > 1:
        files.append(_save(latency_figure(rated, targets, title), folder / "latency.png"))
        if targets:
            files.append(_save(goodput_figure(rated, knee, targets, title, attainment), folder / "goodput.png"))
    shown = knee or points[-1]
    if shown.summary.num_completed:
        files.append(_save(cdf_figure(shown, targets, title), folder / "cdf.png"))
        files.append(_save(ttft_figure(shown, targets, title), folder / "ttft_by_prompt.png"))
    return files


def latency_figure(points: Sequence[Point], targets: Targets, title: str) -> Figure:
    """TTFT, TPOT, longest gap and E2E against the rate: median, 95th and 99th percentile, each with its target."""
    figure = _figure(10, 6.6)
    axes: Any = figure.subplots(2, 2, sharex=True)
    rates = [p.rate or 0.0 for p in points]
    for ax, (name, field, limit) in zip(axes.flat, _latencies(targets), strict=True):
        values: list[Distribution] = [getattr(p.summary, field) for p in points]
        for share, colour, marker in _SHARES:
            ax.plot(rates, [getattr(v, share) * 1e3 for v in values], color=colour, marker=marker, ms=4.5, lw=1.6, label=share)
        _limit_line(ax, limit)
        _log_if_wide(ax, [getattr(v, share) for v in values for share, _, _ in _SHARES])
        _style(ax, name, "", "ms")
        ax.set_xlim(left=0)
    for ax in axes[1]:
        ax.set_xlabel("requests per second offered")
    figure.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, loc="upper right", ncols=3, fontsize=9)
    figure.suptitle(f"{title}: latency against rate", x=0.01, ha="left", fontweight="bold")
    return figure


def goodput_figure(points: Sequence[Point], knee: Point | None, targets: Targets, title: str, attainment: float) -> Figure:
    """Above: requests that kept all targets per second. Below: their share, with the share asked for, and which target was missed."""
    figure = _figure(8, 6.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    rates = [p.rate or 0.0 for p in points]
    goods = [p.summary.goodput for p in points]
    most = max(rates)
    above.plot([0, most], [0, most], color=_GREY, lw=1, ls=":", label="all requests offered")
    above.plot(rates, [math.nan if g is None else g.per_s for g in goods], color=_GREEN, marker="o", lw=1.8, label="kept all targets")
    shares = [math.nan if g is None else g.attainment * 100 for g in goods]
    below.plot(rates, shares, color=_GREEN, marker="o", lw=1.8, label="all targets")
    for name, colour in (("ttft", _BLUE), ("tpot", _ORANGE), ("gap", _RED), ("e2e", _GREY)):
        if getattr(targets, f"{name}_ms") is not None:
            kept = [math.nan if g is None or not g.num_requests else 100 - 100 * _missed(g.missed, name) / g.num_requests for g in goods]
            below.plot(rates, kept, color=colour, lw=1.1, ls="--", label=name.upper() if name != "gap" else "gap")
    below.axhline(attainment * 100, color=_GREY, lw=1, ls=":")
    below.annotate(f"{attainment:.0%}", (0, attainment * 100), xytext=(4, -11), textcoords="offset points", color=_GREY, fontsize=9)
    if knee is not None and knee.rate is not None and knee.summary.goodput is not None:
        good = knee.summary.goodput
        per_gpu = f"\n{knee.rate / good.num_gpus:.3g} per GPU" if good.num_gpus else ""
        for ax in (above, below):
            ax.axvline(knee.rate, color=_RED, lw=1.1, alpha=0.7)
        # Under the curve, left of the knee, there is nothing.
        left = knee.rate > 0.35 * most
        above.annotate(
            f"knee: {knee.rate:.3g} requests/s{per_gpu}",
            (knee.rate, 0),
            xytext=(-8 if left else 8, 8),
            textcoords="offset points",
            ha="right" if left else "left",
            color=_RED,
        )
    _style(above, f"goodput at {targets}", "", "requests per second")
    _style(below, "share of the requests that kept", "requests per second offered", "%")
    above.set_ylim(bottom=0)
    above.set_xlim(left=0)
    below.set_ylim(-3, 104)
    above.legend(frameon=False, loc="upper left")
    below.legend(frameon=False, loc="lower left", ncols=2, fontsize=9)
    figure.suptitle(f"{title}: goodput against rate", x=0.01, ha="left", fontweight="bold")
    return figure


def cdf_figure(point: Point, targets: Targets, title: str) -> Figure:
    """Shares of the requests that were at least as fast, with the targets."""
    figure = _figure(10, 6.6)
    axes: Any = figure.subplots(2, 2, sharey=True)
    latencies = [latency for r in point.result.records if r.measured and (latency := latency_of(r)) is not None]
    fields = ("ttft_s", "tpot_s", "longest_gap_s", "e2e_s")
    for ax, field, (name, _, limit) in zip(axes.flat, fields, _latencies(targets), strict=True):
        values = sorted(value * 1e3 for x in latencies if (value := getattr(x, field)) is not None)
        if values:
            shares = [100 * (i + 1) / len(values) for i in range(len(values))]
            ax.step([values[0], *values], [0.0, *shares], where="post", color=_BLUE, lw=1.8)
            for share, colour, _ in _SHARES:
                at = getattr(Distribution.of(values), share)
                ax.plot([at], [float(share[1:])], "o", color=colour, ms=5.5, label=f"{share}: {_plain_number(float(f'{at:.3g}'), None)} ms")
            if limit is not None:
                ax.axvline(limit, color=_GREY, lw=1.1, ls="--", label=f"target: {limit:g} ms")
            ax.legend(loc="lower right", fontsize=9, framealpha=0.85, edgecolor="none")
            if values[0] > 0 and values[-1] > 30 * values[0]:
                ax.set_xscale("log")
            else:
                _room(ax, values[0], max(values[-1], limit or 0.0))
        ax.xaxis.set_major_formatter(_plain_number)
        _style(ax, name, "ms", "")
    for row in axes:
        row[0].set_ylabel("% of the requests")
    figure.suptitle(f"{title}: {point.label}, {len(latencies)} requests", x=0.01, ha="left", fontweight="bold")
    return figure


def ttft_figure(point: Point, targets: Targets, title: str) -> Figure:
    """Each request's time to first token against its prompt's length, and each bin's median and 90th percentile."""
    figure = _figure(8, 5)
    ax = figure.subplots()
    pairs = [
        (r.prompt_tokens, latency.ttft_s * 1e3, r.cached_tokens > 0)
        for r in point.result.records
        if r.measured and (latency := latency_of(r)) is not None
    ]
    step = max(1, len(pairs) // _MAX_DOTS)
    any_cached = any(cached for *_, cached in pairs)
    for cached, colour, name in ((False, _BLUE, "nothing cached" if any_cached else "one request"), (True, _GREEN, "prefix cached")):
        dots = [(x, y) for x, y, c in pairs[::step] if c is cached]
        if dots:
            ax.scatter([x for x, _ in dots], [y for _, y in dots], s=9, color=colour, alpha=0.35, linewidths=0, label=name)
    # The median of a handful says nothing.
    bins = [b for b in point.summary.ttft_by_prompt if b.ttft_s.count >= _MIN_IN_BIN]
    middles = [math.sqrt(b.low * (b.high - 1)) if b.low else (b.low + b.high - 1) / 2 for b in bins]
    for share, colour, marker in (("p50", _ORANGE, "o"), ("p90", _RED, "^")):
        ax.plot(middles, [getattr(b.ttft_s, share) * 1e3 for b in bins], color=colour, marker=marker, lw=1.8, label=f"{share} of its bin")
    _limit_line(ax, targets.ttft_ms)
    if bins and bins[0].low * 8 < bins[-1].high:
        ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(_plain_number)
    _log_if_wide(ax, [y for _, y, _ in pairs])
    _style(ax, "", "tokens of the prompt", "time to first token, ms")
    ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1.04), ncols=4, fontsize=9)
    ax.set_title(point.label, loc="right", fontsize=10)
    figure.suptitle(f"{title}: TTFT against prompt length", x=0.01, ha="left", fontweight="bold")
    return figure


def _latencies(targets: Targets) -> tuple[tuple[str, str, float | None], ...]:
    """Name, field of Summary, target in ms."""
    return (
        ("time to first token (TTFT)", "ttft_s", targets.ttft_ms),
        ("time per output token (TPOT)", "tpot_s", targets.tpot_ms),
        ("longest gap between tokens", "longest_gap_s", targets.gap_ms),
        ("end to end (E2E)", "e2e_s", targets.e2e_ms),
    )


def _missed(missed: dict[str, int], name: str) -> int:
    """Who was not answered kept nothing."""
    return missed.get(name, 0) + missed.get("answer", 0)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=_DPI, facecolor="white")
    return path


def _style(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=10)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(True, color="#E5E5E5", lw=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _limit_line(ax: Axes, limit_ms: float | None) -> None:
    if limit_ms is not None:
        ax.axhline(limit_ms, color=_GREY, lw=1.1, ls="--")
        ax.annotate(
            f"target {limit_ms:g} ms",
            (0, limit_ms),
            xycoords=("axes fraction", "data"),
            xytext=(4, 3),
            textcoords="offset points",
            color=_GREY,
            fontsize=9,
        )


def _log_if_wide(ax: Axes, values: Iterable[float]) -> None:
    there = [v for v in values if v > 0]
    if there and max(there) > 30 * min(there):
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(_plain_number)


def _room(ax: Axes, low: float, high: float) -> None:
    span = max(high - low, 1e-6)
    ax.set_xlim(max(0.0, low - 0.05 * span), high + 0.18 * span)


def _plain_number(value: float, _: object) -> str:
    return f"{value:,.6g}"
