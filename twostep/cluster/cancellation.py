"""Loops over Redis that end when they are told to."""

from __future__ import annotations

import asyncio


def end_if_cancelled() -> None:
    """To be called by a loop's task after each use of Redis, whose client can take a cancellation for a lost connection: then it is up to
    the loop to remember it. Raises CancelledError."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
