"""Fixtures of the tests of routers and workers together."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_system import make_model_dir


@pytest.fixture(scope="session")
def fake_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("streams") / "m")


@pytest.fixture(scope="module", autouse=True)
def quick_starts(no_full_collections: None) -> None:
    """Of routers; see there."""
