"""How many values a JSON text of a stranger has, before any parser makes objects of them. Parsers hold the interpreter's lock all the
while: a list of eight million empty lists, which is 16 MiB of text, stops every thread for seconds."""

from __future__ import annotations

from dataclasses import dataclass

from twostep.errors import InvalidRequest

# The longest lists are of token ids; the most objects are messages with their calls, and schemas of tools.
MAX_CONTAINERS = 1 << 15
MAX_STRINGS = 1 << 17
MAX_VALUES = 1 << 21
# A slice takes a millisecond.
_SLICE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class JsonSize:
    """`values` counts `containers` (lists and objects) too. Both may be a few more than there are, never fewer."""

    containers: int
    values: int


def rough_size(raw: bytes) -> JsonSize:
    """Counts as if every comma and bracket stood outside of strings."""
    containers = raw.count(b"[") + raw.count(b"{")
    return JsonSize(containers, containers + raw.count(b",") + 1)


def checked_size(raw: bytes) -> JsonSize:
    """Looks outside of strings: a long text is one value. Takes 3 ms for a MiB, in slices between which other threads run. What is no JSON
    is counted as far as it is, and no parser gets further. Raises InvalidRequest: there are more than anybody needs."""
    containers, values, quotes, begin = 0, 0, 0, 0
    while begin < len(raw):
        part = raw[begin : begin + _SLICE_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            # What its last backslash escapes belongs to it.
            part = raw[begin : begin + _SLICE_BYTES + 1]
        begin += len(part)
        if b"\\" in part:
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        # Each quote is one end of a string now.
        pieces = part.split(b'"')
        size = rough_size(b"".join(pieces[quotes % 2 :: 2]))
        quotes += len(pieces) - 1
        containers, values = containers + size.containers, values + size.values
        if quotes > 2 * MAX_STRINGS:
            raise _too_many("strings", MAX_STRINGS)
        if containers > MAX_CONTAINERS:
            raise _too_many("lists and objects", MAX_CONTAINERS)
        if values > MAX_VALUES:
            raise _too_many("values", MAX_VALUES)
    return JsonSize(containers, values)


def _too_many(what: str, most: int) -> InvalidRequest:
    return InvalidRequest(f"there are more than {most} {what} in this JSON; send fewer")
