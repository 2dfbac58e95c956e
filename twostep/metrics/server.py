"""`GET /metrics` of a process: plain HTTP, on threads of its own, so that it answers while the engine or the event loop is stuck.

Whether a process should be restarted is for its health service to say (twostep.rpc.health); this one says what was counted.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from twostep.errors import SetupError
from twostep.metrics.registry import MetricsRegistry

log = logging.getLogger(__name__)

# Scrapers ask one at a time. One connection more than so many takes the place of the oldest, since a scrape is over in milliseconds. One
# that says nothing for so long is closed, and so is one that is not over after so long: a byte now and then keeps no place.
_MAX_CONNECTIONS = 8
# Of those that were closed, some may be about to end.
_MAX_THREADS = 4 * _MAX_CONNECTIONS
_TIMEOUT_S = 5.0
_CONNECTION_S = 15.0
# How long close() takes at most.
_POLL_S = 0.1


class MetricsServer:
    """start(), close(). `port` 0: any free one; `port` is the real one once it is started."""

    def __init__(self, registry: MetricsRegistry, *, host: str, port: int) -> None:
        self._registry = registry
        self._host = host
        self.port = port
        self._server: _Server | None = None

    @classmethod
    def beside(cls, registry: MetricsRegistry, *, host: str, port: int, metrics_port: int | None) -> MetricsServer | None:
        """For a process with a gRPC server on `host` and `port`. `metrics_port` None: port + 2 (gRPC's health port is + 1), any free one
        if `port` is 0; -1: none."""
        if metrics_port == -1:
            return None
        if metrics_port is None:
            metrics_port = port + 2 if port else 0
        return cls(registry, host=host, port=metrics_port)

    def start(self) -> int:
        """Returns the real port. Raises SetupError if nobody can listen there."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            server = _Server((self._host, self.port), family)
        except OSError as error:
            raise SetupError(
                f"cannot serve metrics on {self._host}:{self.port} ({error.strerror or error}); "
                "choose another port with --metrics-port, -1 for none, or another --host"
            ) from error
        server.set_app(_only_metrics(make_wsgi_app(self._registry.collectors)))
        self._server = server
        self.port = server.server_port
        threading.Thread(target=server.serve_forever, name="metrics", kwargs={"poll_interval": _POLL_S}, daemon=True).start()
        return self.port

    def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # An answer under way does not hold up the end of the process.
    block_on_close = False
    # Two processes on one port would each get half of the scrapes; some versions of http.server allow that.
    allow_reuse_port = False

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._lock = threading.Lock()
        self._open: dict[Any, None] = {}
        self._num_threads = 0
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Not WSGIServer's own, which asks the resolver for this machine's name: where there is none, that takes seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = self._num_threads >= _MAX_THREADS
            if not full:
                if len(self._open) >= _MAX_CONNECTIONS:
                    oldest = next(iter(self._open))
                    del self._open[oldest]
                    _shut(oldest)
                self._open[request] = None
                self._num_threads += 1
        if full:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            # The thread did not start, and will not give the place back.
            self._over(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        deadline = threading.Timer(_CONNECTION_S, _shut, [request])
        deadline.daemon = True
        try:
            deadline.start()
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._over(request)

    def _over(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
            self._num_threads -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape from %s failed", client_address, exc_info=True)


def _shut(connection: socket.socket) -> None:
    """Whoever reads from it, or writes to it, is woken. It stays theirs to close."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _only_metrics(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def routed(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/metrics":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        return app(environ, start_response)

    return routed
