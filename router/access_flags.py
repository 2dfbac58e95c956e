"""Flags of who may ask, and of what is held back."""

from __future__ import annotations

import argparse
from pathlib import Path

from twostep.flags import FlagParser


def access_flags(parser: FlagParser) -> None:
    parser.flag(
        "--api-keys-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="let in those only who show a key of this file, which `twostep keys` writes; it is read again when it changes",
    )
    parser.flag("--api-keys", default="", choices=["", "redis"], metavar="redis", help="the same, with the keys in Redis, for all routers")
    parser.flag(
        "--max-connections",
        type=_at_least_one,
        default=4096,
        help="HTTP connections at once; idle ones make room for new ones, and where none is idle new ones are refused",
    )


def _at_least_one(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {1 << 20}")
    return value
