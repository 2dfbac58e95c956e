"""`python -P -m prefill_worker`: see --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from decode_worker.edge import DecodeEdge
from kv_transfer.transports import make_transports
from prefill_worker.edge import PrefillEdge
from twostep.worker.edge import edge_maker
from twostep.worker.process import run_worker


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    return run_worker("prefill", argv, edge_maker({"prefill": PrefillEdge, "decode": DecodeEdge}, make_transports))


if __name__ == "__main__":
    sys.exit(main())
