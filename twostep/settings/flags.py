"""Command-line flags with environment variables: `--max-num-seqs` is also `TWOSTEP_MAX_NUM_SEQS`. The flag wins.

The one place that reads the environment; `__main__` modules parse once into a frozen dataclass.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

KV_TRANSPORTS = ("cuda_ipc", "nixl", "ray", "local")
# See kv_transfer/wire_encoding.py.
KV_WIRES = ("raw", "int8", "fp8", "zstd")


def kv_transports(text: str) -> str:
    """Type of --kv-transfer: auto, none, or some of KV_TRANSPORTS behind commas."""
    names = text.replace(" ", "").split(",")
    if names in (["auto"], ["none"]):
        return names[0]
    if not set(names) <= set(KV_TRANSPORTS) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor none nor a list of some of {', '.join(KV_TRANSPORTS)}, each once")
    return ",".join(names)


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,@?#A-Z]+")


def allowed_origins(text: str) -> tuple[str, ...]:
    """Type of --allowed-origins: a JSON list as vLLM has it, or one origin, or several behind commas."""
    try:
        given = json.loads(text) if text.lstrip().startswith("[") else [part.strip() for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON list; give one like ["https://chat.example"]') from None
    for origin in given:
        if not isinstance(origin, str) or not (origin == "*" or _ORIGIN.fullmatch(origin)):
            raise argparse.ArgumentTypeError(
                f"{origin!r} is no origin; give scheme, host and port as a browser sends them, such as https://chat.example:8443, or *"
            )
    return tuple(given)


_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")


def allowed_hosts(text: str) -> tuple[str, ...]:
    """Type of --allowed-hosts: names behind commas, or a JSON list of them."""
    try:
        given = json.loads(text) if text.lstrip().startswith("[") else [part.strip() for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON list; give one like ["llm.example"]') from None
    for name in given:
        if not isinstance(name, str) or not (name == "*" or _HOST_NAME.fullmatch(name)):
            raise argparse.ArgumentTypeError(
                f"{name!r} is no host name; give it in small letters and without a port, such as llm.example, or *"
            )
    return tuple(given)


def traces_endpoint(environ: Mapping[str, str]) -> str:
    """Where OpenTelemetry's own variables send traces; empty: nowhere."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or environ.get("OTEL_TRACES_EXPORTER", "") == "none":
        return ""
    return environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")


def tracing_flag(parser: FlagParser) -> None:
    """--otlp-endpoint of every process."""
    parser.flag(
        "--otlp-endpoint",
        "--otlp-traces-endpoint",
        default=traces_endpoint(os.environ),
        metavar="URL",
        help="send traces to this OpenTelemetry collector's gRPC port, http://HOST:4317; OTEL_EXPORTER_OTLP_ENDPOINT says "
        "so too, and without either nothing is traced",
    )


class FlagParser(argparse.ArgumentParser):
    """ArgumentParser whose every option can also come from a TWOSTEP_ variable, and says so in --help."""

    # What the refusal of an unknown flag ends with.
    unknown_hint = ""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses what is not known here and now: argparse would let the outermost parser do it, which shows the usage of no command."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self.unknown_hint}")
        return namespace, unknown

    def flag(self, name: str, *shorter: str, group: argparse._ArgumentGroup | None = None, **options: Any) -> None:
        """Like add_argument for one `--name`, which names the variable. A boolean is made with `action="store_true"`, or with
        `argparse.BooleanOptionalAction` where it may be on by default (variable: 1, true, yes, on). `group`: where --help shows it."""
        variable = "TWOSTEP_" + name.lstrip("-").replace("-", "_").upper()
        value = os.environ.get(variable)
        if value is not None and value != "":
            if options.get("action") in ("store_true", argparse.BooleanOptionalAction):
                if value.lower() not in ("0", "1", "true", "false", "yes", "no", "on", "off"):
                    self.error(f"{variable}={value!r}: give 1 or 0")
                options["default"] = value.lower() in ("1", "true", "yes", "on")
            else:
                choices = options.get("choices")
                if choices is not None and value not in choices:
                    self.error(f"{variable}={value!r}: give one of {', '.join(map(str, choices))}")
                # argparse runs `type` over string defaults, so a bad value is refused like one on the command line.
                options["default"] = value
                options["required"] = False
        options["help"] = f"{options.get('help', '')} [{variable}]"  # argparse's own format: a percent sign is written %%
        (group or self).add_argument(name, *shorter, **options)
