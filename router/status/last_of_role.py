"""Whether a worker may leave its role: the last that serves there should not do so by mistake. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from twostep.cluster.records import WorkerRecord


def what_ends(records: Iterable[WorkerRecord], worker_id: str, role: str) -> str:
    """What would not be served any more once the worker had `role`; empty: everything still is, or was not before either."""
    workers = [record for record in records if record.serves]
    leaving = next((record for record in workers if record.worker_id == worker_id), None)
    if leaving is None or leaving.role == role:
        return ""
    others = [record for record in workers if record.worker_id != worker_id]
    if any(record.role == leaving.role for record in others):
        return ""
    if leaving.role == "decode":
        return f"{worker_id} is the last decode worker: nothing would be served until there is another"
    if any(record.local_prefill for record in others):
        return ""
    return f"{worker_id} is the last prefill worker, and no decode worker computes prompts: nothing would be served until there is another"
