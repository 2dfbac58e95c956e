"""Flags of files and batches."""

from __future__ import annotations

from pathlib import Path

from twostep.settings.flag_values import whole
from twostep.settings.flags import FlagParser


def batch_flags(parser: FlagParser) -> None:
    parser.flag(
        "--batch-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="keep files and batches here, and serve /v1/files and /v1/batches; routers of one deployment may share it",
    )
    parser.flag("--batch-concurrency", type=whole(1, 4096), default=64, help="requests of batches that this router asks at once")
    parser.flag("--max-file-bytes", type=whole(1, 1 << 40), default=200 << 20, help="largest file taken")
    parser.flag(
        "--max-owner-bytes",
        type=whole(0, 1 << 60),
        default=10 << 30,
        help="of all that one tenant has on disk, or all of them where no API keys are asked for; 0: no bound",
    )
    parser.flag("--file-retention-days", type=whole(1, 36_500), default=30, help="files and ended batches are kept so long")
