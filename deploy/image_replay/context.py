"""The build's context: the files of the checkout that .dockerignore lets through."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


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
