"""Logging of every process: one line a record on stderr, plain or JSON. Called once, from `__main__`.

A line that concerns a request carries its id, and the id of its trace if it has one, whoever writes it: `concerning` says whom the present
task works for, and tasks that it starts inherit that. The id is the one that router and workers call the request by; what the router was
asked for under a name of the client's own, it calls by that name and `~` and 16 digits.

No line carries what a client sent or got: no prompt, no answer, no key.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

from twostep.process.printable import harmless


@dataclass(frozen=True, slots=True)
class RequestFields:
    """Holds the fields of the log lines that concern one request. An empty `trace_id`: it is not traced."""

    request_id: str
    trace_id: str = ""


_REQUEST: ContextVar[RequestFields | None] = ContextVar("twostep_request", default=None)


def concerning(request_id: str, trace_id: str = "") -> Token[RequestFields | None]:
    """From now on lines of this task, and of tasks that it starts, are about this request, until another call, or until `forget`."""
    return _REQUEST.set(RequestFields(request_id, trace_id))


def forget(token: Token[RequestFields | None]) -> None:
    """Restores the request that lines were about before the call of `concerning` that returned the token. Call it in the task that got the
    token."""
    _REQUEST.reset(token)


def setup_logging(*, level: str = "info", json_lines: bool = False, process: str = "") -> None:
    """Replaces all handlers of the root logger. `process` names the process in every line (for example "prefill-50061")."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if json_lines else Plain(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # They are chatty below warning and say nothing an operator can act on; httpx and what it is made of, addresses that are permissions.
    for name in ("grpc", "asyncio", "httpx", "httpx2", "httpcore", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)


# Handlers format in the task that logs, so that both formatters see whom it works for.


class Plain(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname).1s {process + ' ' if process else ''}%(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        # Logs are read in terminals, and errors may quote anything.
        return harmless(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request = _REQUEST.get()
        if request is None:
            return line
        # Most messages name it already.
        told = [f"request_id={request.request_id}"] if request.request_id not in record.message else []
        told += [f"trace_id={request.trace_id}"] if request.trace_id else []
        return f"{line} [{' '.join(told)}]" if told else line


class JsonLines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := _REQUEST.get()) is not None:
            line["request_id"] = request.request_id
            if request.trace_id:
                line["trace_id"] = request.trace_id
        # What the caller gave as extra={"data": ...}: the same as in the message, for machines.
        if (data := getattr(record, "data", None)) is not None:
            line["data"] = data
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return harmless(json.dumps(line, ensure_ascii=False))
