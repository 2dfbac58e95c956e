"""The prefill role: Prefill and Kv around an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kv_transfer.telemetry import Direction, TransferMetrics, TransferTelemetry
from kv_transfer.transports import Transports, make_transports
from prefill_worker.hand_over import HandOverConfig, HandOvers
from prefill_worker.service import KvService, PrefillService
from prefill_worker.tracing import HandOverSpans
from twostep.engine.types import LayerProgress, StepOutput
from twostep.errors import TwostepError
from twostep.rpc.v1 import worker_pb2
from twostep.worker.edge import EdgeParts


def make_edge(parts: EdgeParts, run_dir: Path) -> PrefillEdge:
    """See twostep.worker.roles."""
    return PrefillEdge(parts, make_transports(parts, run_dir))


class PrefillEdge:
    """See twostep.worker.edge.Edge. It owns `transports`."""

    def __init__(self, parts: EdgeParts, transports: Transports) -> None:
        config = parts.config
        spans = None if parts.tracer is None else HandOverSpans(parts.tracer)
        self._telemetry = TransferTelemetry(parts.metrics.once(TransferMetrics), None if spans is None else spans.transfers)
        self.hand_overs = HandOvers(
            parts.engine,
            transports,
            HandOverConfig(
                worker_id=parts.worker_id,
                epoch=parts.epoch,
                layout=parts.model.layout,
                lease_ttl_s=config.lease_ttl,
                max_leases=config.max_waiting + config.max_num_seqs + 256,
                chunk_bytes=config.chunk_bytes,
                wire=config.kv_wire,
            ),
            secret=parts.secret,
            address=parts.address,
            telemetry=self._telemetry,
        )
        self._prefill = PrefillService(self.hand_overs, parts.reader, spans)
        self._kv = KvService(self.hand_overs)

    @property
    def services(self) -> Mapping[str, object]:
        return {"twostep.v1.Prefill": self._prefill, "twostep.v1.Kv": self._kv}

    async def start(self) -> None:
        await self.hand_overs.start()

    @property
    def ready_transports(self) -> Sequence[str]:
        return tuple(transport.name for transport in self.hand_overs.transports.ready)

    @property
    def why_no_transport(self) -> str:
        return self.hand_overs.transports.why_none

    @property
    def num_fetched_bytes(self) -> int:
        return 0

    def on_step(self, output: StepOutput) -> None:
        self.hand_overs.on_step(output)

    def on_layers(self, progress: Sequence[LayerProgress]) -> None:
        self.hand_overs.on_layers(progress)

    def refuse(self, reason: str) -> None:
        self._prefill.refusal = reason

    @property
    def idle(self) -> bool:
        return self._prefill.num_running == 0 and len(self.hand_overs) == 0

    def fail_all(self, error: TwostepError) -> None:
        self.hand_overs.abort_all(error)

    async def leave(self) -> Transports:
        await self.hand_overs.close()
        return self.hand_overs.transports

    async def close(self) -> None:
        await (await self.leave()).close()

    async def fill_stats(self, stats: worker_pb2.WorkerStats) -> None:
        stats.num_leases = len(self.hand_overs)
        stats.oldest_lease_s = self.hand_overs.oldest_s
        stats.num_sequences = self._prefill.num_running
        stats.bytes_moved = self.hand_overs.bytes_published
        stats.blocks_moved = self.hand_overs.blocks_published
        stats.blocks_reused = self.hand_overs.blocks_skipped
        for transport in self.hand_overs.transports:
            stats.transports.append(await self._telemetry.stats(transport, Direction.PUBLISH))
