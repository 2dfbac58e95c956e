"""Processes in a chart's pods: their own parsers, run over the environment that they get there."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from chart_render import Chart, Object, Pod

from twostep.local.pod import pod_workers
from twostep.settings.autoscaler import AutoscalerSettings
from twostep.settings.pod import PodSettings
from twostep.settings.ray_node import RayNodeSettings
from twostep.settings.router import RouterSettings
from twostep.settings.table import Settings, settings_of
from twostep.settings.worker import WorkerSettings

POD = "twostep.local.pod"
# Modules that the images start, and where their configuration is parsed: table, module, function, arguments before argv.
PARSERS: dict[str, tuple[type[Settings], str, str, tuple[str, ...]]] = {
    "router": (RouterSettings, "router.config", "parse_config", ()),
    "twostep.autoscaler": (AutoscalerSettings, "twostep.autoscaler.config", "parse_config", ()),
    "prefill_worker": (WorkerSettings, "twostep.worker.config", "parse_config", ("prefill",)),
    "decode_worker": (WorkerSettings, "twostep.worker.config", "parse_config", ("decode",)),
    POD: (PodSettings, "twostep.local.pod", "parse_pod", ()),
    "kv_transfer.ray.node": (RayNodeSettings, "kv_transfer.ray.node", "parse_node", ()),
}


@dataclass(frozen=True)
class Process:
    """A process of a container. `flags`: the variables that it, or the one that starts it, reads. `config` as parsed; None with `fault` if
    its parser refuses."""

    pod: Pod
    container: Object
    module: str
    environment: dict[str, str]
    flags: frozenset[str]
    config: Any
    fault: str

    @property
    def name(self) -> str:
        return f"{self.pod.name}: {self.container['name']}: {self.module}"

    def ports(self) -> set[int]:
        """Returns the ports on which it listens for others."""
        config = self.config
        if self.module in (POD, "kv_transfer.ray.node"):
            if self.module == POD:
                return {config.health_port}
            return {int(config.ray_address.rpartition(":")[2])} if config.ray_head else set()
        first = config.grpc_port
        # Among several in one container the supervisor alone asks each for its health.
        alone = self.container["command"][3] != POD
        found = {first} | ({first + 1 if config.health_port is None else config.health_port} if alone else set())
        found.add(first + 2 if config.metrics_port is None else config.metrics_port)
        return found | ({config.port} if self.module == "router" else set())


def processes(chart: Chart) -> Iterator[Process]:
    """All processes of containers whose command is `python -P -m MODULE` with a module of PARSERS."""
    for pod in chart.pods():
        if pod.owner["spec"].get("replicas") == 0:
            continue
        for container in pod.containers():
            command = container.get("command", [])
            if command[:3] == ["python", "-P", "-m"] and command[3] in PARSERS:
                yield from _of_container(pod, container, command[3], [*command[4:], *container.get("args", [])])


def _of_container(pod: Pod, container: Object, module: str, argv: list[str]) -> Iterator[Process]:
    environment = environment_of(container)
    told = tuple(environment.items())
    flags, config, fault = _parsed(module, tuple(argv), told)
    workers = [(worker.argv[3], worker.argv[4:]) for worker in pod_workers(config)] if module == POD and config else []
    parsed = [(name, *_parsed(name, arguments, told)) for name, arguments in workers]
    known = flags.union(*(each[1] for each in parsed))
    yield Process(pod, container, module, environment, known, config, fault)
    for name, _, its_config, its_fault in parsed:
        yield Process(pod, container, name, environment, known, its_config, its_fault)


def environment_of(container: Object) -> dict[str, str]:
    """Returns what the kubelet would set: later variables win, and may refer to earlier ones. What a cluster decides is made up."""
    found: dict[str, str] = {}
    for variable in container.get("env", []):
        value = variable.get("value", "")
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            value = "redis://redis.example:6379/0" if "URL" in variable["name"] else "password"
        elif variable["name"].endswith("_PASSWORD_FILE"):
            # Read while flags are parsed.
            value = os.devnull
        elif "fieldRef" in source:
            value = "10.0.0.1" if source["fieldRef"]["fieldPath"] == "status.podIP" else "some-pod"
        elif "resourceFieldRef" in source:
            value = "4"
        found[variable["name"]] = re.sub(r"\$\(([A-Za-z_]\w*)\)", lambda name: found.get(name[1], name[0]), value)
    return found


@functools.cache
def _parsed(module: str, argv: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> tuple[frozenset[str], Any, str]:
    table, home, function, before = PARSERS[module]
    said = io.StringIO()
    config = None
    with mock.patch.dict(os.environ, dict(environment), clear=True), contextlib.redirect_stderr(said):
        try:
            config = getattr(importlib.import_module(home), function)(*before, argv)
        except SystemExit:
            return frozenset(), None, said.getvalue()
    return frozenset(each.variable for each in settings_of(table)), config, ""
