"""Lines of batch files: what comes in, what goes out. Pure."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from router.batches.records import LineError
from router.json_pieces import json_pieces
from router.json_size import checked_size
from twostep.errors import InvalidRequest

MAX_REQUESTS = 50_000
MAX_CUSTOM_ID_CHARS = 512
# Reading so many holds the interpreter's lock for some hundredths of a second.
_MAX_VALUES = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class InputLine:
    """Where a request stands in its file, in bytes."""

    custom_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class LineRequest:
    custom_id: str
    body: Mapping[str, Any]


def parse_line(raw: bytes, number: int, *, endpoint: str, max_bytes: int) -> LineRequest | LineError | None:
    """`number` counts from 1. None: an empty line, which is passed over."""
    if number == 1:
        raw = raw.removeprefix(_BOM)
    if not raw.strip():
        return None

    def wrong(code: str, message: str, param: str | None = None) -> LineError:
        return LineError(code=code, message=message, line=number, param=param)

    if len(raw) > max_bytes:
        return wrong("line_too_long", f"the line has {len(raw)} bytes and may have {max_bytes}; send less in one request")
    try:
        size = checked_size(raw)
    except InvalidRequest as error:
        return wrong("too_many_values", error.message)
    if size.values > _MAX_VALUES:
        return wrong("too_many_values", f"there are more than {_MAX_VALUES} values in the line; send less in one request")
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return wrong("invalid_json_line", "the line is not a JSON object; write one request a line, without line ends in it")
    if not isinstance(line, dict):
        return wrong("invalid_json_line", f"the line is a JSON {type(line).__name__}; write an object with custom_id, method, url and body")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        return wrong(
            "invalid_custom_id", f"custom_id is not a string of 1 to {MAX_CUSTOM_ID_CHARS} characters; give each line one", "custom_id"
        )
    if line.get("method") != "POST":
        return wrong("invalid_method", "method is not POST; requests of batches are", "method")
    if line.get("url") != endpoint:
        return wrong("invalid_url", f"url is not {endpoint}, which is the batch's endpoint; give a batch for each endpoint", "url")
    body = line.get("body")
    if not isinstance(body, dict):
        return wrong("invalid_body", "body is not an object; give the fields of the request", "body")
    return LineRequest(custom_id, body)


def duplicate(custom_id: str, number: int, known: Container[str]) -> LineError | None:
    if custom_id not in known:
        return None
    message = f"custom_id {custom_id[:80]!r} occurs in an earlier line; each is there once, to tell the answers apart"
    return LineError(code="duplicate_custom_id", message=message, line=number, param="custom_id")


def body_bytes(body: Mapping[str, Any]) -> bytes:
    """Returns a body as the request's endpoint gets it: in the batch class, whatever it says itself."""
    others = {name: value for name, value in body.items() if name not in ("service_tier", "priority", "request_class")}
    # Bit by bit: written at once, millions of token ids would stop every thread for a while.
    return "".join(json_pieces({**others, "request_class": "batch"})).encode("ascii")


def answered(request_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """Returns a line of the output file, or of the error file for a status that is no success. Without its line end. `body` is JSON."""
    before, after = _line(request_id, custom_id, {"status_code": status, "request_id": request_id, "body": 0}, None).rsplit(b"0", 1)
    return b"".join((before, body, after))


def unanswered(request_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Returns a line of the error file, of a request that got no answer at all."""
    return _line(request_id, custom_id, None, {"code": code, "message": message})


def _line(request_id: str, custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> bytes:
    fields = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(fields, separators=(",", ":")).encode("ascii")
