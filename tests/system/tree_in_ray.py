"""Has Ray's workers import from the checkout of the process that asks for them, not from the installed one (RAY_RUNTIME_ENV_HOOK)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def as_here(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**(runtime_env or {}), "env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
