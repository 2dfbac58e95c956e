"""Sets of values that the chart is rendered with: each switch once, all of them together, the profiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chart_render import dotted, merged

Values = dict[str, Any]


def _values(*parts: Mapping[str, Any], **settings: Any) -> Values:
    """Settings with two underscores for a dot: ray__mode="kuberay"."""
    return merged(*parts, *(dotted(name.replace("__", "."), value) for name, value in settings.items()))


def extras(name: str) -> Values:
    """Whatever every component takes (values.yaml: components), told apart by `name`. Extra containers keep the `restricted` level."""
    # fmt: off
    secure = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}}
    few = {"cpu": "10m", "memory": "16Mi"}
    container = {"image": "busybox", "securityContext": secure, "resources": {"requests": few, "limits": few}}
    return {
        "labels": {"by": name}, "annotations": {"by": name}, "podLabels": {"pod": name}, "podAnnotations": {"pod": name},
        "nodeSelector": {"zone": name}, "affinity": {"nodeAffinity": {}}, "priorityClassName": name, "runtimeClassName": name,
        "tolerations": [{"key": name, "operator": "Exists"}],
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": name, "whenUnsatisfiable": "ScheduleAnyway"}],
        "env": [{"name": f"BY_{name.replace('-', '_').upper()}", "value": name}],
        "envFrom": [{"secretRef": {"name": "mine"}, "prefix": f"{name}_"}],
        "extraVolumes": [{"name": f"{name}-files", "emptyDir": {"sizeLimit": "1Mi"}}],
        "extraVolumeMounts": [{"name": f"{name}-files", "mountPath": f"/srv/{name}"}],
        "extraContainers": [{"name": f"{name}-beside", **container}],
        "extraInitContainers": [{"name": f"{name}-before", **container}],
    }
    # fmt: on


# Switches that have nothing to do with each other share a case: each rendering takes a tenth of a second.
SWITCHES: dict[str, Values] = {
    "names": _values(
        nameOverride="llm",
        fullnameOverride="chat",
        commonLabels={"team": "ml"},
        podAnnotations={"note": "x"},
        image={"registry": "registry.example/a", "pullSecrets": [{"name": "pull"}], "worker": {"digest": f"sha256:{'0a' * 32}"}},
    ),
    "given": _values(
        model__volume__existingClaim="weights",
        secrets={"existingSecret": "mine", "deploymentKey": "second", "formerDeploymentKey": "first"},
        tracing__otlpEndpoint="http://collector:4317",
        logLevel="debug",
        logJson=False,
        router={
            "service": {
                "type": "LoadBalancer",
                "annotations": {"a": "b"},
                "loadBalancerClass": "example.com/nlb",
                "loadBalancerSourceRanges": ["10.0.0.0/8", "fd00::/8"],
                "externalTrafficPolicy": "Local",
                "internalTrafficPolicy": "Cluster",
            },
            "batches": {"enabled": True, "existingClaim": "files"},
        },
    ),
    "placement": _values(
        router={"affinity": {"nodeAffinity": {}}, "priorityClassName": "high", "nodeSelector": {"pool": "cpu"}, "pdb": {"enabled": False}},
        prefill={
            "nodeSelector": {"gpu": "h200"},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"a": "b"}}}
            ],
            "pdb": {"enabled": False},
        },
        decode={"tolerations": [], "maxSurge": "25%", "maxUnavailable": "10%", "pdb": {"enabled": False}},
    ),
    "extras": _values(
        components=extras("all"),
        router=extras("router"),
        prefill=extras("prefill"),
        decode=extras("decode"),
        colocated=extras("colocated"),
        ray__head=extras("ray-head"),
        redis=extras("redis"),
        autoscaling={**extras("autoscaler"), "pdb": {"enabled": False}},
    ),
    "devices": _values(
        workers={"gpuResource": "amd.com/gpu", "runtimeClassName": "amd"},
        prefill={"gpus": 4, "gpuResource": "none", "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "four"}]},
        decode={"gpuResource": "nvidia.com/mig-1g.10gb", "runtimeClassName": "nvidia"},
        colocated__resourceClaims=[{"name": "gpus", "resourceClaimName": "all"}, {"name": "nics", "resourceClaimTemplateName": "nic"}],
    ),
    "kernels-in-claims": _values(workers__kernelCache={"type": "pvc", "storageClass": "nfs"}, decode__kernelCache__existingClaim="weights"),
    "kernels-on-nodes": _values(workers__kernelCache={"type": "hostPath", "hostPath": "/srv/k"}, decode__kernelCache__type="none"),
    "host-path": _values(
        model__volume={"type": "hostPath", "hostPath": "/srv/models"}, redis__persistence__enabled=False, networkPolicy__enabled=False
    ),
    "model-loader": _values(
        model={
            "name": "chat",
            "volume": {"existingClaim": ""},
            "loader": {"enabled": True, "command": ["fetch"], "args": ["a b", "$(x)"]},
        }
    ),
    "model-in-each-pod": _values(model={"volume": {"type": "emptyDir"}, "loader": {"enabled": True, "command": ["fetch"]}}),
    "keys-in-a-file": _values(auth={"apiKeys": "file", "existingSecret": "keys", "adminPort": 8001}),
    "keys-in-redis": _values(
        auth__apiKeys="redis",
        router={
            "flags": {"max-inflight": 1024, "reasoning-parser": "auto", "allowed-origins": ["https://a.example"]},
            "batches": {"enabled": True},
        },
    ),
    "tls": _values(tls__enabled=True),
    "tls-issuer": _values(
        tls={"enabled": True, "clientCertificates": True, "certManager": {"issuerRef": {"name": "corp", "kind": "ClusterIssuer"}}},
        model={"volume": {"type": "image"}, "path": "/opt/model"},
    ),
    "tls-secret": _values(tls={"enabled": True, "source": "secret", "existingSecret": "cert", "extraDnsNames": ["llm.example"]}),
    "tls-job": _values(tls={"enabled": True, "source": "job"}),
    "cpu": _values(
        prefill__gpus=0, decode__gpus=0, workers={"device": "cpu", "flags": {"dtype": "float32"}}, autoscaling__router__enabled=True
    ),
    "parallel": _values(prefill__gpus=2, decode={"gpus": 4, "flags": {"max-num-seqs": 64}}, workers__runtimeClassName="nvidia"),
    "no-ray": _values(ray__enabled=False, redis={"embedded": False, "external": {"existingSecret": "redis"}}),
    "decode-alone": _values(ray__enabled=False, prefill__replicas=0, workers__kvTransfer="none"),
    "kuberay": _values(ray__mode="kuberay"),
    "ray-elsewhere": _values(
        ray={"mode": "external", "address": "ray.example:6379"},
        networkPolicy__rayFrom=[{"namespaceSelector": {"matchLabels": {"team": "web"}}}],
    ),
    "ray-sizes": _values(
        ray={"objectStore": "20Gi", "ports": {"first": 12000, "workers": 100}},
        workers__sharedMemory="512Mi",
        redis={"embedded": False, "external": {"existingSecret": "redis", "address": "rediss://r:6379", "passwordKey": "pw"}},
    ),
    "colocated": _values(
        colocated={"enabled": True, "prefill": 2, "decode": 2}, ray__enabled=False, monitoring__serviceMonitor__enabled=True
    ),
    "colocated-with-ray": _values(colocated={"enabled": True, "replicas": 2, "pdb": {"enabled": False}}),
    "colocated-beside-pools": _values(colocated={"enabled": True, "besidePools": True, "prefill": 3, "replicas": 2}),
    "autoscaling": _values(autoscaling={"enabled": True, "maxCostPerHour": 40, "keda": {"fallbackReplicas": 2}, "flags": {"surge": 2}}),
    "autoscaling-to-zero": _values(
        autoscaling={"enabled": True, "scaleToZeroAfterSeconds": 600, "prefill": {"minReplicas": 0}, "decode": {"minReplicas": 0}}
    ),
    "autoscaling-without-rights": _values(
        autoscaling={"enabled": True, "podDeletionCost": False, "switchRoles": False, "replicas": 1, "podPolicy": False},
        tls={"enabled": True, "source": "job"},
    ),
    "autoscaling-with-numbers-held": _values(
        autoscaling={"enabled": True, "holdReplicas": True, "podPolicy": False, "router": {"enabled": True}}, prefill__replicas=3
    ),
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
        gateway={"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm.example"], "grpcHostnames": ["grpc.llm.example"]},
        ingress={"enabled": True, "className": "nginx", "host": "llm.example", "tlsSecret": "cert", "annotations": {"a": "b"}},
    ),
    "gateway-http": _values(gateway={"enabled": True, "parentRefs": [{"name": "public"}], "grpc": False}),
    "gateway-grpc": _values(gateway={"enabled": True, "parentRefs": [{"name": "public", "namespace": "gateways"}], "http": False}),
}

EVERYTHING = _values(
    *(
        SWITCHES[name]
        for name in (
            "names",
            "model-loader",
            "keys-in-a-file",
            "keys-in-redis",
            "tls-job",
            "network-policies",
            "cpu",
            "autoscaling-to-zero",
        )
    ),
    *(SWITCHES[name] for name in ("monitoring", "gateway", "kuberay", "parallel")),
    auth__apiKeys="file",
    tracing__otlpEndpoint="http://collector:4317",
    logLevel="debug",
)

PROFILES = ("demo", "h200", "mixed")

# Each case: a profile ("" for the chart's defaults), and the values over it.
CASES: dict[str, tuple[str, Values]] = {
    "defaults": ("", {}),
    **{name: ("", values) for name, values in SWITCHES.items()},
    "everything": ("", EVERYTHING),
    **{f"profile-{name}": (name, {}) for name in PROFILES},
    "profile-mixed-tls": ("mixed", merged(SWITCHES["tls-job"], SWITCHES["rdma"], {"gateway": SWITCHES["gateway-http"]["gateway"]})),
}
