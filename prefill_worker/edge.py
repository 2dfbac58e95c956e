"""The prefill role: Prefill and Kv around an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kv_transfer.telemetry import Direction, TransferMetrics, TransferTelemetry
from kv_transfer.transport import TransportEnd
from kv_transfer.transports import TransportTable
from prefill_worker.embeddings import Embedder
from prefill_worker.hand_over import HandOvers
from prefill_worker.service import HandOverSpans, KvService, PrefillService
from twostep.cluster.records import MeasuredHandOver
from twostep.engine.types import LayerProgress, StepOutput
from twostep.errors import TwostepError, Unavailable
from twostep.rpc.v1 import worker_pb2
from twostep.worker.edge import EdgeCounts, EdgeParts


class PrefillEdge:
    """See twostep.worker.edge.Edge."""

    # This edge takes KV from nobody.
    measured: tuple[MeasuredHandOver, ...] = ()

    def __init__(self, parts: EdgeParts, transports: TransportTable[TransportEnd]) -> None:
        """Raises SetupError."""
        self.transports = transports
        spans = None if parts.tracer is None else HandOverSpans(parts.tracer)
        self._telemetry = TransferTelemetry(parts.metrics.once(TransferMetrics), None if spans is None else spans.transfers)
        self.hand_overs = HandOvers(parts, transports, self._telemetry)
        self._embeddings = Embedder(parts.engine)
        self._prefill = PrefillService(self.hand_overs, self._embeddings, parts.reader, spans)
        self.services: Mapping[str, object] = {"twostep.v1.Prefill": self._prefill, "twostep.v1.Kv": KvService(self.hand_overs)}

    async def start(self) -> None:
        await self.transports.start()
        await self.hand_overs.start()

    @property
    def counts(self) -> EdgeCounts:
        return EdgeCounts(handed_over=self.hand_overs.num_handed_over)

    def on_step(self, output: StepOutput) -> None:
        self.hand_overs.on_step(output)
        self._embeddings.on_step(output)

    def on_layers(self, progress: Sequence[LayerProgress]) -> None:
        self.hand_overs.on_layers(progress)

    def refuse(self, reason: str) -> None:
        self._prefill.refusal = reason

    @property
    def idle(self) -> bool:
        return self._prefill.num_running == 0 and len(self.hand_overs) == 0

    def fail_all(self, error: TwostepError) -> None:
        self.hand_overs.abort_all(error)
        self._embeddings.fail_all(error)

    async def close(self) -> None:
        self._embeddings.fail_all(Unavailable("the prefill worker is stopping; another one will do"))
        await self.hand_overs.close()

    async def fill_stats(self, stats: worker_pb2.WorkerStats) -> None:
        stats.num_leases += len(self.hand_overs)
        stats.oldest_lease_s = max(stats.oldest_lease_s, self.hand_overs.oldest_s)
        stats.num_sequences += self._prefill.num_running
        stats.bytes_moved += self.hand_overs.bytes_published
        stats.blocks_moved += self.hand_overs.blocks_published
        stats.blocks_reused += self.hand_overs.blocks_skipped
        for transport in self.transports:
            stats.transports.append(await self._telemetry.stats(transport, Direction.PUBLISH))
