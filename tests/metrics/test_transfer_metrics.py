"""One record of a hand-over: counted, logged with its request, traced."""

from __future__ import annotations

import json
import logging
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scraping import Scrape

from kv_transfer import telemetry
from kv_transfer.telemetry import Direction, ProbeResult, TransferMetrics, TransferRecord, TransferSpans, TransferTelemetry, reason_of
from twostep.errors import DataLoss, ResourceExhausted, Unavailable
from twostep.metrics.registry import MetricsRegistry
from twostep.process.log import JsonLines

MOVED = TransferRecord(
    transport="ray",
    direction=Direction.FETCH,
    num_bytes=2_000_000,
    num_chunks=4,
    num_blocks=40,
    queue_s=0.0002,
    copy_s=0.005,
    busy_s=0.004,
    scatter_s=0.001,
    total_s=0.007,
    exposed_s=0.0015,
    num_retries=1,
    request_id="r-1/2",
    peer="prefill-0",
)


def failed(reason: str, *, num_bytes: int = 0) -> TransferRecord:
    return TransferRecord(
        transport="ray", direction=Direction.FETCH, num_bytes=num_bytes, num_chunks=0, num_blocks=0, total_s=30.0, failure=reason
    )


def test_a_hand_over_is_counted_by_transport_and_direction() -> None:
    registry = MetricsRegistry()
    metrics = TransferMetrics(registry)
    metrics.transfer(MOVED)
    told = Scrape.of(registry.collectors)
    both = {"transport": "ray", "direction": "fetch"}
    assert told("twostep_kv_transfers_total", status="ok", **both) == 1
    assert told("twostep_kv_transfers_total", status="failed") is None
    assert told("twostep_kv_transfer_bytes_total", **both) == 2_000_000
    assert told("twostep_kv_transfer_chunks_total", **both) == 4
    assert told("twostep_kv_transfer_blocks_total", **both) == 40
    for name, seconds in (("queue", 0.0002), ("copy", 0.005), ("duration", 0.007), ("exposed", 0.0015)):
        assert told(f"twostep_kv_transfer_{name}_seconds_sum", **both) == pytest.approx(seconds)
        assert told(f"twostep_kv_transfer_{name}_seconds_count", **both) == 1
    assert told("twostep_kv_transfer_scatter_seconds_sum", transport="ray") == pytest.approx(0.001)
    assert told("twostep_kv_transfer_bytes_per_second_sum", transport="ray") == pytest.approx(5e8)
    assert told("twostep_kv_transfer_bytes_per_second_bucket", le="1e+08", transport="ray") == 0
    assert told("twostep_kv_transfer_bytes_per_second_bucket", le="5e+08", transport="ray") == 1
    assert not {"r-1", "prefill-0"} & {part for _, labels in told.samples for pair in labels for part in pair}


def test_failures_count_by_reason_and_leave_the_durations_alone() -> None:
    registry = MetricsRegistry()
    metrics = TransferMetrics(registry)
    for error in (DataLoss("x"), DataLoss("y"), Unavailable("z"), ResourceExhausted("w")):
        metrics.transfer(failed(reason_of(error), num_bytes=100))
    told = Scrape.of(registry.collectors)
    assert told("twostep_kv_transfers_total", status="failed") == 4
    assert told("twostep_kv_transfer_failures_total", reason="data_loss") == 2
    assert told("twostep_kv_transfer_failures_total", reason="unavailable") == 1
    assert told("twostep_kv_transfer_failures_total", reason="resource_exhausted") == 1
    assert told("twostep_kv_transfer_bytes_total") == 400
    assert told("twostep_kv_transfer_duration_seconds_count") is None


def test_a_hand_over_of_nothing_says_nothing_of_rates_and_retries_tell_why() -> None:
    registry = MetricsRegistry()
    metrics = TransferMetrics(registry)
    metrics.transfer(TransferRecord(transport="ray", direction=Direction.FETCH, num_bytes=0, num_chunks=0, num_blocks=0))
    for reason in ("data_loss", "unavailable", "data_loss"):
        metrics.retry("ray", reason)
    told = Scrape.of(registry.collectors)
    assert told("twostep_kv_transfers_total", status="ok") == 1
    assert told("twostep_kv_transfer_bytes_per_second_count") is None
    assert told("twostep_kv_transfer_copy_seconds_count") is None
    assert told("twostep_kv_transfer_retries_total", reason="data_loss") == 2
    assert told("twostep_kv_transfer_retries_total") == 3


def test_probes_show_the_last_rate_of_each_peer() -> None:
    registry = MetricsRegistry()
    metrics = TransferMetrics(registry)
    metrics.probe(ProbeResult(worker_id="p-0", epoch=1, transport="cuda_ipc", bytes_per_s=3e11))
    metrics.probe(ProbeResult(worker_id="p-0", epoch=2, transport="cuda_ipc", bytes_per_s=3.5e11))
    metrics.probe(ProbeResult(worker_id="p-0", epoch=2, transport="nixl", error="no link"))
    told = Scrape.of(registry.collectors)
    assert told("twostep_kv_probe_bytes_per_second", transport="cuda_ipc", peer="p-0") == 3.5e11
    assert told("twostep_kv_probe_bytes_per_second", transport="nixl", peer="p-0") == 0
    assert told("twostep_kv_probes_total", transport="cuda_ipc", status="ok") == 2
    assert told("twostep_kv_probes_total", transport="nixl", status="failed") == 1


@patch.object(telemetry, "_MAX_PROBED", 4)
@given(probes=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["ray", "nixl"])), max_size=40))
def test_peers_that_come_and_go_leave_a_bounded_number_of_series(probes: list[tuple[int, str]]) -> None:
    registry = MetricsRegistry()
    metrics = TransferMetrics(registry)
    latest: dict[tuple[str, str], float] = {}
    for rate, (peer, transport) in enumerate(probes, 1):
        metrics.probe(ProbeResult(worker_id=f"p-{peer}", epoch=rate, transport=transport, bytes_per_s=rate))
        latest.pop((transport, f"p-{peer}"), None)
        latest[transport, f"p-{peer}"] = rate
    kept = dict(list(latest.items())[-4:])
    found = Scrape.of(registry.collectors).samples
    shown = {
        (dict(labels)["transport"], dict(labels)["peer"]): value
        for (name, labels), value in found.items()
        if name == "twostep_kv_probe_bytes_per_second"
    }
    assert shown == kept


def test_the_log_line_names_the_request_and_is_json_for_machines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "kv_transfer.telemetry"):
        TransferTelemetry().transfer(MOVED)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    for part in ("request=r-1/2", "transport=ray", "peer=prefill-0", "bytes=2000000", "retries=1", "exposed_s=0.0015", "gb_per_s=0.5"):
        assert part in record.getMessage().split()
    data = json.loads(JsonLines("decode-1").format(record))["data"]
    assert (data["request"], data["direction"], data["bytes"], data["exposed_s"]) == ("r-1/2", "fetch", 2_000_000, 0.0015)


def test_failures_are_logged_where_everybody_looks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kv_transfer.telemetry"):
        log = TransferTelemetry()
        log.transfer(MOVED)
        log.transfer(failed("cancelled"))
        log.transfer(failed("data_loss"))
    assert ["failure=data_loss" in record.getMessage() for record in caplog.records] == [True]


def test_one_record_reaches_metrics_and_the_span_of_its_request() -> None:
    registry, spans = MetricsRegistry(), TransferSpans()
    span = Mock(recording=True)
    spans.open("r-1/2", span)
    TransferTelemetry(TransferMetrics(registry), spans).transfer(MOVED)
    assert Scrape.of(registry.collectors)("twostep_kv_transfer_bytes_total") == 2_000_000
    ((name, _, _, attributes), _) = span.child.call_args
    assert name == "fetch"
    assert attributes["twostep.bytes"] == 2_000_000
