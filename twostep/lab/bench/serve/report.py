"""Figures as a table for people and as JSON for programs. Pure; times in seconds become milliseconds in the table alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from twostep.lab.bench.serve.metrics import Distribution, LatencyTargets
from twostep.lab.bench.serve.runner import RunResult
from twostep.lab.bench.serve.summary import Summary

_PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of one load."""

    label: str  # the load, for people: `6 requests/s`
    rate: float | None  # requests per second that were to come; None: it was no open loop at a rate
    result: RunResult = field(repr=False)
    summary: Summary = field(repr=False)
    warnings: tuple[str, ...] = ()


BURST = "their requests came within less time than an answer takes, as a burst; give more --num-requests or a longer --duration"


def is_burst(point: Point) -> bool:
    """Returns whether the measured requests came within less time than half of the answers took. A server that passes has only shown how
    many requests it serves at once."""
    summary = point.summary
    return point.rate is not None and summary.num_requests / summary.offered_rate < summary.e2e_s.p50


def warnings_of(result: RunResult, summary: Summary, *, max_slip_s: float, measured_s: float | None) -> tuple[str, ...]:
    """Returns the reasons to doubt the figures. `measured_s`: the measured duration if targets are judged over it."""
    found = []
    if result.interrupted:
        found.append("interrupted: these figures are of what was sent until then, and what was under way counts as not answered")
    elif result.stopped:
        found.append("stopped when it could no longer pass: these figures are of its beginning, and flatter it")
    if summary.slip_s.count and summary.slip_s.p99 > max_slip_s:
        found.append(
            f"requests left up to {summary.slip_s.p99 * 1e3:.1f} ms late (p99; bound {max_slip_s * 1e3:g} ms): this generator could not "
            "keep up; run it on a machine with more free cores, or several of it"
        )
    if result.loop_lag_s.count and result.loop_lag_s.p99 > max_slip_s:
        found.append(
            f"recorded times may be {result.loop_lag_s.p99 * 1e3:.1f} ms late (event loop's lag, p99; bound {max_slip_s * 1e3:g} ms): "
            f"this generator took {result.cpu_share:.0%} of a core; run it on a machine with more free cores"
        )
    if measured_s is not None and measured_s < 60 and not result.stopped:
        found.append(f"goodput is defined over at least 60 s; this was measured over {measured_s:.0f} s")
    if not summary.num_requests:
        found.append("no request came after the warm-up: give a longer duration")
    elif not summary.num_completed:
        found.append(
            "no request completed, so there are no times to tell: see the errors above; if the server was too slow, offer it less "
            "(--concurrency 2, a lower --rate, --input-tokens, --output-tokens) or allow more (--timeout)"
        )
    return tuple(found)


def table(point: Point, targets: LatencyTargets) -> str:
    """Everything about one run."""
    s, work = point.summary, point.summary.throughput
    lines = [
        f"{point.label}: {s.num_requests} requests measured, {s.num_completed} completed",
        f"  offered      {_figure(s.offered_rate, ',.2f')} requests/s",
        f"  done         {_figure(work.requests_per_s, ',.2f')} requests/s ({_figure(work.requests_per_minute, ',.1f')} per minute), "
        f"{_figure(work.mean_concurrency, ',.1f')} under way on average",
        f"  tokens/s     {_figure(work.input_tokens_per_s, ',.0f')} in, {_figure(work.output_tokens_per_s, ',.0f')} out; "
        f"per user {_figure(s.user_tokens_per_s.p50, ',.1f')} (slowest {_figure(s.user_tokens_per_s.min, ',.1f')})",
        f"  prompts      {_span(s.prompt_tokens)} tokens, {_figure(s.cached_share, '.0%')} cached; answers {_span(s.output_tokens)}",
        f"  messages     {_figure(s.tokens_per_message.mean, ',.2f')} tokens each (most {_figure(s.tokens_per_message.max, ',.0f')}): "
        "TPOT is a token's time, ITL and gap are between messages",
    ]
    if s.goodput is not None:
        g = s.goodput
        per_gpu = "" if g.per_s_per_gpu is None else f", {_figure(g.per_s_per_gpu, ',.3f')} requests/s per GPU"
        missed = ", ".join(f"{name} {count}" for name, count in g.missed.items())
        lines.append(f"  goodput      {_figure(g.per_s, ',.3f')} requests/s ({_figure(g.per_minute, ',.1f')} per minute){per_gpu}")
        lines.append(
            f"               {g.num_met} of {g.num_requests} ({_figure(g.attainment, '.1%')}) kept {targets}"
            f"{f'; missed: {missed}' if missed else ''}"
        )
    lines += [f"  {kind:<12} {count}: {s.error_messages[kind]:.120}" for kind, count in s.errors.items()]
    lines += ["", _row("ms", [*_PERCENTILES])]
    for name, values in (("TTFT", s.ttft_s), ("TPOT", s.tpot_s), ("ITL", s.itl_s), ("longest gap", s.longest_gap_s), ("E2E", s.e2e_s)):
        lines.append(_row(name, _milliseconds(values)))
    if s.phases_s:
        lines += ["", _row("phases, ms", [*_PERCENTILES])]
        lines += [_row(name.removesuffix("_s"), _milliseconds(values)) for name, values in s.phases_s.items()]
    if s.gaps_by_cause:
        lines += ["", _row("long gaps, ms", ["count", "sum", "p50", "p99", "max"])]
        for cause, found in s.gaps_by_cause.items():
            lines.append(_row(cause, [f"{found.count}", *map(_ms, (found.sum_s, found.p50_s, found.p99_s, found.max_s))]))
    lag = point.result.loop_lag_s
    lines += [
        "",
        f"  generator    {point.result.cpu_share:.0%} of a core; sent {_ms(s.slip_s.p50)} ms late (p99 {_ms(s.slip_s.p99)}), "
        f"event loop {_ms(lag.p50)} ms late (p99 {_ms(lag.p99)})",
        *(f"  warning: {text}" for text in point.warnings),
    ]
    return "\n".join(lines)


def sweep_table(points: Sequence[Point], knee: Point | None, attainment: float) -> str:
    """A line for each rate, ascending, and the knee."""
    heads = ["kept all", "goodput/s", "per GPU", "TTFT p50", "p99", "TPOT p50", "p99", "gap p50", "p99", "tokens/s", "errors"]
    lines = [_row("requests/s", heads)]
    for point in sorted(points, key=lambda p: p.rate or 0.0):
        s, g = point.summary, point.summary.goodput
        per_gpu = None if g is None else g.per_s_per_gpu
        cells = ["-", "-"] if g is None else [_figure(g.attainment, ".1%"), _figure(g.per_s, ",.3f")]
        cells.append("-" if per_gpu is None else _figure(per_gpu, ",.3f"))
        for values in (s.ttft_s, s.tpot_s, s.longest_gap_s):
            cells += [_ms(values.p50), _ms(values.p99)]
        cells += [_figure(s.throughput.output_tokens_per_s, ",.0f"), f"{sum(s.errors.values())}"]
        lines.append(_row(f"{point.rate or 0.0:,.3g}{' *' if point is knee else ''}", cells))
    if all(point.summary.goodput is None for point in points):
        # No targets were given.
        return "\n".join(lines)
    if knee is None and any(map(is_burst, points)):
        lines.append(f"  No rate was judged: {BURST}.")
    elif knee is None:
        lines.append(f"  No rate was kept up with: none had {attainment:.0%} of its requests meet all targets.")
    elif knee.summary.goodput is not None:
        g = knee.summary.goodput
        per_gpu_text = "" if g.per_s_per_gpu is None else f", {(knee.rate or 0.0) / (g.num_gpus or 1):,.3f} per GPU"
        lines.append(
            f"  * goodput: {knee.rate:,.3g} requests/s{per_gpu_text}, the highest rate at which {attainment:.0%} met all targets "
            f"({_figure(g.per_s, ',.3f')} requests/s did)"
        )
    return "\n".join(lines)


def as_json(points: Sequence[Point], knee: Point | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Strict JSON: what cannot be said (nothing to divide by) is null. Times in seconds."""
    document = {
        "settings": dict(settings),
        "points": [_point(p) for p in points],
        "knee": None if knee is None else _point(knee) | {"point": points.index(knee)},
    }
    plain: dict[str, Any] = _plain(document)
    return plain


def _point(point: Point) -> dict[str, Any]:
    s = point.summary
    out = {"label": point.label, "rate": point.rate, **asdict(s)}
    out["throughput"]["requests_per_minute"] = s.throughput.requests_per_minute
    if s.goodput is not None:
        g = s.goodput
        out["goodput"] |= {
            "attainment": g.attainment,
            "per_s": g.per_s,
            "per_minute": g.per_minute,
            "per_s_per_gpu": g.per_s_per_gpu,
        }
    result = point.result
    out["generator"] = {
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "cpu_share": result.cpu_share,
        "slip_s": asdict(s.slip_s),
        "loop_lag_s": asdict(result.loop_lag_s),
    }
    del out["slip_s"]
    return out | {"warnings": list(point.warnings)}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<16}" + "".join(f"{cell:>11}" for cell in cells)


def _milliseconds(values: Distribution) -> list[str]:
    return [_ms(getattr(values, name)) for name in _PERCENTILES]


def _figure(value: float, form: str) -> str:
    """Shows NaN as a dash: there was nothing to divide by or to count."""
    return "-" if math.isnan(value) else format(value, form)


def _ms(seconds: float) -> str:
    return _figure(seconds * 1e3, ",.1f")


def _span(values: Distribution) -> str:
    return "-" if not values.count else f"{values.min:,.0f} to {values.max:,.0f} (mean {values.mean:,.0f})"
