"""Tests of what every component of the chart may be given: GPUs however they come, the kernel cache, and colocated pods beside pools."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chart_cases import SWITCHES, extras
from chart_checks import CHECKS, shared_names
from chart_processes import processes
from chart_render import CHART, ROOT, Chart, merged, parsed, render, run
from chart_schemas import NEWEST, faults
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.cluster.records import NO_OWNER

COMPONENTS = ("router", "prefill", "decode", "colocated", "ray-head", "redis", "autoscaler")
NUM_CASES = int(os.environ.get("TWOSTEP_CHART_CASES", "8"))
BESIDE = merged(SWITCHES["colocated-beside-pools"], SWITCHES["autoscaling"])


def _has(whole: Any, part: Any) -> bool:
    """Returns whether what a component was given is there: in maps, and in lists in any place."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(name in whole and _has(whole[name], value) for name, value in part.items())
    return whole == part or (isinstance(part, list) and all(each in whole for each in part))


@pytest.mark.parametrize("mode", ["chart", "kuberay"])
@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_takes_what_is_said_of_all_and_of_itself(component: str, mode: str) -> None:
    chart = render(merged(SWITCHES["extras"], BESIDE, {"ray": {"mode": mode}}))
    pod, own, every = chart.pod(component), extras(component), extras("all")
    for text in ("priorityClassName", "runtimeClassName"):
        assert pod.spec[text] == own[text]
    for name in ("nodeSelector", "affinity", "tolerations", "topologySpreadConstraints"):
        assert _has(pod.spec[name], own[name]), name
    assert _has(pod.spec["tolerations"], every["tolerations"])
    assert _has(pod.metadata["labels"], own["podLabels"])
    assert _has(pod.metadata["annotations"], own["podAnnotations"])
    main = pod.spec["containers"][0]
    for values in (every, own):
        assert _has(main, {"env": values["env"], "envFrom": values["envFrom"], "volumeMounts": values["extraVolumeMounts"]})
        assert _has(pod.spec, {"volumes": values["extraVolumes"], "containers": values["extraContainers"]})
        assert _has(pod.spec["initContainers"], values["extraInitContainers"])
    assert pod.spec["initContainers"][0] == every["extraInitContainers"][0], "those given run before the chart's"
    named = [each for each in chart.objects if each["metadata"]["labels"].get("app.kubernetes.io/component") == component]
    for object in (each for each in named if each["kind"] != "NetworkPolicy"):
        assert _has(object["metadata"], {"labels": own["labels"], "annotations": own["annotations"]}), object["kind"]


def _differing(name: str, number: int) -> dict[str, Any]:
    """Returns elements with the same keys for everybody, told apart by the rest."""
    return {
        "env": [{"name": "PROXY", "value": name}, {"name": f"BY_{number}", "value": name}],
        "extraVolumes": [{"name": "files", "configMap": {"name": name}}],
        "extraVolumeMounts": [{"name": "files", "mountPath": "/srv/files", "subPath": name}],
        "extraContainers": [{"name": "logs", "image": name}],
        "extraInitContainers": [{"name": "before", "image": name}],
        "topologySpreadConstraints": [{"maxSkew": number, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        "tolerations": [{"key": "same", "operator": "Exists"}],
    }


@pytest.mark.parametrize("mode", ["chart", "kuberay"])
def test_of_two_elements_of_a_name_the_components_own_stays(mode: str) -> None:
    """API servers refuse both of them, and a client-side apply of them leaves the older one."""
    owns = {each: _differing(each, 2) for each in COMPONENTS}
    values = {name: owns[name] for name in ("router", "prefill", "decode", "colocated", "redis")}
    values |= {"components": _differing("all", 1), "autoscaling": owns["autoscaler"], "ray": {"mode": mode, "head": owns["ray-head"]}}
    chart = render(merged(BESIDE, values))
    assert [fault for object in chart.objects for fault in faults(object, NEWEST)] == []
    for component in COMPONENTS:
        pod, own = chart.pod(component), owns[component]
        main = pod.spec["containers"][0]
        assert _has(main, {"env": own["env"], "volumeMounts": own["extraVolumeMounts"]})
        assert {"name": "BY_1", "value": "all"} in main["env"], "what the component's own list has no element for stays"
        assert _has(pod.spec, {"volumes": own["extraVolumes"], "containers": own["extraContainers"]})
        assert pod.spec["initContainers"][0] == own["extraInitContainers"][0]
        assert pod.spec["topologySpreadConstraints"] == own["topologySpreadConstraints"]
        assert pod.spec["tolerations"].count(own["tolerations"][0]) == 1


LISTS: dict[str, tuple[str, ...]] = {
    "env": ("A", "B", "TWOSTEP_LOG_LEVEL", "HOME"),
    "extraVolumes": ("a", "b", "tmp"),
    "extraContainers": ("a", "b", "router"),
    "extraInitContainers": ("a", "c"),
}


@settings(max_examples=NUM_CASES)
@given(st.data())
def test_any_lists_together(data: st.DataObject) -> None:
    """Whatever names they share, no list is rendered that an API server would refuse."""
    more: dict[str, dict[str, str]] = {"extraContainers": {"image": "x"}, "extraInitContainers": {"image": "x"}}
    values = {
        place: {
            name: [{"name": each, **more.get(name, {})} for each in data.draw(st.lists(st.sampled_from(names), max_size=3))]
            for name, names in LISTS.items()
        }
        for place in ("components", "router")
    }
    result = run(values)
    if result.returncode:
        assert " is there twice in the pod of " in result.stderr, result.stderr
        return
    chart = parsed(result.stdout)
    assert [fault for object in chart.objects for fault in faults(object, NEWEST)] == []
    assert list(shared_names(chart)) == []


def test_each_component_has_a_log_level_of_its_own() -> None:
    chart = render(
        merged(SWITCHES["autoscaling"], {"router": {"flags": {"log-level": "debug"}}, "decode": {"flags": {"log-level": "error"}}})
    )
    found = {each.pod.component: each.config.log_level for each in processes(chart) if each.module != "kv_transfer.ray.node"}
    assert found == {"router": "debug", "autoscaler": "info", "prefill": "info", "decode": "error"}


def test_what_is_said_of_all_holds_for_hooks_where_it_can() -> None:
    every = {name: value for name, value in extras("all").items() if name != "nodeSelector"}
    chart = render(merged(SWITCHES["tls-job"], {"components": every, "router": {"nodeSelector": {"pool": "cpu"}}}))
    for component in ("make-secrets", "make-tls", "test"):
        pod = chart.pod(component)
        assert (pod.spec["priorityClassName"], pod.spec["nodeSelector"]) == ("all", {"pool": "cpu"})
        assert _has(pod.spec["tolerations"], every["tolerations"])
        assert len(pod.spec["containers"]) == 1
        assert "initContainers" not in pod.spec


def test_budgets_are_for_whatever_has_more_than_one_pod() -> None:
    """A budget for a single pod (Redis, Ray's head) would keep the node from ever being drained."""
    budgets = {each["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] for each in render(BESIDE).of("PodDisruptionBudget")}
    assert budgets == {"router", "prefill", "decode", "colocated", "autoscaler"}
    assert not render(merged(BESIDE, {"autoscaling": {"replicas": 1}})).of("PodDisruptionBudget")[0]["metadata"]["name"].endswith("scaler")


# ---- devices ----------------------------------------------------------------------------------------------------------------


def _devices(chart: Chart, component: str) -> dict[str, Any]:
    """Returns what the workers' container asks for beside CPU and memory."""
    found = chart.pod(component).spec["containers"][0]["resources"]
    devices = {name: number for name, number in found["limits"].items() if "/" in name}
    return devices | {name: found[name] for name in ("claims",) if name in found}


@pytest.mark.parametrize("own", [[{"name": "large", "resourceClaimTemplateName": "two"}], []])
def test_a_pools_own_claims_are_all_that_it_has(own: list[dict[str, str]]) -> None:
    """Claims that added up would take the devices of both."""
    every = [{"name": "gpus", "resourceClaimTemplateName": "one"}]
    chart = render({"workers": {"gpuResource": "none", "resourceClaims": every}, "decode": {"resourceClaims": own, "gpus": len(own)}})
    assert chart.pod("prefill").spec["resourceClaims"] == every
    assert chart.pod("decode").spec.get("resourceClaims", []) == own
    assert _devices(chart, "decode").get("claims", []) == [{"name": each["name"]} for each in own]


def test_gpus_come_from_the_resource_or_the_claims_of_their_pool() -> None:
    values = merged(SWITCHES["devices"], {"colocated": {"enabled": True, "besidePools": True}})
    chart = render(values)
    assert _devices(chart, "prefill") == {"claims": [{"name": "gpus"}]}
    assert _devices(chart, "decode") == {"nvidia.com/mig-1g.10gb": 1}
    assert _devices(chart, "colocated") == {"amd.com/gpu": 2, "claims": [{"name": "gpus"}, {"name": "nics"}]}
    assert chart.pod("prefill").spec["resourceClaims"] == values["prefill"]["resourceClaims"]
    assert [chart.pod(pool).spec["runtimeClassName"] for pool in ("prefill", "decode", "colocated")] == ["amd", "nvidia", "amd"]
    worker = next(process for process in processes(chart) if process.pod.component == "prefill")
    assert worker.config.tensor_parallel_size == 4
    assert worker.environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    raylet = chart.pod("prefill").spec["containers"][1]
    assert "claims" not in raylet["resources"]
    older = run(values, flags=("--kube-version", "1.31.0"))
    assert "has resourceClaims, and Kubernetes v1.31.0 has none yet" in older.stderr


# ---- the kernel cache -------------------------------------------------------------------------------------------------------


def test_each_pool_keeps_kernels_where_it_is_told_to() -> None:
    def where(switch: str, pool: str) -> Any:
        chart = render(SWITCHES[switch])
        (volume,) = [each for each in chart.pod(pool).spec["volumes"] if each["name"] == "kernels"]
        mounts = [
            each["mountPath"]
            for container in chart.pod(pool).containers()
            for each in container["volumeMounts"]
            if each["name"] == "kernels"
        ]
        assert mounts == ["/var/cache/twostep/kernels"] * 2
        made = {each["metadata"]["name"] for each in chart.of("PersistentVolumeClaim")}
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        return volume.get("hostPath") or (claim, claim in made)

    assert where("kernels-in-claims", "prefill") == ("demo-twostep-prefill-kernels", True)
    assert where("kernels-in-claims", "decode") == ("weights", False)
    assert where("kernels-on-nodes", "prefill") == {"path": "/srv/k", "type": "DirectoryOrCreate"}
    assert "initContainers" not in render(SWITCHES["kernels-on-nodes"]).pod("decode").spec


@pytest.fixture
def kernel_cache() -> Any:
    spec = importlib.util.spec_from_file_location("kernel_cache", CHART / "files/kernel_cache.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_of_one_pod_are_there_for_the_next(kernel_cache: Any, tmp_path: Path) -> None:
    """By the container's own command, with directories of the test in the place of those of the pod."""
    chart = render(SWITCHES["kernels-in-claims"])
    (container,) = chart.pod("decode").spec["initContainers"]
    *command, shared, own = container["command"]
    assert {shared} < {mount["mountPath"] for mount in container["volumeMounts"]}
    environment = next(process.environment for process in processes(chart) if process.module == "decode_worker")
    assert [environment[f"{kind}_CACHE_DIR"] for kind in ("TRITON", "TORCHINDUCTOR")] == [f"{own}/{kind}" for kind in kernel_cache.KINDS]
    (tmp_path / "shared").mkdir()
    for name in ("a", "b", "a"):
        subprocess.run([sys.executable, *command[1:], tmp_path / "shared", tmp_path / name], check=True)
    (tmp_path / "a/triton/kernel").write_text("compiled")
    assert (tmp_path / "b/triton/kernel").read_text() == "compiled"


@pytest.mark.parametrize("trouble", ["missing", "a file", "full", "read-only"])
def test_a_pod_compiles_its_own_where_the_cache_is_of_no_use(
    kernel_cache: Any, tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    assert kernel_cache.link(str(shared), str(own)) == ""
    if trouble == "missing":
        (shared / "triton").rmdir()
        (shared / "inductor").rmdir()
        shared.rmdir()
    elif trouble == "a file":
        (shared / "triton").rmdir()
        (shared / "triton").write_text("")
    elif trouble == "full":
        kernel_cache.LEAST_FREE_BYTES = 1 << 62
    else:

        def refuse(*args: Any, **more: Any) -> Any:
            raise PermissionError(13, os.strerror(13), str(shared))

        monkeypatch.setattr(kernel_cache.tempfile, "TemporaryFile", refuse)
    assert kernel_cache.link(str(shared), str(own)) != ""
    for kind in kernel_cache.KINDS:
        # Compilers make it anew, in the pod's own directory.
        (own / kind).mkdir()
        assert not (own / kind).is_symlink()


# ---- colocated pods beside pools ----------------------------------------------------------------------------------------------


def test_colocated_pods_and_pools_are_one_release() -> None:
    chart = render(BESIDE)
    assert [fault for check in CHECKS for fault in check(chart)] == []
    workers = [process for process in processes(chart) if process.module in ("prefill_worker", "decode_worker")]
    owners = sorted((process.pod.component, process.config.role, process.config.pod_owner) for process in workers)
    assert owners == [
        ("colocated", "decode", NO_OWNER),
        *[("colocated", "prefill", NO_OWNER)] * 3,
        ("decode", "decode", "decode"),
        ("prefill", "prefill", "prefill"),
    ]
    assert {each["spec"]["scaleTargetRef"]["name"] for each in chart.of("ScaledObject")} == {"demo-twostep-prefill", "demo-twostep-decode"}
    policy = chart.one("NetworkPolicy", "-workers")["spec"]["ingress"][0]
    assert {port["port"] for port in policy["ports"]} == {process.config.grpc_port for process in workers}


def test_without_ray_what_is_left_joins_colocated_pods_and_pools() -> None:
    chart = render(merged(SWITCHES["colocated-beside-pools"], {"ray": {"enabled": False}}))
    transfers = {process.pod.component: process.config.kv_transfer for process in processes(chart) if process.module == "decode_worker"}
    assert transfers == {"decode": "nixl", "colocated": "cuda_ipc,nixl"}


def test_the_page_begins_with_twenty_values() -> None:
    first = (ROOT / "docs/helm-values.md").read_text().split("\n## ")[1]
    assert first.count("\n| `") == 20
