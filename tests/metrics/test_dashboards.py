"""The dashboard and the rules ask for what the code exports, by names, labels and values; every alert has its place in the runbook."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from promql import Reads, reads_of, result_labels

from kv_transfer import telemetry
from kv_transfer.telemetry import Direction
from router.request.targets import Reason
from twostep import errors
from twostep.metrics import catalogue, dashboard
from twostep.metrics.family import Family, MetricKind
from twostep.metrics.registry import MetricsRegistry
from twostep.request_class import RequestClass
from twostep.settings.readers import KV_TRANSPORTS

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "helm" / "files" / "grafana" / "twostep.json"
RULES = [ROOT / "helm" / "files" / "prometheus" / name for name in ("rules.yaml", "alerts.yaml")]
RUNBOOK = ROOT / "docs" / "runbook.md"

# Labels that the scraper adds.
TARGET_LABELS = {"namespace", "job", "instance"}
STATUSES = {status.grpc for status in errors.STATUS.values()} | {"OK", "UNKNOWN"}
ROLES = {"router", "prefill", "decode"}
# Values that a label can have. Other labels are not matched by value anywhere.
VALUES: dict[tuple[str, str], set[str]] = {
    ("twostep_requests_total", "status"): STATUSES,
    ("twostep_trace_spans_total", "status"): {"exported", "lost"},
    ("twostep_kv_transfers_total", "status"): {"ok", "failed"},
    ("twostep_router_workers", "worker_role"): {"prefill", "decode"},
    ("twostep_process_info", "role"): ROLES,
    ("twostep_num_requests_waiting", "role"): ROLES,
    ("twostep_kv_transfer_failures_total", "reason"): {"cancelled"} | {telemetry.reason_of(kind("")) for kind in errors.STATUS},
    ("twostep_kv_transfer_retries_total", "reason"): {"data_loss"},
    ("twostep_autoscaler_limited_total", "reason"): {"max_workers", "max_cost", "surge", "cool_down", "other"},
    ("twostep_autoscaler_pod_patches_total", "status"): {"ok", "failed"},
    ("twostep_requests_refused_total", "reason"): {reason.value for reason in Reason},
}
EVERYWHERE: dict[str, set[str]] = {
    "direction": {direction.value for direction in Direction},
    "transport": {*KV_TRANSPORTS, "none"},
    "request_class": {each.name.lower() for each in RequestClass},
}


@functools.cache
def exported() -> dict[str, set[str]]:
    """Labels of every series that a process may export, by its name there."""
    found: dict[str, set[str]] = {}
    for family in catalogue.FAMILIES:
        found |= {name: set(family.labels) | more for name, more in _series(family)}
    registry = MetricsRegistry()
    for metric in text_string_to_metric_families(generate_latest(registry.collectors).decode()):
        found |= {sample.name: set(sample.labels) for sample in metric.samples}
    return found


def _series(family: Family) -> list[tuple[str, set[str]]]:
    if family.kind is not MetricKind.HISTOGRAM:
        return [(family.name, set())]
    return [(f"{family.name}_bucket", {"le"}), (f"{family.name}_sum", set()), (f"{family.name}_count", set())]


def groups() -> list[dict[str, Any]]:
    return [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]


@functools.cache
def recorded() -> dict[str, set[str]]:
    """Labels of what rules record."""
    found = {}
    for rule in (rule for group in groups() for rule in group["rules"] if "record" in rule):
        labels = result_labels(rule["expr"])
        assert labels is not None, rule["record"]
        found[rule["record"]] = labels
    return found


ALERTS = {rule["alert"]: rule for group in groups() for rule in group["rules"] if "alert" in rule}
PANELS: list[dict[str, Any]] = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
QUERIES = {f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]}
RULE_EXPRESSIONS = {rule.get("alert") or rule["record"]: rule["expr"] for group in groups() for rule in group["rules"]}


def plain(expression: str) -> str:
    """As Grafana sends it."""
    filled = expression.replace("$__rate_interval", "1m")
    for name in ("namespace", "job", "role"):
        filled = filled.replace(f"${name}", ".*")
    assert "$" not in filled, expression
    return filled


def check(reads: Reads, known: dict[str, set[str]]) -> None:
    for metric in reads.metrics:
        assert metric in known, f"{metric} is exported by nobody"
    for metric, label in [(metric, label) for metric, label, _ in reads.matches] + reads.labels:
        assert label in known[metric] | TARGET_LABELS, f"{metric} has no label {label}"
    for metric, label, value in reads.matches:
        if label in TARGET_LABELS or value == ".*":
            continue
        allowed = VALUES.get((metric, label), EVERYWHERE.get(label))
        assert allowed is not None, f"say which values {label} of {metric} has"
        for each in value.split("|"):
            assert each in allowed, f"{label} of {metric} is never {each}"


@pytest.mark.parametrize("expression", [*map(plain, QUERIES.values()), *RULE_EXPRESSIONS.values()], ids=[*QUERIES, *RULE_EXPRESSIONS])
def test_panels_and_rules_ask_for_what_is_exported(expression: str) -> None:
    check(reads_of(expression), exported() | recorded())


def test_the_check_finds_what_is_wrong() -> None:
    known = exported()
    for wrong in (
        "twostep_request_total",
        "twostep_time_to_first_token_seconds",
        "sum by (rôle) (twostep_worker_ready)",
        "sum by (transport) (rate(twostep_requests_total[5m]))",
        'twostep_requests_total{state="OK"}',
        'twostep_requests_total{status="FINE"}',
        'twostep_kv_transfers_total{direction="fetched"}',
        "rate(twostep_requests_total[5m]",
    ):
        with pytest.raises((AssertionError, ValueError)):
            check(reads_of(wrong), known)
    check(reads_of('sum by (le, request_class) (rate(twostep_request_queue_time_seconds_bucket{request_class="batch"}[5m]))'), known)


def labels_of(expression: str) -> set[str]:
    """Labels of what it gives, beside the target's."""
    labels = result_labels(expression)
    known = exported() | recorded()
    return set.intersection(*(known[metric] for metric in reads_of(expression).metrics)) if labels is None else labels - TARGET_LABELS


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_legends_name_labels_that_are_there(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        labels = labels_of(plain(target["expr"]))
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert named <= labels | TARGET_LABELS, f"{panel['title']}: {named - labels} are gone"
        # Labels that tell the series apart must be said, or they all look alike.
        assert not labels or named, panel["title"]


# ---- the dashboard ---------------------------------------------------------------------------------------------------------


def test_the_committed_dashboard_is_what_the_code_makes() -> None:
    assert json.loads(DASHBOARD.read_text()) == dashboard.dashboard(), (
        "run: python -m twostep.metrics.dashboard > helm/files/grafana/twostep.json"
    )


def test_the_dashboard_is_one_that_grafana_provisions() -> None:
    made = json.loads(DASHBOARD.read_text())
    assert [variable["name"] for variable in made["templating"]["list"]] == ["datasource", "namespace", "job", "role"]
    ids = [panel["id"] for panel in made["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] >= 0
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies on another"
        taken |= cells


def test_every_metric_of_requests_and_hand_overs_is_on_the_dashboard() -> None:
    """But for a few that only explain others."""
    shown = {
        metric.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for q in QUERIES.values()
        for metric in reads_of(plain(q)).metrics
    }
    # Which workers are refused has an alert, and `twostep status` says which and why.
    left_out = """
        twostep_process_info twostep_request_attempts_total twostep_router_refused_workers twostep_engine_steps_total
        twostep_worker_sequences twostep_worker_graph_bytes twostep_spec_decode_draft_model_failed
        twostep_worker_streams twostep_kv_stored_objects twostep_kv_transfers_total twostep_kv_transfer_chunks_total
        twostep_kv_transfer_blocks_total twostep_kv_transfer_queue_seconds twostep_kv_transfer_copy_seconds
        twostep_kv_transfer_scatter_seconds twostep_kv_transfer_duration_seconds twostep_kv_probes_total
    """
    names = {family.name for family in catalogue.FAMILIES}
    assert set(left_out.split()) <= names
    assert names - shown - set(left_out.split()) == set(), "put it on the dashboard, or say here that it stays off"


# ---- alerts ----------------------------------------------------------------------------------------------------------------


def test_every_alert_says_what_it_is_and_where_to_read_on() -> None:
    headings = re.findall(r"^### (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(ALERTS), "one heading for each alert, and no other"
    for name, rule in ALERTS.items():
        assert name.startswith("Twostep")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"


@pytest.mark.parametrize("rule", ALERTS.values(), ids=ALERTS)
def test_what_an_alert_says_of_its_series_is_there(rule: dict[str, Any]) -> None:
    told = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert told <= labels_of(rule["expr"]) | TARGET_LABELS


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Prometheus")
def test_alerts_fire_when_they_should() -> None:
    """promtool's own unit tests of rules, over made-up series."""
    for command in (["check", "rules", *map(str, RULES)], ["test", "rules", str(Path(__file__).parent / "alerts_test.yaml")]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
