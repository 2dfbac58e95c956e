"""The JSON schema of the chart's values: types from the defaults, what those cannot say from the rules below, flags from the settings.

A rule is looked up by the value's dotted name; the first whose pattern fits wins. A default of {} or [] must have one. A fragment of
$defs is named by a string.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from typing import Any

from twostep.settings.autoscaler import AutoscalerSettings
from twostep.settings.readers import Number, OneOf, Whole
from twostep.settings.removed import REMOVED
from twostep.settings.router import RouterSettings
from twostep.settings.table import SettingRow, Settings, settings_of
from twostep.settings.worker import WorkerSettings

_NAME = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"
_NATURAL = {"type": "integer", "minimum": 0}
_MODES = {"type": "array", "minItems": 1, "items": {"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]}}


def _one_of(*options: Any) -> dict[str, Any]:
    return {"enum": list(options)}


def _whole(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def _objects(*required: str, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """A list of objects with these fields and no others."""
    fields = {name: {"type": "boolean" if name == "readOnly" else "string"} for name in (*required, *optional)}
    return {"type": "array", "items": {"type": "object", "additionalProperties": False, "required": [*required], "properties": fields}}


# Blocks whose values others may have, too, by their own name: block, values of it (none: all), others.
SHARED: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("workers", ("gpuResource", "resourceClaims", "runtimeClassName", "kernelCache"), ("prefill", "decode", "colocated")),
    ("components", (), ("router", "prefill", "decode", "colocated", "ray.head", "redis", "autoscaling")),
)

RULES: tuple[tuple[str, Any], ...] = (
    ("monitoring.annotations", {"type": "boolean"}),
    ("*.resources", "resources"),
    ("*.nodeSelector", "strings"),
    ("*.tolerations", "tolerations"),
    ("*.affinity", "affinity"),
    ("*.topologySpreadConstraints", "objects"),
    ("*.annotations", "strings"),
    ("*.labels", "strings"),
    ("commonLabels", "strings"),
    ("*podAnnotations", "strings"),
    ("*.podLabels", "strings"),
    ("*.extraVolumes", "references"),
    ("*.extraVolumeMounts", "mounts"),
    ("*.extra*ontainers", "references"),
    ("*.resourceClaims", "claims"),
    ("*.gpuResource", {"type": "string", "pattern": "^([^/ ]+/[^/ ]+|none)$"}),
    ("*.kernelCache.type", _one_of("none", "hostPath", "pvc")),
    ("*.kernelCache.hostPath", {"type": "string", "pattern": "^/.+$"}),
    ("*.env", "env"),
    ("*.envFrom", "objects"),
    ("*.accessModes", _MODES),
    ("*.command", "list"),
    ("*.args", "list"),
    ("*.digest", {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}),
    ("*.existingSecret", "name"),
    ("secrets.deploymentKey", {"type": "string", "pattern": "^[-._a-zA-Z0-9]+$"}),
    ("secrets.formerDeploymentKey", {"type": "string", "pattern": "^[-._a-zA-Z0-9]*$"}),
    ("*.existingClaim", "name"),
    ("ingress.tlsSecret", "name"),
    ("tls.kedaSecret", "name"),
    ("*.priorityClassName", "name"),
    ("*.storageClass", "name"),
    ("*.runtimeClassName", "name"),
    # Longer ones would be cut, and dots and a digit in front are no names of Services.
    ("nameOverride", {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", "maxLength": 40}),
    ("fullnameOverride", {"type": "string", "pattern": "^([a-z]([-a-z0-9]*[a-z0-9])?)?$", "maxLength": 40}),
    ("*.size", "memory"),
    ("*.sizeLimit", "memory"),
    ("*.objectStore", "memory"),
    ("workers.sharedMemory", "memory"),
    ("workers.scratch", "memory"),
    ("*.pdb.maxUnavailable", "amount"),
    ("*.maxSurge", "amount"),
    ("*.maxUnavailable", "amount"),
    ("image.pullPolicy", _one_of("Always", "IfNotPresent", "Never")),
    ("image.pullSecrets", "references"),
    ("model.volume.type", _one_of("pvc", "hostPath", "emptyDir", "image")),
    ("model.path", {"type": "string", "pattern": "^(/.*)?$"}),
    ("model.volume.hostPath", {"type": "string", "pattern": "^(/.*)?$"}),
    ("auth.apiKeys", _one_of("none", "file", "redis")),
    ("auth.adminPort", _whole(-1, 65535)),
    ("tls.source", _one_of("certManager", "secret", "job")),
    ("tls.extraDnsNames", "list"),
    ("tls.certManager.issuerRef.kind", {"type": "string", "minLength": 1}),
    ("tls.certManager.duration", "duration"),
    ("tls.certManager.renewBefore", "duration"),
    ("tls.job.days", _whole(1, 36500)),
    ("podSecurity.*", _whole(1, 2**31 - 1)),
    ("logLevel", _one_of("debug", "info", "warning", "error")),
    ("tracing.otlpEndpoint", {"type": "string", "pattern": "^(https?://.+)?$"}),
    ("autoscaling.replicas", _whole(1, 100)),
    ("*.replicas", _whole(0, 10000)),
    ("*.gpus", _whole(0, 64)),
    ("router.service.type", _one_of("ClusterIP", "NodePort", "LoadBalancer")),
    ("router.service.loadBalancerSourceRanges", {"type": "array", "items": {"type": "string", "pattern": "^[0-9a-fA-F.:]+/[0-9]+$"}}),
    ("router.service.*TrafficPolicy", _one_of("", "Cluster", "Local")),
    ("workers.device", _one_of("auto", "cpu", "cuda")),
    ("workers.kvTransfer", {"type": "string", "pattern": "^(auto|none|(cuda_ipc|nixl|ray)( *, *(cuda_ipc|nixl|ray))*)$"}),
    ("colocated.prefill", _whole(0, 16)),
    ("colocated.decode", _whole(1, 16)),
    ("colocated.gpusPerWorker", _whole(0, 64)),
    ("ray.mode", _one_of("chart", "kuberay", "external")),
    ("ray.address", {"type": "string", "pattern": "^([^:/ ]+:[0-9]+)?$"}),
    ("ray.ports.workers", _whole(8, 10000)),
    ("ray.ports.first", _whole(1024, 65000)),
    ("ray.ports.*", _whole(1, 65535)),
    ("redis.external.address", {"type": "string", "pattern": "^((rediss?://)?[^:/ ]+:[0-9]+)?$"}),
    ("redis.maxMemory", {"type": ["string", "integer"], "pattern": "^[0-9]+([kKmMgG]?[bB]?)$"}),
    ("autoscaling.slo.attainment", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
    ("autoscaling.slo.*", {"type": "number", "exclusiveMinimum": 0, "maximum": 3600000}),
    ("autoscaling.intervalSeconds", {"type": "number", "minimum": 1, "maximum": 86400}),
    ("autoscaling.*.maxReplicas", _whole(1, 10000)),
    ("autoscaling.router.minReplicas", _whole(1, 10000)),
    ("autoscaling.router.targetCPUUtilizationPercentage", _whole(1, 100)),
    ("autoscaling.keda.pollingInterval", _whole(1, 86400)),
    ("autoscaling.keda.fallbackReplicas", _whole(0, 10000)),
    ("networkPolicy.routerFrom", "objects"),
    ("networkPolicy.*From", "objects"),
    ("networkPolicy.extraEgress", "objects"),
    # No pod waits for it: a pool may stay over a holiday.
    ("autoscaling.scaleToZeroAfterSeconds", {"type": "number", "minimum": 0, "maximum": 31536000}),
    # A day at most: pods wait for sums of these.
    ("router.drainSeconds", {"type": "number", "exclusiveMinimum": 0, "maximum": 86400}),
    ("*Seconds", {"type": "number", "minimum": 0, "maximum": 86400}),
    ("*.interval", "duration"),
    ("gateway.requestTimeout", "duration"),
    ("gateway.*arentRefs", "references"),
    ("gateway.*ostnames", "list"),
    ("router.flags", "routerFlags"),
    ("workers.flags", "workerFlags"),
    ("prefill.flags", "workerFlags"),
    ("decode.flags", "workerFlags"),
    ("autoscaling.flags", "autoscalerFlags"),
)

DEFS: dict[str, Any] = {
    "name": {"type": "string", "pattern": _NAME, "maxLength": 253},
    "memory": {"type": ["string", "integer"], "pattern": "^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$"},
    "quantity": {"type": ["string", "number"], "pattern": "^[0-9]+(\\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"},
    "amount": {"type": ["string", "integer"], "minimum": 0, "pattern": "^[0-9]+%$"},
    "duration": {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"},
    "strings": {"type": "object", "additionalProperties": {"type": "string"}},
    "list": {"type": "array", "items": {"type": "string"}},
    "objects": {"type": "array", "items": {"type": "object"}},
    "references": {"type": "array", "items": {"type": "object", "required": ["name"]}},
    "mounts": _objects("name", "mountPath", optional=("subPath", "subPathExpr", "readOnly", "recursiveReadOnly", "mountPropagation")),
    "claims": _objects("name", optional=("resourceClaimName", "resourceClaimTemplateName")),
    "env": {
        "type": "array",
        "items": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "value": {"type": "string"}, "valueFrom": {"type": "object"}},
        },
    },
    "resources": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "requests": {"type": "object", "additionalProperties": {"$ref": "#/$defs/quantity"}},
            "limits": {"type": "object", "additionalProperties": {"$ref": "#/$defs/quantity"}},
        },
    },
    "tolerations": {
        "type": "array",
        "items": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "key": {"type": "string"},
                "operator": _one_of("Exists", "Equal"),
                "value": {"type": "string"},
                "effect": _one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
                "tolerationSeconds": {"type": "integer"},
            },
        },
    },
    "affinity": {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: {"type": "object"} for name in ("nodeAffinity", "podAffinity", "podAntiAffinity")},
    },
}

# What the chart settles itself: a flag that said something else would part from its ports, Secrets and volumes.
# fmt: off
SETTLED = frozenset((
    "host", "port", "grpc-port", "health-port", "metrics-port", "external-scaler-port", "model", "redis-url", "secret-file",
    "former-secret-file", "router-id",
    "worker-id", "autoscaler-id", "pod-name", "pod-namespace", "pod-owner", "advertise-address", "ray-address", "tls-cert", "tls-key",
    "tls-ca", "tls-peer-name", "tls-client-auth", "api-key", "api-key-file", "api-keys", "api-keys-file", "admin-host", "admin-port",
    "batch-dir", "otlp-endpoint", "kubernetes-api", "kubernetes-dir", "drain-timeout", "model-revision",
    "architecture",
))
# fmt: on


def _flags(table: type[Settings]) -> dict[str, Any]:
    properties = {each.name: _flag(each) for each in settings_of(table) if each.name not in SETTLED}
    # Refused by name: the only text allowed says what replaces it.
    properties |= {name: _one_of(f"removed: {why}") for name, why in REMOVED.items() if name not in properties and name not in SETTLED}
    return {"type": "object", "additionalProperties": False, "properties": dict(sorted(properties.items()))}


def _flag(each: SettingRow) -> dict[str, Any]:
    if each.switch:
        return {"type": "boolean"}
    if each.choices:
        return _one_of(*each.choices)
    if isinstance(each.read, Whole | Number):
        # A text may hold a number, as in 'max-inflight: "64"'.
        lower = {"exclusiveMinimum" if isinstance(each.read, Number) and each.read.above else "minimum": each.read.low}
        upper = {"maximum": each.read.high} if math.isfinite(each.read.high) else {}
        bounded = {"type": ["string", "number"], **lower, **upper}
        return {"anyOf": [{"const": 0}, bounded]} if isinstance(each.read, Whole) and each.read.or_zero else bounded
    if isinstance(each.read, OneOf):
        return _one_of(*each.read.values, *map(str, each.read.values))
    return {"type": ["string", "number", "boolean", "array", "object"]}


def _flag_defs() -> dict[str, Any]:
    tables = {"router": RouterSettings, "worker": WorkerSettings, "autoscaler": AutoscalerSettings}
    return {f"{name}Flags": _flags(table) for name, table in tables.items()}


def _rule(name: str) -> Any:
    return next((fragment for pattern, fragment in RULES if fnmatch.fnmatchcase(name, pattern)), None)


def _schema(value: Any, name: str) -> dict[str, Any]:
    fragment = _rule(name) if name else None
    if isinstance(fragment, str):
        return {"$ref": f"#/$defs/{fragment}"}
    if fragment is not None:
        return dict(fragment)
    if isinstance(value, Mapping) and value:
        properties = {key: _schema(child, f"{name}.{key}".removeprefix(".")) for key, child in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}
    if isinstance(value, Mapping | list):
        raise SystemExit(f"scripts/helm_schema.py has no rule for {name}, whose default is empty; add one to RULES")
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return dict(_NATURAL)
    if isinstance(value, int | float):
        return {"type": "number", "minimum": 0}
    return {"type": "string"}


def unused_rules(values: Mapping[str, Any]) -> list[str]:
    """Patterns that no value has."""
    names = set(_names(values))
    return [pattern for pattern, _ in RULES if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]


def _names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{key}.")


def schema_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Raises SystemExit for a value that needs a rule and has none."""
    root = _schema(values, "")
    for block, names, others in SHARED:
        shared = root["properties"][block]["properties"]
        for other in others:
            place = root
            for name in other.split("."):
                place = place["properties"][name]
            place["properties"] = {name: shared[name] for name in names or shared} | place["properties"]
    # Helm gives a chart that is part of another one the values of all.
    root["properties"]["global"] = {"type": "object"}
    comment = "Written by scripts/helm-docs from values.yaml, scripts/helm_schema.py and the flags of the processes."
    return {"$schema": "http://json-schema.org/draft-07/schema#", "$comment": comment, **root, "$defs": DEFS | _flag_defs()}
