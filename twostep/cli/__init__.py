"""The command `twostep`. Each subcommand's module is loaded only when it runs: the client ones need grpcio and protobuf alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 done, 1 failed (one line on stderr says what to do), 2 wrong usage, 130 interrupted."""
    try:
        # Ctrl-C may come while the flags of all commands are still being imported.
        from twostep.cli._main import run  # noqa: PLC0415

        status = run(argv)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)
