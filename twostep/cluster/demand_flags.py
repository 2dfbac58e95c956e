"""What answers are held to whose requests promise nothing: routers meter how many keep it, the autoscaler sizes the deployment for it."""

from __future__ import annotations

import argparse
import math

from twostep.request_class import MAX_TARGET_MS
from twostep.settings.flags import FlagParser

DEFAULT_TTFT_MS = 1000.0
DEFAULT_TPOT_MS = 50.0


def target_flags(parser: FlagParser) -> None:
    """--target-ttft-ms and --target-tpot-ms, the same on every router and autoscaler."""
    parser.flag(
        "--target-ttft-ms",
        type=_milliseconds,
        default=DEFAULT_TTFT_MS,
        help="time to the first token that the deployment is scaled for, of requests that name none; the same on routers and autoscalers",
    )
    parser.flag(
        "--target-tpot-ms",
        type=_milliseconds,
        default=DEFAULT_TPOT_MS,
        help="time per token after it, likewise; no request is refused for either",
    )


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds") from None
    if not math.isfinite(value) or not 0 < value <= MAX_TARGET_MS:
        raise argparse.ArgumentTypeError(f"{text} is not a number of milliseconds above 0, up to {MAX_TARGET_MS}")
    return value
