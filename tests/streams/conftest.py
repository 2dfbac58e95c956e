"""Fixtures of the tests of routers and workers together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bare_deployment import make_bare_model_dir

# Small models saved by transformers.
sys.path.append(str(Path(__file__).parent.parent / "models_forward"))


@pytest.fixture(scope="session")
def fake_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bare_model_dir(tmp_path_factory.mktemp("streams") / "m")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the bounds after which silence is a loss: here all are in one process, which may stand still for longer."""
    for name in ("_STREAM_TIMEOUT_S", "_UNARY_TIMEOUT_S", "_DONE_TIMEOUT_S", "_MAX_EARLY_S"):
        monkeypatch.setattr(f"router.serving.attempt.{name}", 60.0)
    for name in ("router.serving.attempt.ACCEPT_TIMEOUT_S", "twostep.cluster.registration.HEARTBEAT_TTL_S"):
        monkeypatch.setattr(name, 60.0)
    for name in ("router.server", "twostep.worker.telemetry"):
        monkeypatch.setattr(f"{name}.TRACES_FLUSH_S", 60.0)


@pytest.fixture(scope="module", autouse=True)
def quick_starts(no_full_collections: None) -> None:
    """Makes routers start quickly; see `no_full_collections`."""
