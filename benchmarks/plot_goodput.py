"""Pictures and tables of measured sweeps of benchmarks/gpu_goodput.py: who met which targets, and how long the longest gaps were.

    PYTHONPATH=$PWD python -P benchmarks/plot_goodput.py --output docs \
        '3 prefill + 1 decode'=DIR/requests-*.jsonl '4 aggregated'=DIR2/requests-*.jsonl

Each argument names a deployment and its files. Writes goodput.png (attainment against the rate, a panel for each set of targets) and
gaps.png (percentiles of the longest gap of each answer) into --output, and prints the same as Markdown.
"""

from __future__ import annotations

import argparse
import glob
import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from twostep.lab.bench.serve.metrics import Distribution, Latency, Targets, latency_of
from twostep.lab.bench.serve.record import RequestRecord

TARGETS = ("ttft:500 tpot:10 gap:25", "ttft:500 tpot:10", "ttft:500 tpot:30", "ttft:200 tpot:100")
SHARE = 0.95
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")

Sweep = dict[float, list[Latency | None]]


def read(pattern: str) -> Sweep:
    """By rate, the latencies of the requests that count, None for those that failed."""
    sweep: Sweep = {}
    for path in sorted(glob.glob(pattern)):
        for line in Path(path).read_text().splitlines():
            raw = json.loads(line)
            if raw["measured"]:
                sweep.setdefault(raw["rate"], []).append(latency_of(RequestRecord.from_json(raw)))
    return dict(sorted(sweep.items()))


def kept(latencies: list[Latency | None], targets: Targets) -> float:
    return sum(not targets.missed(latency) for latency in latencies) / len(latencies)


def gaps(latencies: list[Latency | None]) -> Distribution:
    return Distribution.of(x.longest_gap_s for x in latencies if x is not None and x.longest_gap_s is not None)


def title(words: str) -> str:
    names = {"ttft": "TTFT", "tpot": "TPOT", "gap": "gap"}
    return ", ".join(f"{names[name]} ≤ {value}" for name, value in (word.split(":") for word in words.split())) + " ms"


def attainment(sweeps: dict[str, Sweep]) -> Figure:
    figure = Figure(figsize=(9.6, 6.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, words in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, TARGETS, strict=True):
        targets = Targets.parse(words.split())
        for color, (name, sweep) in zip(COLORS, sweeps.items(), strict=False):
            axes.plot(list(sweep), [kept(latencies, targets) for latencies in sweep.values()], "o-", color=color, label=name)
        axes.axhline(SHARE, color="0.4", linewidth=0.8, linestyle="--")
        axes.set(title=title(words), ylim=(0, 1.03))
        axes.grid(alpha=0.3)
    figure.axes[0].legend(loc="lower left")
    figure.axes[0].text(0.99, SHARE - 0.045, "95 %", ha="right", color="0.4", transform=figure.axes[0].get_yaxis_transform())
    figure.supxlabel("requests/s on all GPUs")
    figure.supylabel("share of requests that met all targets")
    return figure


def longest_gaps(sweeps: dict[str, Sweep]) -> Figure:
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for color, (name, sweep) in zip(COLORS, sweeps.items(), strict=False):
        found = [gaps(latencies) for latencies in sweep.values()]
        for style, label, values in (
            ("o:", "p50", [x.p50 for x in found]),
            ("s--", "p95", [x.p95 for x in found]),
            ("^-", "p99", [x.p99 for x in found]),
        ):
            axes.plot(list(sweep), [1e3 * value for value in values], style, color=color, label=f"{name}, {label}")
    axes.axhline(25, color="0.4", linewidth=0.8, linestyle="--")
    axes.set(xlabel="requests/s on all GPUs", ylabel="longest gap between tokens, ms", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def table(sweeps: dict[str, Sweep]) -> list[str]:
    lines = ["| | requests/s | " + " | ".join(title(words) for words in TARGETS) + " | TTFT p50 / p95 / p99 ms | TPOT | longest gap |"]
    lines.append("|---" * (len(TARGETS) + 5) + "|")
    for name, sweep in sweeps.items():
        for rate, latencies in sweep.items():
            there = [x for x in latencies if x is not None]
            shares = " | ".join(f"{kept(latencies, Targets.parse(words.split())):.3f}" for words in TARGETS)
            tails = " | ".join(
                " / ".join(f"{1e3 * value:.1f}" for value in (found.p50, found.p95, found.p99))
                for found in (
                    Distribution.of(x.ttft_s for x in there),
                    Distribution.of(x.tpot_s for x in there if x.tpot_s is not None),
                    gaps(latencies),
                )
            )
            lines.append(f"| {name} | {rate:g} ({len(latencies)}) | {shares} | {tails} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", metavar="NAME=FILES", help="files may be a pattern")
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    args = parser.parse_args()
    sweeps = {name: read(pattern) for name, _, pattern in (word.partition("=") for word in args.sweeps)}
    if empty := [name for name, sweep in sweeps.items() if not sweep]:
        parser.error(f"no measured requests of {', '.join(empty)}; give NAME=FILES with files of twostep bench serve --save-requests")
    attainment(sweeps).savefig(args.output / "goodput.png", dpi=110)
    longest_gaps(sweeps).savefig(args.output / "gaps.png", dpi=110)
    print("\n".join(table(sweeps)))


if __name__ == "__main__":
    main()
