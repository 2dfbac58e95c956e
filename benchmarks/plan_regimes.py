"""Simulates where moving KV pays: goodput per GPU of the best split of some GPUs, with workers that take both roles and with
fixed roles, and of the best step budget without a split, over prompt lengths, answer lengths and targets.

    python benchmarks/plan_regimes.py simulate regimes.jsonl --gpus 2 --jobs 4       adds the cells that are not in the file yet
    python benchmarks/plan_regimes.py page regimes.jsonl docs                        writes regimes.md and images/regimes.png there
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.plan.machine import machine_of_preset
from twostep.lab.plan.planner import AGGREGATED_BUDGETS, Option, Question, plan_for_workers
from twostep.lab.plan.workload import parse_workload
from twostep.settings.reading import FlagParser

PROMPTS, OUTPUTS = (512, 2600, 8000), (32, 128, 512)
TARGETS = ("ttft=500,tpot=10,gap=25", "ttft=500,tpot=10", "ttft=500,tpot=30", "ttft=200,tpot=100")
# What both roles at once may lose to aggregated workers: the prediction's error.
LEAST_SHARE = 0.97


def main() -> None:
    parser = FlagParser(prog="python benchmarks/plan_regimes.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    simulating = commands.add_parser("simulate")
    simulating.add_argument("cells", type=Path)
    simulating.add_argument("--preset", default="h200-llama-3.1-8b-graphs")
    simulating.add_argument("--gpus", type=int, default=2)
    simulating.add_argument(
        "--seconds", type=float, default=40.0, help="of arrivals in each simulation; ten times as many for prompts of 8000"
    )
    simulating.add_argument("--jobs", type=int, default=1)
    page = commands.add_parser("page")
    page.add_argument("cells", type=Path)
    page.add_argument("docs", type=Path)
    args = parser.parse_args()
    (_simulate if args.command == "simulate" else _write)(args)


# ---- simulating ---------------------------------------------------------------------------------------------------------


def _simulate(args: argparse.Namespace) -> None:
    known = {_key(cell) for cell in _read(args.cells)} if args.cells.exists() else set()
    cells = [
        # Long prompts come seldom: so that there are enough to judge by.
        {
            "preset": args.preset,
            "gpus": args.gpus,
            "prompt": prompt,
            "answer": answer,
            "slo": slo,
            "seconds": args.seconds * (10 if prompt >= 8000 else 1),
        }
        for slo, prompt, answer in itertools.product(TARGETS, PROMPTS, OUTPUTS)
    ]
    left = [cell for cell in cells if _key(cell) not in known]
    with ProcessPoolExecutor(args.jobs) as pool, args.cells.open("a") as file:
        for i, cell in enumerate(pool.map(_cell, left)):
            file.write(json.dumps(cell) + "\n")
            file.flush()
            print(f"{i + 1} of {len(left)}: {cell}", file=sys.stderr, flush=True)


def _cell(cell: dict[str, Any]) -> dict[str, Any]:
    workload = parse_workload(f"prompts={cell['prompt']}+-30%,outputs={cell['answer']}+-30%")
    targets = LatencyTargets.parse([cell["slo"]])
    asked = Question(base=machine_of_preset(cell["preset"]).base, workload=workload, targets=targets, seconds=cell["seconds"])
    both, aggregated = _best(asked, cell["gpus"], AGGREGATED_BUDGETS)
    fixed, _ = _best(replace(asked, fixed_roles=True), cell["gpus"], AGGREGATED_BUDGETS[-1:])
    return cell | {"both": both, "fixed": fixed, "aggregated": aggregated}


def _best(question: Question, gpus: int, budgets: Sequence[int]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    try:
        plan = plan_for_workers(replace(question, budgets=budgets), gpus)
    except InvalidRequest:
        return None, None
    return _told(plan.disaggregated), _told(plan.aggregated)


def _told(option: Option | None) -> dict[str, Any] | None:
    if option is None:
        return None
    d = option.deployment
    what = str(d.decode.step_tokens) if d.aggregated else f"{d.num_prefill}+{d.num_decode}"
    return {"rate": round(option.goodput_per_worker, 3), "what": what}


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("preset", "gpus", "prompt", "answer", "slo", "seconds"))


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the page -----------------------------------------------------------------------------------------------------------


def _write(args: argparse.Namespace) -> None:
    cells = _read(args.cells)
    (args.docs / "regimes.md").write_text("\n".join(_page(cells)) + "\n")
    _draw(cells, args.docs / "images" / "regimes.png")


def _page(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "# Regimes: where moving KV pays"
    yield ""
    yield "Simulated, not measured ([planning.md](planning.md) says how far the simulation is off), by `benchmarks/plan_regimes.py`:"
    yield f"preset `{cells[0]['preset']}`, lengths ± 30 %, Poisson arrivals. `twostep plan` answers the same for other lengths."
    yield ""
    yield "Every request states its targets, and steps are bounded by them ([scheduling](scheduling.md#what-bounds-a-step));"
    yield "rates are known to some 4 %, those of prompts of 512 and 2600 from 40 s of arrivals, those of 8000 from 400 s."
    yield ""
    yield "Each cell: requests/s per GPU at which 95 % keep the targets (TTFT / TPOT / gap in ms), of **workers that take both roles**"
    yield "(prefill + decode: what they are for), of the same with `--fixed-roles`, and of aggregated workers at their best step budget;"
    yield f"then the first over the last, bold where it is below {LEAST_SHARE}. A dash: no rate."
    yield ""
    yield "![Both roles at once, over aggregated workers at their best budget](images/regimes.png)"
    for gpus in sorted({cell["gpus"] for cell in cells}):
        yield ""
        yield f"## {gpus} GPUs"
        yield ""
        yield "| prompt | answer | " + " | ".join(map(_name, TARGETS)) + " |"
        yield "|---|---|" + "---|" * len(TARGETS)
        for prompt, answer in itertools.product(PROMPTS, OUTPUTS):
            found = {cell["slo"]: cell for cell in cells if (cell["gpus"], cell["prompt"], cell["answer"]) == (gpus, prompt, answer)}
            if found:
                told = [_text(found[slo]) if slo in found else "" for slo in TARGETS]
                yield f"| {prompt} | {answer} | " + " | ".join(told) + " |"


def _name(slo: str) -> str:
    targets = LatencyTargets.parse([slo])
    return " / ".join(f"{ms:g}" for ms in (targets.ttft_ms, targets.tpot_ms, targets.gap_ms) if ms is not None)


def _text(cell: dict[str, Any]) -> str:
    share = _share(cell)
    if all(cell[kind] is None for kind in ("both", "fixed", "aggregated")):
        return "–"
    rates = [f"{one['rate']:.2f} ({one['what']})" if one else "–" for one in (cell["both"], cell["fixed"], cell["aggregated"])]
    told = "" if share is None else f"**{share:.2f}**" if share < LEAST_SHARE else f"{share:.2f}"
    return f"{' / '.join(rates)}: {told}".rstrip(": ")


def _share(cell: dict[str, Any]) -> float | None:
    """Returns the ratio to the goodput of aggregated workers; None: they keep no rate."""
    if cell["aggregated"] is None:
        return None
    return float(cell["both"]["rate"] if cell["both"] else 0.0) / float(cell["aggregated"]["rate"])


def _draw(cells: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - the page needs it, simulating does not
    from matplotlib.figure import Figure  # noqa: PLC0415

    sizes = sorted({cell["gpus"] for cell in cells})
    figure = Figure(figsize=(3.1 * len(TARGETS), 2.9 * len(sizes)), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(len(sizes), len(TARGETS), squeeze=False)
    at: Callable[[dict[str, Any]], tuple[int, int]] = lambda cell: (PROMPTS.index(cell["prompt"]), OUTPUTS.index(cell["answer"]))  # noqa: E731
    for row, gpus in enumerate(sizes):
        for column, slo in enumerate(TARGETS):
            ax = panels[row][column]
            shares = [[float("nan")] * len(OUTPUTS) for _ in PROMPTS]
            for cell in cells:
                if (cell["gpus"], cell["slo"]) == (gpus, slo) and (share := _share(cell)) is not None:
                    i, j = at(cell)
                    shares[i][j] = share
                    ax.text(j, i, f"{share:.2f}", ha="center", va="center")
            ax.imshow(shares, cmap="RdBu", vmin=0.6, vmax=1.4, aspect="auto")
            ax.set_xticks(range(len(OUTPUTS)), [str(n) for n in OUTPUTS])
            ax.set_yticks(range(len(PROMPTS)), [str(n) for n in PROMPTS])
            ax.set_title(f"{gpus} GPUs, {_name(slo)} ms", fontsize=10)
            ax.set_xlabel("answer")
            ax.set_ylabel("prompt")
    figure.suptitle("goodput of workers with both roles / aggregated workers at their best budget (blank: no rate)", x=0.01, ha="left")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110, facecolor="white")


if __name__ == "__main__":
    main()
