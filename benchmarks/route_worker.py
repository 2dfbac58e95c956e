"""A real worker whose KV goes nowhere: for answers of one token, which need none. `route_worker.py prefill|decode FLAGS...`"""

from __future__ import annotations

import sys

from decode_worker.edge import DecodeEdge
from kv_transfer.local.transport import LocalHub, LocalTransport
from kv_transfer.transports import Transports
from prefill_worker.edge import PrefillEdge
from twostep.worker.edge import EdgeParts
from twostep.worker.local_engine import LocalEngine
from twostep.worker.process import run_worker


def _edge(parts: EdgeParts) -> PrefillEdge | DecodeEdge:
    assert isinstance(parts.engine, LocalEngine), "run without --engine-process on"
    runner = parts.engine.runner
    transport = LocalTransport(
        hub=LocalHub(),
        budget_bytes=1 << 30,
        store=runner,
        block_bytes=runner.kv_shape.block_bytes,
        num_layers=runner.kv_shape.num_layers,
        worker_id=parts.worker_id,
        epoch=parts.epoch,
    )
    return (PrefillEdge if parts.config.role == "prefill" else DecodeEdge)(parts, Transports([transport]))


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1], sys.argv[2:], lambda: _edge, "kv_transfer.engine_process"))
