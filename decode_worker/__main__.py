"""`python -P -m decode_worker`: see --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from decode_worker.edge import DecodeEdge
from kv_transfer.remote import transports_of
from prefill_worker.edge import PrefillEdge
from twostep.worker.edge import edge_maker
from twostep.worker.process import run_worker


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    make_edge = edge_maker({"prefill": PrefillEdge, "decode": DecodeEdge}, transports_of)
    return run_worker("decode", argv, make_edge, "kv_transfer.engine_process")


if __name__ == "__main__":
    sys.exit(main())
