"""Helpers of scripts/ for the chart's tests, and an API server's stand-in."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from chart_hooks import FakeApi

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
