"""Flags of files and batches."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from twostep.flags import FlagParser


def batch_flags(parser: FlagParser) -> None:
    parser.flag(
        "--batch-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="keep files and batches here, and serve /v1/files and /v1/batches; routers of one deployment may share it",
    )
    parser.flag("--batch-concurrency", type=_whole(1, 4096), default=64, help="requests of batches that this router asks at once")
    parser.flag("--max-file-bytes", type=_whole(1, 1 << 40), default=200 << 20, help="largest file taken")
    parser.flag("--max-owner-bytes", type=_whole(0, 1 << 60), default=10 << 30, help="of all files of one tenant; 0: no bound")
    parser.flag("--file-retention-days", type=_whole(1, 36_500), default=30, help="files and ended batches are kept so long")


def _whole(low: int, high: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return whole_number
