"""Logging of every process: one line a record on stderr, plain or JSON. Called once, from `__main__`."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


def setup_logging(*, level: str = "info", json_lines: bool = False, process: str = "") -> None:
    """Replaces all handlers of the root logger. `process` names the process in every line (for example "prefill-50061")."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(process) if json_lines else _Plain(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Both are chatty below warning and say nothing an operator can act on.
    for name in ("grpc", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


class _Plain(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname).1s {process + ' ' if process else ''}%(name)s: %(message)s", "%H:%M:%S")


class _JsonLines(logging.Formatter):
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
        # What the caller gave as extra={"data": ...}: the same as in the message, for machines.
        if (data := getattr(record, "data", None)) is not None:
            line["data"] = data
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
