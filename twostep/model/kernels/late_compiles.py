"""Says which kernels are compiled while requests are served: each holds up a step for a second or so, once."""

from __future__ import annotations

import logging
import time
from typing import Any

from triton import knobs

log = logging.getLogger(__name__)


def report_compiles() -> None:
    """From now on every kernel that Triton compiles in this process is logged, with the time that it took."""
    since: dict[str, float] = {}

    def begins(*_: Any, repr: str, **__: Any) -> bool:
        since[repr] = time.monotonic()
        return False

    def ended(*_: Any, repr: str, fn: Any, **__: Any) -> None:
        seconds = time.monotonic() - since.pop(repr, time.monotonic())
        log.warning("kernel %s was compiled while serving, which held up a step for %.2f s: %s", fn.name, seconds, repr)

    knobs.runtime.jit_cache_hook = begins
    knobs.runtime.jit_post_compile_hook = ended
