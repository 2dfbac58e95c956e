"""How long a decision takes with so many workers, in CPU time of one thread: `PYTHONPATH=. python benchmarks/placement_speed.py`.

The dear case: three transports, queues everywhere, several routers, and all decode workers compute prompts too.
"""

from __future__ import annotations

import random
import time

from router.placing.placement import Candidate, MeanLoad, PlacementRequest, Snapshot, place
from twostep.cluster.records import LayoutRecord, WorkerLoad, WorkerRecord
from twostep.step_curve import StepCurve

CURVE = StepCurve(fixed_s=4e-3, per_row_s=20e-6, knee=200, per_pair_s=1e-10, per_sequence_s=2e-6, per_context_s=3e-8)
LAYOUT = LayoutRecord(model_fingerprint="m", dtype="bfloat16", block_size=16, num_layers=32, num_kv_heads=8, head_dim=128)
REPEATS = 300


def worker(role: str, index: int, rng: random.Random) -> Candidate:
    load = WorkerLoad(
        num_running=rng.randrange(60),
        num_context_tokens=rng.randrange(10_000, 60_000),
        num_queued_tokens=rng.randrange(8000),
        num_free_blocks=100_000,
    )
    record = WorkerRecord(
        worker_id=f"{role}-{index}",
        role=role,
        address="127.0.0.1:1",
        epoch=1,
        model="m",
        layout=LAYOUT,
        hash_unit=64,
        secret_check="s",
        num_blocks=100_000,
        max_num_seqs=256,
        max_model_len=8192,
        transports=("cuda_ipc", "nixl", "ray"),
        curve=CURVE,
        step_tokens=2048,
        local_prefill=role == "decode",
        load=load,
    )
    mean = MeanLoad(queued_tokens=rng.randrange(4000), own_queued_tokens=rng.randrange(2000), num_seqs=30, own_num_seqs=rng.randrange(30))
    return Candidate(
        record=record,
        cached_tokens=rng.choice([0, 512, 1024]),
        queued_tokens=rng.randrange(5000),
        recent_tokens=rng.randrange(20_000),
        num_attempts=rng.randrange(40),
        mean=mean,
    )


def main() -> None:
    rng = random.Random(1)
    for num_prefill, num_decode in ((3, 1), (12, 4), (48, 16), (32, 32), (192, 64)):
        snapshot = Snapshot(
            prefill=[worker("prefill", i, rng) for i in range(num_prefill)], decode=[worker("decode", i, rng) for i in range(num_decode)]
        )
        times = []
        for number in range(REPEATS):
            demand = PlacementRequest(request_id=f"r{number}", num_tokens=2600, max_new_tokens=128)
            begun = time.thread_time()
            place(snapshot, demand)
            times.append(time.thread_time() - begun)
        times.sort()
        print(f"{num_prefill:4d} + {num_decode:3d} workers: least {times[0] * 1e6:6.0f} us, median {times[REPEATS // 2] * 1e6:6.0f} us")


if __name__ == "__main__":
    main()
