"""Where separate prefill workers win and where they lose: goodput per GPU of the best split of some GPUs, and of the best step budget
without a split, over prompt lengths, answer lengths and targets. Writes docs/regimes.md.

    python benchmarks/plan_regimes.py --preset h200-llama-3.1-8b --gpus 4 --output docs/regimes.md
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from twostep.errors import InvalidRequest
from twostep.lab.plan.goodput import parse_slo
from twostep.lab.plan.machine import machine_of
from twostep.lab.plan.memory import worker_memory
from twostep.lab.plan.planner import Plan, Question, plan_for_workers
from twostep.lab.plan.presets import load_preset
from twostep.lab.plan.workload import parse_workload

PROMPTS = (128, 512, 2600, 8000)
OUTPUTS = (32, 128, 512)
TARGETS = ("ttft=500,tpot=10,gap=25", "ttft=500,tpot=30", "ttft=200,tpot=100")
BUDGETS = (512, 1024, 2048, 4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="h200-llama-3.1-8b")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals in each simulation")
    parser.add_argument("--output", type=Path, help="standard output if not given")
    args = parser.parse_args()
    lines = [*_head(args), *_rows(args)]
    text = "\n".join(lines) + "\n"
    if args.output is None:
        print(text, end="")
    else:
        args.output.write_text(text)


def _head(args: argparse.Namespace) -> list[str]:
    command = f"python benchmarks/plan_regimes.py --preset {args.preset} --gpus {args.gpus} --seconds {args.seconds:g}"
    return [
        "# Regimes: where separate prefill workers win",
        "",
        f"Simulated by `{command}`",
        f"([planning.md](planning.md)), not measured. {args.gpus} GPUs; lengths ±30 %, Poisson. Each cell: requests/s per GPU at which",
        "95 % keep the targets, of the best split into prefill and decode workers (P+D), and of aggregated workers at the best",
        f"of the step budgets {', '.join(map(str, BUDGETS))}; the winner is bold, with its lead. A dash: no rate keeps them.",
        "",
        "| targets, ms | prompt | answer | split | aggregated | lead |",
        "|---|---|---|---|---|---|",
    ]


def _rows(args: argparse.Namespace) -> list[str]:
    preset = load_preset(args.preset)
    assert preset.model is not None, "this preset has no model"
    memory = worker_memory(preset.model, preset.gpu_memory_bytes, runtime_bytes=preset.runtime_bytes)
    base = machine_of(preset, preset.model, memory).base
    rows = []
    num_done, started = 0, time.monotonic()
    for slo in TARGETS:
        for prompt in PROMPTS:
            for output in OUTPUTS:
                workload = parse_workload(f"prompts={prompt}+-30%,outputs={output}+-30%")
                targets = parse_slo(slo)
                asked = Question(base=base, workload=workload, targets=targets, budgets=BUDGETS, seconds=args.seconds)
                try:
                    plan = plan_for_workers(asked, args.gpus)
                except InvalidRequest:
                    plan = Plan(disaggregated=None, aggregated=None, by_rate=False, tried=0)
                rows.append(f"| {targets} | {prompt} | {output} | {_cells(plan)} |")
                num_done += 1
                total = len(TARGETS) * len(PROMPTS) * len(OUTPUTS)
                print(f"{num_done} of {total}, {time.monotonic() - started:.0f} s: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def _cells(plan: Plan) -> str:
    pair, alike = plan.disaggregated, plan.aggregated
    split = "–" if pair is None else f"{pair.goodput_per_worker:.2f} ({pair.deployment.num_prefill}+{pair.deployment.num_decode})"
    whole = "–" if alike is None else f"{alike.goodput_per_worker:.2f} ({alike.deployment.decode.step_tokens})"
    if pair is None and alike is None:
        return f"{split} | {whole} | –"
    if plan.best is pair:
        split = f"**{split}**"
    else:
        whole = f"**{whole}**"
    gain = plan.gain
    lead = "" if gain is None else f"{max(gain, 1 / (1 + gain) - 1):+.0%}"
    return f"{split} | {whole} | {lead}"


if __name__ == "__main__":
    main()
