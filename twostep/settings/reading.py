"""Reads settings: a flag wins over an environment variable, that over a --config file, that over the default.

Every process parses once, in its `__main__`; nothing else reads the environment. Whatever comes from wherever is a text first, so that a
wrong one is refused alike: by the name under which it was given, with what to give instead.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from twostep.errors import SetupError
from twostep.settings.removed import REMOVED, REMOVED_FLAGS
from twostep.settings.table import SettingRow, Settings, settings_of, switched, table_of, variable_of

TableT = TypeVar("TableT", bound=Settings)

CONFIG_VARIABLE = "TWOSTEP_CONFIG"
# Kubernetes tells pods of the Services beside them: a Service `twostep` gives TWOSTEP_PORT_80_TCP and the like.
_OF_KUBERNETES = re.compile(r".*_SERVICE_(HOST|PORT)(_\w+)?|.*_PORT_\d+_(TCP|UDP)(_\w+)?|TWOSTEP_(\w+_)?PORT_\w+")


class Given(NamedTuple):
    """A setting's text and the name under which it was given."""

    where: str
    text: str


Texts = dict[str, Given]


class FlagParser(argparse.ArgumentParser):
    """ArgumentParser whose options can also come from TWOSTEP_ variables, and that refuses unknown flags with what may have been meant."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses what is not known here and now: argparse would let the outermost parser do it, which shows the usage of no command."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            flag = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint(flag, known)}")
        return namespace, unknown

    def flag(self, name: str, *shorter: str, group: argparse._ArgumentGroup | None = None, **options: Any) -> None:
        """Like add_argument for one `--name` of a command, which names the variable. A boolean is made with `action="store_true"`.
        `group`: where --help shows it."""
        variable = variable_of(name.lstrip("-"))
        value = os.environ.get(variable)
        if value:
            choices = options.get("choices")
            if options.get("action") == "store_true":
                try:
                    options["default"] = switched(value)
                except argparse.ArgumentTypeError as error:
                    self.error(f"{variable}={error}")
            elif choices is not None and value not in choices:
                self.error(f"{variable}={value!r}: give one of {', '.join(map(str, choices))}")
            else:
                # argparse runs `type` over string defaults, so a bad value is refused like one on the command line.
                options["default"] = value
        options["help"] = f"{options.get('help', '')} [{variable}]"  # argparse's own format: a percent sign is written %%
        (group or self).add_argument(name, *shorter, **options)


def hint(name: str, known: Collection[str]) -> str:
    """Returns what to give instead of a name that is not known, to be put behind a refusal; empty if nothing is like it."""
    plain = name.lstrip("-").removeprefix("TWOSTEP_").replace("_", "-").lower()
    why = REMOVED.get(plain) or (REMOVED_FLAGS.get(plain) if name.startswith("-") else None)
    if why:
        return f"; it was removed: {why}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""


def read_settings(
    table: type[TableT],
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    defaults: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> TableT:
    """Returns what the process is told. `defaults`: by a field's name, where they are not the table's. Exits with a usage message for what
    makes no sense."""
    environ = os.environ if environ is None else environ
    # All of the flags in every refusal would bury what is wrong.
    parser = FlagParser(prog=prog, description=description, usage=f"{prog} [--flag value ...] (--help lists them)")
    settings = settings_of(table)
    add_flags(parser, settings)
    add_config_flag(parser)
    args = vars(parser.parse_args(argv))
    try:
        texts = gather(settings, args, environ)
        return build(table, texts, defaults)
    except SetupError as error:
        parser.error(error.message)


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"YAML file of settings, by their flags' names; flags and variables win [{CONFIG_VARIABLE}]",
    )


def add_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup, settings: Iterable[SettingRow]) -> None:
    """Adds a flag for each; whatever is given stays a text, and what is not given leaves no attribute behind."""
    for each in settings:
        default = f" (default: {each.default_text})" if each.default_text else ""
        text = f"{each.help}{default} [{each.variable}]".replace("%", "%%")
        options: dict[str, Any] = {"dest": each.name, "default": argparse.SUPPRESS, "help": text}
        if each.switch:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = each.metavar or (f"{{{','.join(each.choices)}}}" if each.choices else each.kind)
        parser.add_argument(each.flag, *each.aliases, **options)


def gather(settings: Iterable[SettingRow], args: Mapping[str, Any], environ: Mapping[str, str]) -> Texts:
    """Returns the texts that flags, variables and the file of --config give. Raises SetupError for a key of the file that is no setting and
    for a variable that was removed, and warns of variables that no process knows."""
    settings = tuple(settings)
    warn_of_strangers(environ)
    path = args.get("config") or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    texts = _of_file(path, settings) if path is not None else {}
    for each in settings:
        if text := environ.get(each.variable):
            texts[each.name] = Given(each.variable, text)
        if each.name in args:
            value = args[each.name]
            texts[each.name] = Given(each.flag, str(int(value)) if isinstance(value, bool) else value)
    return texts


def build(table: type[TableT], texts: Mapping[str, Given], defaults: Mapping[str, Any] | None = None) -> TableT:
    """Returns the table with these texts read. Raises SetupError for the first that makes no sense, or if some contradict each other."""
    values: dict[tuple[str, ...], Any] = {(name,): value for name, value in (defaults or {}).items()}
    for each in settings_of(table):
        if each.name in texts:
            where, text = texts[each.name]
            try:
                values[each.path] = each.value(text)
            except argparse.ArgumentTypeError as error:
                raise SetupError(f"{where}: {error}") from None
        elif each.required and each.path not in values:
            raise SetupError(f"{each.flag} is missing: give it, or {each.variable}")
    found: TableT = table_of(table, values)
    if wrong := found.contradiction():
        raise SetupError(wrong)
    return found


def _of_file(path: Path, settings: Sequence[SettingRow]) -> Texts:
    try:
        # Not part of the base install, whose commands have no --config.
        import yaml  # noqa: PLC0415

        content = yaml.safe_load(path.read_text())
    except ImportError:
        raise SetupError(f"--config {path} needs PyYAML; install it: pip install pyyaml") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SetupError(f"--config {path} cannot be read: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise SetupError(f"--config {path} is no list of settings; write one a line, such as max-num-seqs: 64")
    known = {each.name for each in settings}
    texts: Texts = {}
    for key, value in (content or {}).items():
        name = str(key).replace("_", "-")
        if name not in known:
            raise SetupError(f"--config {path}: {key} is no setting here{hint(name, known)}")
        if value is not None:
            texts[name] = Given(f"--config {path}: {key}", _text(value))
    return texts


def _text(value: Any) -> str:
    """Returns a value of YAML as a variable would have it."""
    if isinstance(value, bool):
        return str(int(value))
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def warn_of_strangers(environ: Mapping[str, str]) -> None:
    """Writes to stderr which TWOSTEP_ variables nothing reads. Raises SetupError for one that was removed."""
    # The tables are made with this module's neighbours; only a variable that is there makes it worth while to look at all of them.
    from twostep.settings.known import known_variables  # noqa: PLC0415

    mine = [name for name in environ if name.startswith("TWOSTEP_") and not _OF_KUBERNETES.fullmatch(name)]
    if not mine:
        return
    known, removed = known_variables(), {variable_of(name) for name in REMOVED}
    for name in sorted(set(mine) - known):
        said = hint(name, known)
        if name in removed:
            raise SetupError(f"{name} is no setting{said}")
        sys.stderr.write(f"warning: {name} is no setting of Twostep and has no effect{said}\n")
