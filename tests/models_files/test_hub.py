"""Models of the Hugging Face hub: downloaded, found again without a network, gone on with, and refused; on a stand-in of the hub."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_stand_in import StandIn, running

from twostep.checkpoint.directory import weight_files
from twostep.checkpoint.fingerprint import model_fingerprint
from twostep.checkpoint.hub import Hub, fetch
from twostep.checkpoint.model_name import directory_of, name_of
from twostep.cli import main
from twostep.cli._flags import parser
from twostep.cli._up import options_of
from twostep.errors import SetupError
from twostep.local.components import Components
from twostep.local.plan import make_plan
from twostep.local.probes import Probes
from twostep.process.startup import NoProgress
from twostep.worker.config import parse_config
from twostep.worker.model import load_model

INDEX = "model.safetensors.index.json"
NOT_READ = {"README.md": b"r", "pytorch_model.bin": b"b" * 999, "original/consolidated.00.pth": b"p" * 999, "onnx/model.safetensors": b"o"}


class Journal(NoProgress):
    """Keeps what was said and how far it was. At `until` bytes, `then`."""

    def __init__(self, *, until: int = 1 << 60, then: Callable[[], None] = lambda: None) -> None:
        self.lines: list[str] = []
        self.amounts: list[tuple[int, int]] = []
        self._until, self._then = until, then

    def say(self, line: str) -> None:
        self.lines.append(line)

    def advance(self, done: int, total: int, unit: str = "") -> None:
        self.amounts.append((done, total))
        if done >= self._until:
            self._then()


@pytest.fixture
def files(tiny_llama_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in tiny_llama_dir.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A hub with one model, whose branch main is also the tag v1."""
    # So that a file of some hundred kilobytes comes in pieces, and nobody waits before it is asked for again.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    stand_in = StandIn()
    stand_in.publish({**files, **NOT_READ}, "main", "v1")
    with running(stand_in):
        yield stand_in
        # Downloads that nobody waits for end while there is a hub to answer: without one they would close the connections of the next test.
        stand_in.open.set()
        for thread in threading.enumerate():
            if thread.name == "download":
                thread.join()


@pytest.fixture
def get(hub: StandIn, tmp_path: Path) -> Callable[..., Path]:
    """Fetches the model into a cache of this test's own."""

    def get(revision: str = "main", *, weights: bool = True, progress: Any = None, repository: str = hub.repository, **of_hub: Any) -> Path:
        where = Hub(**{"endpoint": hub.url, "cache_dir": tmp_path / "cache", "offline": False, "timeout_s": 60.0, **of_hub})
        return fetch(repository, revision, weights=weights, progress=progress or NoProgress(), hub=where)

    return get


@pytest.fixture
def told(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tells this process of the hub and the cache, as HF_ENDPOINT and HF_HOME would have."""
    path = "{repo_id}/resolve/{revision}/{filename}"
    constants: dict[str, Any] = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{hub.url}/{path}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
    }
    constants["HF_HUB_ETAG_TIMEOUT"] = 60
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)


def sharded(files: dict[str, bytes], *, lost: str = "") -> dict[str, bytes]:
    """Returns the files with the weights in two parts, which the tests do not load."""
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.dumps({"weight_map": {name: name for name in names}})
    rest = {name: content for name, content in files.items() if name != "model.safetensors"}
    return rest | {INDEX: index.encode()} | {name: name.encode() for name in names if name != lost}


def test_what_is_read_is_downloaded_once_and_found_without_a_network(
    hub: StandIn, get: Callable[..., Path], files: dict[str, bytes], tmp_path: Path
) -> None:
    journal = Journal()
    found = get(token="hf_secret", progress=journal)
    assert {path.name: path.read_bytes() for path in found.iterdir()} == files
    assert found.parent.parent == tmp_path / "cache" / "models--org--tiny"
    assert journal.amounts[-1] == (sum(map(len, files.values())),) * 2
    assert hub.refs["main"] in journal.lines[0]
    assert {each.token for each in hub.fetched(".json")} == {"hf_secret"}
    assert {each.token for each in hub.asked if each.path.startswith("/store/")} == {""}, "the token is for the hub alone"

    hub.asked.clear()
    assert get() == get(hub.refs["main"]) == found
    assert {each.path.partition("?")[0] for each in hub.asked} == {
        "/api/models/org/tiny/revision/main",
        f"/api/models/org/tiny/revision/{found.name}",
    }
    hub.asked.clear()
    assert get(offline=True) == get(found.name, offline=True) == found
    assert not hub.asked


@pytest.mark.usefixtures("told")
def test_a_model_of_the_hub_is_described_as_a_directory_is(hub: StandIn, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for name in (hub.repository, str(tiny_llama_dir)):
        with pytest.raises(SystemExit) as ended:
            main(["models", name, "--json"])
        assert not ended.value.code
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1]
    assert said[0]["architecture"] == "LlamaForCausalLM"


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: StandIn, get: Callable[..., Path], files: dict[str, bytes]) -> None:
    old = hub.refs["v1"]
    new = hub.publish(files | {"generation_config.json": b'{"temperature": 0.5}'}, "main", "a/branch")
    assert [get(revision).name for revision in ("main", "a/branch", "v1", old, new)] == [new, new, old, old, new]
    assert len(hub.fetched(".safetensors")) == 2, "from the hub and from its store, for both revisions"
    assert [get(revision, offline=True).name for revision in ("main", "a/branch", "v1")] == [new, new, old]


@pytest.mark.parametrize("revision", ["v2", "0" * 40, "../../main", "-x", "a" * 300])
def test_a_revision_that_is_none_is_refused(get: Callable[..., Path], revision: str) -> None:
    with pytest.raises(SetupError, match="--model-revision"):
        get(revision)


def test_a_sharded_model_and_one_whose_weights_nobody_reads(hub: StandIn, get: Callable[..., Path], files: dict[str, bytes]) -> None:
    hub.publish(sharded(files), "main")
    assert not list(get(weights=False).glob("*.safetensors*"))
    assert not hub.fetched(".safetensors")
    with pytest.raises(SetupError, match="not all"):
        get(offline=True)
    assert [path.name for path in weight_files(get())] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


@pytest.mark.parametrize(
    ("without", "instead"),
    [("config.json", {}), ("tokenizer.json", {}), ("model.safetensors", {"model.gguf": b"g"}), ("model.safetensors", {INDEX: b"{}"})],
)
def test_what_cannot_be_served_is_refused_before_it_is_downloaded(
    hub: StandIn, get: Callable[..., Path], files: dict[str, bytes], without: str, instead: dict[str, bytes]
) -> None:
    hub.publish({name: content for name, content in files.items() if name != without} | instead, "main")
    with pytest.raises(SetupError, match=r"json|safetensors"):
        get()
    assert not [each for each in hub.asked if each.path.startswith("/store/")]


def test_an_index_that_names_what_is_not_there_is_refused(hub: StandIn, get: Callable[..., Path], files: dict[str, bytes]) -> None:
    hub.publish(sharded(files, lost="model-00002-of-00002.safetensors"), "main")
    with pytest.raises(SetupError, match="model-00002"):
        get()


# ---- cut off ----


def test_a_broken_connection_goes_on_where_it_was(hub: StandIn, get: Callable[..., Path], files: dict[str, bytes]) -> None:
    hub.cut, hub.cuts = 300_000, 2
    assert (get() / "model.safetensors").read_bytes() == files["model.safetensors"]
    begins = [each.range for each in hub.asked if each.path.startswith("/store/")]
    assert begins == ["", "bytes=300000-", "bytes=600000-"]


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupted_download_goes_on_with_the_next_start(hub: StandIn, get: Callable[..., Path], files: dict[str, bytes]) -> None:
    journal = Journal(until=400_000, then=interrupt)
    with pytest.raises(KeyboardInterrupt):
        get(progress=journal)
    assert "go on" in journal.lines[-1]
    hub.asked.clear()
    again = Journal()
    assert (get(progress=again) / "model.safetensors").read_bytes() == files["model.safetensors"]
    (store,) = [each for each in hub.asked if each.path.startswith("/store/")]
    assert 300_000 < int(store.range.removeprefix("bytes=").removesuffix("-")) < 400_000
    assert again.amounts[-1] == (len(files["model.safetensors"]),) * 2


@pytest.mark.parametrize(("code", "said"), [(errno.ENOSPC, "free some disk space"), (errno.EIO, "cannot be used")])
def test_a_disk_that_fails_half_way_keeps_what_has_arrived(hub: StandIn, get: Callable[..., Path], code: int, said: str) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(SetupError, match=rf"{said}.* of 0\.7 MB have arrived.*HF_HOME|{said}.*HF_HOME.* of 0\.7 MB have arrived"):
        get(progress=Journal(until=400_000, then=fail))
    hub.asked.clear()
    get()
    assert [bool(each.range) for each in hub.asked if each.path.startswith("/store/")] == [True]


def test_parts_that_do_not_fit_together_are_refused_once(
    hub: StandIn, get: Callable[..., Path], files: dict[str, bytes], tmp_path: Path
) -> None:
    weights = files["model.safetensors"]
    partial = tmp_path / "cache" / "models--org--tiny" / "blobs" / f"{hashlib.sha256(weights).hexdigest()}.incomplete"
    partial.parent.mkdir(parents=True)
    for begun in (b"not the beginning", b"longer than all" * len(weights)):
        partial.write_bytes(begun)
        if len(begun) < len(weights):
            with pytest.raises(SetupError, match="again"):
                get()
    assert (get() / "model.safetensors").read_bytes() == weights


def test_of_two_at_once_one_downloads_and_the_other_waits(hub: StandIn, get: Callable[..., Path]) -> None:
    class Waiting(NoProgress):
        def say(self, line: str) -> None:
            if "another process" in line:
                hub.open.set()

    hub.open.clear()
    found: list[Path] = []
    both = [threading.Thread(target=lambda: found.append(get(progress=Waiting()))) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert found[0] == found[1]
    assert len([each for each in hub.asked if each.path.startswith("/store/")]) == 1


# ---- refused ----


@pytest.mark.parametrize("token", ["", "hf_other", "hf_mine"])
def test_a_gated_model_needs_a_token_that_may_read_it(hub: StandIn, get: Callable[..., Path], token: str) -> None:
    hub.token = "hf_mine"
    if token == "hf_mine":
        assert get(token=token).is_dir()
        return
    with pytest.raises(SetupError, match=r"licence at http://.*/org/tiny, .*HF_TOKEN") as caught:
        get(token=token or None)
    assert "hf_" not in caught.value.message


def no_network(hub: StandIn) -> dict[str, Any]:
    return {"endpoint": "http://127.0.0.1:9"}


def out_of_order(hub: StandIn) -> dict[str, Any]:
    hub.status = 503
    return {}


def token_refused(hub: StandIn) -> dict[str, Any]:
    hub.status = 403
    return {"token": "hf_old"}


def no_hub(hub: StandIn) -> dict[str, Any]:
    hub.status = 200
    return {}


FAILURES = [
    (no_network, "HF_ENDPOINT"),
    (out_of_order, "503"),
    (token_refused, "HF_TOKEN"),
    (no_hub, "HF_ENDPOINT"),
    (lambda hub: {"offline": True}, "HF_HUB_OFFLINE"),
]


@pytest.mark.parametrize(("fail", "said"), FAILURES)
def test_a_hub_that_does_not_answer_is_done_without_where_the_cache_has_all(
    hub: StandIn, get: Callable[..., Path], fail: Callable[[StandIn], dict[str, Any]], said: str
) -> None:
    with pytest.raises(SetupError, match=said):
        get(**fail(hub))
    hub.status = 0
    found, journal = get(), Journal()
    assert get(**fail(hub), progress=journal) == found
    assert said in journal.lines[0]
    assert found.name in journal.lines[0]
    (found / "model.safetensors").unlink()
    with pytest.raises(SetupError, match=said):
        get(**fail(hub))


def test_a_model_that_is_nowhere(get: Callable[..., Path]) -> None:
    with pytest.raises(SetupError, match=r"no directory org/huge here and no model http://.*/org/huge.*HF_TOKEN"):
        get(repository="org/huge")


def test_a_disk_that_is_too_small_is_found_before_the_download(
    hub: StandIn, get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 60_000_000))
    with pytest.raises(SetupError, match=r"MB are to come, 60\.0 MB are free.*HF_HOME"):
        get()
    assert not hub.fetched(".safetensors")


# ---- names, and who takes them ----


def test_a_directory_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert name_of("org/tiny") == "org/tiny"
    Path("org/tiny").mkdir(parents=True)
    assert directory_of("org/tiny") == Path("org/tiny")
    assert name_of("org/tiny") == name_of(Path("org/tiny/")) == "tiny"
    (tmp_path / "link").symlink_to(tmp_path / "hub" / "models--org--tiny--x" / "snapshots" / ("0" * 40))
    assert name_of(tmp_path / "link") == "org/tiny--x"
    with pytest.raises(SetupError, match="--model-revision v1"):
        directory_of("org/tiny", "v1")
    for name in ("nowhere", "/models/nowhere", "./org/nowhere", "a/b/c"):
        with pytest.raises(SetupError, match=name):
            directory_of(name)


@pytest.mark.usefixtures("told")
def test_workers_of_two_revisions_do_not_pass_for_the_same_model(hub: StandIn, files: dict[str, bytes]) -> None:
    tuned = bytearray(files["model.safetensors"])
    tuned[-1] ^= 1
    hub.publish(files | {"model.safetensors": bytes(tuned)}, "main")
    flags = ["--model", "org/tiny", "--runner", "fake", "--model-revision"]
    old, new = (load_model(parse_config("decode", [*flags, revision])) for revision in ("v1", "main"))
    assert old.name == new.name == "org/tiny"
    assert old.layout.model_fingerprint != new.layout.model_fingerprint
    assert new.layout.model_fingerprint == model_fingerprint(directory_of("org/tiny"))


@pytest.mark.usefixtures("told")
def test_up_asks_once_and_tells_all_processes_the_same_directory(hub: StandIn) -> None:
    words = ["up", "--model", "org/tiny", "--model-revision", "v1", "--runner", "fake", "--aggregated", "--port", "0"]
    options, lines = options_of(parser().parse_args(words)), list[str]()
    plan = make_plan(options, environ={}, progress=lines.append)
    try:
        components = Components(options, plan, environ={"TWOSTEP_MODEL_REVISION": "v1"}, probes=Probes()).all()
    finally:
        shutil.rmtree(plan.run_dir)
    assert hub.refs["v1"] in lines[0]
    assert len(hub.fetched("/v1")) == 1
    for each in (each for each in components if "--model" in each.argv):
        name, directory = (each.argv[each.argv.index(flag) + 1] for flag in ("--served-model-name", "--model"))
        assert (name, Path(directory).name) == ("org/tiny", hub.refs["v1"])
        assert "TWOSTEP_MODEL_REVISION" not in each.env


def test_the_command_finds_its_token_and_cache_where_the_hub_has_them(hub: StandIn, tmp_path: Path) -> None:
    hub.token = "hf_mine"
    (tmp_path / "token").write_text(hub.token)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_HUB_ETAG_TIMEOUT": "60"}

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-P", "-m", "twostep.cli", "models", "fetch", hub.repository, "--model-revision", "v1"]
        return subprocess.run(argv, env=environ | more, capture_output=True, text=True, timeout=120, check=False)

    done = run()
    assert done.stdout.strip() == str(tmp_path / "hub" / "models--org--tiny" / "snapshots" / hub.refs["v1"]), done.stderr
    assert hub.token not in done.stderr
    hub.asked.clear()
    assert run(HF_HUB_OFFLINE="1").stdout == done.stdout
    assert not hub.asked
