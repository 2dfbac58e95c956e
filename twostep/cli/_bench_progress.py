"""A run's progress on standard error: a bar where there are tqdm and a terminal, else a line now and then."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import shutil
import sys
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twostep.lab.bench.serve.runner import Extent, RunProgress

_BAR_INTERVAL_S = 0.25
_LINE_INTERVAL_S = 10.0


@contextlib.asynccontextmanager
async def shown(label: str, extent: Extent, progress: RunProgress, *, wanted: bool) -> AsyncIterator[None]:
    """Shows `progress` while the body runs."""
    if not wanted:
        yield
        return
    bar = _bar(label, extent) if sys.stderr.isatty() and importlib.util.find_spec("tqdm") else None
    task = asyncio.create_task(_follow(label, extent, progress, bar))
    try:
        yield
    finally:
        task.cancel()
        if bar is not None:
            _update(bar, extent, progress)
            bar.close()


def _bar(label: str, extent: Extent) -> Any:
    total = extent.end_s if extent.duration_s else extent.num_requests
    form = "{desc} {percentage:3.0f}% {bar} {n:.0f}/{total:.0f}" + (" s" if extent.duration_s else "") + "{postfix}"
    tqdm: Any = importlib.import_module("tqdm").tqdm
    # It is drawn when told, and no thread of its own watches it.
    tqdm.monitor_interval = 0
    # Some terminals say that they have neither columns nor lines; this takes 100 and 24 for it, and tqdm would draw nothing.
    size = shutil.get_terminal_size((100, 24))
    return tqdm(total=total, desc=label, bar_format=form, mininterval=0, leave=False, ncols=size.columns, nrows=size.lines)


def _update(bar: Any, extent: Extent, progress: RunProgress) -> None:
    bar.n = min(progress.elapsed_s if extent.duration_s else progress.num_ended, bar.total)
    bar.set_postfix_str(_state(progress))


def _state(progress: RunProgress) -> str:
    failed = f", {progress.num_failed} failed" if progress.num_failed else ""
    doing = f"waiting for the last {progress.in_flight} answers" if progress.none_to_come else f"{progress.in_flight} under way"
    return f"{progress.num_sent} sent, {doing}{failed}"


async def _follow(label: str, extent: Extent, progress: RunProgress, bar: Any) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(_LINE_INTERVAL_S if bar is None else _BAR_INTERVAL_S)
        if bar is not None:
            _update(bar, extent, progress)
        else:
            print(f"{label}: {time.monotonic() - began:.0f} s, {_state(progress)}", file=sys.stderr, flush=True)
