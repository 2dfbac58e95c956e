"""What hosts add to a request, from the phases that its answer told: the constants of a simulated machine that no step curve has.

    client   ── sent ─────────────────────────────────────── 1st token ──────────────────────────── 2nd token
    server      route · queue · prefill · (on its way)                  publish · fetch · first_decode
                └ edge ┘                  └── edge ──┘                  └── hand-over ─┘ └ waiting for a step, and it

Edge and hand-over are measured; queue, prefill and first_decode are what a simulation is to find out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.plan.deployment import Deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Seconds, None where it was not measured. `edge_s`: from sending to the prompt's place in a worker's queue, and from the end of its
    last step to the client. `hand_over_s`: from the first token to the word that the decode worker has the sequence, bytes included."""

    edge_s: float | None = None
    hand_over_s: float | None = None


def overheads_of(record: RequestRecord) -> Overheads:
    """Of one answer. Nothing is known of failed ones, of servers that tell no phases, and of what a cached first message hides."""
    phases = record.phases
    if not phases or not record.completed or not record.times_s:
        return Overheads()
    edge_s = record.times_s[0] - record.sent_s - phases.get("queue_s", 0.0) - phases.get("prefill_s", 0.0)
    handed_over = phases.get("fetch_s", 0.0) > 0 and len(record.times_s) > 1 and record.num_tokens[0] == 1
    hand_over_s = record.times_s[1] - record.times_s[0] - phases.get("first_decode_s", 0.0) if handed_over else None
    return Overheads(edge_s=max(0.0, edge_s), hand_over_s=None if hand_over_s is None else max(0.0, hand_over_s))


def with_typical(deployment: Deployment, records: Iterable[RequestRecord]) -> Deployment:
    """The deployment with the medians of these records in the place of its constants; those that nobody told stay."""
    edges: list[float] = []
    latencies: list[float] = []
    for record in records:
        measured = overheads_of(record)
        if measured.edge_s is not None:
            edges.append(measured.edge_s)
        if measured.hand_over_s is not None:
            latencies.append(max(0.0, measured.hand_over_s - deployment.hand_over.exposed_s(record.prompt_tokens)))
    if edges:
        deployment = replace(deployment, edge_s=median(edges))
    if latencies:
        deployment = replace(deployment, hand_over=replace(deployment.hand_over, latency_s=median(latencies)))
    return deployment
