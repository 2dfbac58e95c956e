"""Events of streamed answers, as bytes. Pure.

Nearly every event is a piece of plain text, so what stands around it is written once, and each takes one join and one escape. JSON is kept
ASCII: some clients split events at any of Unicode's line ends.
"""

from __future__ import annotations

from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from typing import Any

from router.json_pieces import compact

_quoted: Callable[[str], str] = encode_basestring_ascii


class ChunkWriter:
    """Events of one choice. `head`: what all chunks of the answer have in common (id, object, created, model ...). `wrap` is the shape that
    text has within a choice, as the JSON before and after it. `with_usage`: chunks have a usage, null but in the last one."""

    def __init__(self, head: dict[str, Any], index: int, *, wrap: tuple[str, str], with_usage: bool) -> None:
        self._head = compact(head)[:-1]
        self._index = index
        self._tail = ',"usage":null}\n\n' if with_usage else "}\n\n"
        begin, end = wrap
        self._before = f'data: {self._head},"choices":[{{"index":{index},{begin}'
        self._after = f'{end},"logprobs":null,"finish_reason":null}}]{self._tail}'

    def text(self, text: str) -> bytes:
        """A piece of text and nothing else."""
        return (self._before + _quoted(text) + self._after).encode("ascii")

    def choice(self, fields: dict[str, Any], **others: Any) -> bytes:
        """Any other piece; `others` stand beside the choices: usage, phases. None of them: what `text` has there."""
        choice = compact({"index": self._index, **fields})
        tail = "," + compact(others)[1:] + "\n\n" if others else self._tail
        return f'data: {self._head},"choices":[{choice}]{tail}'.encode("ascii")


def usage_chunk(head: dict[str, Any], usage: dict[str, Any], **others: Any) -> bytes:
    """The last one, without choices."""
    return f"data: {compact({**head, 'choices': [], 'usage': usage, **others})}\n\n".encode("ascii")


CHAT_WRAP = ('"delta":{"content":', "}")
TEXT_WRAP = ('"text":', "")
