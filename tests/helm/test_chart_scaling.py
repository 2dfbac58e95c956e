"""ScaledObjects: that KEDA and the HorizontalPodAutoscaler it makes carry out what the autoscaler decides, at once and whole."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from chart_cases import SWITCHES
from chart_hooks import FakeApi, rights
from chart_processes import processes
from chart_render import NAMESPACE, Chart, Object, merged, parsed, refusal, render, run
from google.protobuf.json_format import ParseDict

from twostep.autoscaler import hpa
from twostep.autoscaler.external_scaler import role_of
from twostep.autoscaler.pods import ANNOTATION, LEASE_ANNOTATION, MarkLease, PodMarks
from twostep.rpc.keda import externalscaler_pb2

CHART_VALUES = merged(SWITCHES["autoscaling"], {"autoscaling": {"decode": {"maxReplicas": 40}}})


def allowed(behavior: Object, pods: int, wanted: int) -> int:
    """Returns the pods that an HPA with this behaviour has after one period, by its documentation: the policy that changes most decides."""
    rules = behavior["scaleUp" if wanted > pods else "scaleDown"]
    assert rules["stabilizationWindowSeconds"] == 0
    assert rules["selectPolicy"] == "Max"
    most = max(
        rule["value"] if rule["type"] == "Pods" else math.ceil(pods * rule["value"] / 100) for rule in rules["policies"]
    )  # fmt: skip
    return min(wanted, pods + most) if wanted > pods else max(wanted, pods - most)


def formula(value: float, pods: int, tolerance: float) -> int:
    """Returns the pods that an HPA makes of an external metric with AverageValue and a target of 1."""
    ratio = value / pods
    return pods if 1 - tolerance <= ratio <= 1 + tolerance else math.ceil(value)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_decisions_are_carried_out_within_one_period(role: str) -> None:
    chart = render(CHART_VALUES)
    spec = chart.one("ScaledObject", role)["spec"]
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    scaler = next(process.config for process in processes(chart) if process.module == "twostep.autoscaler")
    for pods in range(1, spec["maxReplicaCount"] + 1):
        for wish in range(spec["minReplicaCount"], spec["maxReplicaCount"] + 1):
            asked = hpa.ask(wish, pods, None, scaler.hpa_tolerance)
            wanted = formula(hpa.metric(asked.pods, pods, scaler.hpa_tolerance), pods, scaler.hpa_tolerance)
            wanted = min(max(wanted, spec["minReplicaCount"]), spec["maxReplicaCount"])
            assert allowed(behavior, pods, wanted) == wanted
            # Too many by no more than the tolerance, too few never but where the most allowed lies within it.
            assert (
                wanted >= min(wish, pods)
                if wish <= pods
                else wanted >= wish or pods * (1 + scaler.hpa_tolerance) >= spec["maxReplicaCount"]
            )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_scaler_knows_what_keda_asks_for(role: str) -> None:
    """The reference as KEDA builds it from the ScaledObject, given to the external scaler's own reading of it."""
    object = render(CHART_VALUES).one("ScaledObject", role)
    trigger = object["spec"]["triggers"][0]
    assert (trigger["type"], trigger["metricType"]) == ("external", "AverageValue")
    metadata = object["metadata"]
    reference = {"name": metadata["name"], "namespace": metadata["namespace"], "scalerMetadata": trigger["metadata"]}
    assert role_of(ParseDict(reference, externalscaler_pb2.ScaledObjectRef())) == role
    assert object["spec"]["scaleTargetRef"]["name"].endswith(f"-{role}")


def test_bounds_of_keda_and_of_the_autoscaler_are_the_same() -> None:
    chart = render(CHART_VALUES)
    scaler = next(process.config for process in processes(chart) if process.module == "twostep.autoscaler")
    for role in ("prefill", "decode"):
        spec, pool = chart.one("ScaledObject", role)["spec"], getattr(scaler, role)
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (pool.min_workers, pool.max_workers)
        assert spec["fallback"] == {"failureThreshold": 3, "replicas": 2}
        assert "idleReplicaCount" not in spec


def test_pools_that_may_be_let_go_are_let_go_by_keda() -> None:
    chart = render(SWITCHES["autoscaling-to-zero"])
    for role in ("prefill", "decode"):
        spec = chart.one("ScaledObject", role)["spec"]
        assert (spec["idleReplicaCount"], spec["minReplicaCount"]) == (0, 1)
    # Without a worker no router would be ready, and nothing could come that wakes them.
    probe = chart.pod("router").spec["containers"][0]["readinessProbe"]["grpc"]["service"]
    assert probe == "liveness"
    assert render({}).pod("router").spec["containers"][0]["readinessProbe"]["grpc"]["service"] == "readiness"


TLS = {
    "certManager": SWITCHES["tls"],
    "issuer": SWITCHES["tls-issuer"],
    "job": SWITCHES["tls-job"],
    "secret": merged(SWITCHES["tls-secret"], {"tls": {"kedaSecret": "keys"}}),
    "job-and-own": merged(SWITCHES["tls-job"], {"tls": {"kedaSecret": "keys"}}),
}


@pytest.mark.parametrize("source", TLS)
def test_keda_shows_a_certificate_that_is_its_own(source: str) -> None:
    chart: Chart = render(merged(SWITCHES["autoscaling"], TLS[source]))
    authentication = chart.of("TriggerAuthentication")[0]
    for object in chart.of("ScaledObject"):
        trigger = object["spec"]["triggers"][0]
        assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    targets = {target["parameter"]: (target["name"], target["key"]) for target in authentication["spec"]["secretTargetRef"]}
    ours = next(volume["secret"]["secretName"] for volume in chart.pod("decode").spec["volumes"] if volume["name"] == "tls")
    own = "keys" if "keys" in str(TLS[source]) else "demo-twostep-keda"
    assert targets == {"caCert": (ours, "ca.crt"), "tlsClientCert": (own, "tls.crt"), "tlsClientKey": (own, "tls.key")}
    # Its key lies in no pod, and its authority in that of the autoscaler alone.
    for pod in chart.pods():
        mounted = [volume["secret"] for volume in pod.spec["volumes"] if volume.get("secret", {}).get("secretName") == own]
        assert [each["items"] for each in mounted] == [[{"key": "ca.crt", "path": "ca.crt"}]] * (pod.component == "autoscaler")
    scaler = next(process.config for process in processes(chart) if process.module == "twostep.autoscaler")
    worker = next(process.config for process in processes(chart) if process.module == "decode_worker")
    assert (str(scaler.tls.ca), str(worker.tls.ca)) == ("/tmp/authorities.crt", "/etc/twostep/tls/ca.crt")
    assert scaler.front_tls.ca == scaler.tls.ca
    made = {certificate["spec"]["secretName"] for certificate in chart.of("Certificate")}
    assert ("demo-twostep-keda" in made) is (source in ("certManager", "issuer"))


@pytest.mark.parametrize("source", ["certManager", "issuer"])
def test_kedas_certificate_is_of_another_authority(source: str) -> None:
    chart = render(merged(SWITCHES["autoscaling"], TLS[source]))
    ours, keda = chart.one("Certificate", "-tls")["spec"], chart.one("Certificate", "-keda")["spec"]
    assert ours["issuerRef"] != keda["issuerRef"]
    issuer = chart.one("Issuer", keda["issuerRef"]["name"])
    authority = next(each["spec"] for each in chart.of("Certificate") if each["spec"]["secretName"] == issuer["spec"]["ca"]["secretName"])
    assert authority["isCA"] is True
    assert keda["usages"] == ["digital signature", "client auth"]
    assert not set(keda["dnsNames"]) & set(ours["dnsNames"])
    scaled = chart.of("ScaledObject")[0]["spec"]["triggers"][0]
    assert scaled["metadata"]["scalerAddress"].rpartition(":")[0] in ours["dnsNames"]


def test_without_a_secret_of_its_own_keda_shows_none() -> None:
    """If the chart can make none, KEDA gets none: better than the processes' own, whose key would open the workers."""
    chart = render(merged(SWITCHES["autoscaling"], SWITCHES["tls-secret"]))
    (authentication,) = chart.of("TriggerAuthentication")
    assert authentication["spec"]["secretTargetRef"] == [{"parameter": "caCert", "name": "cert", "key": "ca.crt"}]
    scaler = next(process.config for process in processes(chart) if process.module == "twostep.autoscaler")
    assert scaler.front_tls.ca is None
    assert scaler.front_tls.cert is not None
    assert str(scaler.tls.ca) == "/etc/twostep/tls/ca.crt"
    assert not render(SWITCHES["autoscaling"]).of("TriggerAuthentication")


def test_the_processes_own_certificate_is_none_for_keda() -> None:
    values = merged(SWITCHES["autoscaling"], SWITCHES["tls-secret"], {"tls": {"kedaSecret": "cert"}})
    assert "KEDA's key could call workers" in refusal(values)


async def test_the_autoscaler_may_do_what_it_does_and_no_more(api: FakeApi, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of-the-account\n")
    marks = PodMarks(f"http://127.0.0.1:{api.server_port}", tmp_path, namespace=NAMESPACE)
    result = await marks.apply(["a"], ["b"], lease=MarkLease(token=1, holder="x"), timeout_s=60)
    assert result.done == 2
    assert api.asked == rights(render(SWITCHES["autoscaling"]).one("Role", "autoscaler"))


def test_the_right_to_patch_pods_is_bounded_to_the_autoscalers_marks() -> None:
    """An admission policy, since no Role can; its expressions have been tried with an evaluator of CEL."""
    chart = render(SWITCHES["autoscaling"])
    policy, binding = (chart.of(kind)[0] for kind in ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"))
    account = chart.one("RoleBinding", "-autoscaler")["subjects"][0]
    (who,) = policy["spec"]["matchConditions"]
    assert who["expression"] == f"request.userInfo.username == 'system:serviceaccount:{account['namespace']}:{account['name']}'"
    assert policy["spec"]["failurePolicy"] == "Fail"
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["pods"], ["UPDATE"])
    (marks,) = [each["expression"] for each in policy["spec"]["variables"] if each["name"] == "marks"]
    assert {ANNOTATION, LEASE_ANNOTATION} == set(json.loads(marks.replace("'", '"')))
    whose = policy["spec"]["validations"][0]["expression"]
    for pool in ("prefill", "decode"):
        labels = chart.pod(pool).metadata["labels"]
        for label, value in re.findall(r"variables.labels\['([^']+)'\] == '([^']+)'", whose):
            assert labels[label] == value
        assert f"'{pool}'" in whose


@pytest.mark.parametrize(
    ("scaling", "version", "marks", "bounded"),
    [({}, "1.30.0", True, True), ({}, "1.29.0", False, False), ({"podPolicy": False}, "1.29.0", True, False)],
)
def test_no_right_without_its_bound_unless_it_is_wanted(scaling: Object, version: str, marks: bool, bounded: bool) -> None:
    result = run(merged(SWITCHES["autoscaling"], {"autoscaling": scaling}), flags=("--kube-version", version))
    chart = parsed(result.stdout)
    roles = [role["metadata"]["name"] for role in chart.of("Role") if role["metadata"]["name"].endswith("-autoscaler")]
    assert (bool(roles), bool(chart.of("ValidatingAdmissionPolicy"))) == (marks, bounded)
    assert chart.pod("autoscaler").spec["automountServiceAccountToken"] is marks
    (process,) = [each for each in processes(chart) if each.module == "twostep.autoscaler"]
    assert (process.environment.get("TWOSTEP_KUBERNETES_API") == "none") is not marks
