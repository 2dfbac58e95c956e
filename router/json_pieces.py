"""JSON of large values, piece by piece: no piece takes long to make, and the whole is never there. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from json import JSONEncoder
from json.encoder import encode_basestring_ascii
from typing import Any

# Characters, or items of a list: about a tenth of a millisecond.
_SLICE = 4096
# What is handed over at a time.
PIECE_BYTES = 32 << 10
compact: Callable[[Any], str] = JSONEncoder(separators=(",", ":")).encode


class Json(str):
    """A value that is JSON already."""

    __slots__ = ()


def small(items: Iterator[Any]) -> Iterator[Json]:
    """Items of a list, each of which is made at once."""
    return (Json(compact(item)) for item in items)


def json_pieces(value: Any) -> Iterator[str]:
    """Yields JSON as json.dumps writes it without spaces. Besides what that takes: arrays of numbers, `Json`, and iterators, which are
    lists whose items are made one after the other."""
    match value:
        case Json():
            yield value
        case str() if len(value) > _SLICE:
            yield '"'
            for start in range(0, len(value), _SLICE):
                yield encode_basestring_ascii(value[start : start + _SLICE])[1:-1]
            yield '"'
        case Mapping():
            yield "{"
            for number, (name, item) in enumerate(value.items()):
                yield f"{',' if number else ''}{compact(name)}:"
                yield from json_pieces(item)
            yield "}"
        case list() | tuple() | array():
            yield "["
            if value and isinstance(value[0], int):  # and so are all
                for start in range(0, len(value), _SLICE):
                    yield ("," if start else "") + compact(list(value[start : start + _SLICE]))[1:-1]
            else:
                yield from _items(iter(value))
            yield "]"
        case Iterator():
            yield "["
            yield from _items(value)
            yield "]"
        case _:
            yield compact(value)


def _items(items: Iterator[Any]) -> Iterator[str]:
    for number, item in enumerate(items):
        if number:
            yield ","
        yield from json_pieces(item)


def in_chunks(pieces: Iterator[str], size: int = PIECE_BYTES) -> Iterator[bytes]:
    """Joins pieces to chunks of about so many bytes each."""
    waiting: list[str] = []
    num_chars = 0
    for piece in pieces:
        waiting.append(piece)
        num_chars += len(piece)
        if num_chars >= size:
            yield "".join(waiting).encode("ascii")
            waiting, num_chars = [], 0
    if waiting:
        yield "".join(waiting).encode("ascii")
