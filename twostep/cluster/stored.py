"""Reads values that processes leave for each other, in Redis or in a file, as the dataclasses that they were."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def read_stored(kind: type[T], text: str | bytes) -> T:
    """Returns the value of a JSON text. Fields that this version does not know are left out, types are not converted. Raises ValueError
    with the first thing that is wrong."""
    try:
        value: T = _reader(cast(Any, kind)).validate_json(text, strict=True)
        return value
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise ValueError(f"{where}: {first['msg']}, not {first['input']!r:.40}") from None


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
