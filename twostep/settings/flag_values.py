"""What flags take: each of these turns a flag's text into its value, or says what to give instead."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

Number = Callable[[str], float]
Whole = Callable[[str], int]


def whole(low: int, high: int) -> Whole:
    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return whole_number


def not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 up")
    return value


def positive(text: str) -> float:
    value = not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is too little; give a number above 0")
    return value


def share(text: str) -> float:
    value = not_negative(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share; give a number above 0 and at most 1")
    return value


def seconds(low: float = 0.01, high: float = 1e6) -> Number:
    def number_of_seconds(text: str) -> float:
        value = not_negative(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from {low:g} to {high:g}")
        return value

    return number_of_seconds
