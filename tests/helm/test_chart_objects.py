"""The chart over a matrix of values: what Kubernetes takes, and whether its objects fit each other."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from chart_cases import CASES, EVERYTHING, SWITCHES
from chart_checks import CHECKS, endings, hardened, matches, named, probes, quantity, references, scaling, selectors, services
from chart_render import Chart, merged, parsed, render, run
from chart_schemas import NEWEST, OLDEST, VERSIONS, faults
from chart_security import restricted

# Profiles that need more than the `restricted` level say so.
NOT_RESTRICTED = {"rdma", "host-path", "kernels-on-nodes", "profile-mixed-tls"}


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
    """The content of /dev/shm counts against its writer: the worker's ring, the raylet's object store."""
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
    "names": (named, lambda chart: _first(chart, "Service")["metadata"].update(chart.of("Service")[1]["metadata"])),
    "selectors": (selectors, lambda chart: _first(chart, "Deployment")["spec"]["selector"]["matchLabels"].clear()),
    "services": (services, lambda chart: _first(chart, "Service")["spec"]["ports"][0].update(targetPort="other")),
    "probes": (probes, lambda chart: chart.pod("router").spec["containers"][0]["livenessProbe"]["grpc"].update(port=50051)),
    "references": (references, lambda chart: chart.pod("router").spec["volumes"][1]["secret"].update(secretName="x")),
    "endings": (endings, lambda chart: chart.pod("decode").spec.update(terminationGracePeriodSeconds=30)),
    "scaling": (scaling, lambda chart: chart.one("Deployment", "prefill")["spec"].update(replicas=1)),
    "hardened": (hardened, lambda chart: chart.pod("decode").spec.update(automountServiceAccountToken=True)),
    "restricted": (
        lambda chart: restricted(chart.pod("decode")),
        lambda chart: chart.pod("decode").spec["containers"][0]["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
    ),
}


@pytest.mark.parametrize(
    ("kind", "where", "more"),
    [
        ("Deployment", ("spec", "template", "spec", "volumes"), {"name": "tmp", "emptyDir": {}}),
        ("Deployment", ("spec", "template", "spec", "containers", 0, "env"), {"name": "HOME", "value": "/root"}),
        ("Service", ("spec", "ports"), {"name": "again", "port": 8000, "protocol": "TCP"}),
        ("PrometheusRule", ("spec", "groups"), {"name": "twostep-slo", "rules": []}),
    ],
)
def test_what_stands_twice_in_a_list_is_found(kind: str, where: tuple[str | int, ...], more: dict[str, Any]) -> None:
    """JSON schemas do not know of it; API servers do."""
    found = render(SWITCHES["monitoring"]).of(kind)
    object = copy.deepcopy(next((each for each in found if each["metadata"]["name"].endswith("-router")), found[0]))
    assert list(faults(object, NEWEST)) == []
    place: Any = object
    for step in where:
        place = place[step]
    place.append(more)
    assert any(" twice, by " in fault for fault in faults(object, NEWEST))


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checks_find_damage(damage: str) -> None:
    check, harm = DAMAGES[damage]
    chart = Chart(tuple(copy.deepcopy(render(CASES["autoscaling"][1]).objects)))
    assert list(check(chart)) == []
    harm(chart)
    assert list(check(chart)) != []


# Names that Helm takes for a release.
RELEASES = ("llm.prod", "llm-prod", "1st", "a" * 33, "a" * 52 + "b", "a" * 52 + "c")


def test_whatever_a_release_is_called_its_objects_have_names() -> None:
    found: dict[str, str] = {}
    for release, mode in zip(RELEASES, itertools.cycle(("chart", "kuberay"))):
        chart = parsed(run(merged(EVERYTHING, {"fullnameOverride": "", "ray": {"mode": mode}}), release=release).stdout)
        assert [fault for check in (named, selectors, services) for fault in check(chart)] == []
        name = chart.one("HorizontalPodAutoscaler", "-router")["metadata"]["name"]
        assert found.setdefault(name, release) == release, "two releases of one namespace with the same objects"


@pytest.mark.parametrize("case", ["defaults", "kuberay"])
def test_rays_head_has_an_address_that_stays(case: str) -> None:
    """Raylets look it up once: behind a headless Service a new head would be one that nobody finds."""
    chart = render(CASES[case][1])
    service = chart.one("Service", "-ray-head")
    assert service["spec"].get("clusterIP") != "None"
    assert matches({"matchLabels": service["spec"]["selector"]}, chart.pod("ray-head").metadata["labels"])
    raylet = next(container for container in chart.pod("decode").containers() if container["name"] == "raylet")
    assert {"name": "TWOSTEP_RAY_ADDRESS", "value": "demo-twostep-ray-head:6379"} in raylet["env"]
