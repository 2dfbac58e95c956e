"""Which answers came from one worker, told by their tokens alone: tokens of one step arrive together. Shows whether load was even.

    PYTHONPATH=$PWD python -P benchmarks/shared_workers.py requests-28.jsonl

Two answers that overlap for a quarter of a second or more are of one worker if this share of the tokens of the later one came within half a
millisecond of one of the other's; workers are the connected groups. The histogram of all pairs shows how clear that is: two heaps. A worker
that is idle now and then falls into several groups.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np

from twostep.lab.bench.serve.record import RequestRecord

OVERLAP_S, NEAR_S, LEAST_TOKENS = 0.25, 0.0005, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path, help="of twostep bench serve --save-requests, one rate")
    parser.add_argument("--share", type=float, default=0.7)
    args = parser.parse_args()
    records = [RequestRecord.from_json(json.loads(line)) for line in args.requests.read_text().splitlines()]
    records = sorted((r for r in records if len(r.times_s) > LEAST_TOKENS), key=lambda r: r.times_s[1])
    times = [np.array(r.times_s[1:]) for r in records]
    group = list(range(len(records)))
    shares: list[float] = []

    def root(i: int) -> int:
        while group[i] != i:
            group[i] = group[group[i]]
            i = group[i]
        return i

    alive: list[int] = []
    for i, own in enumerate(times):
        alive = [k for k in alive if times[k][-1] > own[0] + OVERLAP_S]
        for k in alive:
            both = own[own <= times[k][-1]]
            if len(both) < LEAST_TOKENS or both[-1] - both[0] < OVERLAP_S:
                continue
            after = np.searchsorted(times[k], both)
            last = len(times[k]) - 1
            nearest = np.minimum(abs(times[k][np.minimum(after, last)] - both), abs(times[k][np.maximum(after - 1, 0)] - both))
            shares.append(float((nearest < NEAR_S).mean()))
            if shares[-1] > args.share:
                group[root(i)] = root(k)
        alive.append(i)
    print("pairs by share of tokens in common, 0 to 1:", *np.histogram(shares, bins=20, range=(0, 1))[0])
    sizes = Counter(root(i) for i, r in enumerate(records) if r.measured)
    total = sum(sizes.values())
    for first, size in sizes.most_common(10):
        gaps = 1e3 * np.concatenate([np.diff(times[i]) for i in range(len(records)) if root(i) == first])
        p50, p99 = np.percentile(gaps, (50, 99))
        print(f"{size:5d} answers, {size / total:5.1%}; gaps p50 {p50:.1f} ms, p99 {p99:.1f} ms")


if __name__ == "__main__":
    main()
