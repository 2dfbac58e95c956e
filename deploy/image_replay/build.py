"""Runs a Dockerfile's steps: each stage is a copy of the base's directory, RUN is a process in it.

What differs from `docker build`: the base is a Debian of the same release with Debian's own Python instead of the official image, steps
have the host's network, names and certificate authorities, and nothing is cached.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from image_replay import context, dockerfile
from image_replay.root import HOST_FILES, ImageSandbox, Root

_RUN_TIMEOUT_S = 3600.0
# Docker hands these to RUN without being told to; pip's are how an index nearby is found.
_FROM_HOST = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BuildError(Exception):
    """A step failed."""


@dataclass(slots=True)
class Image:
    """Holds what a stage has come to."""

    root: Root
    env: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    args: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """`base` stands in for whatever FROM names. `wheels`: a directory that pip looks into as well. `say` gets one line a step."""

    checkout: Path
    base: Path
    scratch: Path
    build_args: Mapping[str, str]
    environ: Mapping[str, str]
    wheels: Path | None
    say: Callable[[str], None]

    def build(self, text: str) -> Image:
        """The last stage. Raises BuildError, ValueError for what is not understood, FileNotFoundError for a COPY of nothing."""
        parsed = dockerfile.parse(text)
        ignore = context.Ignore((self.checkout / ".dockerignore").read_text())
        built: dict[str, Image] = {}
        image: Image | None = None
        for stage in parsed.stages:
            image = self._stage(stage, built, ignore)
            built[stage.name] = image
        assert image is not None
        return image

    def _stage(self, stage: dockerfile.Stage, built: Mapping[str, Image], ignore: context.Ignore) -> Image:
        root = self.scratch / f"stage-{stage.name}"
        self.say(f"FROM {stage.base.partition('@')[0]}  (stage {stage.name})")
        subprocess.run(["cp", "--archive", "--reflink=auto", str(self.base), str(root)], check=True)
        image = Image(Root(root))
        for step in stage.instructions:
            started = time.monotonic()
            self._step(step, image, built, ignore)
            self.say(f"{step.name} {step.value[:100]}  ({time.monotonic() - started:.1f} s)")
        return image

    def _step(self, step: dockerfile.Instruction, image: Image, built: Mapping[str, Image], ignore: context.Ignore) -> None:
        value = dockerfile.expand(step.value, image.args | image.env) if step.name != "RUN" else step.value
        match step.name:
            case "ARG":
                for name, default in dockerfile.assignments(value).items():
                    image.args[name] = self.build_args.get(name, default)
            case "ENV":
                image.env |= dockerfile.assignments(value)
            case "WORKDIR":
                image.cwd = value
                self._in(image, value).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = value
            case "ENTRYPOINT":
                image.entrypoint = dockerfile.command(value)
            case "CMD":
                image.command = dockerfile.command(value)
            case "COPY":
                self._copy(dockerfile.copy(value), image, built, ignore)
            case "RUN":
                self._run(step, image)

    def _run(self, step: dockerfile.Instruction, image: Image) -> None:
        env = {name: self.environ[name] for name in _FROM_HOST if name in self.environ}
        binds = {path: path for path in HOST_FILES if Path(path).exists()}
        if self.wheels is not None:
            env["PIP_FIND_LINKS"] = "/mnt/wheels"
            binds["/mnt/wheels"] = str(self.wheels)
        sandbox = ImageSandbox(env={**env, **image.args, **image.env}, user=image.user, cwd=image.cwd, binds=binds)
        done = image.root.run(["/bin/sh", "-c", step.value], sandbox, _RUN_TIMEOUT_S)
        if done.returncode != 0:
            raise BuildError(f"line {step.line}: RUN ended with {done.returncode}\n" + "\n".join(done.stdout.splitlines()[-40:]))

    def _copy(self, copy: dockerfile.Copy, image: Image, built: Mapping[str, Image], ignore: context.Ignore) -> None:
        target = self._in(image, copy.target)
        into = copy.target.endswith("/") or copy.target in (".", "./") or len(copy.sources) > 1
        if copy.stage:
            for source in copy.sources:
                target.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "--archive", f"{self._in(built[copy.stage], source)}/.", str(target)], check=True)
            return
        for source in copy.sources:
            single = (self.checkout / source).is_file()
            for path in context.files(self.checkout, source, ignore):
                inside = Path(path.name) if single and into else Path() if single else Path(path).relative_to(source)
                (target / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.checkout / path, target / inside)

    def kept(self, text: str) -> Image:
        """The last stage as an earlier run left it: nothing is run, only what holds at its end is read again."""
        stage = dockerfile.parse(text).final
        image = Image(Root(self.scratch / f"stage-{stage.name}"))
        if not image.root.path.is_dir():
            raise FileNotFoundError(f"{image.root.path} is not there: run deploy/replay-image with --keep before")
        for step in stage.instructions:
            if step.name not in ("COPY", "RUN"):
                self._step(step, image, {}, context.Ignore(""))
        return image

    def _in(self, image: Image, path: str) -> Path:
        return image.root.path / str(Path(image.cwd, path)).lstrip("/")


def make_base(directory: Path, *, suite: str, python: str, headers: bool) -> None:
    """A minimal Debian whose Python stands where the official image has it. Raises BuildError: no debootstrap, or another Python."""
    if shutil.which("debootstrap") is None:
        raise BuildError("debootstrap is not there: apt install debootstrap")
    packages = "ca-certificates,netbase,tzdata,python3,python3-venv,python3-pip" + (",libpython3-dev" if headers else "")
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", suite, str(directory)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"debootstrap ended with {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    for name in ("python", "python3", f"python{python}"):
        (directory / "usr/local/bin" / name).symlink_to(f"/usr/bin/python{python}")
    if not (directory / f"usr/bin/python{python}").exists():
        raise BuildError(f"Debian {suite} has no Python {python}")
    for cache in ("var/cache/apt/archives", "var/lib/apt/lists"):
        for path in (directory / cache).iterdir():
            if path.is_file() and path.name != "lock":
                path.unlink()


def disk_bytes(path: Path) -> int:
    """Returns the bytes of a directory, links counted once."""
    return int(subprocess.run(["du", "--bytes", "--summarize", str(path)], capture_output=True, text=True, check=True).stdout.split()[0])
