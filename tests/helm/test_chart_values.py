"""Values: what the schema and the templates refuse, and that schema, page and shipped files are what they are made from."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_schema
import jsonschema
import pytest
import yaml
from chart_cases import CASES, EVERYTHING, SWITCHES
from chart_render import CHART, MODEL, ROOT, dotted, helm, merged, parsed, profile, refusal, render, run

# By dotted name: what is wrong, and what helm says about it.
WRONG: list[tuple[str, Any, str]] = [
    ("router.replicas", -1, "router.replicas: Must be greater than or equal to 0"),
    ("colocated.decode", 0, "colocated.decode: Must be greater than or equal to 1"),
    ("decode.replicas", 3000000000, "decode.replicas: Must be less than or equal to 10000"),
    ("prefill.gpus", 65, "prefill.gpus: Must be less than or equal to 64"),
    ("router.drainSeconds", 0, "router.drainSeconds: Must be greater than 0"),
    ("router.replicas", "many", "router.replicas: Invalid type. Expected: integer, given: string"),
    ("ruoter.replicas", 3, "Additional property ruoter is not allowed"),
    ("prefill.replica", 3, "prefill: Additional property replica is not allowed"),
    ("decode.gpus", 1.5, "decode.gpus: Invalid type. Expected: integer, given: number"),
    ("router.service.type", "Balancer", 'router.service.type must be one of the following: "ClusterIP", "NodePort", "LoadBalancer"'),
    ("ray.mode", "operator", 'ray.mode must be one of the following: "chart", "kuberay", "external"'),
    ("ray.objectStore", "lots", "ray.objectStore: Does not match pattern"),
    ("ray.ports.workers", 4, "ray.ports.workers: Must be greater than or equal to 8"),
    ("redis.embedded", "maybe", "redis.embedded: Invalid type. Expected: boolean, given: string"),
    ("tls.source", "openssl", "tls.source must be one of the following"),
    ("tls.certManager.duration", "90 days", "tls.certManager.duration: Does not match pattern"),
    ("auth.apiKeys", "yes", "auth.apiKeys must be one of the following"),
    ("logLevel", "warn", "logLevel must be one of the following"),
    ("model.volume.type", "nfs", "model.volume.type must be one of the following"),
    ("workers.kvTransfer", "rdma", "workers.kvTransfer: Does not match pattern"),
    ("router.flags.max-inflite", 3, "router.flags: Additional property max-inflite is not allowed"),
    ("router.flags.hash-unit", 128, 'router.flags.hash-unit must be one of the following: "removed: it is a constant now, 64 tokens'),
    ("workers.flags.stall-timeout", 60, "removed: it is a constant now, 120 s"),
    ("router.flags.max-inflight", 0, "router.flags.max-inflight: Must be greater than or equal to 1"),
    ("decode.flags.port", 3, "decode.flags: Additional property port is not allowed"),
    ("router.flags.reasoning-parser", "mine", "router.flags.reasoning-parser must be one of the following"),
    ("router.resources.limits.memory", "2GB", "router.resources.limits.memory: Does not match pattern"),
    ("prefill.resources.cpu", 2, "prefill.resources: Additional property cpu is not allowed"),
    ("prefill.nodeSelector.gpu", True, "prefill.nodeSelector.gpu: Invalid type. Expected: string, given: boolean"),
    ("autoscaling.slo.attainment", 95, "autoscaling.slo.attainment: Must be less than 1"),
    ("autoscaling.decode.maxReplicas", 0, "autoscaling.decode.maxReplicas: Must be greater than or equal to 1"),
    ("image.router.digest", "latest", "image.router.digest: Does not match pattern"),
    ("gateway.requestTimeout", "forever", "gateway.requestTimeout: Does not match pattern"),
    ("fullnameOverride", "a.b", "fullnameOverride: Does not match pattern"),
    ("nameOverride", "a" * 41, "nameOverride: String length must be less than or equal to 40"),
    ("redis.external.address", "redis.example", "redis.external.address: Does not match pattern"),
    ("secrets.existingSecret", "My Secret", "secrets.existingSecret: Does not match pattern"),
    ("redis.extraVolume", [], "redis: Additional property extraVolume is not allowed"),
    ("router.resourceClaims", [], "router: Additional property resourceClaims is not allowed"),
    ("ray.head.extraVolumeMounts", [{"name": "a", "path": "/b"}], "ray.head.extraVolumeMounts.0: mountPath is required"),
    ("prefill.gpuResource", "gpu", "prefill.gpuResource: Does not match pattern"),
    (
        "decode.resourceClaims",
        [{"name": "a", "resourceClaim": "b"}],
        "decode.resourceClaims.0: Additional property resourceClaim is not allowed",
    ),
    ("colocated.kernelCache.typ", "pvc", "colocated.kernelCache: Additional property typ is not allowed"),
    ("router.service.externalTrafficPolicy", "local", "router.service.externalTrafficPolicy must be one of the following"),
]

# Values that are right alone and contradict each other.
CONTRARY: list[tuple[str, Any, str]] = [
    ("tls", {"enabled": True, "source": "secret"}, "give tls.existingSecret"),
    ("image.router.repository", "registry.example/router:2", "image.router.repository is registry.example/router:2, with a tag"),
    ("commonLabels", {"app.kubernetes.io/part-of": "web"}, "commonLabels has app.kubernetes.io/part-of"),
    (
        "",
        {"networkPolicy": {"egress": True}, "redis": {"embedded": False, "external": {"existingSecret": "redis"}}},
        "Redis is there: give networkPolicy.extraEgress",
    ),
    ("router.podLabels", {"app.kubernetes.io/name": "web"}, "router.podLabels has app.kubernetes.io/name"),
    (
        "router.service",
        {"loadBalancerClass": "a.b/c"},
        "router.service.loadBalancerClass is for router.service.type LoadBalancer, and it is ClusterIP",
    ),
    ("router.service", {"type": "NodePort", "loadBalancerSourceRanges": ["10.0.0.0/8"]}, "is for router.service.type LoadBalancer"),
    ("router.service.externalTrafficPolicy", "Local", "is for router.service.type NodePort or LoadBalancer"),
    ("decode.gpuResource", "none", "decode has GPUs and gpuResource none, and nothing brings them"),
    ("decode", {"gpus": 2, "gpuResource": "nvidia.com/mig-1g.10gb"}, "decode asks for 2 of nvidia.com/mig-1g.10gb in one pod"),
    (
        "",
        {"colocated": {"enabled": True}, "workers": {"gpuResource": "nvidia.com/mig-1g.10gb"}},
        "colocated asks for 2 of nvidia.com/mig-1g.10gb",
    ),
    ("prefill.resourceClaims", [{"name": "gpus"}], "prefill: the claim gpus of resourceClaims needs resourceClaimName"),
    ("", {"colocated": {"enabled": True, "besidePools": True}, "workers": {"kvTransfer": "cuda_ipc"}}, "CUDA IPC joins workers of one pod"),
    (
        "",
        {"colocated": {"enabled": True, "besidePools": True, "gpusPerWorker": 2}, "ray": {"enabled": False}},
        "CUDA IPC reads a pool on one GPU",
    ),
    ("router.env", [{"name": "TWOSTEP_HASH_UNIT", "value": "128"}], "router.env has TWOSTEP_HASH_UNIT, which was removed: it is"),
    ("autoscaling.env", [{"name": "TWOSTEP_LEADER_LEASE", "value": "9"}], "autoscaling.env has TWOSTEP_LEADER_LEASE"),
    ("secrets.formerDeploymentKey", "deployment-secret", "secrets.deploymentKey and secrets.formerDeploymentKey are both"),
    ("router.env", [{"name": "TWOSTEP_LOG_LEVEL", "value": "debug"}], "router.env: TWOSTEP_LOG_LEVEL is there twice"),
    ("components.env", [{"name": "HOME", "value": "/root"}], "HOME is there twice in the pod of"),
    ("prefill.extraVolumes", [{"name": "shm", "emptyDir": {}}], "prefill.extraVolumes: shm is there twice"),
    ("redis.extraVolumes", [{"name": "data", "emptyDir": {}}], "redis.extraVolumes: data is there twice"),
    ("decode.extraVolumeMounts", [{"name": "x", "mountPath": "/models"}], "decode.extraVolumeMounts: /models is there twice"),
    ("ray.head.extraContainers", [{"name": "head", "image": "x"}], "ray.head.extraContainers and extraInitContainers: head is there twice"),
    ("decode.extraInitContainers", [{"name": "raylet", "image": "x"}], "decode.extraContainers and extraInitContainers: raylet is there"),
    (
        "router.extraContainers",
        [{"name": "logs", "image": "x", "env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}],
        "logs's env: A is there twice",
    ),
    (
        "model.loader",
        {"enabled": True, "command": ["fetch"], "env": [{"name": "MODEL_PATH", "value": "/x"}]},
        "model.loader.env: MODEL_PATH is there twice",
    ),
    ("", {"workers": {"device": "cuda"}, "decode": {"gpus": 0}}, "workers.device is cuda and decode.gpus is 0"),
    ("redis", {"embedded": False}, "give redis.external.existingSecret"),
    ("auth.apiKeys", "file", "give auth.existingSecret"),
    ("model.volume.type", "emptyDir", "set model.loader.enabled"),
    ("model.path", "", "which model? Give model.path"),
    ("model.path", "/data/llama", "give the path below it, as in /models/"),
    ("model.volume.existingClaim", "", "give model.volume.existingClaim, a claim that holds it (also if it is demo-twostep-model"),
    ("model.loader.enabled", True, "needs one of model.loader.hub"),
    ("ray", {"mode": "external"}, "give ray.address"),
    ("ray.ports", {"first": 60000, "workers": 6000}, "the ports 60000 to 66008: they must end by 65535"),
    ("ray.ports", {"first": 50040}, "leave out 50061 to 50073"),
    ("", {"ray": {"ports": {"first": 50350}}, "colocated": {"enabled": True, "prefill": 16, "decode": 16}}, "leave out 50100 to 50413"),
    ("ray.ports", {"first": 6300, "workers": 100}, "ray.ports.gcs (6379)"),
    ("ray.ports", {"client": 6379}, "ray.ports.gcs and ray.ports.client are both 6379"),
    *(("auth.adminPort", port, f"auth.adminPort is {port}, and routers have that port already") for port in (8000, 50051, 50052, 50053)),
    (
        "router.extraContainers",
        [{"name": "web", "image": "x", "ports": [{"containerPort": 8000}]}],
        "router.extraContainers' ports: 8000/TCP is there twice",
    ),
    ("ray", {"mode": "external", "address": "a:6379"}, "give networkPolicy.rayFrom"),
    ("prefill.maxSurge", 0, "prefill.maxSurge and prefill.maxUnavailable are both 0"),
    ("colocated", {"enabled": True, "maxUnavailable": "0%"}, "colocated.maxSurge and colocated.maxUnavailable are both 0"),
    ("workers.kvTransfer", "none", "set prefill.replicas to 0"),
    ("", {"workers": {"kvTransfer": "none"}, "colocated": {"enabled": True}}, "set colocated.prefill to 0"),
    ("gateway.enabled", True, "give gateway.parentRefs"),
    ("gateway", {"enabled": True, "parentRefs": [{"name": "a"}]}, "give gateway.hostnames and gateway.grpcHostnames"),
    (
        "gateway",
        {"enabled": True, "parentRefs": [{"name": "a"}], "hostnames": ["b.c"], "grpcHostnames": ["b.c"]},
        "gateway.grpcHostnames has b.c, which gateway.hostnames has too",
    ),
    ("ingress", {"enabled": True, "tlsSecret": "cert"}, "give ingress.host"),
    ("autoscaling", {"enabled": True, "scaleToZeroAfterSeconds": 60}, "needs autoscaling.prefill.minReplicas 0"),
    ("autoscaling.router", {"enabled": True, "minReplicas": 11}, "autoscaling.router.maxReplicas (10) is less than"),
    ("autoscaling", {"enabled": True, "prefill": {"minReplicas": 9}}, "autoscaling.prefill.maxReplicas (8) is less than"),
]


@pytest.mark.parametrize("turn", [0, 1])
def test_wrong_values_are_refused_by_name(turn: int) -> None:
    """Helm tells all faults at once: those of other values than the ones before share a rendering."""
    wrong = [fault for fault in WRONG if [other[0] for other in WRONG[: WRONG.index(fault)]].count(fault[0]) == turn]
    said = refusal(merged(*(dotted(name, value) for name, value, _ in wrong)))
    assert [fault for fault in wrong if fault[2] not in said] == []


@pytest.mark.parametrize(("name", "value", "words"), CONTRARY, ids=[f"{name}-{number}" for number, (name, *_) in enumerate(CONTRARY)])
def test_contrary_values_are_refused_with_what_to_change(name: str, value: Any, words: str) -> None:
    assert words in refusal(dotted(name, value) if name else value)


@pytest.mark.parametrize(
    "values",
    [
        {"commonLabels": {"app.kubernetes.io/environment": "production", "helm.sh/team": "ml"}},
        # A worker's pod has only ports 50061 to 50073; where the head is elsewhere, its ports are, too.
        {"ray": {"ports": {"first": 50100}}},
        merged(SWITCHES["ray-elsewhere"], {"ray": {"ports": {"first": 10000}}}),
        {"networkPolicy": {"egress": True}, "tracing": {"otlpEndpoint": "http://localhost:4317"}},
        {"redis": {"resources": None}},
        merged(SWITCHES["autoscaling-to-zero"], {"autoscaling": {"scaleToZeroAfterSeconds": 3 * 86400}}),
        merged(SWITCHES["autoscaling"], {"tls": {"source": "secret", "kedaSecret": "keda"}}),
    ],
    ids=("labels", "ports", "ports-elsewhere", "collector-beside", "no-resources", "days-without-requests", "tls-off"),
)
def test_what_contradicts_nothing_is_taken(values: Mapping[str, Any]) -> None:
    render(values)


def test_labels_of_the_charts_own_are_refused() -> None:
    for label in render({}).of("Deployment")[0]["metadata"]["labels"]:
        assert f"commonLabels has {label}, which the chart sets itself" in refusal({"commonLabels": {label: "x"}})


def test_a_registry_goes_before_what_names_none() -> None:
    own = {"image": {"registry": "registry.example:5000/llm", "router": {"repository": "localhost:5000/router"}}}
    images = {pod.component: pod.spec["containers"][0]["image"].partition("@")[0] for pod in render(own).pods()}
    assert images["redis"] == "registry.example:5000/llm/valkey/valkey"
    assert render({}).pod("redis").spec["containers"][0]["image"].startswith("docker.io/valkey/valkey@")
    assert images["router"] == "localhost:5000/router:0.1.0"
    assert images["prefill"] == "registry.example:5000/llm/twostep/worker-cuda:0.1.0"


@pytest.mark.parametrize("name", ["h200", "mixed", pytest.param("demo", marks=pytest.mark.exhaustive)])
def test_every_value_of_a_profile_has_an_effect(name: str) -> None:
    """A value that changes no object only looks as if it did something. Those that are the chart's defaults may stand there, to be seen."""
    whole = profile(name)
    rendered = run({}, name).stdout
    idle = []
    for path, value in _settings(whole):
        default = functools.reduce(lambda block, part: block.get(part, {}) if isinstance(block, dict) else {}, path, profile(""))
        if value != default and run(dotted(".".join(path), default or None), name).stdout == rendered:
            idle.append(".".join(path))
    assert idle == []


def _settings(block: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in block.items():
        if isinstance(value, dict) and "." not in "".join(value) and key != "resources":
            yield from _settings(value, (*path, key))
        else:
            yield (*path, key), value


@pytest.mark.parametrize(("other", "words"), [("colocated", "colocated.enabled"), ("decode-alone", "set autoscaling.enabled to false")])
def test_where_nothing_can_be_scaled_nothing_is(other: str, words: str) -> None:
    assert words in refusal(merged(SWITCHES["autoscaling"], SWITCHES[other]))


def test_every_switch_has_a_case() -> None:
    """Every boolean of the values is both on and off in some case."""
    seen: dict[str, set[bool]] = {}
    for name, values in CASES.values():
        _booleans(merged(profile(""), profile(name) if name else {}, values), "", seen)
    assert [name for name, states in seen.items() if len(states) < 2] == []


def _booleans(values: dict[str, Any], prefix: str, seen: dict[str, set[bool]]) -> None:
    for key, value in values.items():
        if isinstance(value, bool):
            seen.setdefault(prefix + key, set()).add(value)
        elif isinstance(value, dict):
            _booleans(value, f"{prefix}{key}.", seen)


def test_the_schema_is_a_schema_whose_every_rule_is_used() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    assert helm_schema.unused_rules(profile("")) == []
    used = set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(schema)))
    assert used == schema["$defs"].keys()


def test_rendering_draws_nothing_at_random() -> None:
    """Neither one rendering nor another of the same values differs: GitOps tools would apply what is random anew every time."""
    words = re.compile(r"\b(rand\w+|uuidv4|gen(CA|SelfSigned|Signed|PrivateKey)\w*|derivePassword|lookup|now|htpasswd|bcrypt)\b")
    # Numbers of pods, and whether something scales them: tests/helm/test_chart_replicas.py.
    allowed = {"_replicas.tpl": {"lookup"}}
    for file in (CHART / "templates").rglob("*"):
        if file.is_file():
            # Scripts and prose apart: between the braces of templates.
            for expression in re.findall(r"\{\{(?!-? */\*)(.*?)\}\}", file.read_text(), flags=re.DOTALL):
                found = {match[0] for match in words.finditer(re.sub(r'"[^"]*"', "", expression))}
                assert found <= allowed.get(file.name, set()), (file.name, expression)
    once = run(EVERYTHING).stdout
    command = [helm(), "template", "demo", str(CHART), "--namespace", "serving", "--values", "-"]
    again = subprocess.run(command, input=json.dumps(merged(MODEL, EVERYTHING)), capture_output=True, text=True, check=True).stdout
    assert again == once


def notes_of(case: str, tmp_path: Path, more: Mapping[str, Any] | None = None) -> str:
    """helm template leaves NOTES.txt out: a copy of the chart includes it in an object."""
    chart = tmp_path / "helm"
    shutil.copytree(CHART, chart)
    (chart / "templates/notes-here.yaml").write_text('notes: {{ include (print $.Template.BasePath "/NOTES.txt") . | toJson }}\n')
    name, values = CASES[case]
    result = run(merged(values, more or {}), name, chart)
    assert result.returncode == 0, result.stderr
    notes: str = next(json.loads(line.removeprefix("notes: ")) for line in result.stdout.splitlines() if line.startswith("notes: "))
    return notes


@pytest.mark.parametrize("case", ["defaults", "everything", "tls-secret"])
def test_notes_say_what_to_type_next_and_what_is_open(case: str, tmp_path: Path) -> None:
    notes, (name, values) = notes_of(case, tmp_path), CASES[case]
    full = "chat" if case == "everything" else "demo-twostep"
    assert "helm test demo -n serving" in notes
    assert f"port-forward svc/{full}-router 8000:8000" in notes
    assert ("No TLS" in notes) is (not values.get("tls", {}).get("enabled", False))
    assert ("OPEN TO EVERYBODY" in notes) is (case != "everything")
    assert ("stay as they are given" in notes) is (case != "everything")
    assert ("get scaledobjects" in notes) is (case == "everything")
    assert ("kubernetes.io/metadata.name" in notes) is (case == "everything")
    assert ("Routers are ready without workers" in notes) is (case == "everything")
    assert ("twostep/router:0.1.0 and twostep/worker-cuda:0.1.0: nothing of that name is published" in notes) is (case != "everything")
    assert ("-o jsonpath='{.data.ca\\.crt}' | base64 -d > ca.crt" in notes) is (case != "defaults")
    assert "> tls.key" not in notes
    if case == "tls-secret":
        assert "demo-twostep-peer" in notes
        assert "llm.example" in notes
    services = {service["metadata"]["name"] for service in render(values, name).of("Service")}
    for named in re.findall(rf"({full}[\w-]*)\.serving\.svc\.cluster\.local:", notes):
        assert named in services


def waits(notes: str) -> list[int]:
    """Minutes of --timeout for an install and for an upgrade."""
    return [int(found) for found in re.findall(r"helm (?:install|upgrade) \.\.\. --wait --timeout (\d+)m\n", notes)]


def test_notes_say_how_long_helm_must_wait(tmp_path: Path) -> None:
    """Its own five minutes are less than the chart gives a worker to load."""
    pool = {"workers": {"startupSeconds": 1800, "drainSeconds": 120}, "prefill": {"replicas": 2}, "decode": {"replicas": 3}}
    notes = notes_of("defaults", tmp_path / "a", pool)
    deadlines = {
        each["spec"]["progressDeadlineSeconds"] for each in render(pool).of("Deployment") if "progressDeadlineSeconds" in each["spec"]
    }
    assert deadlines == {1800 + 120 + 300}, "nor does a Deployment count as stuck before"
    assert waits(notes) == [37, 3 * 37]
    assert "after the loader" not in notes
    assert waits(notes_of("autoscaling", tmp_path / "b", pool)) == [37, 8 * 37]
    assert waits(notes_of("colocated-with-ray", tmp_path / "c", pool)) == [37, 2 * 37]
    assert "after the loader" in notes_of("model-loader", tmp_path / "d", pool)


def test_commands_of_the_pages_wait_long_enough() -> None:
    """Those that install the demo, and test it after that."""
    limit = yaml.safe_load((CHART / "values-demo.yaml").read_text())["workers"]["startupSeconds"]
    for page in ("README.md", "docs/kubernetes.md"):
        (command,) = re.findall(r"^ *(helm install demo .*)$", (ROOT / page).read_text(), re.MULTILINE)
        found = re.search(r"--wait --timeout (\d+)m", command)
        assert found, command
        assert int(found[1]) * 60 > limit, command


def test_values_of_a_chart_before_this_one_are_taken(tmp_path: Path) -> None:
    """`helm upgrade --reuse-values` puts the former chart's defaults in the place of this one's: what they do not have is not there."""
    chart = tmp_path / "helm"
    shutil.copytree(CHART, chart)
    values = yaml.safe_load((chart / "values.yaml").read_text())
    for name in (
        "components",
        "tls.kedaSecret",
        "workers.kernelCache",
        "workers.resourceClaims",
        "autoscaling.pdb",
        "autoscaling.podPolicy",
        "secrets.deploymentKey",
        "secrets.formerDeploymentKey",
        "autoscaling.holdReplicas",
        "colocated.besidePools",
    ):
        *blocks, last = name.split(".")
        del functools.reduce(dict.__getitem__, blocks, values)[last]
    (chart / "values.yaml").write_text(yaml.safe_dump(values))
    for case in ("everything", "tls-secret", "autoscaling-without-rights"):
        given = merged(CASES[case][1], SWITCHES["autoscaling"])
        result = run(given, chart=chart)
        assert result.returncode == 0, result.stderr
        assert parsed(result.stdout) == render(given), "and mean what they meant"


def test_a_platform_may_choose_the_users() -> None:
    values = {"podSecurity": dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))}
    for pod in render(values).pods():
        assert pod.spec["securityContext"].keys() == {"runAsNonRoot", "fsGroupChangePolicy", "seccompProfile"}


def test_hooks_run_where_routers_may() -> None:
    """In a cluster whose every node bears a taint, an install would wait for its first hook and fail."""
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    values = {
        "router": {"nodeSelector": {"pool": "llm"}, "tolerations": [toleration]},
        "podAnnotations": {"sidecar.istio.io/inject": "false"},
    }
    chart = render(merged(SWITCHES["tls-job"], values))
    for component in ("router", "make-secrets", "make-tls", "test"):
        pod = chart.pod(component)
        assert (pod.spec["nodeSelector"], pod.spec["tolerations"]) == ({"pool": "llm"}, [toleration])
    for pod in chart.pods():
        assert pod.metadata["annotations"]["sidecar.istio.io/inject"] == "false", pod.name


def test_no_meshs_sidecar_keeps_a_hook_from_its_end() -> None:
    wanted = {"sidecar.istio.io/inject": "true", "linkerd.io/inject": "enabled"}
    for pod in render(merged(SWITCHES["tls-job"], {"podAnnotations": wanted})).pods():
        found = {name: pod.metadata["annotations"][name] for name in wanted}
        hook = pod.owner["kind"] == "Job"
        assert found == ({"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"} if hook else wanted), pod.name
