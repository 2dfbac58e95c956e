"""The page and the code say the same, and every process exports what the page says it does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kv_transfer.telemetry import TransferMetrics
from router import config as router_flags
from router.config import RouterConfig
from twostep.autoscaler import config as autoscaler_flags
from twostep.autoscaler.config import AutoscalerConfig
from twostep.engine.types import EngineStats
from twostep.metrics import catalogue
from twostep.metrics.autoscaler import AutoscalerMetrics
from twostep.metrics.batches import BatchMetrics, BatchState
from twostep.metrics.engine import EngineMetrics
from twostep.metrics.family import MetricKind
from twostep.metrics.http import HttpMetrics
from twostep.metrics.process import register_process
from twostep.metrics.registry import MetricsRegistry
from twostep.metrics.router import RouterGauges, RouterMetrics
from twostep.metrics.worker import WorkerMetrics
from twostep.settings.worker import DEFAULT_PORTS
from twostep.worker import config as worker_flags

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
STATS = EngineStats(num_running=0, num_waiting=0, num_reserved=0, num_held=0, num_blocks=4, num_free_blocks=4, num_cached_blocks=0, steps=0)
STATE = RouterGauges(num_running=0, num_waiting=0, num_streams=0, workers={"prefill": 0})


def exported(process: str) -> dict[str, tuple[str, str]]:
    """Kind and help of each family, as scraped."""
    registry = MetricsRegistry()
    register_process(registry, process)
    if process == "router":
        RouterMetrics(registry, lambda: STATE)
        HttpMetrics(registry)
        BatchMetrics(registry, lambda: BatchState(num_open=0, running={}))
    elif process == "autoscaler":
        AutoscalerMetrics(registry, list)
    else:
        EngineMetrics(registry, role=process, stats=lambda: STATS)
        WorkerMetrics(registry, role=process)
        TransferMetrics(registry)
    families = text_string_to_metric_families(generate_latest(registry.collectors).decode())
    return {f.name: (f.type, f.documentation) for f in families if f.name.startswith("twostep_") and not f.name.endswith("_created")}


def test_the_page_is_what_the_code_declares() -> None:
    assert PAGE.read_text() == catalogue.page(), "run: python -m twostep.metrics.catalogue > docs/metrics.md"


def test_every_exported_metric_is_on_the_page_where_the_page_says() -> None:
    listed = set(re.findall(r"^\| `(twostep_\w+)` \|", PAGE.read_text(), re.MULTILINE))
    processes = {name: exported(name) for name in ("router", "prefill", "autoscaler")}
    found = {name: kind for process in processes.values() for name, (kind, _) in process.items()}
    assert {name + "_total" if kind == "counter" else name for name, kind in found.items()} == listed
    for title, where, families in catalogue.SECTIONS:
        named = [told for name, told in processes.items() if name in where.replace(",", "").split()]
        assert named, title
        for family in families:
            name = family.name.removesuffix("_total") if family.kind is MetricKind.COUNTER else family.name
            assert all(told[name] == (family.kind.value, family.help) for told in named)


def test_labels_are_few_and_never_a_request() -> None:
    ours = (
        "role worker_role transport direction status finish_reason reason request_class path phase state kind peer version handler method "
        "position"
    )
    assert {label for family in catalogue.FAMILIES for label in family.labels} <= set(ours.split())


def test_the_ports_on_the_page_are_the_defaults() -> None:
    ports = {
        "router": RouterConfig(model=Path()).grpc_port,
        "prefill worker": DEFAULT_PORTS["prefill"],
        "decode worker": DEFAULT_PORTS["decode"],
        "autoscaler": AutoscalerConfig().grpc_port,
    }
    for process, port in ports.items():
        assert f"| {process} | {port + 2} |" in PAGE.read_text()


def test_the_port_is_a_flag_and_a_variable_of_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def ports(*flags: str) -> list[int | None]:
        router_config = router_flags.parse_config(["--model", "m", *flags])
        return [
            router_config.metrics_port,
            *(worker_flags.parse_config(role, ["--model", "m", *flags]).metrics_port for role in DEFAULT_PORTS),
            autoscaler_flags.parse_config(flags).metrics_port,
        ]

    assert ports() == [None] * 4
    assert ports("--metrics-port", "9100") == [9100] * 4
    monkeypatch.setenv("TWOSTEP_METRICS_PORT", "9101")
    assert ports() == [9101] * 4
    assert ports("--metrics-port", "-1") == [-1] * 4
    with pytest.raises(SystemExit):
        ports("--metrics-port", "65536")
