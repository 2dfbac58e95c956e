"""The table of settings: frozen dataclasses whose fields say what they are for. A line such as

    max_waiting: int = setting(256, "prompts that may wait; more are refused", Whole(1, 1 << 20))

is the flag --max-waiting with its help, default and bounds, the variable TWOSTEP_MAX_WAITING, the key max-waiting of a --config file and
of the chart's `flags`, and a row of docs/settings.md. A field without setting() is a constant: nobody sets it, but a test may. What
cannot be together is a Rule in the table's RULES.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, get_args, get_type_hints

from twostep.settings.readers import Number, OneOf, Reader, Whole

_SETTING, _GROUP = "setting", "group"


class FileKind(Enum):
    """The use of a path setting: the process reads the file, appends to it, or keeps files in the folder."""

    READ, WRITTEN, FOLDER = range(3)


class Required:
    """Stands for the default of a setting that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """One row of the table. `path`: where the value stands in its dataclass. `choices`: the only values allowed, if there are any; `read`
    may know other words for them. `switch`: a flag without a value, with a twin --no-... `several`: the flag takes several words. `secret`:
    taken from the variable or a --config file alone, since everybody can list a process' flags. `file`: of what kind the path is."""

    path: tuple[str, ...]
    help: str
    default: Any
    read: Reader
    choices: tuple[str, ...]
    metavar: str
    aliases: tuple[str, ...]
    several: bool
    secret: bool
    file: FileKind | None
    switch: bool

    @property
    def name(self) -> str:
        return "-".join(self.path).replace("_", "-")

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return variable_of(self.name)

    @property
    def required(self) -> bool:
        return self.default is Required

    @property
    def kind(self) -> str:
        """Returns a letter or word for the values."""
        if isinstance(self.read, Whole | OneOf):
            return "N"
        if isinstance(self.read, Number):
            return "MS" if self.read.unit == "milliseconds" else "S" if self.read.unit else "X"
        return "FILE" if self.read is Path else "TEXT"

    @property
    def default_text(self) -> str:
        """Returns the default as one would write it; empty where the help says what becomes of a setting that is not given."""
        if self.switch:
            return "on" if self.default else ""
        if self.required or self.default in (None, "", (), {}) or (isinstance(self.read, Whole) and not self.read.takes(self.default)):
            return ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def value(self, text: str) -> Any:
        """Reads a text. Raises ArgumentTypeError saying what to give."""
        if self.switch:
            return switched(text)
        value = self.read(text)
        if self.choices and value not in self.choices:
            raise argparse.ArgumentTypeError(f"{text!r}: give one of {', '.join(self.choices)}")
        return value


def variable_of(name: str) -> str:
    """Returns the environment variable of a flag, `name` without its dashes."""
    return "TWOSTEP_" + name.replace("-", "_").upper()


def switched(text: str) -> bool:
    """Reads 1, true, yes, on and their opposites. Raises ArgumentTypeError."""
    if text.lower() not in ("0", "1", "true", "false", "yes", "no", "on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r}: give 1 or 0")
    return text.lower() in ("1", "true", "yes", "on")


def setting(
    default: Any,
    help: str,
    read: Reader | None = None,
    *,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    aliases: tuple[str, ...] = (),
    several: bool = False,
    secret: bool = False,
    file: FileKind | None = None,
) -> Any:
    """Makes a dataclass field a setting. `default` may be Required, or a class that makes it. Without `read` the field's annotation says
    how a text is read: str, bool or Path."""
    about: dict[str, Any] = {"help": help, "read": read, "choices": choices, "metavar": metavar, "aliases": aliases}
    about |= {"several": several, "secret": secret, "file": file}
    if default is Required:
        return field(metadata={_SETTING: about})
    if isinstance(default, type):
        return field(default_factory=default, metadata={_SETTING: about})
    return field(default=default, metadata={_SETTING: about})


def group(default: Settings) -> Any:
    """Makes a dataclass field a table of its own: `tls` of TlsFiles gives --tls-cert, --tls-key and so on. {group} in a help: its name."""
    return field(default=default, metadata={_GROUP: True})


@dataclass(frozen=True, slots=True)
class Rule:
    """Says which values cannot be together, and what to change. `wrong` is asked of the whole table; without a `message` it returns it,
    empty if nothing is wrong. {max-waiting} in a message becomes that setting's value behind the name under which it was given."""

    wrong: Callable[[Any], object]
    message: str = ""

    def broken(self, table: Settings) -> str:
        """Returns the message; empty: nothing is wrong."""
        found = self.wrong(table)
        return (self.message if found else "") if self.message else str(found)


class Settings:
    """Holds what a process may be told; dataclasses of settings derive from it. Its rules are its own and its bases'."""

    __slots__ = ()
    RULES: ClassVar[tuple[Rule, ...]] = ()

    def broken(self) -> Iterator[str]:
        """Yields the message of each rule that these values break."""
        for each in reversed(type(self).__mro__):
            for rule in vars(each).get("RULES", ()):
                if message := rule.broken(self):
                    yield message


def settings_of(table: type[Settings]) -> tuple[SettingRow, ...]:
    """Returns the rows of a table, those of its base classes first."""
    hints = get_type_hints(table)
    found: list[SettingRow] = []
    for each in fields(table):  # type: ignore[arg-type]
        if _GROUP in each.metadata:
            for inner in settings_of(type(_default(each))):
                default = functools.reduce(getattr, inner.path, _default(each))
                help = inner.help.replace("{group}", each.name)
                found.append(replace(inner, path=(each.name, *inner.path), default=default, help=help))
        elif _SETTING in each.metadata:
            found.append(_setting(each.name, hints[each.name], each.metadata[_SETTING], _default(each)))
    return tuple(found)


def readers_of(table: type[Settings]) -> dict[str, Reader]:
    """Returns what reads each setting, for flags of the same names elsewhere: `type` of an argparse argument."""
    return {each.name: each.value for each in settings_of(table)}


def _default(each: Any) -> Any:
    if each.default_factory is not MISSING:
        return each.default_factory()
    return Required if each.default is MISSING else each.default


def _setting(name: str, hint: Any, about: Mapping[str, Any], default: Any) -> SettingRow:
    kinds = set(get_args(hint)) - {type(None)} if isinstance(hint, UnionType) else {hint}
    assert about["read"] or kinds <= {str, bool, Path}, f"{name} needs a reader: a text is no {hint}"
    read = about["read"] or (Path if kinds == {Path} else str)
    return SettingRow(path=(name,), default=default, switch=kinds == {bool}, **{**about, "read": read})


def table_of(table: type[Settings], values: Mapping[tuple[str, ...], Any]) -> Any:
    flat = {path[0]: value for path, value in values.items() if len(path) == 1}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        if len(path) == 2:
            inner.setdefault(path[0], {})[path[1]] = value
    for each in fields(table):  # type: ignore[arg-type]
        if each.name in inner:
            flat[each.name] = replace(_default(each), **inner[each.name])
    return table(**flat)
