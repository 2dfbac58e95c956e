"""Runs a Dockerfile's steps: each stage is a copy of the base's directory, RUN is a process in it.

What differs from `docker build`: the base is a Debian of the same release with Debian's own Python instead of the official image, steps
have the host's network, names and certificate authorities, and nothing is cached.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from image_replay import dockerfile
from image_replay.root import ImageSandbox, run_in

_RUN_TIMEOUT_S = 3600.0
# Docker hands these to RUN without being told to; pip's are how an index nearby is found.
_FROM_HOST = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT")
# The host's names and authorities, so that downloads work as they do outside.
_HOST_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ReplayError(Exception):
    """A step failed, or the image is not what it should be."""


@dataclass(slots=True)
class Image:
    """Holds what a stage has come to."""

    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    args: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def path(self, inside: str) -> Path:
        return self.root / str(Path(self.cwd, inside)).lstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """`base` stands in for whatever FROM names. `wheels`: a directory that pip looks into as well."""

    checkout: Path
    base: Path
    scratch: Path
    build_args: Mapping[str, str]
    wheels: Path | None

    def build(self, text: str) -> Image:
        """The last stage. Raises ReplayError, ValueError for what is not understood, FileNotFoundError for a COPY of nothing."""
        built: dict[str, Image] = {}
        for stage in dockerfile.parse(text).stages:
            print(f"FROM {stage.base.partition('@')[0]}  (stage {stage.name})", flush=True)
            image = Image(self.scratch / f"stage-{stage.name}")
            subprocess.run(["cp", "--archive", "--reflink=auto", str(self.base), str(image.root)], check=True)
            for step in stage.instructions:
                print(f"{step.name} {step.value[:100]}", flush=True)
                self._step(step, image, built)
            built[stage.name] = image
        return image

    def _step(self, step: dockerfile.Instruction, image: Image, built: Mapping[str, Image]) -> None:
        value = dockerfile.expand(step.value, image.args | image.env) if step.name != "RUN" else step.value
        match step.name:
            case "ARG":
                image.args |= {name: self.build_args.get(name, default) for name, default in dockerfile.assignments(value).items()}
            case "ENV":
                image.env |= dockerfile.assignments(value)
            case "WORKDIR":
                image.cwd = value
                image.path(value).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = value
            case "ENTRYPOINT":
                image.entrypoint = dockerfile.command(value)
            case "CMD":
                image.command = dockerfile.command(value)
            case "COPY":
                self._copy(dockerfile.copy(value), image, built)
            case "RUN":
                self._run(step, image)

    def _run(self, step: dockerfile.Instruction, image: Image) -> None:
        env = {name: os.environ[name] for name in _FROM_HOST if name in os.environ}
        binds = {path: path for path in _HOST_FILES if Path(path).exists()}
        if self.wheels is not None:
            env["PIP_FIND_LINKS"] = "/mnt/wheels"
            binds["/mnt/wheels"] = str(self.wheels)
        sandbox = ImageSandbox(env={**env, **image.args, **image.env}, user=image.user, cwd=image.cwd, binds=binds)
        done = run_in(image.root, ["/bin/sh", "-c", step.value], sandbox, _RUN_TIMEOUT_S)
        if done.returncode != 0:
            raise ReplayError(f"line {step.line}: RUN ended with {done.returncode}\n" + "\n".join(done.stdout.splitlines()[-40:]))

    def _copy(self, copy: dockerfile.Copy, image: Image, built: Mapping[str, Image]) -> None:
        target = image.path(copy.target)
        into = copy.target.endswith("/") or copy.target in (".", "./") or len(copy.sources) > 1
        ignore = dockerfile.Ignore((self.checkout / ".dockerignore").read_text())
        for source in copy.sources:
            if copy.stage:
                target.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "--archive", f"{built[copy.stage].path(source)}/.", str(target)], check=True)
                continue
            single = (self.checkout / source).is_file()
            for path in dockerfile.files(self.checkout, source, ignore):
                inside = Path(path.name) if single and into else Path() if single else Path(path).relative_to(source)
                (target / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.checkout / path, target / inside)


def make_base(directory: Path, *, suite: str, python: str) -> None:
    """A minimal Debian whose Python stands where the official image has it. Raises ReplayError: no debootstrap, or another Python."""
    if shutil.which("debootstrap") is None:
        raise ReplayError("debootstrap is not there: apt install debootstrap")
    packages = "ca-certificates,netbase,tzdata,python3,python3-venv,python3-pip"
    command = ["debootstrap", "--variant=minbase", f"--include={packages}", suite, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReplayError(f"debootstrap ended with {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    for name in ("python", "python3", f"python{python}"):
        (directory / "usr/local/bin" / name).symlink_to(f"/usr/bin/python{python}")
    if not (directory / f"usr/bin/python{python}").exists():
        raise ReplayError(f"Debian {suite} has no Python {python}")
