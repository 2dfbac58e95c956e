"""Tests of what is scraped, and of what the chart's rules and dashboard ask for."""

from __future__ import annotations

import json

import pytest
import yaml
from chart_cases import CASES, SWITCHES
from chart_checks import lasting, matches
from chart_processes import processes
from chart_render import ROOT, Chart, merged, render


def scraped(chart: Chart) -> list[tuple[str, int]]:
    """Component and port of everything that the ServiceMonitor has scraped, as the operator finds it: a target for each Service and pod."""
    monitor = chart.of("ServiceMonitor")[0]["spec"]
    found = []
    for service in chart.of("Service"):
        if not matches(monitor["selector"], service["metadata"]["labels"]):
            continue
        for endpoint in monitor["endpoints"]:
            for port in service["spec"]["ports"]:
                if port["name"] == endpoint["port"]:
                    pods = [pod for pod in lasting(chart) if matches({"matchLabels": service["spec"]["selector"]}, pod.metadata["labels"])]
                    found += [(pod.component, pod.ports()[port["targetPort"]]) for pod in pods]
    return found


@pytest.mark.parametrize("case", ["autoscaling", "colocated"])
def test_each_metrics_port_is_scraped_once(case: str) -> None:
    chart = render(merged(CASES[case][1], SWITCHES["monitoring"]))
    served = []
    for process in processes(chart):
        if hasattr(process.config, "metrics_port"):
            first = process.config.grpc_port
            served.append((process.pod.component, first + 2 if process.config.metrics_port is None else process.config.metrics_port))
    assert sorted(scraped(chart)) == sorted(served)
    # Rules and dashboards tell processes apart by job: the component.
    assert chart.of("ServiceMonitor")[0]["spec"]["jobLabel"] == "app.kubernetes.io/component"


def test_annotations_say_where_metrics_are() -> None:
    chart = render(SWITCHES["monitoring"])
    for pod in lasting(chart):
        annotations = pod.metadata.get("annotations", {})
        if "metrics" in pod.ports():
            assert annotations["prometheus.io/port"] == str(pod.ports()["metrics"])
        else:
            assert "prometheus.io/scrape" not in annotations


def test_rules_and_dashboard_arrive_whole() -> None:
    """tests/metrics compares the files with what the code exports."""
    chart = render(SWITCHES["monitoring"])
    originals = [yaml.safe_load((ROOT / "helm/files/prometheus" / name).read_text())["groups"] for name in ("rules.yaml", "alerts.yaml")]
    assert chart.of("PrometheusRule")[0]["spec"]["groups"] == [group for groups in originals for group in groups]
    dashboard = chart.one("ConfigMap", "-dashboard")
    assert json.loads(dashboard["data"]["twostep.json"]) == json.loads((ROOT / "helm/files/grafana/twostep.json").read_text())
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
