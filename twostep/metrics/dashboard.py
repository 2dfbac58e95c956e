"""Grafana's dashboard: `python -m twostep.metrics.dashboard > helm/files/grafana/twostep.json`; a test compares the two.

Panels stand in rows of a 24-column grid.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from twostep.metrics.dashboard_panels import ROWS
from twostep.metrics.panel import Panel, S

_COLUMNS = 24
_HEIGHT, _STAT_HEIGHT = 8, 4
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": _at(0, y, _COLUMNS, 1), "panels": []}
        )
        y, x, height = y + 1, 0, 0
        for panel in row:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + height
            height = _STAT_HEIGHT if panel.stat else _HEIGHT
            panels.append(_panel(panel, len(panels) + 1, _at(x, y, panel.width, height)))
            x += panel.width
        y += height
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


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, number: int, at: dict[str, int]) -> dict[str, Any]:
    steps = [{"color": colour, "value": None if at == 0 else at} for at, colour in panel.thresholds] or [{"color": "blue", "value": None}]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    made: dict[str, Any] = {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _DATASOURCE, "expr": query, "legendFormat": legend, "range": True, "instant": False}
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }
    if panel.stat:
        defaults["color"] = {"mode": "thresholds"}
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        made["options"] = {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area", "textMode": "auto"}
    else:
        fill = {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}} if panel.stack else {"fillOpacity": 8}
        defaults["custom"] = {"drawStyle": "line", "lineWidth": 1, "showPoints": "never", "spanNulls": False, **fill}
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
        made["options"] = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    return made


def _variables() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1, "hide": 0}
    ]
    for name, label, query in (
        ("namespace", "Namespace", "label_values(twostep_process_info, namespace)"),
        ("job", "Job", 'label_values(twostep_process_info{namespace=~"$namespace"}, job)'),
        ("role", "Role", f"label_values(twostep_process_info{{{S}}}, role)"),
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
