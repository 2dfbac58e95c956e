"""compose.yaml: valid by the Compose specification, hardened, and made of flags, files and ports that the processes know."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml
from image_replay import dockerfile

from kv_transfer.ray import node as ray_node
from router import config as router_config
from twostep.model.loading.store import DEFAULT_MODEL
from twostep.settings.ray_node import RayNodeSettings
from twostep.settings.router import RouterSettings
from twostep.settings.table import settings_of
from twostep.settings.worker import DEFAULT_PORTS, WorkerSettings
from twostep.worker import config as worker_config

CHECKOUT = Path(__file__).resolve().parents[2]
PROCESSES = ("router", "prefill", "decode", "ray-head", "prefill-ray", "decode-ray")


@pytest.fixture
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHECKOUT / "deploy/compose.yaml").read_text())
    return loaded


def validate(compose: dict[str, Any]) -> None:
    """Raises ValueError. compose_spec knows no image with both tag and digest, which the specification allows: it gets the digest."""
    text = re.sub(r'("image": "[^"@]+):[^":@/]+@', r"\1@", json.dumps(compose))
    compose_spec.PyCompose.from_json(text).validate()


def test_it_is_valid(compose: dict[str, Any]) -> None:
    validate(compose)


def test_every_service_is_hardened(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["user"] == "10001:10001", name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.keys() & {"privileged", "cap_add", "devices"}, name
        assert service.get("pid", "service:").startswith("service:"), name


def test_images_are_built_here_or_pinned_by_digest(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        if "build" in service:
            path = CHECKOUT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]
            assert path.is_file()
            assert service["image"] == "twostep/" + path.name.removeprefix("Dockerfile.")
        else:
            assert re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", service["image"])


def test_the_chart_runs_the_same_redis(compose: dict[str, Any]) -> None:
    """deploy/pin-base-images finds the chart's digest by the one of compose.yaml."""
    image = yaml.safe_load((CHECKOUT / "helm/values.yaml").read_text())["image"]["redis"]
    assert compose["services"]["redis"]["image"] == f"{image['registry']}/{image['repository']}:{image['tag']}@{image['digest']}"


def test_what_serves_others_says_whether_it_is_well(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {name for name, service in services.items() if "healthcheck" not in service} == {"setup", "prefill-ray", "decode-ray"}
    for service in services.values():
        for needed, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[needed]
    health = {"router": 50052, "prefill": DEFAULT_PORTS["prefill"] + 1, "decode": DEFAULT_PORTS["decode"] + 1}
    for name, port in health.items():
        assert services[name]["healthcheck"]["test"][-1] == f"127.0.0.1:{port}"


@pytest.mark.parametrize("name", PROCESSES)
def test_flags_and_variables_are_those_of_the_process(compose: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each TWOSTEP_ variable is read by the process, and the process takes all of them together."""
    service = compose["services"][name]
    module, *flags = service.get("command") or ["router"]
    parsers = {
        "router": router_config.parse_config,
        "prefill_worker": lambda argv: worker_config.parse_config("prefill", argv),
        "decode_worker": lambda argv: worker_config.parse_config("decode", argv),
        "kv_transfer.ray.node": ray_node.parse_node,
    }
    given = {key: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for key, value in service["environment"].items() if key.startswith("TWOSTEP_")}
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    tables = {"router": RouterSettings, "kv_transfer.ray.node": RayNodeSettings}
    assert given.keys() <= {each.variable for each in settings_of(tables.get(module, WorkerSettings))}
    assert parsers[module](flags) is not None


def test_what_setup_leaves_is_what_the_others_read(compose: dict[str, Any]) -> None:
    services = compose["services"]
    script = services["setup"]["command"][0]
    compile(script, "setup", "exec")
    where = dict(volume.split(":")[:2] for volume in services["setup"]["volumes"])
    assert where == {"models": "/var/cache/twostep", "secrets": "/var/lib/twostep"}
    for name in PROCESSES:
        mounts = {volume.split(":")[0]: volume.split(":")[1:] for volume in services[name]["volumes"]}
        environment = services[name]["environment"]
        assert mounts["secrets"] == ["/run/twostep", "ro"]
        for key in ("TWOSTEP_SECRET_FILE", "RAY_AUTH_TOKEN_PATH"):
            if key in environment:
                assert environment[key].startswith("/run/twostep/")
                assert f'"{Path(environment[key]).name}"' in script
        if "TWOSTEP_MODEL" in environment:
            assert mounts["models"] == ["/models", "ro"]
            assert environment["TWOSTEP_MODEL"] == "/models/model"
            assert environment["TWOSTEP_SERVED_MODEL_NAME"] == DEFAULT_MODEL
        assert services[name]["depends_on"]
    assert 'cache / "model"' in script
    for service in services.values():
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in compose["volumes"]


def test_what_images_must_be_able_to_write_is_theirs(compose: dict[str, Any]) -> None:
    """A new named volume takes the owner of the directory it is mounted on: those of setup must be the user's in the image."""
    text = dockerfile.parse((CHECKOUT / "deploy/Dockerfile.worker-cpu").read_text()).final
    made = next(each.value for each in text.instructions if each.name == "RUN")
    for volume in compose["services"]["setup"]["volumes"]:
        assert volume.split(":")[1] in made
    assert "-o 10001 -g 10001" in made


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_and_its_node_are_one_host(compose: dict[str, Any], role: str) -> None:
    worker, node = compose["services"][role], compose["services"][f"{role}-ray"]
    assert node["network_mode"] == node["ipc"] == node["pid"] == f"service:{role}"
    assert worker["ipc"] == "shareable"
    assert f"{role}-tmp:/tmp" in worker["volumes"]
    assert f"{role}-tmp:/tmp" in node["volumes"]
    assert worker["environment"]["TWOSTEP_ADVERTISE_ADDRESS"] == role
    assert worker["environment"]["TWOSTEP_RAY_ADDRESS"] == node["environment"]["TWOSTEP_RAY_ADDRESS"] == "ray-head:6379"
    # The store, and the ring of the KV agent, which has 64 MiB on a CPU.
    ring = 64 << 20
    assert int(worker["shm_size"].removesuffix("m")) << 20 >= int(node["environment"]["TWOSTEP_RAY_STORE_BYTES"]) + ring


def test_only_the_router_is_published_and_on_loopback(compose: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert published == {"router": ["127.0.0.1:8000:8000", "127.0.0.1:50051:50051"]}
