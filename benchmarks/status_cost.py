"""What it costs a router to look at itself once a second, and to tell it to the pages that are open: CPU time of each part.

python benchmarks/status_cost.py --workers 64
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable

from google.protobuf.json_format import MessageToDict

from router.placing.load_ratio import WaitingRequests, role_load
from router.status.board import HISTORY_POINTS
from router.status.status import columns, point, router_load, take_sample, worker_status
from twostep.cluster.records import LayoutRecord, WorkerLoad, WorkerRecord
from twostep.cluster.snapshot import Candidate, MeanLoad, Snapshot
from twostep.metrics.registry import MetricsRegistry
from twostep.metrics.router import RouterMetrics, RouterState
from twostep.rpc.v1 import status_pb2
from twostep.step_curve import StepCurve

_RECORD = WorkerRecord(
    worker_id="decode-0",
    role="decode",
    address="127.0.0.1:50061",
    epoch=1,
    model="m",
    layout=LayoutRecord(model_fingerprint="m", dtype="bfloat16", block_size=16, num_layers=32, num_kv_heads=8, head_dim=128),
    hash_unit=64,
    secret_check="x",
    num_blocks=20_000,
    max_num_seqs=256,
    max_model_len=8192,
    load=WorkerLoad(num_running=40, num_context_tokens=60_000, num_free_blocks=12_000, queried_tokens_per_s=9e3, tokens_per_s=2e3),
    curve=StepCurve(fixed_s=0.006, per_row_s=2e-5, per_sequence_s=2e-5, per_context_s=1e-8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    num_workers = parser.parse_args().workers
    state = RouterState(num_running=100, num_waiting=3, num_streams=num_workers, workers={})
    metrics = RouterMetrics(MetricsRegistry(), lambda: state)
    for status in ("OK", "CANCELLED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL"):
        for finish in ("stop", "length", ""):
            for name in ("interactive", "standard", "batch"):
                metrics.requests.labels(status, finish, name).inc()
                metrics.queue.labels(name).observe(0.02)
    metrics.ttft.observe(0.1)
    samples = [take_sample(metrics, float(second)) for second in range(62)]
    records = [dataclasses.replace(_RECORD, worker_id=f"decode-{i}") for i in range(num_workers)]
    candidates = [Candidate(record=record, mean=MeanLoad(queued_tokens=500.0, num_seqs=40.0)) for record in records]
    snapshot = Snapshot(prefill=candidates[::2], decode=candidates[1::2])
    points = [point(samples, state, 1.234, records, 1e9 + i) for i in range(HISTORY_POINTS)]

    def status_json() -> str:
        load = router_load(samples[0], samples[-1], state, 1.5)
        status = status_pb2.ClusterStatus(workers=[worker_status(record) for record in records], load=load)
        return json.dumps(MessageToDict(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))

    def history_json() -> str:
        return json.dumps({"columns": columns(points)})

    print(f"{num_workers} workers")
    tell("every second: counters", lambda: take_sample(metrics, 1.0))
    tell("every second: P:D load", lambda: role_load(snapshot, WaitingRequests(num_requests=3)))
    tell("every second: point of the history", lambda: point(samples, state, 1.5, records, 1e9))
    tell(f"every second while a page is open: status as JSON, {len(status_json()) / 1e3:.0f} kB", status_json)
    tell(f"when a page is opened: history as JSON, {len(history_json()) / 1e3:.0f} kB", history_json)


def tell(what: str, run: Callable[[], object], times: int = 200) -> None:
    run()
    begun = time.process_time()
    for _ in range(times):
        run()
    print(f"  {what:70} {(time.process_time() - begun) / times * 1e3:6.2f} ms")


if __name__ == "__main__":
    main()
