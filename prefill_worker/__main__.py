"""`python -P -m prefill_worker`: see --help."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kv_transfer.ray_transport import RayTransport
from prefill_worker.edge import PrefillEdge
from twostep.errors import SetupError
from twostep.worker.edge import EdgeParts
from twostep.worker.process import run_worker


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="ts-") as run_dir:
        return run_worker("prefill", argv, lambda parts: _make_edge(parts, Path(run_dir)))


def _make_edge(parts: EdgeParts, run_dir: Path) -> PrefillEdge:
    if parts.config.kv_transfer == "local":
        raise SetupError("--kv-transfer local joins workers of one process only; give ray or auto to worker processes")
    return PrefillEdge(
        parts,
        RayTransport(
            parts.model.runner,
            parts.model.runner.kv_shape.block_bytes,
            worker_id=parts.worker_id,
            epoch=parts.epoch,
            ray_address=parts.config.ray_address,
            num_layers=parts.model.runner.kv_shape.num_layers,
            pin=parts.model.runner.pin_host,
            run_dir=parts.config.run_dir or run_dir,
            budget_bytes=parts.config.kv_budget_bytes,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
