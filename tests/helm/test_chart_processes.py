"""Processes understand what the chart tells them: every variable is a flag, every value one that its parser takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from chart_cases import CASES
from chart_processes import processes
from chart_render import CHART, Chart, dotted, merged, render
from chart_schemas import NEWEST, faults
from helm_schema import SETTLED


@pytest.mark.parametrize("case", CASES)
def test_parsers_take_what_they_are_told(case: str) -> None:
    profile, values = CASES[case]
    found = list(processes(render(values, profile)))
    assert [f"{process.name}: {process.fault}" for process in found if process.config is None] == []
    for process in found:
        strangers = {name for name in process.environment if name.startswith("TWOSTEP_")} - process.flags
        assert not strangers, f"{process.name} knows no {strangers}"


@pytest.mark.parametrize("case", ["defaults", "autoscaling", "colocated", "colocated-beside-pools", "tls", "keys-in-a-file", "ray-sizes"])
def test_processes_listen_where_their_containers_say(case: str) -> None:
    profile, values = CASES[case]
    listening: dict[str, set[int]] = {}
    declared: dict[str, set[int]] = {}
    for process in processes(render(values, profile)):
        where = f"{process.pod.name}: {process.container['name']}"
        listening.setdefault(where, set()).update(process.ports())
        declared[where] = {port["containerPort"] for port in process.container.get("ports", [])}
    assert listening == declared


def _config(chart: Chart, module: str) -> Any:
    return next(process.config for process in processes(chart) if process.module == module)


def test_values_arrive() -> None:
    chart = render(CASES["everything"][1])
    router = _config(chart, "router")
    assert (router.served_model_name, router.otlp_endpoint, router.log_level) == (("chat",), "http://collector:4317", "debug")
    assert router.drain_timeout == 120
    prefill, decode = _config(chart, "prefill_worker"), _config(chart, "decode_worker")
    assert (prefill.tensor_parallel_size, decode.tensor_parallel_size, decode.max_num_seqs) == (2, 4, 64)
    assert (prefill.pod_owner, decode.pod_owner) == ("prefill", "decode")
    assert prefill.worker_id == prefill.pod_name == "some-pod"
    assert decode.advertise_address == "10.0.0.1:50071"
    assert prefill.secret_file == decode.secret_file == router.secret_file


@pytest.mark.parametrize(("cpu", "each"), [("32", 16), ("500m", 1), (9, 4), ("7500m", 3)])
def test_workers_of_one_pod_share_its_cpus(cpu: Any, each: int) -> None:
    values = {"colocated": {"enabled": True, "gpusPerWorker": 0, "resources": {"limits": {"cpu": cpu}}}}
    threads = [_config(render(values), module).cpu_threads for module in ("prefill_worker", "decode_worker")]
    assert threads == [each, each]


@pytest.mark.parametrize("case", ["defaults", "cpu", "colocated", "model-loader"])
def test_who_asks_for_no_gpu_sees_none(case: str) -> None:
    """The CUDA image asks the container runtime for all of them."""
    for pod in render(CASES[case][1]).pods():
        for container in pod.containers():
            if "worker-cuda" in container["image"]:
                asks = "nvidia.com/gpu" in container["resources"]["limits"]
                void = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]
                assert asks is not void, f"{pod.name}: {container['name']}"


@pytest.mark.parametrize(
    ("module", "name"), [("router", "router_id"), ("twostep.autoscaler", "autoscaler_id"), ("prefill_worker", "worker_id")]
)
def test_processes_go_by_the_names_of_their_pods(module: str, name: str) -> None:
    """The names in a log, a decision or a lease can be found."""
    process = next(process for process in processes(render(CASES["autoscaling"][1])) if process.module == module)
    assert getattr(process.config, name) == "some-pod"
    of_pods = [each["name"] for each in process.container["env"] if "metadata.name" in str(each.get("valueFrom"))]
    assert "TWOSTEP_" + name.upper() in of_pods or "TWOSTEP_POD_NAME" in of_pods


def test_the_autoscaler_knows_the_pools() -> None:
    scaler = _config(render(CASES["everything"][1]), "twostep.autoscaler")
    assert (scaler.prefill.gpus_per_worker, scaler.decode.gpus_per_worker) == (2, 4)
    assert (scaler.prefill.min_workers, scaler.decode.max_workers) == (0, 8)
    assert scaler.scale_to_zero_after == 600
    assert scaler.worker_drain == 120
    own = _config(render(CASES["autoscaling-without-rights"][1]), "twostep.autoscaler")
    assert (own.kubernetes_api, own.switch_roles) == ("", False)


@pytest.mark.parametrize("case", ["autoscaling", "everything"])
def test_routers_and_autoscalers_have_the_same_targets(case: str) -> None:
    chart = render(CASES[case][1])
    router, scaler = _config(chart, "router"), _config(chart, "twostep.autoscaler")
    assert (router.target_ttft_ms, router.target_tpot_ms) == (scaler.target_ttft_ms, scaler.target_tpot_ms)


def _bounds(schema: dict[str, Any], bound: str, prefix: str = "") -> Iterator[dict[str, Any]]:
    """Values at a bound of the schema, as far as it gives one."""
    for name, child in schema["properties"].items():
        if child.get("type") == "object" and "properties" in child:
            yield from _bounds(child, bound, f"{prefix}{name}.")
        elif bound in child and not prefix.startswith("ray.ports"):
            yield dotted(prefix + name, child[bound])


@pytest.mark.parametrize("switch", ["autoscaling", "colocated"])
@pytest.mark.parametrize("bound", ["minimum", "maximum"])
def test_what_the_schema_lets_through_parsers_take(bound: str, switch: str) -> None:
    """All numbers at their least or most at once. (Ray's ports apart: two of those together are too many.)"""
    schema = json.loads((CHART / "values.schema.json").read_text())
    more = {"autoscaling": {role: {"minReplicas": 0} for role in ("prefill", "decode")}}
    chart = render(merged(*_bounds(schema, bound), CASES["tls-job"][1], more, {switch: {"enabled": True}}))
    assert [f"{process.name}: {process.fault}" for process in processes(chart) if process.config is None] == []
    assert [fault for object in chart.objects for fault in faults(object, NEWEST)] == []


def test_what_the_chart_settles_is_no_flag_to_give() -> None:
    """A flag that the schema offers, and the chart sets for itself whatever is given, would be taken and have no effect."""
    for process in processes(render(CASES["everything"][1])):
        connected = {
            name for name in process.environment if name.startswith("TWOSTEP_") and name.endswith(("_PORT", "_FILE", "_URL", "_ID"))
        }
        settled = {"TWOSTEP_" + name.replace("-", "_").upper() for name in SETTLED}
        assert {name for name in connected if not name.startswith("TWOSTEP_RAY_")} <= settled, process.name
