"""Draws what gpu_goodput.py kept: of each set of targets, the share of requests by requests a second and GPU, a line for each system.

    python benchmarks/plot_goodput.py --gpus 4 --out goodput.png "2 + 2"=both22,both22b "4 aggregated"=agg

A system is a name and the folders that `--out` gave it. A rate whose requests stated targets counts for those alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
from gpu_goodput import TARGETS, Run

from twostep.lab.bench.serve.metrics import LatencyTargets, latency_of
from twostep.lab.bench.serve.record import RequestRecord
from twostep.settings.reading import FlagParser

mpl.use("Agg")
import matplotlib.pyplot as plt


def shares(folders: list[Path], targets: str, place: int) -> dict[float, float]:
    """Returns the share of requests that met the targets, by rate; the mean where a rate was run several times."""
    found = defaultdict[float, list[float]](list)
    for file in (file for folder in folders for file in folder.glob("requests-*.jsonl")):
        run = Run.parse(file.stem.removeprefix("requests-"))
        if run.stated not in (None, place):
            continue
        records = [RequestRecord.from_json(json.loads(line)) for line in file.read_text().splitlines()]
        met = [not LatencyTargets.parse(targets.split()).missed(latency_of(record)) for record in records if record.measured]
        found[run.rate].append(statistics.fmean(met))
    return {rate: statistics.fmean(each) for rate, each in sorted(found.items())}


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="+", help="NAME=FOLDER[,FOLDER...]")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figure, axes = plt.subplots(1, len(TARGETS), figsize=(3.2 * len(TARGETS), 3.4), sharey=True, layout="constrained")
    for place, (targets, axis) in enumerate(zip(TARGETS, axes, strict=True)):
        for words in args.systems:
            name, _, folders = words.partition("=")
            points = shares([Path(folder) for folder in folders.split(",")], targets, place)
            axis.plot([rate / args.gpus for rate in points], list(points.values()), "o-", label=name)
        axis.axhline(0.95, color="0.6", linewidth=0.8)
        axis.set_title(targets, fontsize=9)
        axis.set_xlabel("requests/s per GPU")
        axis.grid(alpha=0.2)
    axes[0].set_ylabel("share that met the targets")
    axes[0].legend(fontsize=8)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
