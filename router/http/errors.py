"""Every failure as OpenAI's clients expect it: {"error": {"message", "type", "param", "code"}}, and never a stack trace. At the paths of
Anthropic's API it is as that one's clients do."""

from __future__ import annotations

import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from twostep.errors import (
    SHOULD_RETRY,
    ContextExceeded,
    InvalidRequest,
    NonFiniteLogits,
    ResourceExhausted,
    TwostepError,
    Unauthenticated,
    UnknownModel,
    status_of,
)

log = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


# Of a message: "chat.messages[0].role is empty; ..."
_FIELD = re.compile(r"(?:chat\.)?(?P<name>[a-z_]+)(?P<rest>(?:\[\d+\]|\.\w+)*)(?!\w)")


class HttpError(TwostepError):
    """A failure with a status that no exception of twostep.errors has. `param`: the field that is to blame."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s


class WrongField(HttpError, InvalidRequest):
    """A field that is to blame for what is found out while the request is served: metrics and status count an InvalidRequest."""


@contextmanager
def blaming(called: Mapping[str, str], *, item: str = "") -> Iterator[None]:
    """Turns errors of what knows nothing of HTTP into HTTP's, as a context around it: messages that begin with a field's name are about it.
    `called`: the body's fields by the names that messages have for them; `item`: the one of several that all other messages are about, as
    `input[3]`."""
    try:
        yield
    except WrongField:
        raise
    except InvalidRequest as error:
        field = _FIELD.match(error.message)
        name = None if field is None else called.get(field["name"])
        code = "context_length_exceeded" if isinstance(error, ContextExceeded) else None
        if field is not None and name is not None:
            param = f"{name}{field['rest']}"
            raise WrongField(400, param + error.message[field.end() :], param=param, code=code) from error
        if item:
            raise WrongField(400, f"{item}: {error.message}", param=item, code=code) from error
        raise
    except NonFiniteLogits as error:
        if item:
            error.args = (f"{item}: {error.message}",)
        raise


_CODES: Mapping[type[TwostepError], str] = {
    ContextExceeded: "context_length_exceeded",
    NonFiniteLogits: "non_finite_logits",
    UnknownModel: "model_not_found",
    Unauthenticated: "invalid_api_key",
    ResourceExhausted: "rate_limit_exceeded",
}


def body_of(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Returns status, JSON body and headers. What is not ours is logged, and the client gets a reference to it."""
    headers: dict[str, str] = {}
    param = code = retry_after_s = None
    match error:
        case HttpError():
            status, message = error.status, error.message
            param, code, retry_after_s = error.param, error.code, error.retry_after_s
        case TwostepError():
            status, message = status_of(error).http, error.message
            code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)
            param = "model" if isinstance(error, UnknownModel) else None
            if isinstance(error, Unauthenticated):
                headers["WWW-Authenticate"] = "Bearer"
            if isinstance(error, ResourceExhausted) and error.hopeless:
                headers[SHOULD_RETRY] = "false"
            elif isinstance(error, ResourceExhausted):
                retry_after_s = error.retry_after_s or 1.0
        case web.HTTPException():
            status = error.status
            message = _MESSAGES.get(status, f"{error.reason}; see the API's description at /openapi.json")
            if "Allow" in error.headers:
                headers["Allow"] = error.headers["Allow"]
        case _:
            reference, status = secrets.token_hex(4), status_of(error).http
            log.error("unexpected error %s", reference, exc_info=error)
            message = f"internal error {reference}; look for this reference in the router's log"
    if retry_after_s is not None:
        # Whole seconds, as the header is defined (RFC 9110, 10.2.3).
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}, headers


_MESSAGES = {
    404: "there is nothing at this path; the page is at /ui, the API's description at /openapi.json",
    405: "this path does not take that method; see the API's description at /openapi.json",
    413: "the request's body is too large; send less, or raise the router's --max-body-bytes",
}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body_of(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """See body_of: in the shape, and for long prompts in the words, of Anthropic's API."""
    status, body, headers = body_of(error)
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = body["error"]["message"]
    if isinstance(error, ContextExceeded) and error.max_model_len:
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.max_model_len} maximum. {message}"
        if error.max_tokens:
            added = f"{error.prompt_tokens} + {error.max_tokens} > {error.max_model_len}"
            message = f"input length and `max_tokens` exceed context limit: {added}, decrease input length or `max_tokens` and try again"
    return status, {"type": "error", "error": {"type": kind, "message": message}}, headers


def error_response(error: BaseException, path: str = "") -> web.Response:
    """`path`: what was asked for."""
    status, body, headers = anthropic_body_of(error) if path.startswith("/v1/messages") else body_of(error)
    return web.json_response(body, status=status, headers=headers)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return error_response(error, request.path)
    except web.RequestPayloadError:
        garbled = HttpError(400, "the body is not encoded as its headers say; send it whole, as content-encoding has it")
        return error_response(garbled, request.path)
    except Exception as error:  # noqa: BLE001  # body_of logs whatever is not ours
        return error_response(error, request.path)
