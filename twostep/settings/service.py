"""Settings that several processes share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from twostep.settings.readers import OPTIONAL_PORT, SECONDS_OR_NONE
from twostep.settings.table import FileKind, Rule, Settings, group, setting
from twostep.settings.tls import PLAINTEXT, TlsFiles

LOG_LEVELS = ("debug", "info", "warning", "error")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Constants that processes must agree on: tokens of one prefix hash, and how long a decode worker keeps what it has for a router whose
# stream broke.
HASH_UNIT = 64
ROUTER_LEASE_S = 5.0
MODEL_REVISION = "branch, tag or commit of a model of the hub; main if not given"
ARCHITECTURE = (
    "what the model is, in place of config.json's `architectures`: for one that is a known one by another name, such as LlamaForCausalLM"
)
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
_LAST_PORT = 65535
ANY_HOST = frozenset(("", "0.0.0.0", "::"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings(Settings):
    log_level: str = setting("info", "least severe level that is logged", choices=LOG_LEVELS)
    log_json: bool = setting(False, "one JSON object a line")


def ports_of(service: Any) -> dict[str, int]:
    """Returns the ports of a process by their settings' names, settled; 0 is any free one, -1 none."""
    first = service.grpc_port
    beside = {"health-port": first + 1, "metrics-port": first + 2}
    found = {"grpc-port": first}
    for name in ("port", *beside, "admin-port"):
        given = getattr(service, name.replace("-", "_"), -1)
        found[name] = given if given is not None else beside[name] if first else 0
    return found


def _wrong_ports(service: Any) -> str:
    """Returns what is wrong with the ports of a process together, for a Rule."""
    hosts = {service.host, getattr(service, "admin_host", service.host)}
    seen: dict[int, str] = {}
    for name, number in ports_of(service).items():
        if number > _LAST_PORT:
            return f"{{grpc-port}} leaves no port for {{{name}}}, which would be {number}; give a lower one"
        apart = name == "admin-port" and len(hosts) > 1 and not hosts & ANY_HOST
        if number > 0 and not apart and seen.setdefault(number, name) != name:
            return f"{{{seen[number]}}} and {{{name}}} are both {number}; give another one to either"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings(LogSettings):
    """Holds what routers, workers and autoscalers may be told. A port of None is the gRPC port + 1 or + 2."""

    redis_url: str = setting(DEFAULT_REDIS_URL, "where workers register", metavar="URL")
    secret_file: Path | None = setting(None, "deployment secret, the same file on every process", metavar="FILE", file=FileKind.READ)
    former_secret_file: Path | None = setting(
        None,
        "while the secret is being changed: the one before, which is accepted and signed with, too (docs/access.md)",
        metavar="FILE",
        file=FileKind.READ,
    )
    host: str = setting("0.0.0.0", "address to listen on")
    health_port: int | None = setting(None, "plaintext health-only port; the gRPC port + 1 if not given, -1 for none", OPTIONAL_PORT)
    metrics_port: int | None = setting(None, "plaintext HTTP, GET /metrics; the gRPC port + 2 if not given, -1 for none", OPTIONAL_PORT)
    hung_after: float = setting(
        30.0,
        "seconds without progress of the event loop after which the process exits, for its supervisor to start it again; start-up does not "
        "count; 0: never",
        SECONDS_OR_NONE,
    )
    tls: TlsFiles = group(PLAINTEXT)

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(_wrong_ports),
        Rule(
            lambda service: (service.tls.cert is None) != (service.tls.key is None),
            "{tls-cert} and {tls-key} go together: give both or neither",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedServiceSettings(ServiceSettings):
    """Holds what routers and workers may be told: they have spans to send, and a model."""

    model_revision: str = setting("", MODEL_REVISION, metavar="REV")
    architecture: str = setting("", ARCHITECTURE, metavar="NAME")
    otlp_endpoint: str = setting(
        "",
        "send traces to this OpenTelemetry collector's gRPC port, http://HOST:4317; OTEL_EXPORTER_OTLP_ENDPOINT says so too, and without "
        "either nothing is traced",
        metavar="URL",
        aliases=("--otlp-traces-endpoint",),
    )


def traces_endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """Returns where OpenTelemetry's own variables send traces; empty: nowhere."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or environ.get("OTEL_TRACES_EXPORTER", "") == "none":
        return ""
    return environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
