"""Flags of who may ask, and of what is held back."""

from __future__ import annotations

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
