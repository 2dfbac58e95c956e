"""`python -P -m prefill_worker`: see --help."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from twostep.worker.process import run_worker
from twostep.worker.roles import edges_of_packages


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="ts-") as run_dir:
        return run_worker("prefill", argv, edges_of_packages(Path(run_dir)))


if __name__ == "__main__":
    sys.exit(main())
