"""A plan as text for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from twostep.lab.bench.serve.metrics import Distribution
from twostep.lab.plan.machine import Machine
from twostep.lab.plan.model import gib
from twostep.lab.plan.planner import Option, Plan, Question

_TITLES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "longest_gap_s": "longest gap"}


def option_json(option: Option, question: Question, machine: Machine) -> dict[str, Any]:
    """Times in seconds; costs in the currency of the prices."""
    deployment, trial = option.deployment, option.trial
    sample = question.workload.sample()
    mean_in = sum(r.num_prompt for r in sample) / len(sample)
    mean_out = sum(r.num_output for r in sample) / len(sample)
    per_request = option.hour / 3600 / trial.rate
    roles = [] if deployment.aggregated else ["prefill"]
    roles.append("aggregated" if deployment.aggregated else "decode")
    return {
        "name": deployment.name,
        "num_prefill": deployment.num_prefill,
        "num_decode": deployment.num_decode,
        "step_tokens": deployment.decode.step_tokens if deployment.aggregated else None,
        "gpus": deployment.num_workers * machine.gpus,
        "goodput_per_s": option.goodput,
        "goodput_per_s_per_gpu": option.goodput_per_worker / machine.gpus,
        "planned_rate": trial.rate,
        "share_kept": trial.goodput.attainment,
        **{name: asdict(values) for name, values in _latencies(option).items()},
        "cost_per_hour": option.hour,
        "cost_per_request": per_request,
        "cost_per_million_tokens": 1e6 * per_request / (mean_in + mean_out),
        "cost_per_million_output_tokens": 1e6 * per_request / mean_out,
        "roles": {role: _role_json(role, option, machine) for role in roles},
    }


def _role_json(role: str, option: Option, machine: Machine) -> dict[str, Any]:
    uses = [use for use in option.trial.run.workers if use.role == role]
    spec = option.deployment.prefill if role == "prefill" else option.deployment.decode
    assert spec is not None
    peak = max(use.peak_blocks for use in uses) * spec.block_size
    return {
        "workers": len(uses),
        "busy": _mean([use.busy for use in uses]),
        "sequences_decoding": _mean([use.decodes for use in uses]),
        "peak_sequences_decoding": max(use.peak_decodes for use in uses),
        "preemptions": sum(use.num_preemptions for use in uses),
        "peak_tokens": peak,
        "peak_kv_bytes": peak * machine.model.kv_token_bytes / machine.gpus,
        "pool_tokens": spec.num_tokens,
    }


def plan_json(plan: Plan, question: Question, machine: Machine) -> dict[str, Any]:
    model, memory = machine.model, machine.memory
    return {
        "workload": str(question.workload),
        "targets_ms": {name.removesuffix("_ms"): value for name, value in asdict(question.targets).items() if value is not None},
        "machine": machine.name,
        "model": model.name,
        "curves_of": machine.curves_of or model.name,
        "kv_bytes_per_token": model.kv_token_bytes,
        "kv_formula": model.formula,
        "state_bytes_per_sequence": machine.base.hand_over.state_bytes,
        "memory": None if memory is None else asdict(memory) | {"pool_bytes": memory.pool_bytes, "pool_tokens": memory.num_tokens},
        "recommended": plan.best.deployment.name,
        "disaggregated_over_aggregated": plan.gain,
        "simulations": plan.tried,
        "disaggregated": None if plan.disaggregated is None else option_json(plan.disaggregated, question, machine),
        "aggregated": None if plan.aggregated is None else option_json(plan.aggregated, question, machine),
    }


def plan_text(plan: Plan, question: Question, machine: Machine) -> str:
    best, model, memory = plan.best, machine.model, machine.memory
    deployment = best.deployment
    chosen = option_json(best, question, machine)
    split = f"P:D {deployment.num_prefill}:{deployment.num_decode}"
    what = "no split: every worker computes prompts and decodes" if deployment.aggregated else split
    lines = [
        f"workload     {question.workload}",
        f"targets      {question.targets}, of 95 % of the requests",
        f"machine      {machine.name}, {model.name}",
        *([f"curves       {_foreign(machine)}"] if machine.curves_of else []),
        "",
        f"recommended  {deployment.name}   ({what})",
        f"             {best.goodput:.3g} requests/s kept to the targets, {best.goodput_per_worker / machine.gpus:.3g} per GPU",
        f"             {_verdict(plan)}",
        "",
        *_table(plan, question, machine),
        "",
        f"{deployment.name} at {best.trial.rate:.4g} requests/s: {best.trial.goodput.attainment:.1%} of "
        f"{best.trial.goodput.num_requests} simulated requests kept all targets",
    ]
    for name, d in _latencies(best).items():
        if d.count:
            title = _TITLES[name]
            lines.append(f"  {title:<12} p50 {d.p50 * 1e3:.1f}, p95 {d.p95 * 1e3:.1f}, p99 {d.p99 * 1e3:.1f} ms")
    for role, use in chosen["roles"].items():
        line = f"  {role:<12} {use['workers']} x busy {use['busy']:.2f}"
        if role != "prefill" or deployment.both_roles:
            line += f", {use['sequences_decoding']:.1f} sequences decoding at once, {use['peak_sequences_decoding']} at most"
        lines.append(line + (f", {use['preemptions']} gave way for want of memory" if use["preemptions"] else ""))
    lines += ["", f"memory       KV of a token: {model.formula}"]
    if states := machine.base.decode.num_state_blocks:
        lines.append(f"             states of a sequence: {states} blocks = {machine.base.hand_over.state_bytes:,.0f} bytes")
    if memory is not None:
        lines.append(
            f"             a GPU of {gib(memory.gpu_bytes)}, {memory.utilization:.0%} of it: weights {gib(memory.weight_bytes)}, "
            f"steps and libraries {gib(memory.runtime_bytes)}, "
            f"KV {gib(memory.num_tokens * memory.kv_token_bytes)} = {memory.num_tokens:,} tokens"
        )
    for role, use in chosen["roles"].items():
        lines.append(
            f"             each {role} worker needs {gib(use['peak_kv_bytes'])} at most, "
            f"{use['peak_tokens'] / use['pool_tokens']:.0%} of its pool"
        )
    return "\n".join(lines)


def _foreign(machine: Machine) -> str:
    return f"measured with {machine.curves_of}: steps of {machine.model.name} take other times, which this plan does not know"


def _verdict(plan: Plan) -> str:
    if plan.aggregated is None or plan.gain is None:
        with_or_without = "without" if plan.aggregated is None else "with"
        return f"{with_or_without} separate prefill workers the targets are kept at no rate"
    how = f"{abs(plan.gain):.0%} {'more' if plan.gain >= 0 else 'less'}"
    return f"disaggregated gives {how} goodput for the money than {plan.aggregated.deployment.name}"


def _table(plan: Plan, question: Question, machine: Machine) -> list[str]:
    rows = [("", "GPUs", "goodput/s", "per GPU", "cost/h", "cost/request", "/1M tokens", "/1M output")]
    for option in (plan.disaggregated, plan.aggregated):
        if option is None:
            continue
        raw = option_json(option, question, machine)
        rows.append(
            (
                raw["name"],
                str(raw["gpus"]),
                f"{raw['goodput_per_s']:.2f}",
                f"{raw['goodput_per_s_per_gpu']:.2f}",
                f"{raw['cost_per_hour']:.2f}",
                f"{raw['cost_per_request']:.6f}",
                f"{raw['cost_per_million_tokens']:.3f}",
                f"{raw['cost_per_million_output_tokens']:.3f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in rows
    ]


def _latencies(option: Option) -> dict[str, Distribution]:
    found = option.trial.latencies
    return {
        "ttft_s": Distribution.of(x.ttft_s for x in found),
        "tpot_s": Distribution.of(x.tpot_s for x in found if x.tpot_s is not None),
        "longest_gap_s": Distribution.of(x.longest_gap_s for x in found if x.longest_gap_s is not None),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
