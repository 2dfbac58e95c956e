"""`python -P -m decode_worker`: see --help."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from twostep.worker.process import run_worker

if TYPE_CHECKING:
    from twostep.worker.edge import Edge, EdgeParts


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    return run_worker("decode", argv, _load_edge, "kv_transfer.engine_process")


def _load_edge() -> Callable[[EdgeParts], Edge]:
    from decode_worker.edge import DecodeEdge  # noqa: PLC0415
    from kv_transfer.remote import transports_of  # noqa: PLC0415
    from prefill_worker.edge import PrefillEdge  # noqa: PLC0415
    from twostep.worker.edge import edge_maker  # noqa: PLC0415

    return edge_maker({"prefill": PrefillEdge, "decode": DecodeEdge}, transports_of)


if __name__ == "__main__":
    sys.exit(main())
