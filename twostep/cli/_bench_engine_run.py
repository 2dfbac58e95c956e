"""`twostep bench engine`: what one engine does on this machine, beside what the machine could do."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from twostep.checkpoint.expert_sizes import expected_experts
from twostep.lab.bench import engine as bench
from twostep.lab.bench import roofline
from twostep.model.families.registry import parse_config
from twostep.model.runner.device import choose_device, device_of
from twostep.model.runner.model_runner import with_quantization
from twostep.worker.config import WorkerConfig
from twostep.worker.model import load_model


def bench_engine(args: argparse.Namespace, model_dir: Path) -> int:
    """Measures and shows; returns the exit status. Raises SetupError."""
    name, why = choose_device(args.device)
    device = device_of(name)
    model = with_quantization(parse_config(model_dir, args.architecture), args.quantization)
    bench.check_context(args.input_tokens, args.output_tokens, model.max_model_len)
    dtype = model.dtype if args.dtype == "auto" else args.dtype
    # A model and its cache leave a GPU no memory to be measured in.
    limits = roofline.measure_limits(device, getattr(torch, dtype)) if device.type == "cuda" else None
    if device.type == "cuda":
        torch.cuda.empty_cache()
    config = WorkerConfig(
        role="decode",
        model=str(model_dir),
        architecture=args.architecture,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        quantization=args.quantization,
        device=name,
        load_format=args.load_format,
        block_size=args.block_size,
        max_model_len=min(model.max_model_len, args.input_tokens + args.output_tokens),
        max_num_seqs=max(args.batch_size),
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes or 0,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )
    runner = load_model(config).runner
    scenarios = [
        bench.Scenario(batch=batch, prompt_tokens=args.input_tokens, output_tokens=args.output_tokens, temperature=args.temperature)
        for batch in args.batch_size
    ]
    for scenario in scenarios:
        bench.check_room(runner, scenario)
    limits = limits or roofline.measure_limits(device, getattr(torch, dtype))
    if not args.json:
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        print(f"{kind} ({why}), torch {torch.__version__}", flush=True)
        print(
            f"limits here: read {limits.bytes_per_s / 1e9:,.0f} GB/s, {dtype} product {limits.flops_per_s / 1e12:,.1f} TFLOP/s", flush=True
        )
    if model.experts is not None and not args.json:
        router = model.experts.router
        reads = ", ".join(
            f"{expected_experts(router.num_experts, router.top_k, batch):.1f} at batch {batch}" for batch in sorted(set(args.batch_size))
        )
        print(f"of {router.num_experts} experts a decode step is counted to read, in each layer: {reads}", flush=True)
    shape = roofline.ModelShape.of(model, runner.kv_shape, dtype)
    results = []
    for scenario in scenarios:
        result = bench.run_scenario(runner, shape, limits, scenario, args.max_num_batched_tokens)
        results.append(result)
        if not args.json:
            _show(result)
    if args.json:
        print(json.dumps({"device": name, "dtype": dtype, "limits": asdict(limits), "results": [_plain(r) for r in results]}, indent=2))
    return 0


def _show(result: bench.ScenarioResult) -> None:
    s = result.scenario
    print(f"\nbatch {s.batch}, {s.prompt_tokens} prompt tokens, {s.output_tokens} new ones", flush=True)
    ttft = sorted(result.ttft_s)
    tpot = sorted(result.tpot_s)
    print(f"  prefill {_phase(result.prefill)}")
    print(f"          TTFT p50 {_ms(_at(ttft, 0.5))}, p99 {_ms(_at(ttft, 0.99))}; least possible for all {_ms(result.prefill.floor_s)}")
    print(f"  decode  {_phase(result.decode)}")
    print(
        f"          TPOT p50 {_ms(_at(tpot, 0.5))}, p99 {_ms(_at(tpot, 0.99))}, longest {_ms(tpot[-1])}; "
        f"least possible {_ms(result.decode.floor_s)}",
        flush=True,
    )


def _phase(phase: bench.PhaseResult) -> str:
    return f"{phase.tokens_per_s:,.0f} tokens/s, MFU {phase.mfu:.2f}, MBU {phase.mbu:.2f}, bound by {phase.bound.value}"


def _plain(result: bench.ScenarioResult) -> dict[str, Any]:
    phases = {}
    for name in ("prefill", "decode"):
        phase: bench.PhaseResult = getattr(result, name)
        phases[name] = asdict(phase) | {"bound": phase.bound.value, "tokens_per_s": phase.tokens_per_s}
    times = {"ttft_p50_s": statistics.median(result.ttft_s), "ttft_p99_s": _at(sorted(result.ttft_s), 0.99)}
    times |= {"tpot_p50_s": statistics.median(result.tpot_s), "tpot_p99_s": _at(sorted(result.tpot_s), 0.99)}
    return asdict(result.scenario) | times | phases


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
