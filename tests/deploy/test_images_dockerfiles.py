"""The Dockerfiles: linted, small, pinned, without root, and made of files that are there."""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from image_replay import dockerfile

from router.config import RouterConfig
from twostep.settings.worker import DEFAULT_PORTS

CHECKOUT = Path(__file__).resolve().parents[2]
IMAGES = ("router", "worker-cpu", "worker-cuda")
WORKERS = ("worker-cpu", "worker-cuda")


def parsed(image: str) -> dockerfile.Dockerfile:
    return dockerfile.parse((CHECKOUT / f"deploy/Dockerfile.{image}").read_text())


def base(image: str) -> str:
    return dockerfile.assignments(parsed(image).args[0].value)["PYTHON_IMAGE"]


@pytest.fixture(scope="module")
def ignore() -> dockerfile.Ignore:
    return dockerfile.Ignore((CHECKOUT / ".dockerignore").read_text())


def test_all_images_stand_on_one_base_that_is_pinned_by_digest() -> None:
    (only,) = {base(image) for image in IMAGES}
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+-slim-\w+@sha256:[0-9a-f]{64}", only)
    assert {stage.base for image in IMAGES for stage in parsed(image).stages} == {"${PYTHON_IMAGE}"}


@pytest.mark.parametrize("image", IMAGES)
def test_the_final_stage_takes_nothing_but_the_built_environment(image: str) -> None:
    stages = parsed(image).stages
    assert [stage.name for stage in stages[:-1]] == ["build"]
    copies = [dockerfile.copy(each.value) for each in stages[-1].instructions if each.name == "COPY"]
    assert copies == [dockerfile.Copy("build", ("/opt/twostep",), "/opt/twostep")]


@pytest.mark.parametrize("image", IMAGES)
def test_the_image_runs_as_a_fixed_user_without_a_shell_in_front(image: str) -> None:
    final = parsed(image).final
    assert final.last("USER") == "10001:10001"
    assert dockerfile.command(final.last("ENTRYPOINT")) == ["python", "-P", "-m"]
    (module,) = dockerfile.command(final.last("CMD"))
    assert importlib.util.find_spec(f"{module}.__main__") is not None
    names = [each.name for each in final.instructions]
    assert "RUN" not in names[names.index("USER") :]


@pytest.mark.parametrize("image", IMAGES)
def test_every_install_asks_for_hashes_or_for_no_index(image: str) -> None:
    installs = [
        part for stage in parsed(image).stages for each in stage.instructions for part in each.value.split("&&") if "pip" in part.split()
    ]
    installs = [part for part in installs if " install " in part]
    assert len(installs) >= 3
    for part in installs:
        assert "--no-deps" in part
        assert "--require-hashes" in part or "--no-index" in part
    assert dockerfile.assignments(parsed(image).stages[0].last("ENV"))["PIP_NO_CACHE_DIR"] == "1"


@pytest.mark.parametrize("image", IMAGES)
def test_every_package_and_every_source_is_copied(image: str, ignore: dockerfile.Ignore) -> None:
    copies = [dockerfile.copy(each.value) for each in parsed(image).stages[0].instructions if each.name == "COPY"]
    sources = {source for each in copies for source in each.sources}
    packages = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {package.rstrip("*") for package in packages} <= sources
    assert {"pyproject.toml", "README.md", "LICENSE"} <= sources
    for source in sources:
        assert list(dockerfile.files(CHECKOUT, source, ignore))


def test_only_the_cuda_image_has_a_compiler() -> None:
    with_one = [image for image in IMAGES if any("gcc" in each.value for each in parsed(image).final.instructions)]
    assert with_one == ["worker-cuda"]


@pytest.mark.parametrize("image", WORKERS)
def test_what_is_removed_is_removed_from_the_python_of_the_base(image: str) -> None:
    (version,) = set(re.findall(r"/lib/python(3\.\d+)/", (CHECKOUT / f"deploy/Dockerfile.{image}").read_text()))
    assert f"python:{version}-slim" in base(image)


def test_the_ports_exposed_are_those_the_processes_take() -> None:
    router = RouterConfig.__dataclass_fields__["grpc_port"].default
    wanted = {"router": {router, RouterConfig.__dataclass_fields__["port"].default, router + 1, router + 2}}
    workers = {port + offset for port in DEFAULT_PORTS.values() for offset in (0, 1, 2)}
    wanted |= dict.fromkeys(WORKERS, workers)
    assert {image: set(map(int, parsed(image).final.last("EXPOSE").split())) for image in IMAGES} == wanted


def test_nothing_of_the_checkout_but_sources_reaches_a_build(ignore: dockerfile.Ignore) -> None:
    for path in (
        ".git/config",
        ".venv/bin/python",
        "tests/conftest.py",
        "deploy/compose.yaml",
        "docs/images.md",
        "secret",
        ".run/x/secret",
    ):
        assert not ignore.lets_through(path), path
    for path in ("twostep/__pycache__/errors.cpython-311.pyc", "twostep.egg-info/PKG-INFO", "router/http/__pycache__/x.pyc"):
        assert not ignore.lets_through(path), path
    for path in ("twostep/errors.py", "router/ui/index.html", "deploy/requirements/router.txt", "pyproject.toml"):
        assert ignore.lets_through(path), path
