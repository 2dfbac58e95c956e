"""Workers refuse calls of processes whose version is too far from theirs (twostep/version_skew.py).

Every channel between processes says its version at the head of its user agent, `twostep/0.1.0 grpc-python-asyncio/...`: a header that each
call carries anyway. Callers without one are older than that, or not ours.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import grpc
import grpc.aio

from twostep.errors import Incompatible, status_of
from twostep.version_skew import UNSAID, version_in_agent, why_not

log = logging.getLogger(__name__)

# Callers that were refused are remembered, so that each is said once; no more of them.
_MAX_SAID = 256


class VersionGate(grpc.aio.ServerInterceptor):
    """In front of `services`, by their full names. All others (health, reflection, administration) are for every version."""

    def __init__(self, version: str, services: Collection[str], *, us: str) -> None:
        """`us`: who refuses, for the reason."""
        self._version = version
        self._prefixes = tuple(f"/{name}/" for name in services)
        self._us = us
        self._said: set[str] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith(self._prefixes):
            return handler
        theirs = _version_of(handler_call_details)
        reason = why_not(self._version, theirs, us=self._us, them="the caller")
        if not reason:
            return handler
        if theirs not in self._said and len(self._said) < _MAX_SAID:
            self._said.add(theirs)
            log.warning("calls of %s are refused: %s", method, reason)
        return _refusing(reason, handler)


def _version_of(details: grpc.HandlerCallDetails) -> str:
    for key, value in details.invocation_metadata or ():
        if key == "user-agent":
            return version_in_agent(value if isinstance(value, str) else value.decode("latin-1"))
    return UNSAID


def _refusing(reason: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same kind that refuses with `reason`. It reads nothing of what it was sent."""
    code = grpc.StatusCode[status_of(Incompatible(reason)).grpc]

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(code, reason)

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
