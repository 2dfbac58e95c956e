"""API keys over gRPC: whoever shows none is refused before its message is read, whatever it asks for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio

from router.access.control import Access
from router.access.identity import Identity
from router.targets import TENANT_HEADER
from twostep.errors import Unauthenticated, status_of

# Probes show no key: whether a router is well is said to anybody.
_OPEN = ("/grpc.health.v1.Health/",)

Plain = Sequence[tuple[str, str]]


def plain_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> Plain:
    return [(key, value if isinstance(value, str) else value.decode("utf-8", "replace")) for key, value in metadata or ()]


def identify(access: Access, metadata: Plain, *, peer: str = "") -> Identity:
    """`peer` as gRPC names it, with a port. Raises Unauthenticated. Of what is said twice, the last counts."""
    told = dict(metadata)
    return access.identify(told.get("authorization"), told.get(TENANT_HEADER), address=peer.rpartition(":")[0])


class KeyGuard(grpc.aio.ServerInterceptor):
    """Outside of all other interceptors: a call without a key costs nothing more."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if self._access.enabled and not handler_call_details.method.startswith(_OPEN):
            try:
                identify(self._access, plain_metadata(handler_call_details.invocation_metadata))
            except Unauthenticated as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def _refusing(error: Unauthenticated) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode[status_of(error).grpc], error.message)

    # Of whatever kind the method is: on the wire there is nothing but the status.
    return grpc.unary_unary_rpc_method_handler(refuse)
