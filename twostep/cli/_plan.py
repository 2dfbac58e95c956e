"""`twostep plan`: how many workers of each role, by simulation. With --fixed-roles it needs the base install alone, else
the router's placement (--redis-url: redis)."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from twostep.checkpoint.architectures import take_architecture
from twostep.checkpoint.config_file import read_config
from twostep.checkpoint.fields import Fields
from twostep.checkpoint.model_name import directory_of, name_of
from twostep.cli._terminal import Terminal, clipped
from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.bench.shapes import SHAPES
from twostep.lab.plan.machine import (
    Machine,
    Preset,
    load_preset,
    machine_of,
    machine_of_workers,
    preset_names,
    registered_workers,
)
from twostep.lab.plan.model import PlannedModel, model_of, parse_bytes, quantized_model, read_model, worker_memory
from twostep.lab.plan.planner import Question, plan_for_rate, plan_for_workers
from twostep.lab.plan.report import plan_json, plan_text
from twostep.lab.plan.workload import parse_workload
from twostep.quantized_vector import QUANTIZED

_DRAW_EVERY_S, _LINE_EVERY_S = 0.25, 5.0


def run(args: argparse.Namespace) -> int:
    _check(args)
    machine = _machine(args)
    workload = parse_workload(args.workload)
    prefill_price, decode_price = _prices(args.gpu_hour_price)
    question = Question(
        base=machine.base,
        workload=workload,
        targets=_targets(args.slo),
        prefill_hour=prefill_price * machine.gpus,
        decode_hour=decode_price * machine.gpus,
        fixed_roles=args.fixed_roles or machine.fixed_roles,
        seed=args.seed,
    )
    progress = _Progress()
    try:
        if args.rate is not None:
            plan = plan_for_rate(question, args.rate, progress.tell)
        else:
            plan = plan_for_workers(question, args.gpus // machine.gpus, progress.tell)
    finally:
        progress.clear()
    print(json.dumps(_finite(plan_json(plan, question, machine)), indent=2) if args.json else plan_text(plan, question, machine))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises InvalidRequest for numbers that make no sense."""
    if args.rate is not None and not 0 < args.rate < 1e6:
        raise InvalidRequest(f"--rate {args.rate:g}: give requests a second, above 0 and below a million")
    if args.gpus is not None and args.gpus < args.tensor_parallel_size:
        raise InvalidRequest(f"--gpus {args.gpus}: a worker takes {args.tensor_parallel_size}; give at least as many")
    if args.gpus is not None and args.gpus > 1024:
        raise InvalidRequest(f"--gpus {args.gpus} is more than is planned at once; plan a part of it, ratios stay the same")


def _targets(text: str) -> LatencyTargets:
    targets = LatencyTargets.parse([text])
    if not targets:
        raise InvalidRequest("--slo has no target; give some of ttft=500,tpot=10,gap=25,e2e=5000")
    return targets


def _prices(text: str) -> tuple[float, float]:
    """Returns the price of a prefill and of a decode worker's GPU. Raises InvalidRequest."""
    try:
        prefill, decode = map(float, text.split(",") * (1 if "," in text else 2))
    except ValueError:
        prefill = decode = 0.0
    if not (0 < prefill < math.inf and 0 < decode < math.inf):
        raise InvalidRequest(f"--gpu-hour-price {text}: give a number above 0, or two behind a comma")
    return prefill, decode


def _machine(args: argparse.Namespace) -> Machine:
    preset = _preset(args)
    if args.redis_url:
        return machine_of_workers(registered_workers(args.redis_url), preset)
    model = _model(args, preset)
    gpu_bytes = parse_bytes(args.gpu_memory) if args.gpu_memory else preset.gpu_memory_bytes
    if not gpu_bytes:
        raise InvalidRequest("how much memory a GPU has is not known: give --gpu-memory, as 141GiB")
    memory = worker_memory(
        model,
        gpu_bytes,
        utilization=args.gpu_memory_utilization,
        runtime_bytes=preset.runtime_bytes,
        block_size=args.block_size,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    return machine_of(preset, model, memory, gpus=args.tensor_parallel_size)


def _preset(args: argparse.Namespace) -> Preset:
    """Returns what is known of the machine, with what the flags say instead."""
    if not args.preset and not args.redis_url:
        raise InvalidRequest(f"how long steps take is not known: give --preset ({', '.join(preset_names())}, or a file) or --redis-url URL")
    preset = load_preset(args.preset or preset_names()[0])
    if args.redis_url:
        # Of the preset, how KV travels and what the edge adds.
        preset = replace(preset, model=None, gpu_memory_bytes=0)
    seats = {"max_num_seqs": args.max_num_seqs} if args.max_num_seqs else {}
    budget = {"step_tokens": args.max_num_batched_tokens} if args.max_num_batched_tokens else {}
    return preset.with_specs(prefill={**seats, **budget}, decode=seats)


def _model(args: argparse.Namespace, preset: Preset) -> PlannedModel:
    if args.model in SHAPES:
        with tempfile.TemporaryDirectory() as empty:
            model = model_of(SHAPES[args.model], Path(empty), **_formats(args))
        return replace(model, name=args.model)
    if args.model:
        # Of the hub, without the weights: they are counted from the shape.
        model_dir = directory_of(args.model, weights=False)
        take_architecture(Fields(model_dir / "config.json", read_config(model_dir, args.architecture)))
        model = read_model(model_dir, architecture=args.architecture, **_formats(args))
        return replace(model, name=name_of(args.model))
    if preset.model is None:
        raise InvalidRequest(f"which model is not known: give --model DIR, or one of {', '.join(SHAPES)}")
    if args.kv_cache_dtype in QUANTIZED:
        return quantized_model(preset.model, args.kv_cache_dtype)
    return preset.model


def _formats(args: argparse.Namespace) -> dict[str, str]:
    return {"dtype": args.dtype, "kv_cache_dtype": args.kv_cache_dtype, "quantization": args.quantization}


class _Progress:
    """Shows what was tried last, on stderr: in place on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._terminal = Terminal.of(sys.stderr, os.environ)
        self._began = self._last = time.monotonic()
        self._count = 0

    def tell(self, line: str, share: float) -> None:
        self._count += 1
        now, live = time.monotonic(), self._terminal.live
        if now - self._last >= (_DRAW_EVERY_S if live else _LINE_EVERY_S):
            self._last = now
            left_s = (now - self._began) * (1 - share) / share if share else None
            left = "" if left_s is None else f", about {left_s:.0f} s left"
            text = f"{self._count} deployments and rates simulated{left}; {line}"
            self._terminal.write(f"\r\x1b[K{clipped(text, self._terminal.size().columns - 1)}" if live else f"{text}\n")

    def clear(self) -> None:
        self._terminal.write("\r\x1b[K" if self._terminal.live else "")


def _finite(value: object) -> object:
    """JSON has no infinity and no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
