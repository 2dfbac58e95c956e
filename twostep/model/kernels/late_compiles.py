"""Says which kernels are compiled while requests are served: each holds up a step for a second or so, once."""

from __future__ import annotations

import logging
from typing import Any

from triton import knobs
from triton.compiler import ASTSource

log = logging.getLogger(__name__)


def report_compiles() -> None:
    """From now on every kernel that Triton compiles in this process is logged, with the time that it took.

    By Triton's listener, which only looks on: its hooks write a kernel's constants as JSON first, and fail where one is no such value."""
    knobs.compilation.listener = _compiled


def _compiled(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], times: knobs.CompileTimes, cache_hit: bool) -> None:
    if cache_hit:
        # Milliseconds.
        return
    constants = f" with {src.constants}" if isinstance(src, ASTSource) else ""
    log.warning("kernel %s was compiled while serving, which held up a step for %.2f s%s", src.name, times.total / 1e6, constants)
