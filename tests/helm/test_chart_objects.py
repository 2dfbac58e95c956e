"""The chart over a matrix of values: what Kubernetes takes, and whether its objects fit each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from chart_cases import CASES, EVERYTHING, SWITCHES
from chart_checks import CHECKS, endings, hardened, matches, named, probes, quantity, references, resources, scaling, selectors, services
from chart_render import Chart, merged, render
from chart_schemas import NEWEST, OLDEST, VERSIONS, faults
from chart_security import restricted

# Profiles that need more than the `restricted` level say so.
NOT_RESTRICTED = {"rdma", "host-path", "profile-mixed-tls"}


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_the_objects(case: str) -> None:
    profile, values = CASES[case]
    versions = VERSIONS if case == "everything" else (OLDEST, NEWEST)
    assert [fault for object in render(values, profile).objects for version in versions for fault in faults(object, version)] == []


@pytest.mark.parametrize("case", CASES)
def test_the_objects_fit_each_other(case: str) -> None:
    profile, values = CASES[case]
    chart = render(values, profile)
    assert [f"{check.__name__}: {fault}" for check in CHECKS for fault in check(chart)] == []


@pytest.mark.parametrize("case", CASES)
def test_pods_keep_the_restricted_level(case: str) -> None:
    profile, values = CASES[case]
    found = [fault for pod in render(values, profile).pods() for fault in restricted(pod)]
    assert bool(found) is (case in NOT_RESTRICTED), found


def test_shared_memory_is_counted_on_top() -> None:
    """What /dev/shm holds counts against whoever wrote it: the worker its ring, the raylet its object store."""
    chart = render({"workers": {"sharedMemory": "2Gi"}, "ray": {"objectStore": "10Gi"}})
    for role in ("prefill", "decode"):
        pod = chart.pod(role)
        limits = {container["name"]: quantity(container["resources"]["limits"]["memory"]) for container in pod.spec["containers"]}
        assert limits == {"worker": (64 + 2) << 30, "raylet": (2 + 10) << 30}
        shm = next(volume for volume in pod.spec["volumes"] if volume["name"] == "shm")
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{12 << 10}Mi"}
        for container in pod.spec["containers"]:
            assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


def _first(chart: Chart, kind: str) -> Any:
    return chart.of(kind)[0]


# Each check finds what it is there for: (check, what is done to a chart that is right).
DAMAGES: dict[str, tuple[Callable[[Chart], Any], Callable[[Chart], Any]]] = {
    "a name twice": (named, lambda chart: _first(chart, "Service")["metadata"].update(chart.of("Service")[1]["metadata"])),
    "a selector of other pods": (selectors, lambda chart: _first(chart, "Deployment")["spec"]["selector"]["matchLabels"].clear()),
    "a budget of nobody": (selectors, lambda chart: _first(chart, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].update(a="b")),
    "a port of another name": (services, lambda chart: _first(chart, "Service")["spec"]["ports"][0].update(targetPort="other")),
    "a trigger elsewhere": (
        services,
        lambda chart: _first(chart, "ScaledObject")["spec"]["triggers"][0]["metadata"].update(scalerAddress="nobody.serving.svc.x:50081"),
    ),
    "a probe of the wrong port": (
        probes,
        lambda chart: chart.pod("router").spec["containers"][0]["livenessProbe"]["grpc"].update(port=50051),
    ),
    "a probe of no service": (
        probes,
        lambda chart: chart.pod("decode").spec["containers"][0]["readinessProbe"]["grpc"].update(service="x"),
    ),
    "a Secret that nobody makes": (
        references,
        lambda chart: next(each for each in chart.pod("router").spec["volumes"] if "secret" in each)["secret"].update(secretName="x"),
    ),
    "shared memory beyond the limit": (
        resources,
        lambda chart: next(each for each in chart.pod("decode").spec["volumes"] if each["name"] == "shm")["emptyDir"].update(
            sizeLimit="1Ti"
        ),
    ),
    "killed before it has drained": (endings, lambda chart: chart.pod("decode").spec.update(terminationGracePeriodSeconds=30)),
    "replicas of two owners": (scaling, lambda chart: chart.one("Deployment", "prefill")["spec"].update(replicas=1)),
    "a root file system to write to": (
        hardened,
        lambda chart: chart.pod("router").spec["containers"][0]["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    "a token for nothing": (hardened, lambda chart: chart.pod("decode").spec.update(automountServiceAccountToken=True)),
    "a capability": (
        lambda chart: restricted(chart.pod("decode")),
        lambda chart: chart.pod("decode").spec["containers"][0]["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
    ),
    "an unknown field": (
        lambda chart: [fault for object in chart.objects for fault in faults(object, NEWEST)],
        lambda chart: _first(chart, "ScaledObject")["spec"].update(minReplicas=1),
    ),
}

# Lists whose elements must differ by what Kubernetes tells them apart by: (values, the kind, where the list is, an element that is one too
# many).
LISTS: dict[str, tuple[str, str, tuple[str | int, ...], dict[str, Any]]] = {
    "rule groups": ("monitoring", "PrometheusRule", ("spec", "groups"), {"name": "twostep-slo", "rules": []}),
    "containers": ("", "Deployment", ("spec", "template", "spec", "containers"), {"name": "router"}),
    "volumes": ("", "Deployment", ("spec", "template", "spec", "volumes"), {"name": "tmp", "emptyDir": {}}),
    "mounts": (
        "", "Deployment", ("spec", "template", "spec", "containers", 0, "volumeMounts"), {"name": "models", "mountPath": "/tmp"},
    ),
    "variables": ("", "Deployment", ("spec", "template", "spec", "containers", 0, "env"), {"name": "HOME", "value": "/root"}),
    "ports": ("", "Deployment", ("spec", "template", "spec", "containers", 0, "ports"), {"name": "again", "containerPort": 8000}),
    "names of ports": ("", "Deployment", ("spec", "template", "spec", "containers", 0, "ports"), {"name": "http", "containerPort": 1}),
    "ports of a Service": ("", "Service", ("spec", "ports"), {"name": "again", "port": 8000, "protocol": "TCP"}),
    "variables of Ray's head": (
        "kuberay", "RayCluster", ("spec", "headGroupSpec", "template", "spec", "containers", 0, "env"), {"name": "HOME", "value": "/root"},
    ),
    "headers": (
        "gateway", "HTTPRoute", ("spec", "rules", 0, "matches"),
        {"headers": [{"name": "a", "value": "1"}, {"name": "a", "value": "2"}]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("case", LISTS)
def test_what_stands_twice_in_a_list_is_found(case: str, version: str) -> None:
    """JSON schemas do not know of it; API servers do."""
    switch, kind, where, more = LISTS[case]
    found = render(SWITCHES[switch] if switch else {}).of(kind)
    object = copy.deepcopy(next((each for each in found if each["metadata"]["name"].endswith("-router")), found[0]))
    assert list(faults(object, version)) == []
    place: Any = object
    for step in where:
        place = place[step]
    place.append(more)
    assert any(" twice, by " in fault for fault in faults(object, version))


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checks_find_damage(damage: str) -> None:
    check, harm = DAMAGES[damage]
    chart = Chart(tuple(copy.deepcopy(render(CASES["autoscaling"][1]).objects)))
    assert list(check(chart)) == []
    harm(chart)
    assert list(check(chart)) != []


def test_long_names_stay_names() -> None:
    name = "a-name-that-somebody-found-good-and-is-far-too-long-for-a-service"
    for mode in ("chart", "kuberay"):
        chart = render(merged(EVERYTHING, {"fullnameOverride": name, "ray": {"mode": mode}}))
        assert [fault for check in (named, selectors, services) for fault in check(chart)] == []


@pytest.mark.parametrize("case", ["defaults", "kuberay"])
def test_rays_head_has_an_address_that_stays(case: str) -> None:
    """Raylets look it up once: behind a headless Service a new head would be one that nobody finds."""
    chart = render(CASES[case][1])
    service = chart.one("Service", "-ray-head")
    assert service["spec"].get("clusterIP") != "None"
    assert matches({"matchLabels": service["spec"]["selector"]}, chart.pod("ray-head").metadata["labels"])
    raylet = next(container for container in chart.pod("decode").containers() if container["name"] == "raylet")
    assert {"name": "TWOSTEP_RAY_ADDRESS", "value": "demo-twostep-ray-head:6379"} in raylet["env"]
