"""The kernels of a decode step of models with experts: how many a layer has, and what each takes.

    PYTHONPATH=. python benchmarks/gpu_experts_steps.py              on a GPU: µs a layer of a captured step, and of each of its kernels
    PYTHONPATH=. python benchmarks/gpu_experts_steps.py --list       without one: what a layer launches; nothing is computed

Two depths of each model run, of random weights: their difference, a layer, is without embedding and output layer. Contexts are 1024 tokens,
and experts are drawn evenly. To compare two trees, give each as PYTHONPATH to this one file, on the same card in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from twostep.model.kernels import triton_launch

LISTS = "--list" in sys.argv
if LISTS:
    # Before anything takes them by name: an H200's.
    for name, value in (("overlaps", True), ("num_sms_of", 132), ("shared_bytes_of", 227 * 1024)):
        setattr(triton_launch, name, lambda device, value=value: value)
    setattr(torch.cuda, "CUDAGraph", object)  # noqa: B010

from twostep.engine.batch import Batch  # noqa: E402
from twostep.lab.bench import shapes  # noqa: E402
from twostep.model.families.registry import build_model, parse_config  # noqa: E402
from twostep.model.kernels.triton_ops import TritonOps  # noqa: E402
from twostep.model.loading.weights import fill_random  # noqa: E402
from twostep.model.runner.model_runner import kv_shape, with_quantization  # noqa: E402
from twostep.model.runner.step_graphs import _Captured  # noqa: E402
from twostep.model.step.graph_ladder import StepShape  # noqa: E402
from twostep.model.step.kv_cache import KvCache  # noqa: E402
from twostep.settings.reading import FlagParser  # noqa: E402

BLOCK, CONTEXT = 16, 1024
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3-bf16": (shapes.QWEN3_30B_A3B, "none"),
    "qwen3-fp8": (shapes.QWEN3_30B_A3B, "fp8"),
    "qwen3-int4": (shapes.QWEN3_30B_A3B, "int4"),
    "deepseek-bf16": (shapes.DEEPSEEK_V2_LITE, "none"),
    "deepseek-fp8": (shapes.DEEPSEEK_V2_LITE, "fp8"),
}
# All layers with experts, and the depths whose difference is looked at.
DEPTHS = (2, 6)
MORE_KEYS = {"vocab_size": 1024, "first_k_dense_replace": 0, "max_position_embeddings": 4096}
# Of torch's operators, those that launch nothing.
NO_LAUNCH = ("empty", "new_empty", "view", "as_strided", "slice", "select", "transpose", "permute", "expand", "unsqueeze", "squeeze",
             "detach", "split", "unbind", "alias", "t.", "lift_fresh", "_unsafe_view", "chunk", "arange")  # fmt: skip


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["qwen3-bf16", "qwen3-fp8", "deepseek-bf16"])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--no-profile", action="store_true", help="the time of a layer alone")
    args = parser.parse_args()
    if not args.list:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    with torch.inference_mode():
        for name in args.models:
            if args.list:
                list_kernels(name, args.batch_size)
            else:
                measure(name, args.batch_size, profiled=not args.no_profile)


class LayerSteps:
    """Captured steps of one depth of a model."""

    def __init__(self, name: str, depth: int, most: int, device: str, *, small: bool) -> None:
        raw, quantization = MODELS[name]
        raw = raw | MORE_KEYS | {"num_hidden_layers": depth}
        raw = {key: value for key, value in raw.items() if key in MODELS[name][0]}
        if small:
            raw |= {key: 16 for key in ("num_experts", "n_routed_experts") if key in raw}
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(raw))
            config = with_quantization(parse_config(Path(directory)), quantization)
        assert config.experts is not None
        config = replace(config, experts=replace(config.experts, router=replace(config.experts.router, scattered=True)))
        self._blocks = CONTEXT // BLOCK + 1
        self._cache = KvCache(kv_shape(config, "bfloat16", most * self._blocks if not small else 8, BLOCK, "auto", one_group=True), device)
        self._cache.tensor.zero_()
        self._ops = TritonOps(device)
        self._ops.tries = False
        if small:
            self._ops._capability = (9, 0)
        self._model = build_model(config, torch.bfloat16, self._ops, device)
        fill_random(self._model)
        self._device = device

    def step(self, size: int) -> _Captured:
        tables = torch.arange(size * self._blocks, dtype=torch.int32, device=self._device).view(size, -1)
        captured = _Captured(self._model, self._cache, self._ops, StepShape(size, size), [tables], [], sharing=False)
        lengths = np.full(size, CONTEXT + 1, np.int32)
        batch = Batch(
            token_ids=np.arange(size, dtype=np.int64),
            positions=lengths.astype(np.int64) - 1,
            query_start=np.arange(size + 1, dtype=np.int32),
            seq_lens=lengths,
            block_tables=tables.cpu().numpy()[None],
            slots=np.arange(size, dtype=np.int64)[None] * self._blocks * BLOCK + CONTEXT,
            sample_rows=np.arange(size),
            sampling=(),
        )
        with self._ops.upload.ahead((captured.inputs.packed(batch, size, 0),)) as (inputs,):
            captured.inputs.memory.copy_(inputs)
        return captured


class Launches(TorchDispatchMode):
    """Notes what a step launches, and computes none of the kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if not name.startswith(NO_LAUNCH):
            self.names.append(f"torch {name}")
        return func(*args, **(kwargs or {}))


def list_kernels(name: str, sizes: list[int]) -> None:
    launched: list[str] = []

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}")

    JITFunction.run = run
    depths = [LayerSteps(name, depth, 1, "cpu", small=True) for depth in (2, 3)]
    for size in sizes:
        lists = []
        for steps in depths:
            step = steps.step(size)
            with Launches() as mode:
                mode.names = launched
                launched.clear()
                step.step()
            lists.append(list(launched))
        layer = Counter(lists[1]) - Counter(lists[0])
        print(f"{name}, {size} sequences: {layer.total()} launches a layer", flush=True)
        shown = set[str]()
        for each in lists[1]:
            if layer[each] and each not in shown:
                shown.add(each)
                print(f"    {layer[each]} {each}")


def measure(name: str, sizes: list[int], *, profiled: bool) -> None:
    times: dict[int, dict[int, float]] = {}
    kernels: dict[int, dict[int, dict[str, tuple[int, float]]]] = {}
    for depth in DEPTHS:
        steps = LayerSteps(name, depth, max(sizes), "cuda", small=False)
        stream = torch.cuda.Stream()
        for size in sizes:
            captured = steps.step(size)
            captured.warm_up(stream, 1)
            captured.capture(None)
            times.setdefault(size, {})[depth] = replay_us(captured.graph)
            if profiled:
                kernels.setdefault(size, {})[depth] = kernels_of(captured.graph)
        del steps
        torch.cuda.empty_cache()
    few, many = DEPTHS
    for size in sizes:
        print(f"{name}, {size} sequences: {(times[size][many] - times[size][few]) / (many - few):.1f} us a layer", flush=True)
        if not profiled:
            continue
        found = list[tuple[float, float, str]]()
        for kernel, (count, us) in kernels[size][many].items():
            less, fewer_us = kernels[size][few].get(kernel, (0, 0.0))
            if count > less:
                found.append(((us - fewer_us) / (many - few), (count - less) / (many - few), kernel))
        print(f"    {sum(each[1] for each in found):g} kernels, {sum(each[0] for each in found):.1f} us when each runs by itself")
        for each_us, times_a_layer, kernel in sorted(found, reverse=True):
            print(f"    {each_us:6.1f} us  {times_a_layer:g} {kernel[:90]}")


def replay_us(graph: torch.cuda.CUDAGraph, repeats: int = 25) -> float:
    times = list[float]()
    for _ in range(repeats + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[5:])


def kernels_of(graph: torch.cuda.CUDAGraph, repeats: int = 5) -> dict[str, tuple[int, float]]:
    """Returns how often each kernel is launched in a replay, and the microseconds it takes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in profile.events():
        count, us = found.get(event.name, (0, 0.0))
        found[event.name] = count + 1, us + event.device_time_total
    return {name: (count // repeats, us / repeats) for name, (count, us) in found.items() if count >= repeats}


if __name__ == "__main__":
    main()
