"""GET /metrics over real sockets."""

from __future__ import annotations

import http.client
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from twostep.errors import SetupError
from twostep.metrics.family import gauge
from twostep.metrics.registry import MetricSample, MetricsRegistry
from twostep.metrics.server import MetricsServer

LEVEL = gauge("twostep_level", "A level.")
# For what comes at once, were it not for a busy machine.
SOON_S = 60.0


@pytest.fixture
def registry() -> MetricsRegistry:
    made = MetricsRegistry()
    made.gauge(LEVEL).set(42)
    return made


@pytest.fixture
def server(registry: MetricsRegistry) -> Iterator[MetricsServer]:
    made = MetricsServer(registry, host="127.0.0.1", port=0)
    made.start()
    yield made
    made.close()


def get(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SOON_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"] or "", response.read().decode()
    finally:
        connection.close()


def test_it_serves_metrics_and_nothing_else(server: MetricsServer) -> None:
    status, kind, text = get(server.port)
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert "\ntwostep_level 42.0\n" in text
    assert "# HELP twostep_level A level." in text
    assert get(server.port, "/")[0] == 404
    assert get(server.port, "/metrics/x")[0] == 404
    assert get(server.port, method="POST")[0] == 405


def test_connections_that_say_nothing_are_few_and_hold_nobody_up(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # Those that have a place keep it meanwhile.
    monkeypatch.setattr("twostep.metrics.server._Handler.timeout", 1000.0)
    monkeypatch.setattr("twostep.metrics.server._CONNECTION_S", 1000.0)
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(12)]
    try:
        give_up = time.monotonic() + SOON_S
        closed: set[socket.socket] = set()
        while len(closed) < 4:
            readable, _, _ = select.select([s for s in silent if s not in closed], [], [], 0.1)
            closed |= {connection for connection in readable if connection.recv(1) == b""}
            assert time.monotonic() < give_up, "all beyond eight are closed"
        assert closed == set(silent[:4]), "the oldest"
        for _ in range(10):
            assert get(server.port)[0] == 200, "and a scrape has a place at once"
    finally:
        for connection in silent:
            connection.close()


def test_a_connection_that_says_a_byte_now_and_then_ends_too(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, socket.create_connection(("127.0.0.1", server.port)) as dribbling:
        patch.setattr("twostep.metrics.server._CONNECTION_S", 0.5)
        give_up = time.monotonic() + SOON_S
        while not select.select([dribbling], [], [], 0.05)[0]:
            assert time.monotonic() < give_up, "it keeps its place for ever"
            try:
                dribbling.sendall(b"G")
            except ConnectionError:
                break
    assert get(server.port)[0] == 200


def test_one_slow_reading_does_not_keep_the_port_from_closing(registry: MetricsRegistry) -> None:
    held, began = threading.Event(), threading.Event()

    def slow() -> list[MetricSample]:
        began.set()
        held.wait(300)
        return []

    registry.on_scrape([gauge("twostep_slow", "Slow.")], slow)
    server = MetricsServer(registry, host="127.0.0.1", port=0)
    port = server.start()
    began.clear()  # registering asks for nothing, but let that be no assumption
    scrape = threading.Thread(target=get, args=(port,))
    scrape.start()
    try:
        assert began.wait(SOON_S)
        closing = threading.Thread(target=server.close)
        closing.start()
        closing.join(SOON_S)
        assert not closing.is_alive()
        with pytest.raises(ConnectionError):
            get(port)
    finally:
        held.set()
        scrape.join(SOON_S)


def test_a_taken_port_is_named_with_its_flag(registry: MetricsRegistry, server: MetricsServer) -> None:
    with pytest.raises(SetupError, match=rf"{server.port}.*--metrics-port"):
        MetricsServer(registry, host="127.0.0.1", port=server.port).start()


def test_a_closed_server_gives_its_port_back(registry: MetricsRegistry) -> None:
    for _ in range(10):
        first = MetricsServer(registry, host="127.0.0.1", port=0)
        port = first.start()
        first.close()
        first.close()
        second = MetricsServer(registry, host="127.0.0.1", port=port)
        # Meanwhile somebody else on this machine may have been given it, and hardly ten times.
        with suppress(SetupError):
            assert second.start() == port
            second.close()
            return
    pytest.fail("nobody can listen where a server has been closed")


@pytest.mark.parametrize(
    ("port", "metrics_port", "expected"), [(50051, None, 50053), (0, None, 0), (50051, 9100, 9100), (50051, 0, 0), (50051, -1, None)]
)
def test_the_port_beside_a_grpc_server(registry: MetricsRegistry, port: int, metrics_port: int | None, expected: int | None) -> None:
    made = MetricsServer.beside(registry, host="127.0.0.1", port=port, metrics_port=metrics_port)
    assert (None if made is None else made.port) == expected
