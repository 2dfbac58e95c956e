"""Reads the stream of an OpenAI-compatible server: server-sent events with JSON in them. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_DONE = b"[DONE]"


class EventReader:
    """Bytes, cut anywhere, to the data of whole events (WHATWG HTML, "Server-sent events": lines may end in LF or CRLF, an event ends
    with an empty line, `data` lines of one event are joined by LF; comments and other fields are left out)."""

    def __init__(self, max_bytes: int = 8 << 20) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._max_bytes = max_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """Raises ValueError if a line never ends."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > self._max_bytes:
            raise ValueError(f"a line of more than {self._max_bytes} bytes; this is no stream of events")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    text: str = ""
    has_token: bool = False
    """It stands for at least one token, visible or not."""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """So far, or in all: the server's count."""
    cached_tokens: int | None = None
    error: str = ""
    done: bool = False


def read_event(data: bytes) -> StreamEvent:
    """Reads an event of /v1/completions or /v1/chat/completions. Raises ValueError if it is no JSON object.

    An event with a text is a message of tokens, and so is one whose text is empty while the answer goes on (half a character, held
    back); a chat's first event, which only says the role, is not."""
    if data == _DONE:
        return StreamEvent(done=True)
    body: Any = json.loads(data)
    if not isinstance(body, dict):
        raise ValueError(f"an event with {data[:100]!r}; expected a JSON object")
    if body.get("error"):
        error = body["error"]
        return StreamEvent(error=str(error.get("message", error)) if isinstance(error, dict) else str(error))
    usage: Any = body.get("usage") or {}
    details: Any = usage.get("prompt_tokens_details") or {}
    counts = {
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "cached_tokens": details.get("cached_tokens"),
    }
    choices: Any = body.get("choices")
    if not choices:
        return StreamEvent(**counts)
    choice = choices[0]
    finish = choice.get("finish_reason") or ""
    delta: Any = choice.get("delta")
    if delta is None:
        text = choice.get("text")
        said = text is not None
    else:
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        said = "role" not in delta and ("content" in delta or "reasoning_content" in delta or bool(delta.get("tool_calls")))
    return StreamEvent(text=text or "", has_token=bool(text) or (said and not finish), finish_reason=finish, **counts)
