"""The chart as `helm template` renders it: each set of values once for all tests."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm"
NAMESPACE = "serving"
RELEASE = "demo"
TIMEOUT_S = 120

Object = dict[str, Any]


def _mapping(loader: Any, node: yaml.MappingNode) -> Object:
    """Helm takes a key that stands there twice; kustomize, Flux and Argo CD do not."""
    keys = [key.value for key, _ in node.value]
    assert len(set(keys)) == len(keys), f"{sorted(key for key in keys if keys.count(key) > 1)} twice, {node.start_mark}"
    found: Object = loader.construct_mapping(node, deep=True)
    return found


_Loader: Any = type("_Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


@functools.cache
def helm() -> str:
    """The command; the test is skipped where there is none. deploy/requirements/helm.txt brings it."""
    beside = Path(sys.executable).with_name("helm")
    found = str(beside) if beside.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("needs the helm command")
    return found


@dataclass(frozen=True)
class Pod:
    """A pod that some object makes, or is."""

    owner: Object
    metadata: Object
    spec: Object

    @property
    def name(self) -> str:
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}"

    @property
    def component(self) -> str:
        component: str = self.metadata["labels"]["app.kubernetes.io/component"]
        return component

    def containers(self) -> Iterator[Object]:
        """All of them: init containers first."""
        yield from self.spec.get("initContainers", [])
        yield from self.spec["containers"]

    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for container in self.containers() for port in container.get("ports", [])}


@dataclass(frozen=True)
class Chart:
    """The objects that the chart makes of one set of values."""

    objects: tuple[Object, ...]

    def of(self, *kinds: str) -> list[Object]:
        return [object for object in self.objects if object["kind"] in kinds]

    def one(self, kind: str, name: str) -> Object:
        """The object of this kind whose name ends so. Raises AssertionError unless there is exactly one."""
        found = [object for object in self.of(kind) if object["metadata"]["name"].endswith(name)]
        assert len(found) == 1, f"{len(found)} objects {kind} with a name that ends in {name}"
        return found[0]

    def pods(self) -> Iterator[Pod]:
        for object in self.objects:
            if object["kind"] == "Pod":
                yield Pod(object, object["metadata"], object["spec"])
            elif object["kind"] == "RayCluster":
                groups = [object["spec"]["headGroupSpec"], *object["spec"].get("workerGroupSpecs", [])]
                for group in groups:
                    yield Pod(object, group["template"]["metadata"], group["template"]["spec"])
            elif object["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
                template = object["spec"]["template"]
                yield Pod(object, template["metadata"], template["spec"])

    def pod(self, component: str) -> Pod:
        """The pod of a component. Raises StopIteration if there is none."""
        return next(pod for pod in self.pods() if pod.component == component)


@functools.cache
def profile(name: str) -> Mapping[str, Any]:
    """helm/values-NAME.yaml; the chart's defaults for an empty name."""
    text = (CHART / f"values{name and '-'}{name}.yaml").read_text()
    values: Mapping[str, Any] = yaml.load(text, _Loader)
    return values


# A model, which every release must be given; the demo brings its own.
MODEL: Mapping[str, Any] = {"model": {"path": "/models/model", "volume": {"existingClaim": "weights"}}}


def render(values: Mapping[str, Any], profile: str = "") -> Chart:
    """Raises AssertionError with helm's own words if it refuses."""
    result = run(values, profile)
    assert result.returncode == 0, result.stderr
    return parsed(result.stdout)


def refusal(values: Mapping[str, Any], profile: str = "", *, model: bool = True) -> str:
    """Helm's words about values that it is to refuse."""
    result = run(values, profile, model=model)
    assert result.returncode != 0, f"helm takes {values}"
    return result.stderr


def run(
    values: Mapping[str, Any],
    profile: str = "",
    chart: Path = CHART,
    *,
    model: bool = True,
    flags: tuple[str, ...] = (),
    release: str = RELEASE,
) -> subprocess.CompletedProcess[str]:
    """`helm template`, with `flags`. Values go over those of the profile. `model`: over MODEL, too, where the profile has none."""
    given = merged(MODEL, values) if model and profile != "demo" else values
    return _run(json.dumps(given, sort_keys=True), profile, chart, flags, release)


@functools.cache
def _run(values: str, profile: str, chart: Path, flags: tuple[str, ...], release: str) -> subprocess.CompletedProcess[str]:
    files = ["--values", str(CHART / f"values-{profile}.yaml")] if profile else []
    command = [helm(), "template", release, str(chart), "--namespace", NAMESPACE, *files, "--values", "-", *flags]
    return subprocess.run(command, input=values, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def parsed(text: str) -> Chart:
    parts = re.split(r"^---$", text, flags=re.MULTILINE)
    return Chart(tuple(object for part in parts if (object := _object(part)) is not None))


@functools.cache
def _object(text: str) -> Object | None:
    """One document. Most are the same from case to case, and YAML's reader takes longer than helm's writer."""
    object: Object | None = yaml.load(text, _Loader)
    return object


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Values over each other, the last one wins; mappings are merged, as helm does."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else value
    return result


def dotted(name: str, value: Any) -> dict[str, Any]:
    """`a.b` and 1 as {"a": {"b": 1}}."""
    for part in reversed(name.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value
