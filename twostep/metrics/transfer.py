"""Declares the metrics of what moving KV between workers costs. kv_transfer counts it (kv_transfer/telemetry.py); each worker reports its
own side."""

from __future__ import annotations

from twostep.metrics.family import BYTES_PER_SECOND, TRANSFER_SECONDS, counter, gauge, histogram

_BOTH = ["transport", "direction"]

TRANSFERS = counter(
    "twostep_kv_transfers_total",
    "Hand-overs by transport, direction (publish: this worker is the source; fetch: it is the reader) and status (ok, failed).",
    [*_BOTH, "status"],
)
FAILURES = counter(
    "twostep_kv_transfer_failures_total", "Failed hand-overs by reason: an error class in snake case, or cancelled.", [*_BOTH, "reason"]
)
RETRIES = counter(
    "twostep_kv_transfer_retries_total",
    "Chunks asked for again, by reason; data_loss: the checksum did not match, so bytes were damaged on the way.",
    ["transport", "reason"],
)
BYTES = counter("twostep_kv_transfer_bytes_total", "KV moved, those of failed hand-overs included.", _BOTH)
CHUNKS = counter("twostep_kv_transfer_chunks_total", "Chunks moved.", _BOTH)
BLOCKS = counter("twostep_kv_transfer_blocks_total", "KV blocks moved.", _BOTH)
QUEUE = histogram(
    "twostep_kv_transfer_queue_seconds",
    "publish: waiting for room in the transport's budget. fetch: chunks waiting for their turn.",
    TRANSFER_SECONDS,
    _BOTH,
)
COPY = histogram(
    "twostep_kv_transfer_copy_seconds",
    "publish: from the pool to where readers find it. fetch: from there into this worker's pool, verified. Chunks overlap and are summed.",
    TRANSFER_SECONDS,
    _BOTH,
)
SCATTER = histogram(
    "twostep_kv_transfer_scatter_seconds",
    "What of the copy of a fetch verified and wrote blocks, where the transport tells it apart.",
    TRANSFER_SECONDS,
    ["transport"],
)
TOTAL = histogram(
    "twostep_kv_transfer_duration_seconds",
    "publish: from the first final block to the last chunk published, much of it while the prompt is computed. fetch: from the manifest to "
    "the last block in place.",
    TRANSFER_SECONDS,
    _BOTH,
)
EXPOSED = histogram(
    "twostep_kv_transfer_exposed_seconds",
    "What a client may feel. publish: after the first token. fetch: from the word that all is published to the last block in place.",
    TRANSFER_SECONDS,
    _BOTH,
)
RATE = histogram(
    "twostep_kv_transfer_bytes_per_second",
    "Bytes of one fetch by the time while any of its chunks was being copied; pauses in which the prompt is computed do not count.",
    BYTES_PER_SECOND,
    ["transport"],
)
PROBE = gauge(
    "twostep_kv_probe_bytes_per_second",
    "What the last probe copy from a peer (its worker id) reached; 0: this transport does not work with it.",
    ["transport", "peer"],
)
PROBES = counter("twostep_kv_probes_total", "Probe copies by status: ok, failed.", ["transport", "status"])
