"""Flags of who may ask, and of what is held back."""

from __future__ import annotations

import argparse
from pathlib import Path

from twostep.settings.flags import FlagParser


def access_flags(parser: FlagParser) -> None:
    parser.flag(
        "--api-keys-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="let in those only who show a key of this file, which `twostep keys` writes; it is read again when it changes",
    )
    parser.flag(
        "--api-keys",
        default="",
        choices=["", "redis", "redis-adopt"],
        metavar="redis",
        help="the same, with the keys in Redis, for all routers; redis-adopt: also those there that nobody has signed yet, which it signs",
    )
    parser.flag(
        "--admin-port",
        type=_port,
        default=-1,
        help="HTTP for operators: API keys, workers' roles, the log's level, a drain; none if not given, 0 for any free one",
    )
    parser.flag("--admin-host", default="127.0.0.1", help="address of --admin-port; whoever can reach it needs the admin key all the same")
    parser.flag(
        "--admin-key-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="what opens --admin-port; if not given, a key that follows from the deployment's secret",
    )
    parser.flag(
        "--max-connections",
        type=_at_least_one,
        default=4096,
        help="connections at once, on either port; new ones are refused where, over HTTP, no idle one makes room for them",
    )
    parser.flag(
        "--hold-back",
        default="",
        metavar="MODULE:FUNCTION",
        help="show all text to this function before it is sent: it may replace it or end the answer (docs/access.md)",
    )
    parser.flag(
        "--hold-back-chars",
        type=_not_negative,
        default=64,
        help="characters of an answer that are kept back, so that the function sees what follows them before they are sent",
    )
    parser.flag("--hold-back-timeout", type=_seconds, default=1.0, help="seconds that the function may take for each piece of text")
    parser.flag(
        "--hold-back-failure",
        default="closed",
        choices=["closed", "open"],
        help="what it could not judge in time is not sent, and the request fails; open: it is sent",
    )


def _port(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 1 << 16
    if not -1 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give one up to 65535, 0 for any free one, -1 for none")
    return value


def _not_negative(text: str) -> int:
    return 0 if text.strip() == "0" else _at_least_one(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, 3600 at most")
    return value


def _at_least_one(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {1 << 20}")
    return value
