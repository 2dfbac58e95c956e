"""Tests of the number of pods when the autoscaler is switched on in a release that runs, and afterwards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from chart_apply import REPLICAS, Applied, Conflict
from chart_cases import SWITCHES
from chart_checks import scaling
from chart_cluster import looked_up, upgraded
from chart_render import Chart, Object, merged, render

MARK = "twostep/replicas"
BEFORE = {"prefill": {"replicas": 3}, "decode": {"replicas": 4}, "router": {"replicas": 5}}
AUTOSCALED = merged(BEFORE, SWITCHES["autoscaling"], {"autoscaling": {"router": {"enabled": True}}})
KINDS = ("Deployment", "ScaledObject", "HorizontalPodAutoscaler")
POOLS = ("prefill", "decode", "router")


def live(chart: Chart, **pods: int) -> list[Object]:
    """Returns what a cluster would have of a rendered chart: numbers of pods as given, else as said, else 1."""
    objects = copy.deepcopy(chart.of(*KINDS))
    for object in objects:
        if object["kind"] == "Deployment":
            component = object["metadata"]["labels"]["app.kubernetes.io/component"]
            object["spec"]["replicas"] = pods.get(component, object["spec"].get("replicas", 1))
    return objects


def said(chart: Chart) -> dict[str, Any]:
    """Replicas of the pools, None: left out. With a number that is the cluster's goes the mark."""
    found = {}
    for pool in POOLS:
        deployment = chart.one("Deployment", f"-{pool}")
        found[pool] = deployment["spec"].get("replicas")
        scaled = bool(
            [object for object in chart.of(*KINDS[1:]) if object["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]]
        )
        assert (MARK in deployment["metadata"].get("annotations", {})) is (scaled and found[pool] is not None)
    return found


def test_switching_on_keeps_the_pods_that_there_are(tmp_path: Path) -> None:
    """Helm takes away what it said and says no more, and Kubernetes puts 1 in the place of replicas."""
    on = upgraded(AUTOSCALED, live(render(BEFORE), decode=7), tmp_path)
    assert said(on) == {"prefill": 3, "decode": 7, "router": 5}
    # The next upgrade meets what was decided meanwhile, and again cannot leave it out.
    later = upgraded(AUTOSCALED, live(on, prefill=6, decode=2, router=9), tmp_path)
    assert said(later) == {"prefill": 6, "decode": 2, "router": 9}
    # Where there is one pod, to leave it out changes nothing: and from then on nothing is said.
    quiet = upgraded(AUTOSCALED, live(later, prefill=1, decode=2, router=1), tmp_path)
    assert said(quiet) == {"prefill": None, "decode": 2, "router": None}
    after = upgraded(AUTOSCALED, live(quiet, prefill=8, decode=2, router=4), tmp_path)
    assert said(after) == {"prefill": None, "decode": 2, "router": None}


def test_a_release_that_began_so_says_no_number(tmp_path: Path) -> None:
    """A rollback would put it back to the number of that day."""
    first = render(AUTOSCALED)
    assert said(first) == dict.fromkeys(POOLS)
    assert said(upgraded(AUTOSCALED, live(first, prefill=5, decode=6, router=7), tmp_path)) == dict.fromkeys(POOLS)


def test_switching_off_says_what_the_values_say(tmp_path: Path) -> None:
    on = upgraded(AUTOSCALED, live(render(BEFORE)), tmp_path)
    off = upgraded(BEFORE, live(on, prefill=8), tmp_path)
    assert said(off) == {"prefill": 3, "decode": 4, "router": 5}
    assert list(scaling(off)) == []


def test_null_leaves_the_number_to_a_scaler_of_ones_own() -> None:
    assert said(render({pool: {"replicas": None} for pool in POOLS})) == dict.fromkeys(POOLS)
    assert said(render({pool: {"replicas": 0} for pool in POOLS})) == dict.fromkeys(POOLS, 0)


@pytest.mark.parametrize(("case", "least"), [("autoscaling", 1), ("autoscaling-to-zero", 0)])
def test_no_fewer_than_the_least(case: str, least: int, tmp_path: Path) -> None:
    """An HPA takes no notice of a Deployment with 0."""
    chart = upgraded(SWITCHES[case], live(render({}), prefill=0, decode=3, router=2), tmp_path)
    assert said(chart) == {"prefill": least, "decode": 3, "router": 2}
    more = merged(SWITCHES[case], {"autoscaling": {"router": {"enabled": True, "minReplicas": 4}}})
    assert said(upgraded(more, live(render({}), router=2), tmp_path))["router"] == 4


# ---- without a cluster to look into: `helm template` and server-side apply --------------------------------------------------------


HELD = merged(AUTOSCALED, {"autoscaling": {"holdReplicas": True}})


def owned_number(deployment: Object) -> Object:
    """Returns the object that the operator applies by another manager (docs/kubernetes.md)."""
    return {**{name: deployment[name] for name in ("apiVersion", "kind")}, "spec": {"replicas": deployment["spec"]["replicas"]}}


@pytest.mark.parametrize("pool", POOLS)
def test_the_hand_over_keeps_every_pod_under_server_side_apply(pool: str) -> None:
    before, held, scaled = (render(values).one("Deployment", f"-{pool}") for values in (BEFORE, HELD, AUTOSCALED))
    number = BEFORE[pool]["replicas"]
    cluster = Applied()
    cluster.apply("gitops", before)
    cluster.apply("gitops", held)
    assert cluster.pods == number
    cluster.apply("replicas", owned_number(held))
    cluster.apply("gitops", scaled)
    assert cluster.pods == number, "nobody says the number any more but the manager of the hand-over"
    cluster.update("hpa", REPLICAS, number + 4)
    cluster.apply("gitops", scaled)
    assert cluster.pods == number + 4
    # Off again, with the number that runs.
    cluster.apply("gitops", render({pool: {"replicas": number + 4}}).one("Deployment", f"-{pool}"))
    assert cluster.pods == number + 4


def test_a_scaler_that_moved_meanwhile_owns_the_number() -> None:
    """Then the hand-over is done already. What is held meets a conflict, or, forced as GitOps tools do, puts the number back."""
    held, scaled = (render(values).one("Deployment", "-prefill") for values in (HELD, AUTOSCALED))
    cluster = Applied()
    cluster.apply("gitops", held)
    cluster.update("hpa", REPLICAS, 8)
    with pytest.raises(Conflict):
        cluster.apply("gitops", held)
    cluster.apply("gitops", scaled)
    assert cluster.pods == 8


def test_without_the_hand_over_the_number_would_become_1() -> None:
    """Without the hand-over pods are lost, and the stand-in of the API server shows it."""
    cluster = Applied()
    for values in (HELD, AUTOSCALED):
        cluster.apply("gitops", render(values).one("Deployment", "-prefill"))
    assert cluster.pods == 1


def test_a_number_that_was_scaled_by_hand_conflicts_unless_it_is_given_or_left_out() -> None:
    def prefill(replicas: int | None) -> Object:
        return render({"prefill": {"replicas": replicas}}).one("Deployment", "-prefill")

    cluster = Applied()
    cluster.apply("gitops", prefill(3))
    cluster.update("kubectl", REPLICAS, 5)
    with pytest.raises(Conflict):
        cluster.apply("gitops", prefill(3))
    cluster.apply("gitops", prefill(5))
    cluster.apply("gitops", prefill(None))
    assert cluster.pods == 5


def test_a_variable_that_is_given_and_taken_away_leaves_the_charts_own() -> None:
    """Under server-side apply a variable twice would be refused, and under a patch by the list's key it would go for both."""
    cluster = Applied()
    plain = render({}).one("Deployment", "-router")
    given = {"components": {"env": [{"name": "A", "value": "1"}]}, "router": {"env": [{"name": "A", "value": "2"}]}}
    cluster.apply("gitops", plain)
    first = dict(cluster.fields)
    cluster.apply("gitops", render(given).one("Deployment", "-router"))
    variable = ("spec", "template", "spec", "containers", ("router",), "env", ("A",), "value")
    assert cluster.fields[variable] == "2"
    cluster.apply("gitops", plain)
    assert cluster.fields == first


def test_nothing_but_deployments_and_their_scalers_is_looked_up(tmp_path: Path) -> None:
    assert looked_up(BEFORE, live(render(BEFORE)), tmp_path) == []
    asked = looked_up(AUTOSCALED, live(render(AUTOSCALED)), tmp_path)
    kinds = {path.split("/")[-2] for path in asked if "/namespaces/" in path}
    assert kinds == {"deployments", "scaledobjects", "horizontalpodautoscalers"}
