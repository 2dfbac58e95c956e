"""`python -P -m decode_worker`: see --help."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from decode_worker.edge import DecodeEdge
from kv_transfer.transports import make_transports
from prefill_worker.edge import PrefillEdge
from twostep.worker.process import run_worker


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    edges = {"prefill": PrefillEdge, "decode": DecodeEdge}
    with tempfile.TemporaryDirectory(prefix="ts-") as run_dir:
        return run_worker("decode", argv, lambda parts: edges[parts.config.role](parts, make_transports(parts, Path(run_dir))))


if __name__ == "__main__":
    sys.exit(main())
