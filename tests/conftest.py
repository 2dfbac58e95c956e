"""Fixtures every area may use. Importing this file imports neither torch nor transformers."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from twostep.model.loading import store

# Without a GPU, kernels run in Triton's interpreter, which must be chosen before anything imports triton; transformers does.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests begin processes by fork and exec: gRPC's handlers of a fork, run in between, write into the new process's terminal.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# The same cases for everybody, however busy the machine is.
hypothesis.settings.register_profile(
    "twostep", derandomize=True, deadline=None, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("twostep")

# A shell without job control starts what it runs in the background with Ctrl-C ignored, and so would be the processes tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Folders whose tests start processes, namespaces, browsers or containers, render the chart or play whole days.
_SYSTEM_FOLDERS = {"deploy", "faults", "fuzz", "helm", "hostile", "streams", "system"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts tests into the tiers of `make test` and `make test-all`: a test of the system is marked so by itself, by its folder, or by
    its need of Ray. Those marked `smoke` are in the first tier all the same, those marked `exhaustive` in neither."""
    for item in items:
        if item.path.parent.name in _SYSTEM_FOLDERS or item.get_closest_marker("ray") or item.get_closest_marker("exhaustive"):
            item.add_marker("system")


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(importlib.import_module("distribution").Distribution())


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama as transformers saves it: 3 layers, hidden 64, 4 heads on 2 KV heads, vocabulary of a byte-level BPE with
    ChatML tokens (ids 0 to 2), float32, context 2048, two end-of-sequence ids (2 and 0), a chat template."""
    tiny_models = importlib.import_module("tiny_models")
    path: Path = tiny_models.save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")
    return path


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model, converted (30 layers, bfloat16, 270 MB): out of the user's cache, or fetched into it once."""
    return store.resolve(store.DEFAULT_MODEL, cache_dir=store.default_cache_dir(os.environ))


@pytest.fixture(scope="session")
def self_signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of localhost and 127.0.0.1, which is its own authority, and its key: PEM files."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    subprocess.run([openssl, "req", "-x509", *kind, "-keyout", key, "-out", cert, *subject], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def no_full_collections() -> Iterator[None]:
    """Routers in the tests' own process start without collecting all garbage: of a process that has PyTorch and a thousand tests in its
    memory that takes half a second for each router, in which the workers beside it stand still. Real processes do it all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twostep.rpc.collector._collect", lambda *_, **__: 0.0)
        yield
