"""Sets of values that the chart is rendered with: each switch once, all of them together, the profiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chart_render import dotted, merged

Values = dict[str, Any]


def _values(*parts: Mapping[str, Any], **settings: Any) -> Values:
    """Settings with two underscores for a dot: ray__mode="kuberay"."""
    return merged(*parts, *(dotted(name.replace("__", "."), value) for name, value in settings.items()))


SWITCHES: dict[str, Values] = {
    "names": _values(nameOverride="llm", fullnameOverride="chat", commonLabels={"team": "ml"}, podAnnotations={"note": "x"}),
    "registry": _values(
        image__registry="registry.example/a", image__pullSecrets=[{"name": "pull"}], image__worker__digest=f"sha256:{'0a' * 32}"
    ),
    "model-claim": _values(model__volume__existingClaim="weights"),
    "model-host-path": _values(model__volume={"type": "hostPath", "hostPath": "/srv/models"}),
    "model-image": _values(model__volume__type="image", model__path="/opt/model"),
    "model-loader": _values(model={"name": "chat", "loader": {"enabled": True, "command": ["fetch"], "args": ["a b", "$(x)"]}}),
    "model-in-each-pod": _values(model={"volume": {"type": "emptyDir"}, "loader": {"enabled": True, "command": ["fetch"]}}),
    "secrets": _values(secrets__existingSecret="mine"),
    "keys-in-a-file": _values(auth={"apiKeys": "file", "existingSecret": "keys", "adminPort": 8001}),
    "keys-in-redis": _values(auth__apiKeys="redis"),
    "tls": _values(tls__enabled=True),
    "tls-issuer": _values(
        tls={"enabled": True, "clientCertificates": True, "certManager": {"issuerRef": {"name": "corp", "kind": "ClusterIssuer"}}}
    ),
    "tls-secret": _values(tls={"enabled": True, "source": "secret", "existingSecret": "cert", "extraDnsNames": ["llm.example"]}),
    "tls-job": _values(tls={"enabled": True, "source": "job"}),
    "tracing": _values(tracing__otlpEndpoint="http://collector:4317", logLevel="debug", logJson=False),
    "router-flags": _values(router={"flags": {"max-inflight": 1024, "reasoning-parser": "auto", "allowed-origins": ["https://a.example"]}}),
    "router-balancer": _values(router__service={"type": "LoadBalancer", "annotations": {"a": "b"}}),
    "batches": _values(router__batches__enabled=True),
    "batches-claim": _values(router__batches={"enabled": True, "existingClaim": "files"}),
    "no-budgets": _values(router__pdb__enabled=False, prefill__pdb__enabled=False, decode__pdb__enabled=False),
    "placement": _values(
        router={"affinity": {"nodeAffinity": {}}, "priorityClassName": "high", "nodeSelector": {"pool": "cpu"}},
        prefill={
            "nodeSelector": {"gpu": "h200"},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"a": "b"}}}
            ],
        },
        decode={"tolerations": [], "maxSurge": "25%", "maxUnavailable": "10%"},
    ),
    "cpu": _values(prefill__gpus=0, decode__gpus=0, workers={"device": "cpu", "flags": {"dtype": "float32"}}),
    "parallel": _values(prefill__gpus=2, decode={"gpus": 4, "flags": {"max-num-seqs": 64}}, workers__runtimeClassName="nvidia"),
    "no-ray": _values(ray__enabled=False),
    "decode-alone": _values(ray__enabled=False, prefill__replicas=0, workers__kvTransfer="none"),
    "kuberay": _values(ray__mode="kuberay"),
    "ray-elsewhere": _values(ray={"mode": "external", "address": "ray.example:6379"}),
    "ray-sizes": _values(ray={"objectStore": "20Gi", "ports": {"first": 12000, "workers": 100}}, workers__sharedMemory="512Mi"),
    "redis-elsewhere": _values(
        redis={"embedded": False, "external": {"existingSecret": "redis", "address": "r:6379", "passwordKey": "pw"}}
    ),
    "redis-elsewhere-without-ray": _values(redis={"embedded": False, "external": {"existingSecret": "redis"}}),
    "redis-in-memory": _values(redis__persistence__enabled=False),
    "colocated": _values(colocated={"enabled": True, "prefill": 2, "decode": 2}),
    "autoscaling": _values(autoscaling={"enabled": True, "maxCostPerHour": 40, "keda": {"fallbackReplicas": 2}, "flags": {"surge": 2}}),
    "autoscaling-to-zero": _values(
        autoscaling={"enabled": True, "scaleToZeroAfterSeconds": 600, "prefill": {"minReplicas": 0}, "decode": {"minReplicas": 0}}
    ),
    "autoscaling-without-rights": _values(autoscaling={"enabled": True, "podDeletionCost": False, "switchRoles": False, "replicas": 1}),
    "router-autoscaling": _values(autoscaling__router__enabled=True),
    "no-network-policies": _values(networkPolicy__enabled=False),
    "network-policies": _values(
        networkPolicy={
            "egress": True,
            "routerFrom": [{"namespaceSelector": {"matchLabels": {"team": "web"}}}],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
        }
    ),
    "rdma": _values(rdma__enabled=True),
    "monitoring": _values(
        monitoring={
            "annotations": True,
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "prometheusRule": {"enabled": True},
            "grafanaDashboard": {"enabled": True},
        }
    ),
    "gateway": _values(
        gateway={"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm.example"], "grpcHostnames": ["grpc.llm.example"]}
    ),
    "gateways": _values(
        gateway={"enabled": True, "parentRefs": [{"name": "public"}], "grpcParentRefs": [{"name": "public", "sectionName": "grpc"}]}
    ),
    "ingress": _values(
        ingress={"enabled": True, "className": "nginx", "host": "llm.example", "tlsSecret": "cert", "annotations": {"a": "b"}}
    ),
}

EVERYTHING = _values(
    *(
        SWITCHES[name]
        for name in ("names", "registry", "model-loader", "keys-in-a-file", "tls-job", "tracing", "batches", "network-policies")
    ),
    *(SWITCHES[name] for name in ("autoscaling-to-zero", "router-autoscaling", "monitoring", "gateway", "ingress", "kuberay", "parallel")),
)

PROFILES = ("demo", "h200", "mixed")

# What each case is: a profile ("" for the chart's defaults), and the values over it.
CASES: dict[str, tuple[str, Values]] = {
    "defaults": ("", {}),
    **{name: ("", values) for name, values in SWITCHES.items()},
    "everything": ("", EVERYTHING),
    **{f"profile-{name}": (name, {}) for name in PROFILES},
    **{f"profile-{name}-tls": (name, merged(SWITCHES["tls-job"], SWITCHES["monitoring"])) for name in PROFILES},
}
