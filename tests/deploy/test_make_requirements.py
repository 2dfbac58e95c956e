"""What `make` installs: every package in one version with hashes, for each Python and machine that the project runs on; PyTorch alone comes
from an index of the operator's choice."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[2]
LOCKS = CHECKOUT / "deploy/requirements"
EXTRAS = {"make-worker": ("worker",), "make-dev": ("worker", "dev")}
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = (("Linux", "x86_64"), ("Linux", "aarch64"))


def lines(name: str) -> list[str]:
    text = (LOCKS / f"{name}.txt").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith(("#", "--"))]


def environment(python: str, system: str, machine: str) -> dict[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "platform_system": system,
        "sys_platform": system.lower(),
        "platform_machine": machine,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "extra": "",
    }


def pins(name: str, where: dict[str, str]) -> dict[str, str]:
    """Canonical name to version, of what is installed there. Fails for one that stands twice."""
    found: dict[str, str] = {}
    for line in lines(name):
        requirement = Requirement(line.partition(" --hash")[0].strip())
        if requirement.marker is not None and not requirement.marker.evaluate(where):
            continue
        package = canonicalize_name(requirement.name)
        assert package not in found, f"{package} stands twice in {name}.txt"
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        found[package] = specifier.version
    return found


def wanted(extras: tuple[str, ...], where: dict[str, str]) -> list[Requirement]:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    found = [Requirement(line) for line in project["dependencies"]]
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            requirement = Requirement(line)
            found += wanted(tuple(requirement.extras), where) if requirement.name == "twostep" else [requirement]
    return [requirement for requirement in found if requirement.marker is None or requirement.marker.evaluate(where)]


def environments() -> list[dict[str, str]]:
    return [environment(python, *machine) for python in PYTHONS for machine in MACHINES]


@pytest.mark.parametrize("name", EXTRAS)
def test_every_package_has_hashes_and_nothing_is_compiled(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text()
    assert "--only-binary :all:\n" in text
    assert "://" not in text
    for line in lines(name):
        assert re.search(r"(\s+--hash=sha256:[0-9a-f]{64})+$", line), line[:100]


@pytest.mark.parametrize("name", EXTRAS)
def test_all_that_the_extras_ask_for_is_there_and_within_their_floors(name: str) -> None:
    for where in environments():
        found = pins(name, where)
        for requirement in wanted(EXTRAS[name], where):
            package = canonicalize_name(requirement.name)
            if package == "torch":
                continue
            assert requirement.specifier.contains(found[package]), f"{requirement} is {found[package]}: run deploy/pin-requirements"


@pytest.mark.parametrize("name", EXTRAS)
def test_versions_are_those_of_the_constraints(name: str) -> None:
    constraints = [line.split("==") for line in (CHECKOUT / "deploy/constraints.txt").read_text().splitlines() if "==" in line]
    want = {canonicalize_name(package): version for package, version in constraints if not package.startswith("#")}
    for where in environments():
        found = pins(name, where)
        common = found.keys() & want.keys()
        assert {package: found[package] for package in common} == {package: want[package] for package in common}
        assert {"ray", "redis", "aiohttp"} <= common


def test_both_have_the_same_versions() -> None:
    for where in environments():
        worker, dev = pins("make-worker", where), pins("make-dev", where)
        assert worker.items() <= dev.items()


def test_the_images_have_the_same_versions() -> None:
    where = environment("3.11", "Linux", "x86_64")
    worker, image = pins("make-worker", where), pins("worker-cpu", where)
    common = worker.keys() & image.keys()
    assert {package: worker[package] for package in common} == {package: image[package] for package in common}


def test_pytorch_is_left_to_its_index_and_what_it_needs_is_there() -> None:
    for where in environments():
        found = pins("make-worker", where)
        assert "torch" not in found
        assert not [package for package in found if package.startswith(("nvidia-", "cuda-"))]
        # What any build of PyTorch asks for: else it would come along without hashes.
        assert {"filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec"} <= found.keys()


def test_the_makefile_installs_nothing_else_but_pytorch() -> None:
    installs = [line for line in (CHECKOUT / "Makefile").read_text().splitlines() if line.startswith("\t@$(PIP)")]
    assert len(installs) >= 4
    for line in installs:
        assert "--no-deps --require-hashes" in line or "--no-deps --no-build-isolation" in line or '"PyTorch"' in line, line
