"""Tests of what a worker's processes import, which is a large part of their start."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "without"),
    [
        # Before the engine's process has begun.
        ("decode_worker.__main__", {"numpy", "grpc", "redis", "pydantic", "twostep.engine", "kv_transfer"}),
        ("prefill_worker.__main__", {"numpy", "grpc", "redis", "pydantic", "twostep.engine", "kv_transfer"}),
        # The edge's.
        ("kv_transfer.engine_process", {"redis", "prometheus_client", "jinja2", "opentelemetry", "twostep.rpc.server", "torch"}),
    ],
)
def test_what_is_not_needed_is_not_imported(module: str, without: set[str]) -> None:
    program = f"import {module}, sys; print(*sys.modules)"
    imported = set(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split())
    assert imported & without == set()
