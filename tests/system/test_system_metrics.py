"""Every process of a running system serves its metrics, and they tell of the requests it served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import System, running, wait_until
from scraping import Scrape, scrape_until

from twostep.metrics import catalogue

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NUM_REQUESTS, NUM_TOKENS = 3, 6
PROMPT = list(range(2, 102))


@pytest.fixture(scope="module")
def system(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tiny_llama_dir, tmp_path_factory.mktemp("metrics"), extra=("--dtype", "float32")) as system:
        yield system


def metrics_ports(system: System) -> dict[str, int]:
    """As `twostep up` prints them."""
    text = system.log_tail(20000)
    return {name: int(port) for name, port in re.findall(r"(\S+) http://[\w.]+:(\d+)/metrics", text)}


def test_metrics_of_every_process_tell_of_the_requests(system: System) -> None:
    ports = wait_until(lambda: metrics_ports(system), timeout_s=30, what="it says where metrics are")
    assert set(ports) == {"router", "prefill-0", "decode-0"}
    with system.client() as client:
        for n in range(NUM_REQUESTS):
            prompt = [(token + n) % 200 + 2 for token in PROMPT]
            answer = client.generate(token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout=60).result()
            assert len(answer.token_ids) == NUM_TOKENS

    router = scrape_until(ports["router"], lambda told: told("twostep_requests_total", status="OK") == NUM_REQUESTS)
    assert router("twostep_time_to_first_token_seconds_count") == NUM_REQUESTS
    assert router("twostep_generation_tokens_total") == NUM_REQUESTS * NUM_TOKENS
    assert router("twostep_inter_token_latency_seconds_count") == NUM_REQUESTS * (NUM_TOKENS - 1)
    assert router("twostep_router_workers") == 2

    # What the edges hold is asked for once a second.
    prefill = scrape_until(ports["prefill-0"], lambda told: _moved(told, "publish") == NUM_REQUESTS and _is_ready(told, "prefill"))
    decode = scrape_until(ports["decode-0"], lambda told: _moved(told, "fetch") == NUM_REQUESTS and _is_ready(told, "decode"))
    num_bytes = decode("twostep_kv_transfer_bytes_total", direction="fetch", transport="ray")
    assert num_bytes == prefill("twostep_kv_transfer_bytes_total", direction="publish", transport="ray")
    assert num_bytes is not None
    assert num_bytes > 0
    for told, role, direction in ((prefill, "prefill", "publish"), (decode, "decode", "fetch")):
        assert told("twostep_process_info", role=role) == 1
        assert told("twostep_kv_transfer_duration_seconds_count", direction=direction) == NUM_REQUESTS
        assert told("twostep_kv_transfer_exposed_seconds_count", direction=direction) == NUM_REQUESTS
        assert told("process_resident_memory_bytes")
    assert decode("twostep_kv_transfer_scatter_seconds_count", transport="ray") == NUM_REQUESTS
    assert decode("twostep_kv_transfer_bytes_per_second_count", transport="ray") == NUM_REQUESTS
    # On a busy machine the first probe ends after the requests.
    scrape_until(ports["decode-0"], lambda told: (told("twostep_kv_probe_bytes_per_second", transport="ray", peer="prefill-0") or 0) > 0)
    assert prefill("twostep_engine_tokens_total", kind="prefill") == NUM_REQUESTS * len(PROMPT)
    assert decode("twostep_engine_tokens_total", kind="decode") == NUM_REQUESTS * (NUM_TOKENS - 1)

    exported = {
        "router": router,
        "router with an HTTP port": router,
        "router with --batch-dir": router,
        "router, prefill and decode worker": decode,
        "prefill and decode worker": prefill,
        "prefill and decode worker, each its own side": decode,
    }
    of_others = [where for _, where, _ in catalogue.SECTIONS if where not in exported]
    assert [where.split(",")[0] for where in of_others] == ["autoscaler"], "scraped in tests/autoscaler"
    for _, where, families in catalogue.SECTIONS:
        assert where in of_others or {family.name for family in families} <= exported[where].families, where
    scrape_until(ports["prefill-0"], lambda told: told("twostep_kv_leases") == 0 and told("twostep_kv_stored_bytes") == 0)
    scrape_until(ports["decode-0"], lambda told: told("twostep_kv_oldest_lease_seconds") == 0 and told("twostep_worker_sequences") == 0)


def _is_ready(told: Scrape, role: str) -> bool:
    return told("twostep_worker_ready") == told("twostep_kv_transport_ready", role=role, transport="ray") == 1


def _moved(told: Scrape, direction: str) -> float | None:
    return told("twostep_kv_transfers_total", direction=direction, status="ok")
