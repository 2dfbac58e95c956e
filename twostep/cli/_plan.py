"""`twostep plan`: how many workers of each role, by simulation. Needs the base install alone (--redis-url: redis)."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.errors import InvalidRequest, SetupError
from twostep.lab.bench.shapes import SHAPES
from twostep.lab.plan.goodput import parse_slo
from twostep.lab.plan.machine import Machine, machine_of, machine_of_workers
from twostep.lab.plan.memory import parse_bytes, worker_memory
from twostep.lab.plan.model_shape import PlannedModel, model_of, read_model
from twostep.lab.plan.planner import Question, plan_for_rate, plan_for_workers
from twostep.lab.plan.presets import Preset, load_preset, preset_names, read_curves
from twostep.lab.plan.report import plan_json, plan_text
from twostep.lab.plan.workload import parse_workload

if TYPE_CHECKING:
    from twostep.cluster.records import WorkerRecord

_QUIET_S = 1.0
_LINE_EVERY_S = 5.0
_DRAW_EVERY_S = 0.2


def run(args: argparse.Namespace) -> int:
    _check(args)
    machine = _machine(args)
    workload = parse_workload(args.workload)
    prefill_price, decode_price = _prices(args.gpu_hour_price)
    question = Question(
        base=machine.base,
        workload=workload,
        targets=parse_slo(args.slo),
        prefill_hour=prefill_price * machine.gpus,
        decode_hour=decode_price * machine.gpus,
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
    if args.tensor_parallel_size < 1 or (args.gpus is not None and args.gpus < args.tensor_parallel_size):
        raise InvalidRequest(f"--gpus {args.gpus}: a worker takes {args.tensor_parallel_size}; give at least as many")
    if args.gpus is not None and args.gpus > 1024:
        raise InvalidRequest(f"--gpus {args.gpus} is more than is planned at once; plan a part of it, ratios stay the same")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise InvalidRequest(f"--gpu-memory-utilization {args.gpu_memory_utilization:g}: give a share above 0, at most 1")
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise InvalidRequest(f"--{name.replace('_', '-')} {value:g}: give a number above 0")


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
        return machine_of_workers(_registered(args.redis_url), preset)
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
    return machine_of(preset, model, memory, block_size=args.block_size, gpus=args.tensor_parallel_size)


def _preset(args: argparse.Namespace) -> Preset:
    """Returns what is known of the machine, with what the flags say instead."""
    if sum(map(bool, (args.curve, args.redis_url))) > 1:
        raise InvalidRequest("--curve and --redis-url both say how long steps take: give one of them")
    if args.preset:
        preset = load_preset(args.preset)
    elif args.curve or args.redis_url:
        preset = replace(load_preset(preset_names()[0]), name="", about="", mixed=None, model=None, gpu_memory_bytes=0, measured=())
    else:
        raise InvalidRequest(
            f"how long steps take is not known: give --preset ({', '.join(preset_names())}), --curve FILE or --redis-url URL"
        )
    if args.curve:
        prefill, decode = read_curves(args.curve)
        preset = replace(preset, name=str(args.curve), prefill=prefill, decode=decode, mixed=None)
    return replace(
        preset,
        max_num_seqs=args.max_num_seqs or preset.max_num_seqs,
        prefill_tokens=args.max_num_batched_tokens or preset.prefill_tokens,
    )


def _model(args: argparse.Namespace, preset: Preset) -> PlannedModel:
    if args.model in SHAPES:
        with tempfile.TemporaryDirectory() as empty:
            model = model_of(SHAPES[args.model], Path(empty), dtype=args.dtype, kv_cache_dtype=args.kv_cache_dtype)
        return replace(model, name=args.model)
    if args.model:
        return read_model(Path(args.model), dtype=args.dtype, kv_cache_dtype=args.kv_cache_dtype)
    if preset.model is None:
        raise InvalidRequest(f"which model is not known: give --model DIR, or one of {', '.join(SHAPES)}")
    if args.kv_cache_dtype != "auto":
        return replace(preset.model, item_bytes=1, scale_bytes=2)
    return preset.model


def _registered(url: str) -> list[WorkerRecord]:
    """Raises SetupError if nobody answers there."""
    if missing := [name for name in ("redis", "pydantic") if importlib.util.find_spec(name) is None]:
        raise SetupError(f"--redis-url needs {' and '.join(missing)}, which this installation lacks; install 'twostep[router]'")
    from twostep.lab.plan.live import registered_workers  # noqa: PLC0415 - needs redis

    return registered_workers(url)


class _Progress:
    """Shows what was tried last, on stderr, once it takes long: in place on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._last = time.monotonic() + _QUIET_S - _LINE_EVERY_S
        self._terminal = sys.stderr.isatty()
        self._since = time.monotonic()
        self._count = 0
        self._drawn = False

    def tell(self, line: str) -> None:
        self._count += 1
        now = time.monotonic()
        if now - self._since < _QUIET_S or now - self._last < (_DRAW_EVERY_S if self._terminal else _LINE_EVERY_S):
            return
        self._last = now
        text = f"{self._count} deployments and rates simulated; {line}"
        print(f"\r\x1b[K{text}" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr, flush=True)
        self._drawn = self._terminal

    def clear(self) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _finite(value: object) -> object:
    """JSON has no infinity and no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
