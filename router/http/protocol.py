"""HTTP/1.1 of one connection: aiohttp's, but for what is said where there is no request that could be answered."""

from __future__ import annotations

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_request import BaseRequest

from router.http.errors import HttpError, error_response
from router.http.unread import Connection

_TOO_LONG = "a line of the request's head is too long; keep the URL and each header under 8 KiB"
_NO_HTTP = "this is no HTTP request that can be read; send HTTP/1.1, to an https:// address if the router has --tls-cert"


class Protocol(Connection):
    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """No application has seen the request: there is no name and no key of it, and nothing of it is quoted."""
        # It logs, and raises ConnectionError for what is half answered.
        super().handle_error(request, status, exc, message)
        why = (
            "something failed in the router; its log says what"
            if status >= 500
            else _TOO_LONG
            if isinstance(exc, LineTooLong)
            else _NO_HTTP
        )
        response = error_response(HttpError(status, why))
        response.headers["Server"] = "twostep"
        response.force_close()
        return response
