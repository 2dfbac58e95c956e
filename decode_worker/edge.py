"""The decode role: Decode around an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decode_worker.paths import Discovery, Paths
from decode_worker.peers import Peers
from decode_worker.pull import Puller
from decode_worker.sequences import Sequences, SequencesConfig
from decode_worker.service import DecodeService
from decode_worker.tracing import SequenceSpans
from kv_transfer.telemetry import Direction, TransferMetrics, TransferTelemetry
from kv_transfer.transport import TransportEnd
from kv_transfer.transports import TransportTable
from twostep.cluster.records import MeasuredHandOver
from twostep.engine.types import LayerProgress, StepOutput
from twostep.errors import TwostepError
from twostep.rpc.call_signing import CallSigner
from twostep.rpc.v1 import worker_pb2
from twostep.worker.edge import EdgeCounts, EdgeParts, until

_FLUSH_S = 2.0


class DecodeEdge:
    """See twostep.worker.edge.Edge."""

    def __init__(self, parts: EdgeParts, transports: TransportTable[TransportEnd], *, limits: SequencesConfig | None = None) -> None:
        self.transports = transports
        spans = None if parts.tracer is None else SequenceSpans(parts.tracer)
        self._telemetry = TransferTelemetry(parts.metrics.once(TransferMetrics), None if spans is None else spans.transfers)
        self._peers = Peers(parts.config.tls, CallSigner(parts.secret, parts.worker_id))
        self._paths = Paths(transports, self._peers, parts.secret, self._telemetry)
        self._discovery = Discovery(parts.config.redis_url, self._paths, secret=parts.secret, own_id=parts.worker_id)
        self._puller = Puller(parts, transports, self._peers, self._paths, self._telemetry)
        limits = limits or SequencesConfig(
            local_prefill=parts.config.serves_alone,
            reservation_lease_s=parts.config.lease_ttl,
            router_lease_s=parts.config.router_lease,
        )
        self.sequences = Sequences(parts.engine, self._puller, limits, secret=parts.secret, layout=parts.engine.facts.layout)
        self._service = DecodeService(self.sequences, parts.reader, spans, epoch=parts.epoch)
        self.services: Mapping[str, object] = {"twostep.v1.Decode": self._service}

    async def start(self) -> None:
        await self.transports.start()
        await self.sequences.start()
        self._discovery.start()

    @property
    def counts(self) -> EdgeCounts:
        sequences = self.sequences
        return EdgeCounts(fetched_bytes=sequences.bytes_fetched, kept=sequences.num_kept, taken_over=sequences.num_taken_over)

    @property
    def measured(self) -> Sequence[MeasuredHandOver]:
        return self.sequences.hand_overs.means

    def on_step(self, output: StepOutput) -> None:
        self.sequences.on_step(output)

    def on_layers(self, progress: Sequence[LayerProgress]) -> None:
        """Does nothing: nothing is handed over from here."""

    def refuse(self, reason: str) -> None:
        self._service.refusal = reason

    @property
    def idle(self) -> bool:
        return len(self.sequences) == 0 and self.sequences.all_sent

    def fail_all(self, error: TwostepError) -> None:
        self.sequences.fail_all(error)

    async def close(self) -> None:
        await self.sequences.close()
        self._service.close()
        await self._puller.close()
        # The streams end by themselves once routers have read what is left; those that do not read are cut with the server.
        await until(lambda: self.sequences.num_streams == 0, _FLUSH_S)
        await self._discovery.close()
        await self._paths.close()
        await self._peers.close()

    async def fill_stats(self, stats: worker_pb2.WorkerStats) -> None:
        stats.num_leases += self.sequences.num_reservations
        stats.oldest_lease_s = max(stats.oldest_lease_s, self.sequences.oldest_hand_over_s)
        stats.num_sequences += len(self.sequences)
        stats.num_streams += self.sequences.num_streams
        stats.bytes_moved += self.sequences.bytes_fetched
        stats.blocks_moved += self.sequences.blocks_fetched
        stats.blocks_reused += self.sequences.blocks_reused
        for transport in self.transports:
            stats.transports.append(await self._telemetry.stats(transport, Direction.FETCH))
        for path in self._paths.results:
            stats.paths.add(
                worker_id=path.worker_id, epoch=path.epoch, transport=path.transport, bytes_per_s=path.bytes_per_s, error=path.error
            )
