"""Reads settings: a flag wins over an environment variable, that over a --config file, that over the default.

Every process parses once, in its `__main__`; nothing else reads the environment. Whatever comes from wherever is a text first, so that a
wrong one is refused alike: by the name under which it was given, with what to give instead, and all of them at once.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from twostep.errors import WrongSettings
from twostep.settings.removed import REMOVED, REMOVED_FLAGS
from twostep.settings.table import SettingRow, Settings, settings_of, switched, table_of, variable_of

TableT = TypeVar("TableT", bound=Settings)

CONFIG_VARIABLE = "TWOSTEP_CONFIG"
# Kubernetes tells pods of the Services beside them: a Service `twostep` gives TWOSTEP_PORT=tcp://..., TWOSTEP_PORT_80_TCP and the like.
_OF_KUBERNETES = re.compile(r".*_SERVICE_(HOST|PORT)(_\w+)?|.*_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?|TWOSTEP_(\w+_)?PORT_\w+")
_SERVICE_LINKS = ("tcp://", "udp://", "sctp://")
# Where a parser leaves what it does not know, if whoever reads the settings is to say so: no flag has such a name.
_UNKNOWN = "unknown arguments"
_NAMED = re.compile(r"\{([a-z0-9-]+)\}")


class Given(NamedTuple):
    """A setting's text and the name under which it was given. `shown`: both, where they are more than one after the other."""

    where: str
    text: str
    shown: str = ""

    def __str__(self) -> str:
        return self.shown or f"{self.where} {self.text}"


class Texts(dict[str, Given]):
    """Holds what was given, by the settings' names. `problems`: what was given that is no setting."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []


class FlagParser(argparse.ArgumentParser):  # noqa: TID251
    """ArgumentParser whose options can also come from TWOSTEP_ variables, and that takes no shortened flags and refuses unknown ones with
    what may have been meant."""

    def __init__(self, *, unknown_later: bool = False, **options: Any) -> None:
        """`unknown_later`: unknown flags are left to `gather`, which says what else is wrong, too."""
        # A shortened flag is mistyped as likely as not, and means another one once there are new ones.
        super().__init__(allow_abbrev=False, **options)
        self._unknown_later = unknown_later

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses what is not known here and now: argparse would let the outermost parser do it, which shows the usage of no command."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")] or unknown[:1]
            meant = "".join(hint(flag, known) for flag in flags)
            if not flags[0].startswith("-") and "--model" in known and all(action.option_strings for action in self._actions):
                # As `vllm serve MODEL` takes it.
                meant = f"; did you mean --model {flags[0]}?"
            problem = f"unrecognized arguments: {' '.join(unknown)}{meant}"
            if not self._unknown_later:
                self.error(problem)
            setattr(namespace, _UNKNOWN, problem)
        return namespace, []

    def flag(self, name: str, *shorter: str, group: argparse._ArgumentGroup | None = None, **options: Any) -> None:
        """Like add_argument for one `--name` of a command, which names the variable. A boolean is made with `action="store_true"`.
        `group`: where --help shows it."""
        variable = variable_of(name.lstrip("-"))
        options["help"] = f"{options.get('help', '')} [{variable}]"  # argparse's own format: a percent sign is written %%
        value = os.environ.get(variable)
        if value:
            options["default"] = value
        action = (group or self).add_argument(name, *shorter, **options)
        if value:
            # argparse runs `type` over a default that is a text, unless the flag is given.
            read = switched if options.get("action") == "store_true" else options.get("type", str)
            action.type = _of_variable(variable, value, read, options.get("choices"))


def _of_variable(variable: str, value: str, read: Callable[[str], Any], choices: Collection[str] | None) -> Callable[[str], Any]:
    """Returns `read`, whose refusal of the variable's own text names the variable."""

    def reads(text: str) -> Any:
        try:
            if text is value and choices is not None and text not in choices:
                raise argparse.ArgumentTypeError(f"{text!r}: give one of {', '.join(choices)}")
            return read(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{variable}: {error}" if text is value else str(error)) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"{f'{variable}: ' if text is value else ''}{text!r} is no {reads.__name__}") from None

    reads.__name__ = getattr(read, "__name__", "value")
    return reads


def hint(name: str, known: Collection[str]) -> str:
    """Returns what to give instead of a name that is not known, to be put behind a refusal; empty if nothing is like it."""
    plain = _plain(name)
    why = REMOVED.get(plain) or (REMOVED_FLAGS.get(plain) if name.startswith("-") else None)
    if why:
        return f"; it was removed: {why}"
    names = {_plain(each): each for each in known}
    near = difflib.get_close_matches(plain, names, n=1, cutoff=0.75)
    near = near or sorted((each for each in names if _overlap(plain, each)), key=len)[:3]
    return f"; did you mean {' or '.join(names[each] for each in near)}?" if near else ""


def _plain(name: str) -> str:
    """Returns a flag or a variable as a setting's name."""
    return name.lstrip("-").removeprefix("TWOSTEP_").replace("_", "-").lower()


def _overlap(name: str, known: str) -> bool:
    """Returns whether one is the other shortened, as `http-port` and `port`, or `port` and `grpc-port`."""
    return bool(known) and (known.startswith(name) or known.endswith(f"-{name}") or name.endswith(f"-{known}"))


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
    parser = FlagParser(prog=prog, description=description, usage=f"{prog} [--flag value ...] (--help lists them)", unknown_later=True)
    settings = settings_of(table)
    add_flags(parser, settings)
    add_config_flag(parser)
    args = vars(parser.parse_args(argv))
    try:
        return build(table, gather(settings, args, environ), defaults)
    except WrongSettings as error:
        parser.error(error.message)


def add_config_flag(parser: FlagParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"YAML file of settings, by their flags' names; flags and variables win [{CONFIG_VARIABLE}]",
    )


class _RefusedSecret(argparse.Action):
    """Refuses a secret on the command line, with where to put the secret instead."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        parser.error(f"{option} would show the key to everybody who lists processes; give {option}-file FILE, or {variable_of(self.dest)}")


def add_flags(parser: FlagParser | argparse._ArgumentGroup, settings: Iterable[SettingRow]) -> None:
    """Adds a flag for each; whatever is given stays a text, and what is not given leaves no attribute behind."""
    for each in settings:
        default = f" (default: {each.default_text})" if each.default_text else ""
        text = f"{each.help}{default} [{each.variable}]".replace("%", "%%")
        options: dict[str, Any] = {"dest": each.name, "default": argparse.SUPPRESS, "help": text}
        if each.switch:
            options["action"] = argparse.BooleanOptionalAction
        elif each.secret:
            options |= {"action": _RefusedSecret, "nargs": "?", "help": argparse.SUPPRESS}
        else:
            options["metavar"] = each.metavar or (f"{{{','.join(each.choices)}}}" if each.choices else each.kind)
            options["nargs"] = "+" if each.several else None
        parser.add_argument(each.flag, *each.aliases, **options)


def gather(settings: Iterable[SettingRow], args: Mapping[str, Any], environ: Mapping[str, str]) -> Texts:
    """Returns the texts that flags, variables and the file of --config give. Warns of variables that no process knows."""
    settings = tuple(settings)
    texts = Texts()
    if unknown := args.get(_UNKNOWN):
        texts.problems.append(unknown)
    texts.problems += check_variables(environ)
    path = args.get("config") or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    if path is not None:
        _read_file(path, settings, texts)
    for each in settings:
        if (text := environ.get(each.variable)) and not text.startswith(_SERVICE_LINKS):
            texts[each.name] = Given(each.variable, text, each.variable if each.secret else f"{each.variable}={text}")
        if each.name in args:
            value = " ".join(args[each.name]) if each.several else args[each.name]
            flag = f"--no-{each.name}" if value is False else each.flag
            texts[each.name] = Given(flag, str(int(value)), flag) if isinstance(value, bool) else Given(flag, value)
    return texts


def build(table: type[TableT], texts: Texts, defaults: Mapping[str, Any] | None = None, *, others: Iterable[SettingRow] = ()) -> TableT:
    """Returns the table with these texts read. `others`: settings that its rules name and that are not its own. Raises WrongSettings for
    all that makes no sense, alone or together."""
    values: dict[tuple[str, ...], Any] = {(name,): value for name, value in (defaults or {}).items()}
    problems: list[str] = []
    unread: set[str] = set()
    settings = {each.name: each for each in settings_of(table)}
    for each in settings.values():
        try:
            if each.name in texts:
                values[each.path] = each.value(texts[each.name].text)
            elif each.required and each.path not in values:
                raise argparse.ArgumentTypeError(f"it is missing: give it, or {each.variable}")
        except argparse.ArgumentTypeError as error:
            problems.append(f"{texts[each.name].where if each.name in texts else each.flag}: {error}")
            unread.add(each.name)
    if not any(settings[name].required for name in unread):
        found: TableT = table_of(table, values)
        rows = {each.name: each for each in others} | settings
        # What could not be read was said already; its default may break rules that it would not have.
        broken = (message for message in found.broken() if unread.isdisjoint(_NAMED.findall(message)))
        problems += [_NAMED.sub(lambda name: _shown(name, rows, texts), message) for message in broken]
    if problems or texts.problems:
        raise WrongSettings([*texts.problems, *problems])
    return found


def _shown(name: re.Match[str], rows: Mapping[str, SettingRow], texts: Texts) -> str:
    """Returns the value of the setting {name}, behind the name under which it was given."""
    if name[1] in texts:
        return str(texts[name[1]])
    if name[1] not in rows:
        return name[0]
    each = rows[name[1]]
    return f"{each.flag} {each.default_text} (its default)" if each.default_text and not each.switch else f"{each.flag} (not given)"


def _read_file(path: Path, settings: Sequence[SettingRow], texts: Texts) -> None:
    try:
        # Not part of the base install, whose commands have no --config.
        import yaml  # noqa: PLC0415

        written = path.read_text()
        content, top = yaml.safe_load(written), yaml.compose(written, yaml.SafeLoader)
    except ImportError:
        texts.problems.append(f"--config {path} needs PyYAML; install it: pip install pyyaml")
        return
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        texts.problems.append(f"--config {path} cannot be read: {error}")
        return
    if content is not None and not isinstance(content, dict):
        texts.problems.append(f"--config {path} is no list of settings; write one a line, such as max-num-seqs: 64")
        return
    lines: dict[str, int] = {}
    for key, _ in top.value if content else ():
        line = key.start_mark.line + 1
        if lines.setdefault(key.value, line) != line:
            texts.problems.append(f"--config {path}, line {line}: {key.value} is in line {lines[key.value]}, too; leave one of them out")
    known = {each.name for each in settings}
    for key, value in (content or {}).items():
        name = str(key).replace("_", "-")
        where = f"--config {path}, line {lines[str(key)]}" if str(key) in lines else f"--config {path}"
        if name not in known:
            texts.problems.append(f"{where}: {key} is no setting here{hint(name, known)}")
        elif value is not None:
            texts[name] = Given(f"{where}: {key}", _text(value), f"{key}: {_text(value)} ({where})")


def _text(value: Any) -> str:
    """Returns a value of YAML as a variable would have it."""
    if isinstance(value, bool):
        return str(int(value))
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def check_variables(environ: Mapping[str, str]) -> list[str]:
    """Writes to stderr which TWOSTEP_ variables nothing reads; returns what is wrong with those that were removed."""
    # The tables are made with this module's neighbours; only a variable that is there makes it worth while to look at all of them.
    from twostep.settings.known import known_variables  # noqa: PLC0415

    mine = [
        name
        for name, value in environ.items()
        if name.startswith("TWOSTEP_") and not _OF_KUBERNETES.fullmatch(name) and not value.startswith(_SERVICE_LINKS)
    ]
    if not mine:
        return []
    known, removed = known_variables(), {variable_of(name) for name in REMOVED}
    problems = []
    for name in sorted(set(mine) - known):
        said = hint(name, known)
        if name in removed:
            problems.append(f"{name} is no setting{said}")
        else:
            sys.stderr.write(f"warning: {name} is no setting of Twostep and has no effect{said}\n")
    return problems
