"""Dockerfiles as data, of which no more is understood than this project's files use, and the files that their COPY takes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

KNOWN = frozenset({"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "RUN", "USER", "WORKDIR"})
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Instruction:
    line: int
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    base: str
    """As written, variables and all."""
    instructions: tuple[Instruction, ...]

    def last(self, name: str) -> str:
        """Value of the instruction that holds at the end; empty: there is none."""
        return next((each.value for each in reversed(self.instructions) if each.name == name), "")


@dataclass(frozen=True, slots=True)
class Dockerfile:
    args: tuple[Instruction, ...]
    """ARGs before the first FROM: what FROM lines may name."""
    stages: tuple[Stage, ...]

    @property
    def final(self) -> Stage:
        return self.stages[-1]


def parse(text: str) -> Dockerfile:
    """Raises ValueError for what is not understood: a step left out in silence would prove nothing."""
    args: list[Instruction] = []
    stages: list[Stage] = []
    for instruction in _instructions(text):
        if instruction.name not in KNOWN:
            raise ValueError(f"line {instruction.line}: {instruction.name} is not understood here")
        if instruction.name == "FROM":
            match = re.fullmatch(r"(\S+)(?:\s+AS\s+(\S+))?", instruction.value, re.IGNORECASE)
            if match is None:
                raise ValueError(f"line {instruction.line}: FROM {instruction.value} is not understood here")
            stages.append(Stage(match[2] or str(len(stages)), match[1], ()))
        elif stages:
            stages[-1] = Stage(stages[-1].name, stages[-1].base, (*stages[-1].instructions, instruction))
        elif instruction.name == "ARG":
            args.append(instruction)
        else:
            raise ValueError(f"line {instruction.line}: {instruction.name} before the first FROM")
    if not stages:
        raise ValueError("no FROM")
    return Dockerfile(tuple(args), tuple(stages))


def _instructions(text: str) -> Iterator[Instruction]:
    """Continued lines joined, comments and empty lines dropped, also between continued ones."""
    parts: list[str] = []
    begun = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun or number
        parts.append(line.strip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            name, _, value = " ".join(parts).partition(" ")
            yield Instruction(begun, name.upper(), value.strip())
            parts, begun = [], 0


def expand(text: str, variables: Mapping[str, str]) -> str:
    """$NAME and ${NAME}; what is not set is empty, as for Docker."""
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], ""), text)


def assignments(value: str) -> dict[str, str]:
    """Returns the assignments of ENV, NAME=VALUE several times, or of ARG, where the value may be missing."""
    pairs = (word.partition("=") for word in shlex.split(value))
    return {name: text for name, _, text in pairs}


def command(value: str) -> list[str]:
    """Returns the words of ENTRYPOINT or CMD: JSON lists, for a shell in between would keep signals from the process. Raises ValueError."""
    words = json.loads(value) if value else []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{value} is no JSON list of strings")
    return words


@dataclass(frozen=True, slots=True)
class Copy:
    """`stage` empty: from the build's context."""

    stage: str
    sources: tuple[str, ...]
    target: str


def copy(value: str) -> Copy:
    """Returns the parts of COPY. Raises ValueError for flags other than --from."""
    words = shlex.split(value)
    stage = ""
    while words and words[0].startswith("--"):
        flag, _, stage = words.pop(0).partition("=")
        if flag != "--from":
            raise ValueError(f"COPY {flag} is not understood here")
    if len(words) < 2:
        raise ValueError(f"COPY {value}: a source and a target are needed")
    return Copy(stage, tuple(words[:-1]), words[-1])


class Ignore:
    """The rules of a .dockerignore. The last one that matches a path, or a directory above it, decides."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        self._rules = [(_pattern(line.removeprefix("!")), line.startswith("!")) for line in lines if line and not line.startswith("#")]

    def lets_through(self, path: str) -> bool:
        parts = PurePosixPath(path).parts
        prefixes = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        through = True
        for pattern, lets in self._rules:
            if any(pattern.fullmatch(prefix) for prefix in prefixes):
                through = lets
        return through


def _pattern(rule: str) -> re.Pattern[str]:
    """`**` is any number of directories, `*` and `?` stay within one."""
    expression = (
        re.escape(rule.strip("/")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    )
    return re.compile(expression)


def files(root: Path, source: str, ignore: Ignore) -> Iterator[PurePosixPath]:
    """Paths below `root` that COPY of `source` takes. Raises FileNotFoundError if there are none: Docker's COPY fails, too."""
    top = root / source
    candidates = [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
    found = [path.relative_to(root) for path in candidates if ignore.lets_through(path.relative_to(root).as_posix())]
    if not found:
        raise FileNotFoundError(f"COPY {source}: the context has no such file, or .dockerignore keeps it out")
    yield from map(PurePosixPath, found)
