"""NetworkPolicies, evaluated as a cluster would: who reaches whom, on which port."""

from __future__ import annotations

from typing import Any

import pytest
from chart_cases import CASES, SWITCHES
from chart_checks import lasting, matches
from chart_processes import processes
from chart_render import NAMESPACE, Chart, Object, merged, render

from kv_transfer.ray.node import RayPorts

RESTRICTED_ROUTERS = {"networkPolicy": {"routerFrom": [{"namespaceSelector": {"matchLabels": {"team": "web"}}}]}}
CHART_VALUES = merged(SWITCHES["autoscaling"], SWITCHES["tls-job"], RESTRICTED_ROUTERS)

OWN = {"kubernetes.io/metadata.name": NAMESPACE}
# Pods of others: labels of their namespace, their own labels.
STRANGERS: dict[str, tuple[Object, Object]] = {
    "neighbour": (OWN, {"app": "other"}),
    "web": ({"kubernetes.io/metadata.name": "web", "team": "web"}, {}),
    "keda": ({"kubernetes.io/metadata.name": "keda"}, {"app": "keda-operator"}),
    "prometheus": ({"kubernetes.io/metadata.name": "monitoring"}, {}),
    "other release": (
        OWN,
        {"app.kubernetes.io/part-of": "twostep", "app.kubernetes.io/instance": "x", "app.kubernetes.io/component": "router"},
    ),
}


def reaches(chart: Chart, source: str, target: str, port: int) -> bool:
    """`source`: a component of the chart, or one of STRANGERS."""
    namespace, labels = STRANGERS.get(source) or (OWN, chart.pod(source).metadata["labels"])
    pod = chart.pod(target)
    policies = [policy["spec"] for policy in chart.of("NetworkPolicy") if matches(policy["spec"]["podSelector"], pod.metadata["labels"])]
    policies = [policy for policy in policies if "Ingress" in policy["policyTypes"]]
    if not policies:
        return True
    rules = [rule for policy in policies for rule in policy.get("ingress", [])]
    return any(_ports(rule, port, pod.ports()) and _peers(rule, namespace, labels) for rule in rules)


def _ports(rule: Object, port: int, names: dict[str, int]) -> bool:
    def has(each: Object) -> bool:
        first: Any = each["port"]
        first = names[first] if isinstance(first, str) else first
        return bool(first <= port <= each.get("endPort", first))

    return "ports" not in rule or any(map(has, rule["ports"]))


def _peers(rule: Object, namespace: Object, labels: Object) -> bool:
    def has(peer: Object) -> bool:
        assert peer.keys() <= {"namespaceSelector", "podSelector"}, peer
        there = matches(peer["namespaceSelector"], namespace) if "namespaceSelector" in peer else namespace == OWN
        return there and matches(peer.get("podSelector", {}), labels)

    return not rule.get("from") or any(map(has, rule["from"]))


FIRST, LAST = RayPorts().first, RayPorts().last
YES = [
    ("router", "prefill", 50061), ("router", "decode", 50071), ("router", "redis", 6379),
    ("decode", "prefill", 50061), ("prefill", "decode", 50071), ("decode", "decode", 50071),
    ("autoscaler", "prefill", 50061), ("autoscaler", "redis", 6379), ("keda", "autoscaler", 50081),
    ("prefill", "redis", 6379), ("decode", "redis", 6379), ("ray-head", "redis", 6379),
    ("decode", "ray-head", 6379), ("prefill", "ray-head", FIRST), ("ray-head", "decode", FIRST), ("ray-head", "decode", LAST),
    ("prefill", "decode", LAST), ("test", "router", 8000), ("test", "router", 50051), ("web", "router", 8000), ("web", "router", 50051),
    ("prometheus", "router", 50053), ("prometheus", "prefill", 50063), ("prometheus", "decode", 50073), ("prometheus", "autoscaler", 50083),
]  # fmt: skip
NO = [
    ("neighbour", "prefill", 50061), ("neighbour", "redis", 6379), ("neighbour", "ray-head", 6379), ("neighbour", "router", 8000),
    ("neighbour", "autoscaler", 50081), ("other release", "decode", 50071), ("other release", "redis", 6379),
    ("web", "decode", 50071), ("web", "autoscaler", 50081), ("prometheus", "decode", 50071), ("prometheus", "redis", 6379),
    ("keda", "decode", 50071), ("keda", "router", 8000), ("test", "redis", 6379), ("test", "prefill", 50061), ("test", "ray-head", 6379),
    ("router", "ray-head", 6379), ("router", "decode", FIRST), ("router", "autoscaler", 50081), ("decode", "autoscaler", 50081),
    ("autoscaler", "ray-head", 6379), ("autoscaler", "decode", FIRST), ("prefill", "decode", LAST + 1), ("prefill", "router", 50051),
    ("redis", "decode", 50071), ("neighbour", "test", 80), ("router", "make-tls", 80), ("neighbour", "make-secrets", 80),
]  # fmt: skip


def test_pods_are_reached_by_those_they_serve_and_by_nobody_else() -> None:
    chart = render(CHART_VALUES)
    assert [asked for asked in YES if not reaches(chart, *asked)] == []
    assert [asked for asked in NO if reaches(chart, *asked)] == []


def test_routers_are_open_where_nobody_says_who_may_ask() -> None:
    assert reaches(render({}), "neighbour", "router", 8000)
    assert not reaches(render({}), "neighbour", "decode", 50071)


@pytest.mark.parametrize("case", ["defaults", "kuberay", "colocated", "tls", "no-ray", "names", "autoscaling"])
def test_every_pod_is_under_some_policy(case: str) -> None:
    chart = render(CASES[case][1])
    for pod in chart.pods():
        assert any(matches(policy["spec"]["podSelector"], pod.metadata["labels"]) for policy in chart.of("NetworkPolicy")), pod.name


@pytest.mark.parametrize("case", ["defaults", "ray-sizes", "kuberay"])
def test_ports_of_ray_are_those_its_nodes_take(case: str) -> None:
    chart = render(CASES[case][1])
    found = [process.config.ports for process in processes(chart) if process.module == "kv_transfer.ray.node"]
    assert found
    for ports in found:
        for source, target in (("decode", "prefill"), ("ray-head", "prefill"), ("prefill", "ray-head")):
            assert reaches(chart, source, target, ports.first)
            assert reaches(chart, source, target, ports.last)
            assert not reaches(chart, source, target, ports.last + 1)
            assert not reaches(chart, source, target, ports.first - 1)


def test_a_head_elsewhere_reaches_the_raylets_and_nothing_else() -> None:
    chart = render(CASES["ray-elsewhere"][1])
    assert reaches(chart, "web", "decode", FIRST)
    assert reaches(chart, "web", "prefill", LAST)
    assert not reaches(chart, "web", "decode", 50071)
    assert not reaches(chart, "neighbour", "decode", FIRST)


def test_every_worker_of_one_pod_is_reached() -> None:
    chart = render(CASES["colocated"][1])
    grpc = [process.config.grpc_port for process in processes(chart) if process.module in ("prefill_worker", "decode_worker")]
    assert len(grpc) == 4
    for port in grpc:
        assert reaches(chart, "router", "colocated", port)
        assert reaches(chart, "prometheus", "colocated", port + 2)
        assert not reaches(chart, "neighbour", "colocated", port)


def test_egress_leaves_names_and_the_release() -> None:
    values = CASES["network-policies"][1]
    chart = render(merged(values, SWITCHES["autoscaling"], SWITCHES["tls-job"]))
    bound = [policy["spec"] for policy in chart.of("NetworkPolicy") if "Egress" in policy["spec"]["policyTypes"]]
    assert len(bound) == 1
    held = {pod.component for pod in chart.pods() if matches(bound[0]["podSelector"], pod.metadata["labels"])}
    # Those that are not held ask the API server, whose address no chart knows.
    assert {pod.component for pod in chart.pods()} - held == {"autoscaler", "make-tls", "make-secrets"}
    names, release, more = bound[0]["egress"]
    assert {(each["protocol"], each["port"]) for each in names["ports"]} == {("UDP", 53), ("TCP", 53)}
    for pod in lasting(chart):
        assert matches(release["to"][0]["podSelector"], pod.metadata["labels"])
    assert more == values["networkPolicy"]["extraEgress"][0]
