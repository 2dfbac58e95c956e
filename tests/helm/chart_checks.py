"""Whether the objects of a rendered chart fit each other. Each check yields what does not, in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from chart_render import NAMESPACE, Chart, Object, Pod
from chart_security import hardened

from twostep.rpc.health import LIVENESS, READINESS

# Kinds without a namespace.
CLUSTER_WIDE = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: object) -> int:
    """Bytes of a quantity of memory."""
    found = re.fullmatch(r"(\d+)([A-Za-z]*)", str(text))
    assert found, text
    return int(found[1]) * _UNITS[found[2]]


def matches(selector: Object, labels: Object) -> bool:
    """A label selector as Kubernetes reads it; an empty one matches everything."""
    for label, value in selector.get("matchLabels", {}).items():
        if labels.get(label) != value:
            return False
    for expression in selector.get("matchExpressions", []):
        there = labels.get(expression["key"]) in expression.get("values", [])
        if {"In": not there, "NotIn": there}[expression["operator"]]:
            return False
    return True


def lasting(chart: Chart) -> list[Pod]:
    """Pods of the release itself: those of hooks come and go."""
    return [pod for pod in chart.pods() if pod.owner["kind"] not in ("Job", "Pod")]


def named(chart: Chart) -> Iterator[str]:
    """Every object once, in the release's namespace, with the labels by which it is found; names that Kubernetes takes."""
    seen = set()
    for object in chart.objects:
        key = (object["kind"], object["metadata"]["name"])
        if key in seen:
            yield f"{key} twice"
        seen.add(key)
        if object["kind"] in CLUSTER_WIDE:
            if not key[1].startswith(f"{NAMESPACE}."):
                yield f"{key}: a release of the same name in another namespace has it, too"
            continue
        if object["metadata"].get("namespace") != NAMESPACE:
            yield f"{key} says no namespace"
        # Names of Services begin with a letter.
        if len(key[1]) > 63 or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", key[1]):
            yield f"{key}: no DNS label"
        labels = object["metadata"].get("labels", {})
        for label in ("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart"):
            if label not in labels:
                yield f"{key} has no {label}"


def selectors(chart: Chart) -> Iterator[str]:
    """Workloads select their own pods and no others; Services and budgets select some."""
    for object in chart.of("Deployment", "StatefulSet"):
        found = [pod.owner for pod in lasting(chart) if matches(object["spec"]["selector"], pod.metadata["labels"])]
        if found != [object]:
            yield f"{object['metadata']['name']} selects the pods of {[owner['metadata']['name'] for owner in found]}"
        changing = {"helm.sh/chart", "app.kubernetes.io/version"} & object["spec"]["template"]["metadata"]["labels"].keys()
        if changing:
            yield f"{object['metadata']['name']}: its pods restart for {changing}"
    for object in chart.of("PodDisruptionBudget"):
        found = [pod.owner for pod in lasting(chart) if matches(object["spec"]["selector"], pod.metadata["labels"])]
        if len(found) != 1:
            yield f"PodDisruptionBudget {object['metadata']['name']} selects {len(found)} workloads"
    for object in chart.of("StatefulSet"):
        service = [other for other in chart.of("Service") if other["metadata"]["name"] == object["spec"]["serviceName"]]
        if not service or service[0]["spec"].get("clusterIP") != "None":
            yield f"{object['metadata']['name']}: no headless Service {object['spec']['serviceName']}"
    for object in chart.of("Deployment"):
        for constraint in object["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
            if "app.kubernetes.io/name" in str(constraint) and not matches(
                constraint["labelSelector"], object["spec"]["template"]["metadata"]["labels"]
            ):
                yield f"{object['metadata']['name']} is spread by labels that it does not have"


def services(chart: Chart) -> Iterator[str]:
    """A Service's port is a port of every pod behind it, by name; routes and triggers name Services that there are."""
    known: dict[str, Object] = {}
    for service in chart.of("Service"):
        name = service["metadata"]["name"]
        known[name] = service
        behind = [pod for pod in lasting(chart) if matches({"matchLabels": service["spec"]["selector"]}, pod.metadata["labels"])]
        if not behind:
            yield f"Service {name} has no pods"
        for port in service["spec"]["ports"]:
            for pod in behind:
                if pod.ports().get(port["targetPort"]) is None:
                    yield f"Service {name}: {pod.name} has no port {port['targetPort']}"
                elif pod.ports()[port["targetPort"]] != port["port"]:
                    yield f"Service {name}: port {port['port']} is {pod.ports()[port['targetPort']]} there"
    for asked, by in _asked_for(chart):
        name, port = asked
        ports = known[name]["spec"]["ports"] if name in known else []
        if not any(port in (each["name"], each["port"]) for each in ports):
            yield f"{by} asks Service {name} on port {port}, which it does not have"


def _asked_for(chart: Chart) -> Iterator[tuple[tuple[str, Any], str]]:
    for route in chart.of("HTTPRoute", "GRPCRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                yield (backend["name"], backend["port"]), route["kind"]
    for ingress in chart.of("Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                service = path["backend"]["service"]
                yield (service["name"], service["port"]["name"]), "Ingress"
    for scaled in chart.of("ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            host, port = trigger["metadata"]["scalerAddress"].split(":")
            name, namespace, kind = host.split(".")[:3]
            if (namespace, kind) != (NAMESPACE, "svc"):
                yield (host, port), "ScaledObject"
            yield (name, int(port)), "ScaledObject"
    for pod in chart.pods():
        for container in pod.containers():
            for variable in container.get("env", []):
                found = re.search(r"(?:@|^)(demo-[\w-]+|chat-[\w-]+):(\d+)", variable.get("value", ""))
                if found:
                    yield (found[1], int(found[2])), f"{pod.name}: {variable['name']}"


def probes(chart: Chart) -> Iterator[str]:
    """gRPC probes ask the health port for a service that twostep.rpc.health has; every container with such a port is probed."""
    for pod in lasting(chart):
        for container in pod.spec["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container.get(kind)
                where = f"{pod.name}: {container['name']}: {kind}"
                if probe is None:
                    if any(name.startswith("health") for name in ports):
                        yield f"{where} is not there"
                elif "grpc" in probe:
                    if probe["grpc"]["port"] not in [port for name, port in ports.items() if name.startswith("health")]:
                        yield f"{where} asks port {probe['grpc']['port']}, which is no health port"
                    if probe["grpc"]["service"] not in (LIVENESS, READINESS):
                        yield f"{where} asks for {probe['grpc']['service']}"
                    if kind == "livenessProbe" and probe["grpc"]["service"] != LIVENESS:
                        yield f"{where}: a worker that is not ready would be restarted"
                elif "tcpSocket" in probe and probe["tcpSocket"]["port"] not in ports:
                    yield f"{where} asks a port {probe['tcpSocket']['port']} that there is not"


def references(chart: Chart) -> Iterator[str]:
    """Secrets, ConfigMaps, claims and accounts that pods name are rendered, made by a hook, or the user's by name."""
    made = {(kind, object["metadata"]["name"]) for kind in ("ConfigMap", "ServiceAccount", "Secret") for object in chart.of(kind)}
    made |= {("PersistentVolumeClaim", object["metadata"]["name"]) for object in chart.of("PersistentVolumeClaim")}
    made |= {("Secret", object["spec"]["secretName"]) for object in chart.of("Certificate")}
    for job in (pod for pod in chart.pods() if pod.owner["kind"] == "Job"):
        made |= {
            ("Secret", each["value"]) for container in job.containers() for each in container["env"] if each["name"].endswith("SECRET_NAME")
        }
    # Names that chart_cases.py gives for what the user brings.
    made |= {("Secret", name) for name in ("mine", "keys", "cert", "redis", "pull")}
    made |= {("PersistentVolumeClaim", name) for name in ("weights", "files")}
    for kind, name, by in _named_by(chart):
        if (kind, name) not in made:
            yield f"{by} names {kind} {name}, which nobody makes"


def _named_by(chart: Chart) -> Iterator[tuple[str, str, str]]:
    for pod in chart.pods():
        if "serviceAccountName" in pod.spec:
            yield "ServiceAccount", pod.spec["serviceAccountName"], pod.name
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        for claim in pod.owner["spec"].get("volumeClaimTemplates", []):
            volumes[claim["metadata"]["name"]] = {}
        for volume in volumes.values():
            if "secret" in volume:
                yield "Secret", volume["secret"]["secretName"], pod.name
            if "configMap" in volume:
                yield "ConfigMap", volume["configMap"]["name"], pod.name
            if "persistentVolumeClaim" in volume:
                yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], pod.name
        for secret in pod.spec.get("imagePullSecrets", []):
            yield "Secret", secret["name"], pod.name
        mounted = set()
        for container in pod.containers():
            for mount in container.get("volumeMounts", []):
                mounted.add(mount["name"])
                if mount["name"] not in volumes:
                    yield "volume", mount["name"], f"{pod.name}: {container['name']}"
            for variable in container.get("env", []):
                source = variable.get("valueFrom", {})
                if "secretKeyRef" in source:
                    yield "Secret", source["secretKeyRef"]["name"], f"{pod.name}: {variable['name']}"
        for name in volumes.keys() - mounted:
            yield "mount of volume", name, pod.name
    for authentication in chart.of("TriggerAuthentication"):
        for target in authentication["spec"]["secretTargetRef"]:
            yield "Secret", target["name"], "TriggerAuthentication"


def shared_names(chart: Chart) -> Iterator[str]:
    """Containers of a pod have names and ports of their own, init containers included. No list says so: `faults` cannot see it."""
    for pod in chart.pods():
        found = [each["name"] for each in pod.containers()]
        yield from (f"{pod.name} has two containers {name}" for name in {name for name in found if found.count(name) > 1})
        ports = [(port["containerPort"], port.get("protocol", "TCP")) for each in pod.containers() for port in each.get("ports", [])]
        yield from (f"{pod.name} has two ports {port}" for port in {port for port in ports if ports.count(port) > 1})


def resources(chart: Chart) -> Iterator[str]:
    """Memory-backed volumes fit into the limits of those who mount them, and disk that a pod may fill is asked for; requests stay within
    limits; GPUs are asked for once."""
    for pod in chart.pods():
        own = [each.get("emptyDir") or {} for each in pod.spec.get("volumes", []) if not each["name"].endswith("-files")]
        disk = sum(quantity(each["sizeLimit"]) for each in own if "sizeLimit" in each and each.get("medium") != "Memory")
        asked_for = sum(quantity(each["resources"]["requests"].get("ephemeral-storage", 0)) for each in pod.spec["containers"])
        if asked_for < disk:
            yield f"{pod.name} may fill {disk} bytes of a node's disk, and asks for {asked_for}"
        for volume in pod.spec.get("volumes", []):
            empty = volume.get("emptyDir")
            if empty is not None and "sizeLimit" not in empty:
                yield f"{pod.name}: volume {volume['name']} has no bound"
            if empty is not None and empty.get("medium") == "Memory":
                name = volume["name"]
                users = [each for each in pod.spec["containers"] if name in [mount["name"] for mount in each.get("volumeMounts", [])]]
                limit = sum(quantity(each["resources"]["limits"]["memory"]) for each in users)
                if quantity(empty["sizeLimit"]) >= limit:
                    yield f"{pod.name}: {volume['name']} may hold {empty['sizeLimit']}, and those who mount it {limit} bytes"
                stores = [_variable(each, "TWOSTEP_RAY_STORE_BYTES") for each in users]
                if sum(int(store) for store in stores if store) > quantity(empty["sizeLimit"]):
                    yield f"{pod.name}: {volume['name']} is too small for the object store"
        for container in pod.containers():
            asked, limits = container["resources"]["requests"], container["resources"]["limits"]
            if quantity(asked["memory"]) > quantity(limits["memory"]):
                yield f"{pod.name}: {container['name']} asks for more memory than it may have"
            if {name: value for name, value in asked.items() if "/" in name} != {
                name: value for name, value in limits.items() if "/" in name
            }:
                yield f"{pod.name}: {container['name']}: devices asked for and allowed differ"


def _variable(container: Object, name: str) -> str | None:
    return next((each.get("value") for each in container.get("env", []) if each["name"] == name), None)


def endings(chart: Chart) -> Iterator[str]:
    """A pod is given longer to go than its drain and preStop take."""
    for pod in lasting(chart):
        for container in pod.containers():
            drain = _variable(container, "TWOSTEP_DRAIN_TIMEOUT")
            before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
            slept = int(before[1]) if before[:1] == ["sleep"] else 0
            if drain and pod.spec["terminationGracePeriodSeconds"] < float(drain) + slept + 10:
                yield f"{pod.name}: {container['name']} drains for {drain} s after {slept}, and is killed before"


def scaling(chart: Chart) -> Iterator[str]:
    """Each workload has one owner of its replicas: the chart, an HPA or KEDA."""
    owners: dict[str, list[str]] = {}
    for object in chart.of("HorizontalPodAutoscaler", "ScaledObject"):
        target = object["spec"]["scaleTargetRef"]
        owners.setdefault(target["name"], []).append(object["kind"])
    for name, kinds in owners.items():
        targets = [object for object in chart.of("Deployment") if object["metadata"]["name"] == name]
        if len(kinds) > 1 or len(targets) != 1:
            yield f"{kinds} scale {name}, of which there are {len(targets)}"
    for object in chart.of("Deployment", "StatefulSet"):
        by = owners.get(object["metadata"]["name"], [])
        said = {"replicas" in object["spec"], "twostep/replicas" in object["metadata"].get("annotations", {})}
        if by and said == {True}:
            # A number that is held for a hand-over.
            continue
        if ("replicas" in object["spec"]) is bool(by):
            yield f"{object['metadata']['name']} says {object['spec'].get('replicas')} replicas, and is scaled by {by}"
    for object in chart.of("ScaledObject"):
        spec = object["spec"]
        if not spec.get("idleReplicaCount", 0) < spec["minReplicaCount"] <= spec["maxReplicaCount"]:
            yield f"ScaledObject {object['metadata']['name']}: idle, least and most do not follow each other"
        if "behavior" not in spec["advanced"]["horizontalPodAutoscalerConfig"]:
            yield f"ScaledObject {object['metadata']['name']} leaves the HPA its own behaviour"


CHECKS: tuple[Callable[[Chart], Iterator[str]], ...] = (
    named, selectors, services, probes, references, shared_names, resources, endings, scaling, hardened,
)  # fmt: skip
