"""A run's progress on standard error: at a terminal one line that is drawn anew, else a line now and then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

from twostep.cli._terminal import Terminal, clipped
from twostep.lab.bench.serve.runner import Extent, RunProgress

_DRAW_EVERY_S, _LINE_EVERY_S = 0.25, 10.0


@contextlib.asynccontextmanager
async def shown(label: str, extent: Extent, progress: RunProgress, *, wanted: bool) -> AsyncIterator[None]:
    """Shows `progress` while the body runs."""
    if not wanted:
        yield
        return
    terminal = Terminal.of(sys.stderr, os.environ)
    task = asyncio.create_task(_follow(terminal, label, extent, progress))
    try:
        yield
    finally:
        task.cancel()
        terminal.write("\r\x1b[K" if terminal.live else "")


async def _follow(terminal: Terminal, label: str, extent: Extent, progress: RunProgress) -> None:
    while True:
        await asyncio.sleep(_DRAW_EVERY_S if terminal.live else _LINE_EVERY_S)
        done = f"{progress.elapsed_s:.0f}/{extent.end_s:.0f} s" if extent.duration_s else f"{progress.num_ended}/{extent.num_requests}"
        failed = f", {progress.num_failed} failed" if progress.num_failed else ""
        doing = f"waiting for the last {progress.in_flight} answers" if progress.none_to_come else f"{progress.in_flight} under way"
        line = f"{label}: {done}, {progress.num_sent} sent, {doing}{failed}"
        terminal.write(f"\r\x1b[K{clipped(line, terminal.size().columns - 1)}" if terminal.live else f"{line}\n")
