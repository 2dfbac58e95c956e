"""Grafana's dashboard: `python -m twostep.metrics.dashboard > helm/files/grafana/twostep.json`; a test compares the two.

Panels stand in rows of a 24-column grid.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from twostep.metrics.dashboard_panels import PANELS

_COLUMNS = 24
# Width and height of what shows lines, and of a number.
_SIZE, _NUMBER_SIZE = (8, 8), (3, 4)
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OF_DEPLOYMENT = 'namespace=~"$namespace", job=~"$job"'
_OF_ROLE = f'{_OF_DEPLOYMENT}, role=~"$role"'


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    # Where the next panel goes, and the height of those beside it.
    x = y = height = 0
    for head, *queries in _blocks():
        number = len(panels) + 1
        if head.startswith("= "):
            x, y, height = 0, y + height, 0
            row = {"id": number, "type": "row", "title": head[2:], "collapsed": False, "gridPos": _at(0, y, _COLUMNS, 1), "panels": []}
            panels.append(row)
            y += 1
            continue
        kind, _, rest = head.partition(" ")
        title, what, about = rest.split(" | ")
        unit, *options = what.split(" ")
        width, tall = _NUMBER_SIZE if kind == "number" else _SIZE
        width = next((int(each.removeprefix("width=")) for each in options if each.startswith("width=")), width)
        if x + width > _COLUMNS:
            x, y = 0, y + height
        height = tall
        panels.append(
            {
                "id": number,
                "type": "stat" if kind == "number" else "timeseries",
                "title": title,
                "description": about,
                "datasource": _DATASOURCE,
                "gridPos": _at(x, y, width, height),
                **_panel(kind, unit, options, [query for line in queries for query in _queries(line)]),
            }
        )
        x += width
    return {
        "uid": "twostep",
        "title": "Twostep",
        "description": "Disaggregated LLM serving: requests, latency, prefill and decode, KV, hand-overs, targets, health.",
        "tags": ["twostep", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _blocks() -> Iterator[list[str]]:
    """Yields each row and each panel of the list: its first line, then those of its queries, each whole."""
    block: list[str] = []
    for line in PANELS.splitlines():
        text = line.strip()
        if line.startswith("    "):
            block[-1] += f" {text}"
        elif line.startswith("  "):
            block.append(text)
        else:
            if block:
                yield block
            block = [text]
    yield block


def _queries(line: str) -> Iterator[tuple[str, str]]:
    """Yields PromQL and its legend."""
    if line.startswith("percentiles "):
        histogram = line.removeprefix("percentiles ")
        for share in (0.5, 0.95, 0.99):
            yield from _queries(f"p{share * 100:g} = histogram_quantile({share:g}, sum by (le) (rate({histogram}_bucket{{S}}[W])))")
        return
    legend, _, query = line.rpartition(" = ")
    yield query.replace("{S", "{" + _OF_DEPLOYMENT).replace("{R", "{" + _OF_ROLE).replace("[W]", "[$__rate_interval]"), legend


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(kind: str, unit: str, options: list[str], queries: list[tuple[str, str]]) -> dict[str, Any]:
    steps = [step.split(":") for option in options if ":" in option for step in option.split(",")] or [["0", "blue"]]
    colours = [{"color": colour, "value": float(value) or None} for value, colour in steps]
    defaults: dict[str, Any] = {"unit": unit, "min": 0, "thresholds": {"mode": "absolute", "steps": colours}}
    for option in options:
        if option.startswith("max="):
            defaults["max"] = float(option.removeprefix("max="))
    if kind == "number":
        defaults["color"] = {"mode": "thresholds"}
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        shown: dict[str, Any] = {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area", "textMode": "auto"}
    else:
        fill = {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}} if kind == "areas" else {"fillOpacity": 8}
        defaults["custom"] = {"drawStyle": "line", "lineWidth": 1, "showPoints": "never", "spanNulls": False, **fill}
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
        shown = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _DATASOURCE, "expr": query, "legendFormat": legend, "range": True, "instant": False}
            for i, (query, legend) in enumerate(queries)
        ],
        "options": shown,
    }


def _variables() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1, "hide": 0}
    ]
    for name, label, query in (
        ("namespace", "Namespace", "label_values(twostep_process_info, namespace)"),
        ("job", "Job", 'label_values(twostep_process_info{namespace=~"$namespace"}, job)'),
        ("role", "Role", f"label_values(twostep_process_info{{{_OF_DEPLOYMENT}}}, role)"),
    ):
        found.append(
            {
                "name": name,
                "label": label,
                "type": "query",
                "datasource": _DATASOURCE,
                "query": {"query": query, "refId": name},
                "definition": query,
                "refresh": 2,
                "sort": 1,
                "multi": True,
                "includeAll": True,
                # Also where there is no such label.
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
                "hide": 0,
            }
        )
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n")
