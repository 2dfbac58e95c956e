"""Holds what both clients are made of: where the routers are, how long a request may take, and what every call carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import grpc

from twostep.client import _channel
from twostep.client._pool import Pool, RouterEndpoint
from twostep.client._types import Compression, RouterState
from twostep.errors import InvalidRequest

W = TypeVar("W")


class ClientBase(Generic[W]):
    """Base of Client and AsyncClient."""

    def __init__(
        self,
        target: str | Sequence[str],
        open_wire: Callable[[str, grpc.ChannelCredentials | None], W],
        *,
        api_key: str | None,
        timeout: float,
        max_retries: int,
        max_connections: int,
        compression: Compression,
        credentials: grpc.ChannelCredentials | None,
    ) -> None:
        routers: list[RouterEndpoint[W]] = _channel.routers_of(target)
        targets = [router.target for router in routers]
        self._compression = _channel.checked_compression(compression)
        self._timeout = _channel.checked_timeout(timeout, _channel.DEFAULT_TIMEOUT_S)
        self._max_retries = max_retries
        self._tls = credentials is not None
        self._key = _channel.key_metadata(api_key, targets, tls=self._tls)
        self._pool = Pool(
            routers, lambda address: open_wire(address, credentials), max_connections=_channel.checked_connections(max_connections)
        )

    def __repr__(self) -> str:
        where = _channel.targets_repr(self._pool.targets)
        return f"{type(self).__name__}({where}, timeout={self._timeout:g}, max_retries={self._max_retries}, tls={self._tls})"

    @property
    def routers(self) -> tuple[RouterState, ...]:
        """Returns the state of each router that this client was given, as it sees it now."""
        return self._pool.states()

    def _attempts(self, timeout: float | None, longest_s: float | None = None) -> _channel.Attempts:
        """`longest_s`: of a call for which nobody waits long, unless told to."""
        default = self._timeout if longest_s is None else min(self._timeout, longest_s)
        return _channel.Attempts(_channel.checked_timeout(timeout, default), self._max_retries)

    def _metadata(self, traceparent: str | None = None) -> _channel.Metadata:
        return (*self._key, *_channel.trace_of(traceparent))

    def _check_open(self) -> None:
        if self._pool.closed:
            raise InvalidRequest("this client is closed; make a new one")
