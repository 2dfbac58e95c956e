"""Writes where the time of a run's requests went as one HTML file, which loads nothing and has no script. Pure.

Bars and pictures are drawn by width and height in percent, so that the page is as wide as its reader's window; words are never scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files

from twostep.lab.bench.serve.causes import (
    CAUSES,
    FIRST_TOKEN_PARTS,
    SECOND_TOKEN_PARTS,
    CauseFigures,
    LongGap,
    first_token_parts,
    long_gaps,
)
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.bench.serve.summary import Summary

# Of the waterfall: requests, and the height of each in pixels.
_ROWS, _ROW_PX = 100, 7
_POINTS = 4000
_WORST = 10
# A mark in the waterfall is this wide at least, in thousandths of the picture.
_LEAST_WIDTH = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRun:
    """One run: `records` are all of its requests."""

    label: str
    records: Sequence[RequestRecord] = field(repr=False)
    summary: Summary = field(repr=False)
    targets: LatencyTargets


def page(runs: Sequence[PageRun], title: str, about: str = "") -> str:
    """Returns the file's text. Runs are shown beside one another, on the same scales."""
    gaps = [_gaps_of(run) for run in runs]
    style = files("twostep.lab.bench.serve").joinpath("page.css").read_text(encoding="utf-8")
    firsts = [run.summary.first_token_parts_s for run in runs]
    causes = _keys("cause", {cause: CAUSES[cause] for cause in CAUSES if any(g.cause == cause for found in gaps for g in found)})
    sections = [
        _section(
            "Runs",
            "Times in milliseconds; a gap is a request's longest one. The definitions are those of docs/benchmarking.md.",
            [_panel("", _runs_table(runs))],
        ),
        _section(
            "Where the time to the first token went",
            "Each bar is the mean of the requests about that percentile.",
            [_panel("", _bars(runs, firsts, FIRST_TOKEN_PARTS))],
        ),
        _section(
            "From the first token to the second",
            "The hand-over, where prefill and decode are apart.",
            [_panel("", _bars(runs, [r.summary.second_token_parts_s for r in runs], SECOND_TOKEN_PARTS))],
        ),
        _section(
            "Gaps by cause",
            "Each request's longest gap, and every gap above the target if one was given. The bar is the sum.",
            [_panel(run.label, _causes_table(run.summary.gaps_by_cause, _longest_sum(runs))) for run in runs],
        ),
        _section(
            "Gaps over time",
            "The same gaps when they ended, in seconds since the run's start. The dashed line is the target.",
            [_panel(run.label, _scatter(run, found, _extremes(gaps))) for run, found in zip(runs, gaps, strict=True)],
            keys=causes,
        ),
        _section(
            "Requests about the longest gap",
            f"A line for each request, in the order of sending, {_ROWS} at most; long gaps in the colour of their cause. Point at a line.",
            [_panel(run.label, _waterfall(run, found)) for run, found in zip(runs, gaps, strict=True)],
            keys=_keys("part", _there(firsts, FIRST_TOKEN_PARTS) | {"decode": "later tokens"}) + causes,
        ),
        _section("The longest gaps", "", [_panel(run.label, _worst(found)) for run, found in zip(runs, gaps, strict=True)]),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body><h1>{escape(title)}</h1><p>{escape(about)}</p>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _gaps_of(run: PageRun) -> list[LongGap]:
    bound_s = None if run.targets.gap_ms is None else run.targets.gap_ms / 1e3
    return [gap for record in run.records if record.measured for gap in long_gaps(record, bound_s)]


# ---- words, keys, tables --------------------------------------------------------------------------------------------------


def _section(title: str, about: str, panels: Iterable[str], keys: str = "") -> str:
    return f'<h2>{escape(title)}</h2><p>{escape(about)}</p>{keys}<div class="side-by-side">{"".join(panels)}</div>'


def _panel(title: str, body: str) -> str:
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<div class="panel">{heading}{body}</div>'


def _class(kind: str, name: str) -> str:
    return f"{kind}-{name.replace(' ', '-').replace('_', '-')}"


def _key(kind: str, name: str) -> str:
    return f'<span class="key {_class(kind, name)}"></span>{escape(name.replace("_", " "))}'


def _keys(kind: str, names: Mapping[str, str]) -> str:
    return '<ul class="keys">' + "".join(f'<li title="{escape(names[name])}">{_key(kind, name)}</li>' for name in names) + "</ul>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Heads and cells are HTML; one that begins with a tag of its own keeps it."""
    head = "".join(name if name.startswith("<th") else f"<th>{name}</th>" for name in heads)
    body = "".join("<tr>" + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return "–" if math.isnan(value) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _runs_table(runs: Sequence[PageRun]) -> str:
    times = (("TTFT", "ttft_s", "ttft_ms"), ("TPOT", "tpot_s", "tpot_ms"), ("gap", "longest_gap_s", "gap_ms"))
    rows = []
    for run in runs:
        s = run.summary
        row = [escape(run.label), f"{s.num_completed} of {s.num_requests}"]
        row.append("–" if s.goodput is None else f"{s.goodput.attainment:.1%}")
        for _, name, limit in times:
            limit_ms, values = getattr(run.targets, limit), getattr(s, name)
            for seconds in (values.p50, values.p95, values.p99):
                missed = limit_ms is not None and seconds * 1e3 > limit_ms
                row.append(f'<td class="missed">{_ms(seconds)}</td>' if missed else _ms(seconds))
        rows.append(row)
    heads = [f"{name} {share}" for name, _, _ in times for share in ("p50", "p95", "p99")]
    return _table(["run", "answered", "kept all", *heads], rows)


def _bars(runs: Sequence[PageRun], found: Sequence[Mapping[str, Mapping[str, float]]], about: Mapping[str, str]) -> str:
    longest = max((sum(parts.values()) for shares in found for parts in shares.values()), default=0.0)
    there = _there(found, about)
    out = []
    for run, shares in zip(runs, found, strict=True):
        for i, (share, parts) in enumerate(shares.items()):
            first = "" if i else " first"
            pieces = "".join(_piece("part", part, seconds, longest) for part, seconds in parts.items() if seconds > 0)
            out.append(
                f'<span class="run{first}">{"" if i else escape(run.label)}</span><span class="share{first}">{share}</span>'
                f'<span class="bar{first}">{pieces}</span><span class="{first}">{_ms(sum(parts.values()))} ms</span>'
            )
    rows = [
        [escape(run.label), share, *(_ms(parts.get(part, math.nan)) for part in there)]
        for run, shares in zip(runs, found, strict=True)
        for share, parts in shares.items()
    ]
    table = f"<details><summary>As a table</summary>{_table(['run', '', *(part.replace('_', ' ') for part in there)], rows)}</details>"
    return f'{_keys("part", there)}<div class="bars">{"".join(out)}</div>{table}' if out else "<p>No request has one.</p>"


def _there(found: Sequence[Mapping[str, Mapping[str, float]]], about: Mapping[str, str]) -> dict[str, str]:
    return {part: about[part] for part in about if any(part in parts for shares in found for parts in shares.values())}


def _piece(kind: str, name: str, seconds: float, longest: float) -> str:
    tip = f"{name.replace('_', ' ')}: {_ms(seconds)} ms"
    return f'<i class="{_class(kind, name)}" style="width:{100 * seconds / longest:.3f}%" title="{tip}"></i>'


def _longest_sum(runs: Sequence[PageRun]) -> float:
    return max((figures.sum_s for run in runs for figures in run.summary.gaps_by_cause.values()), default=0.0) or 1.0


def _causes_table(causes: Mapping[str, CauseFigures], longest: float) -> str:
    rows = [
        [
            f'<td title="{escape(CAUSES[cause])}">{_key("cause", cause)}</td>',
            f"{g.count}",
            f'<td class="plot"><span class="bar">{_piece("cause", cause, g.sum_s, longest)}</span></td>',
            *(_ms(value) for value in (g.sum_s, g.p50_s, g.p99_s, g.max_s)),
        ]
        for cause, g in causes.items()
    ]
    return _table(["cause", "gaps", "", "sum, ms", "p50", "p99", "longest"], rows, "causes") if rows else "<p>There are none.</p>"


def _worst(gaps: Sequence[LongGap]) -> str:
    rows = [
        [
            f"{_ms(gap.gap_s)}",
            f"{gap.ended_s:.2f}",
            f"{gap.request}",
            f"{gap.position}",
            f'<td class="left">{_key("cause", gap.cause)}</td>',
            f'<td class="words">{escape(_told(gap))}</td>',
        ]
        for gap in sorted(gaps, key=lambda gap: gap.gap_s, reverse=True)[:_WORST]
    ]
    return (
        _table(["ms", "at, s", "request", "token", *(f'<th class="words">{name}</th>' for name in ("cause", "its parts, ms"))], rows)
        if rows
        else "<p>There are none.</p>"
    )


def _told(gap: LongGap) -> str:
    parts = sorted(gap.parts_s.items(), key=lambda part: part[1], reverse=True)
    words = ", ".join(f"{cause} {_ms(seconds)}" for cause, seconds in parts if seconds >= 0.0005)
    if gap.decodes or gap.prompt_tokens:
        words += f"; its step: {gap.prompt_tokens} prompt tokens, {gap.decodes} sequences"
    return words + (f"; {gap.steps_missed} steps without it" if gap.steps_missed else "")


# ---- pictures -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Extremes:
    """What all pictures of gaps have in common: when the last ended, and the longest and the shortest, in milliseconds."""

    end_s: float
    low_ms: float
    high_ms: float

    def y(self, ms: float) -> float:
        """Returns the share of the height, on a logarithmic scale."""
        return math.log(max(ms, self.low_ms) / self.low_ms) / math.log(self.high_ms / self.low_ms)


def _extremes(gaps: Sequence[Sequence[LongGap]]) -> _Extremes:
    times = [1e3 * gap.gap_s for found in gaps for gap in found] or [1.0]
    low, high = max(0.1, min(times) / 1.5), max(times) * 1.5
    return _Extremes(max((gap.ended_s for found in gaps for gap in found), default=1.0) * 1.01, low, max(high, low * 4))


def _scatter(run: PageRun, gaps: Sequence[LongGap], scale: _Extremes) -> str:
    shown = sorted(gaps, key=lambda gap: gap.gap_s, reverse=True)[:_POINTS]
    ticks_ms = [m * 10**e for e in range(-1, 6) for m in (1, 2, 5) if scale.low_ms <= m * 10**e <= scale.high_ms]
    rules = "".join(f"M0 {1000 - 1000 * scale.y(ms):.0f}H1000" for ms in ticks_ms)
    drawn = [f'<path class="rule" d="{rules}"/>']
    limit = run.targets.gap_ms
    if limit is not None and scale.low_ms < limit < scale.high_ms:
        drawn.append(f'<path class="target" d="M0 {1000 - 1000 * scale.y(limit):.0f}H1000"/>')
    for cause in CAUSES:
        points = [gap for gap in shown if gap.cause == cause]
        # A line of no length has a round end: a dot that no scale makes an oval.
        dots = "".join(f"M{1000 * g.ended_s / scale.end_s:.1f} {1000 - 1000 * scale.y(1e3 * g.gap_s):.1f}h0" for g in points)
        if dots:
            drawn.append(f'<path class="{_class("cause", cause)}" d="{dots}"/>')
    ys = "".join(f'<span class="tick y" style="bottom:{100 * scale.y(ms):.1f}%">{ms:g} ms</span>' for ms in ticks_ms)
    return _picture(drawn, 260, ys + _seconds(0.0, scale.end_s), f"{len(shown)} gaps over time, by cause")


def _waterfall(run: PageRun, gaps: Sequence[LongGap]) -> str:
    records = [r for r in run.records if r.measured and r.times_s]
    if not records:
        return "<p>There are none.</p>"
    worst = max(gaps, key=lambda gap: gap.gap_s, default=None)
    centre = next((i for i, r in enumerate(records) if worst is not None and r.index == worst.request), 0)
    begin = max(0, min(centre - _ROWS // 2, len(records) - _ROWS))
    rows = records[begin : begin + _ROWS]
    start, end = min(r.sent_s for r in rows), max(r.times_s[-1] for r in rows)
    of_request: dict[int, list[LongGap]] = {}
    for gap in gaps:
        of_request.setdefault(gap.request, []).append(gap)
    scale = 1000 / max(1e-9, end - start)
    drawn = []
    for row, record in enumerate(rows):
        found = of_request.get(record.index, [])
        bars = [_rect("part", part, at - start, seconds, row, scale) for part, at, seconds in _spans(record)]
        bars += [_rect("cause", gap.cause, gap.ended_s - gap.gap_s - start, gap.gap_s, row, scale, _LEAST_WIDTH) for gap in found]
        drawn.append(f"<g><title>{escape(_line(record, found))}</title>{''.join(bars)}</g>")
    note = f"{len(rows)} of {len(records)} requests, from {start:.2f} to {end:.2f} s"
    return f"<p>{note}</p>" + _picture(drawn, len(rows) * _ROW_PX, _seconds(start, end), note, rows=len(rows))


def _spans(record: RequestRecord) -> list[tuple[str, float, float]]:
    """Returns (part, begin, length) in seconds, one after the other."""
    spans, at = [], record.sent_s
    for part, seconds in first_token_parts(record).items():
        spans.append((part, at, seconds))
        at += seconds
    return [*spans, ("decode", record.times_s[0], record.times_s[-1] - record.times_s[0])]


def _line(record: RequestRecord, gaps: Sequence[LongGap]) -> str:
    parts = ", ".join(f"{part} {_ms(seconds)}" for part, seconds in first_token_parts(record).items())
    told = "; ".join(f"{_ms(gap.gap_s)} ms before token {gap.position}: {gap.cause}" for gap in gaps[:3])
    return f"request {record.index}: {record.prompt_tokens} + {record.output_tokens} tokens; {parts} ms; {told}"


def _rect(kind: str, name: str, begin: float, length: float, row: int, scale: float, least: float = 0.0) -> str:
    x, width = begin * scale, max(least, length * scale)
    return f'<rect class="{_class(kind, name)}" x="{x:.1f}" y="{row + 0.1}" width="{width:.2f}" height="0.8"/>' if width else ""


def _seconds(start: float, end: float) -> str:
    """Returns marks of 1, 2 or 5 times a power of ten, some five of them."""
    about = max(1e-3, (end - start) / 5)
    power = 10 ** math.floor(math.log10(about))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= about)
    places = [step * i for i in range(math.ceil(start / step), math.floor(end / step) + 1)]
    return "".join(f'<span class="tick x" style="left:{100 * (at - start) / (end - start):.2f}%">{at:g} s</span>' for at in places)


def _picture(drawn: Sequence[str], height: int, ticks: str, about: str, rows: int = 0) -> str:
    box, kind = (f"0 0 1000 {rows}", " rows") if rows else ("0 0 1000 1000", "")
    return (
        f'<div class="plot-area{kind}"><svg viewBox="{box}" preserveAspectRatio="none" height="{height}" role="img" '
        f'aria-label="{escape(about)}">{"".join(drawn)}</svg>{ticks}</div>'
    )
