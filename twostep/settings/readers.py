"""Readers of settings: each turns a text into a value, or says what to give instead.

`Whole`, `OneOf` and `Number` also tell the chart's schema their bounds.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostep.errors import SetupError
from twostep.quantized_vector import QUANTIZED
from twostep.settings.speculative import SpeculativeConfig

KV_TRANSPORTS = ("cuda_ipc", "nixl", "ray", "local")
KV_CACHE_DTYPES = ("auto", "exact", *QUANTIZED)
# See kv_transfer/wire_encoding.py.
KV_WIRES = ("raw", "int8", "fp8", "zstd")

Reader = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Whole:
    """Reads a whole number from `low` to `high`; with `or_zero` also 0, which leaves the choice to the process."""

    low: int
    high: int
    or_zero: bool = False

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = self.low - 1
        if not self.takes(value):
            besides = ", nor 0" if self.or_zero else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {self.low} to {self.high}{besides}")
        return value

    def takes(self, value: int) -> bool:
        return self.low <= value <= self.high or (self.or_zero and not value)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Reads one of some whole numbers."""

    values: tuple[int, ...]

    def __call__(self, text: str) -> int:
        if text not in map(str, self.values):
            raise argparse.ArgumentTypeError(f"{text!r}: give one of {', '.join(map(str, self.values))}")
        return int(text)


@dataclass(frozen=True, slots=True)
class Number:
    """Reads a finite number from `low` to `high`; with `above`, `low` itself is too little. `unit` is for messages alone."""

    low: float = 0.0
    high: float = math.inf
    above: bool = False
    unit: str = ""

    def __call__(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not self.low <= value <= self.high or (self.above and value == self.low):
            kind = f"number of {self.unit}" if self.unit else "number"
            least = f"above {self.low:g}" if self.above else f"from {self.low:g}"
            most = f" to {self.high:g}" if math.isfinite(self.high) else "" if self.above else " up"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {kind} {least}{most}")
        return value


COUNT = Whole(1, 1 << 20)
PORT = Whole(0, 65535)
OPTIONAL_PORT = Whole(-1, 65535)
NOT_NEGATIVE = Number()
POSITIVE = Number(above=True)
SHARE = Number(0, 1, above=True)
SECONDS = Number(0, 1e6, above=True, unit="seconds")
SECONDS_OR_NONE = Number(0, 1e6, unit="seconds")
# As a request's promise may be at most (twostep/request_class.py).
MILLISECONDS = Number(0, 3_600_000, above=True, unit="milliseconds")


def kv_transports(text: str) -> str:
    """Reads --kv-transfer: auto, none, or some of KV_TRANSPORTS behind commas."""
    names = text.replace(" ", "").split(",")
    if names in (["auto"], ["none"]):
        return names[0]
    if not set(names) <= set(KV_TRANSPORTS) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor none nor a list of some of {', '.join(KV_TRANSPORTS)}, each once")
    return ",".join(names)


def kv_cache_dtype(text: str) -> str:
    """Reads --kv-cache-dtype, of KV_CACHE_DTYPES; also vLLM's other word for one of them."""
    if text == "fp8_e4m3":
        return "fp8"
    if text not in KV_CACHE_DTYPES:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give fp8 (which is e4m3) or int8, each a byte a number, int4, exact (as --dtype), or auto (as the checkpoint says)"
        )
    return text


def speculative_config(text: str) -> str:
    """Reads --speculative-config: a JSON object, or nothing."""
    if text:
        try:
            SpeculativeConfig.parse(text)
        except SetupError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error.message}") from None
    return text


def _names(text: str, example: str) -> list[Any]:
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        found: list[Any] = json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON list; give one like ["{example}"]') from None
    return found


def model_names(text: str) -> tuple[str, ...]:
    """Reads --served-model-name: names between blanks or commas."""
    found = tuple(re.split(r"[\s,]+", text.strip(", \t\n")))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: a name stands there twice; give each once")
    return tuple(filter(None, found))


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,@?#A-Z]+")


def allowed_origins(text: str) -> tuple[str, ...]:
    """Reads --allowed-origins: a JSON list as vLLM has it, or one origin, or several behind commas."""
    given = _names(text, "https://chat.example")
    for origin in given:
        if not isinstance(origin, str) or not (origin == "*" or _ORIGIN.fullmatch(origin)):
            raise argparse.ArgumentTypeError(
                f"{origin!r} is no origin; give scheme, host and port as a browser sends them, such as https://chat.example:8443, or *"
            )
    return tuple(given)


_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")


def allowed_hosts(text: str) -> tuple[str, ...]:
    """Reads --allowed-hosts: names behind commas, or a JSON list of them."""
    given = _names(text, "llm.example")
    for name in given:
        if not isinstance(name, str) or not (name == "*" or _HOST_NAME.fullmatch(name)):
            raise argparse.ArgumentTypeError(
                f"{name!r} is no host name; give it in small letters and without a port, such as llm.example, or *"
            )
    return tuple(given)


# Counters are tokens by weight: beyond these, a request is no longer seen in them.
_MIN_WEIGHT, _MAX_WEIGHT = 1e-6, 1e6


def tenant_weights(text: str) -> dict[str, float]:
    """Reads --tenant-weights: `name=weight` behind commas, or a file with one a line (`#` begins a comment)."""
    path = Path(text)
    try:
        if "=" not in text or path.is_file():
            entries = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
        else:
            entries = [entry.strip() for entry in text.split(",")]
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither name=weight,... nor a readable file: {error}") from None
    weights: dict[str, float] = {}
    for entry in filter(None, entries):
        name, _, number = (part.strip() for part in entry.rpartition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not _MIN_WEIGHT <= weight <= _MAX_WEIGHT:
            raise argparse.ArgumentTypeError(f"{entry!r}: write name=weight, the weight a number from {_MIN_WEIGHT:g} to {_MAX_WEIGHT:g}")
        if name in weights:
            raise argparse.ArgumentTypeError(f"tenant {name!r} has two weights; give it one")
        weights[name] = weight
    return weights


def trace_url(text: str) -> str:
    """Reads --trace-url: a URL with {trace_id} in it; empty for none."""
    if text and not (text.startswith(("https://", "http://")) and text.count("{trace_id}") == 1):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no URL with {{trace_id}} in it; give one such as https://jaeger.example/trace/{{trace_id}}"
        )
    return text


def kubernetes_api(text: str) -> str:
    """Reads --kubernetes-api: a URL; empty for none."""
    if text in ("", "none"):
        return ""
    if not text.startswith(("https://", "http://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL; give one such as https://10.0.0.1:443, or none")
    return text.rstrip("/")


def worker_flags(text: str) -> tuple[str, ...]:
    """Reads --prefill-flags: a JSON object of flags without their dashes; true and false switch a flag on and off."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object; give one like {{"max-num-seqs": 64}}')
    return tuple(
        f"--{name}" if value is True else f"--no-{name}" if value is False else f"--{name}={value}" for name, value in given.items()
    )


def module_function(text: str) -> str:
    """Reads --hold-back; empty for none."""
    if text and not re.fullmatch(r"[\w.]+:[\w.]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not MODULE:FUNCTION, such as filters:judge")
    return text


def device(text: str) -> str:
    """Reads --device; empty as auto."""
    if text and not re.fullmatch(r"(auto|cuda)(:\d{1,6})?|cpu", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not understood; give auto, cpu, cuda or cuda:N")
    return text


def host_and_port(text: str) -> str:
    """Reads --ray-address; empty for none."""
    host, _, port = text.rpartition(":")
    if text and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, such as 127.0.0.1:6379")
    return text
