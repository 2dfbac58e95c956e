"""The whole engine on one GPU: the time between consecutive tokens on the host, with the step loop planning ahead and without.

    PYTHONPATH=. python benchmarks/gpu_step_loop.py                      # Llama-3.1-8B's shape, random weights, bfloat16
    PYTHONPATH=. python benchmarks/gpu_step_loop.py --device cpu --tiny  # a dry run

Every row submits prompts of 1024 tokens to an Engine and steps it: a step is the wall time from one output with a token of every sequence
to the next, median over contexts from 1024 on. `launch` and `wait` are the host's share: building and queueing a step, and waiting for one
in flight. vLLM 0.24.0 and the floor (cuBLAS and KV bytes) are figures of the same kind of machine, an H200.

First, right tokens: a small model in float32 gives the same streams with look-ahead and without, greedy, drawn and penalized; streams are
compared up to the first difference, which with other batches' rounding must be a near-tie, so few may differ.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from twostep.engine.batch import Batch, InFlight, KvShape, LayerMark, Sampled, SamplingRow
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.lab.bench.roofline import measure_limits
from twostep.lab.bench.shapes import LLAMA_8B
from twostep.model.heads.source import HeadSource
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser

BLOCK_SIZE = 16
CONTEXT = 1024
VLLM = {1: 4.90, 16: 5.55, 64: 7.70, 128: 10.67, 256: 17.09}
FLOOR = {1: 4.03, 16: 4.63, 64: 6.56, 128: 9.2, 256: 15.4}
SMALL = LLAMA_8B | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 5003,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "penalized": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "greedy with logprobs": {"temperature": 0.0, "logprobs": 5},
}


class TimedRunner:
    """Notes how long the host spends in launch and in waiting."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.launches: list[float] = []
        self.waits: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @property
    def kv_shape(self) -> KvShape:
        return self._runner.kv_shape

    def launch(self, batch: Batch) -> InFlight:
        start = time.perf_counter()
        step = self._runner.launch(batch)
        self.launches.append(time.perf_counter() - start)
        return _TimedStep(step, self.waits)


class _TimedStep:
    def __init__(self, step: InFlight, waits: list[float]) -> None:
        self._step = step
        self._waits = waits

    @property
    def layer_marks(self) -> Sequence[LayerMark]:
        return self._step.layer_marks

    def result(self) -> Sampled:
        start = time.perf_counter()
        sampled = self._step.result()
        self._waits.append(time.perf_counter() - start)
        return sampled


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=list(VLLM))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens")
    parser.add_argument("--quick", action="store_true", help="greedy steps with look-ahead only")
    args = parser.parse_args()
    if args.device != "cpu":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
        limits = measure_limits(torch.device(args.device), torch.bfloat16)
        print(f"limits of the card: reads {limits.bytes_per_s / 1e12:.2f} TB/s, cuBLAS {limits.flops_per_s / 1e12:.0f} TFLOP/s", flush=True)
    check(args.device)
    if args.tiny:
        args.batch, args.steps = [1, 4], 6
    context = 40 if args.tiny else CONTEXT
    started = time.perf_counter()
    largest = max(args.batch)
    num_blocks = largest * (-(-(context + args.steps + largest) // BLOCK_SIZE) + 1) + 512
    model = make(SMALL if args.tiny else LLAMA_8B, num_blocks=num_blocks, max_num_seqs=largest, max_model_len=2048, device=args.device)
    runner = TimedRunner(model)
    gc.collect()
    gc.freeze()  # as a worker does
    print(f"ready after {time.perf_counter() - started:.1f} s (random weights, kernels compiled, graphs captured)", flush=True)
    prompts = np.random.default_rng(0).integers(0, 5000, (largest, context)).tolist()
    short = max(3, args.steps // 4)
    some = [batch for batch in (256, 64, 1) if batch <= largest]
    print(f"{'':24}{'batch':>6}{'ms a step':>11}{'p99':>8}{'launch':>8}{'wait':>8}{'vLLM':>8}{'floor':>8}", flush=True)
    bounds = EngineConfig(max_num_batched_tokens=8192, max_num_seqs=largest, max_waiting=largest, hash_unit=BLOCK_SIZE)
    engine = Engine(runner, replace(bounds, look_ahead=True))
    for batch in sorted(args.batch, reverse=True):  # the largest computes all prompts, which the others find in the pool
        report("look-ahead", engine, prompts[:batch], args.steps, "greedy")
    if args.quick:
        return
    for name in list(SAMPLINGS)[1:]:
        for batch in some:
            report(name, engine, prompts[:batch], short, name)
    engine = Engine(runner, replace(bounds, look_ahead=False))
    for batch in some:
        report("synchronous", engine, prompts[:batch], short, "greedy")
    print(f"without the engine, contexts around {context + args.steps // 2}:", flush=True)
    for batch in some:
        for name, ahead in (("launched ahead", True), ("one at a time", False)):
            times = bare_steps(runner, batch, short, context + (args.steps - short) // 2, ahead=ahead)
            print(f"{name:24}{batch:6}{statistics.median(times) * 1e3:11.3f}", flush=True)
        if args.device != "cpu":
            print(f"{'graph alone':24}{batch:6}{graph_ms(runner, batch):11.3f}", flush=True)


def report(name: str, engine: Engine, prompts: Sequence[Sequence[int]], steps: int, sampling: str) -> None:
    runner = engine.runner
    assert isinstance(runner, TimedRunner)
    runner.launches.clear()
    runner.waits.clear()
    times = sorted(engine_steps(engine, name, prompts, steps, SAMPLINGS[sampling]))
    batch = len(prompts)
    peer = f"{VLLM[batch]:8.2f}{FLOOR[batch]:8.2f}" if batch in VLLM and name == "look-ahead" else ""
    launch, wait = (statistics.median(part[-steps:]) * 1e3 for part in (runner.launches, runner.waits))
    middle, high = statistics.median(times) * 1e3, times[int(len(times) * 0.99)] * 1e3
    print(f"{name:24}{batch:6}{middle:11.3f}{high:8.2f}{launch:8.3f}{wait:8.3f}{peer}", flush=True)


def engine_steps(engine: Engine, name: str, prompts: Sequence[Sequence[int]], steps: int, sampling: dict[str, Any]) -> list[float]:
    """Seconds between consecutive outputs that hold a token of every sequence."""
    ids = [f"{name} {len(prompts)} {i}" for i in range(len(prompts))]
    for i, prompt in enumerate(prompts):
        # The first ones decode while the last prompts are still computed.
        params = SamplingParams(max_tokens=steps + 8 + len(prompts) // 2, seed=i, ignore_eos=True, **sampling)
        engine.submit(
            EngineRequest(seq_id=ids[i], token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params, prefix_key=b"benchmark")
        )
    at: list[float] = []
    while len(at) <= steps + 4:
        output = engine.step()
        assert output.num_prefill_tokens + output.num_decode_tokens, "nothing is left to step"
        assert not output.failures, output.failures
        if len(output.tokens) == len(prompts) and not output.num_prefill_tokens:
            at.append(time.perf_counter())
    for seq_id in ids:
        engine.cancel(seq_id)
    engine.settle_launched()
    return [after - before for before, after in itertools.pairwise(at[4:])]


def bare_steps(runner: TimedRunner, batch: int, steps: int, context: int, *, ahead: bool) -> list[float]:
    """Seconds from one result of the runner to the next, with the next step launched before or after it."""
    width = -(-(context + steps + 8) // BLOCK_SIZE)
    tables = np.random.default_rng(1).permutation(runner.kv_shape.num_blocks)[: batch * width].astype(np.int32).reshape(batch, width)
    at: list[float] = []
    before: InFlight | None = None
    for step in range(steps + 4):
        launched = runner.launch(decode_batch(tables, context + step, carries=step > 0))
        for in_flight in (before,) if ahead else (launched,):
            if in_flight is not None:
                in_flight.result()
                at.append(time.perf_counter())
        before = launched
    if ahead and before is not None:
        before.result()
    return [after - earlier for earlier, after in itertools.pairwise(at[3:])]


def graph_ms(runner: TimedRunner, batch: int) -> float:
    """Device time of the captured step, as its last inputs left it."""
    graph = runner._steps._graphs._graphs[batch].graph
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(30):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 30


def decode_batch(tables: np.ndarray, length: int, *, carries: bool) -> Batch:
    batch, position = len(tables), length - 1
    row = SamplingRow(
        params=SamplingParams(max_tokens=1, temperature=0.0), position=0, history=(), num_prompt_tokens=0, stop_ids=frozenset()
    )
    return Batch(
        token_ids=np.arange(batch, dtype=np.int64),
        positions=np.full(batch, position, np.int64),
        query_start=np.arange(batch + 1, dtype=np.int32),
        seq_lens=np.full(batch, length, np.int32),
        block_tables=np.ascontiguousarray(tables[None, :, : -(-length // BLOCK_SIZE)]),
        slots=tables[None, :, position // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + position % BLOCK_SIZE,
        sample_rows=np.arange(batch),
        sampling=[row] * batch,
        carried=np.arange(batch, dtype=np.int32) if carries else None,
    )


def check(device: str) -> None:
    runner = make(SMALL, num_blocks=512, max_num_seqs=16, device=device)
    rng = np.random.default_rng(2)
    work = []
    for i in range(16):
        length = int(rng.integers(1, 200))
        params = SamplingParams(max_tokens=30, seed=i, **list(SAMPLINGS.values())[i % len(SAMPLINGS)])
        tokens = rng.integers(0, 5003, length).tolist()
        eos = frozenset(range(0, 5003, 60))
        work.append(EngineRequest(seq_id=f"{i}", token_ids=tokens, num_prompt_tokens=length, sampling=params, eos_token_ids=eos))
    bounds = EngineConfig(max_num_batched_tokens=64, max_num_seqs=16, hash_unit=BLOCK_SIZE)
    ahead, again, behind = (
        [[token.token_id for token in tokens] for tokens in generate(Engine(runner, replace(bounds, look_ahead=on)), work)]
        for on in (True, True, False)
    )
    assert ahead == again, "the same steps gave other tokens"
    differ = [i for i in range(len(work)) if ahead[i] != behind[i]]
    total = sum(map(len, ahead))
    print(f"right tokens: {total} tokens, {len(work) - len(differ)} of {len(work)} streams equal with look-ahead and without", flush=True)
    ended = sum(len(tokens) < 30 for tokens in ahead)
    print(f"              {ended} streams ended by a stop id; those that differ: {[list(SAMPLINGS)[i % 4] for i in differ]}", flush=True)
    if len(differ) > 2:
        sys.exit("more streams differ than near-ties explain")


def make(
    config: dict[str, Any],
    *,
    num_blocks: int,
    max_num_seqs: int,
    device: str,
    max_model_len: int | None = None,
    head: HeadSource | None = None,
) -> ModelRunner:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        return ModelRunner(
            directory,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            device=device,
            load_format="dummy",
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            head=head,
        )


if __name__ == "__main__":
    main()
