"""Values as bytes, and back, between the two processes of one worker: plain data and registered types, and nothing else.

`marshal` carries numbers, texts, bytes and tuples in C; the classes named with `register_types` travel as lists of their fields, under
their names. Both ends are one version's code in one interpreter, of which neither is more trusted than the other.
"""

from __future__ import annotations

import dataclasses
import marshal
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from twostep import errors
from twostep.errors import InternalError, TwostepError

_ATOMS = frozenset((int, float, str, bytes, bool, type(None), frozenset))


class _Kind(NamedTuple):
    name: str
    fields: Callable[[Any], Sequence[Any]]
    make: Callable[..., Any]


_BY_TYPE: dict[type, _Kind] = {}
_BY_NAME: dict[str, _Kind] = {}


def register_types(*types: type) -> None:
    """Lets these classes travel: dataclasses of what may travel, and enums. A class's name is its own among them."""
    for each in types:
        kind = _enum(each) if issubclass(each, Enum) else _dataclass(each)
        assert each in _BY_TYPE or kind.name not in _BY_NAME, f"two classes are called {kind.name}"
        _BY_TYPE[each] = _BY_NAME[kind.name] = kind


def _enum(of: type[Enum]) -> _Kind:
    return _Kind(of.__name__, lambda value: (value.value,), of)


def _dataclass(of: Any) -> _Kind:
    names = [field.name for field in dataclasses.fields(of) if field.init]
    return _Kind(
        of.__name__, lambda value: [getattr(value, name) for name in names], lambda *values: of(**dict(zip(names, values, strict=True)))
    )


def pack(*values: object) -> bytes:
    """Raises TypeError for what may not travel. A sequence is all of the kind of its first element."""
    return marshal.dumps([_plain(value) for value in values])


def unpack(data: bytes | memoryview) -> list[Any]:
    """Returns what `pack` was given; sequences are tuples."""
    return [_value(value) for value in marshal.loads(data)]


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if (of := _BY_TYPE.get(kind)) is not None:
        return [of.name, *map(_plain, of.fields(value))]
    if kind is tuple or kind is list:
        # Tokens and blocks come by the thousand, and are plain as they are.
        return tuple(value) if not value or type(value[0]) in _ATOMS else tuple(map(_plain, value))
    if isinstance(value, TwostepError):
        found = {name: each for name, each in vars(value).items() if name != "message"}
        return ["!", kind.__name__, value.message, tuple(found), tuple(found.values())]
    if kind is np.ndarray:
        return ["[]", value.dtype.str, value.shape, value.tobytes()]
    if isinstance(value, Path):
        return ["/", str(value)]
    raise TypeError(f"a {kind.__name__} does not travel between a worker's processes; name it in `register_types`")


def _value(plain: Any) -> Any:
    if type(plain) is tuple:
        return tuple(map(_value, plain)) if plain and type(plain[0]) in (list, tuple) else plain
    if type(plain) is not list:
        return plain
    name, *fields = plain
    match name:
        case "!":
            return _error(*fields)
        case "[]":
            dtype, shape, data = fields
            return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
        case "/":
            return Path(fields[0])
    return _BY_NAME[name].make(*map(_value, fields))


def _error(name: str, message: str, names: Sequence[str], values: Sequence[Any]) -> TwostepError:
    kind = getattr(errors, name, InternalError)
    error: TwostepError = kind(message)
    for attribute, value in zip(names, values, strict=True):
        setattr(error, attribute, value)
    return error
