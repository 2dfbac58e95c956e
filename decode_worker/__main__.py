"""`python -P -m decode_worker`: see --help."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from decode_worker.edge import DecodeEdge
from kv_transfer.ray_transport import RayTransport
from twostep.errors import SetupError
from twostep.worker.edge import EdgeParts
from twostep.worker.process import run_worker


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="ts-") as run_dir:
        return run_worker("decode", argv, lambda parts: _make_edge(parts, Path(run_dir)))


def _make_edge(parts: EdgeParts, run_dir: Path) -> DecodeEdge:
    if parts.config.kv_transfer == "local":
        raise SetupError("--kv-transfer local joins workers of one process only; give ray or auto to worker processes")
    return DecodeEdge(
        parts,
        [
            RayTransport(
                parts.model.runner,
                parts.model.runner.kv_shape.block_bytes,
                worker_id=parts.worker_id,
                epoch=parts.epoch,
                ray_address=parts.config.ray_address,
                num_layers=parts.model.runner.kv_shape.num_layers,
                pin=parts.model.runner.pin_host,
                run_dir=parts.config.run_dir or run_dir,
            )
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
