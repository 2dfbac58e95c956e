"""`twostep bench page`: saved requests to a page."""

from __future__ import annotations

import argparse

from twostep.errors import SetupError
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.bench.serve.page import PageRun, page
from twostep.lab.bench.serve.saved import read_runs
from twostep.lab.bench.serve.summary import Windows, summarize


def run(args: argparse.Namespace) -> int:
    targets = LatencyTargets.parse(args.goodput)
    if not args.output.parent.is_dir():
        raise SetupError(f"{args.output.parent} is not a folder; make it, or give another file")
    runs = []
    for path in args.runs:
        for label, records in read_runs(path):
            summary = summarize(records, Windows.of_requests(records, open_loop=False), targets=targets)
            runs.append(PageRun(label=label, records=records, summary=summary, targets=targets))
    about = f"From {', '.join(path.name for path in args.runs)}. Targets: {targets or 'none'}."
    args.output.write_text(page(runs, "Under load", about), encoding="utf-8")
    print(f"drawn: {args.output}")
    return 0
