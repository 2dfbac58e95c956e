"""Measures what a decode step costs the host, without a device: the engine's thread and the worker's edge, part by part.

    python benchmarks/host_step.py --against ../another-tree

The runner computes nothing. Each tree has a process of its own, which take turns, so that a busy machine slows both. Microseconds a step.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from decode_worker.sequences import Sequences, SequencesConfig
from twostep.cluster.records import LayoutRecord
from twostep.engine import step_launcher
from twostep.engine.batch import Batch, FinishedStep, Sampled
from twostep.engine.config import EngineConfig
from twostep.engine.engine import Engine
from twostep.engine.fake import FakeRunner
from twostep.engine.scheduler import Scheduler
from twostep.engine.types import EngineRequest
from twostep.keys.secret import DeploymentSecret
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser
from twostep.step_curve import StepCurve

BLOCK_SIZE = 16


class IdleRunner(FakeRunner):
    def launch(self, batch: Batch) -> FinishedStep:
        count = len(batch.sampling)
        return FinishedStep(Sampled(token_ids=[7] * count, logprobs=[None] * count, top_logprobs=[()] * count))


class Parts:
    """Wraps functions and notes how long each call took, in microseconds."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}

    def wrap(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)
        spent = self.spent[part] = []

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                spent.append((time.perf_counter() - began) * 1e6)

        setattr(owner, name, timed)


class _Port:
    """The engine, as an edge of any tree asks it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.cancel = engine.cancel

    def submit(self, request: EngineRequest) -> asyncio.Future[None]:
        self._engine.submit(request)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


async def measure(args: argparse.Namespace) -> dict[str, float]:
    num_blocks = args.sequences * -(-(args.prompt + 2 * args.steps) // BLOCK_SIZE) + 64
    parts = Parts()
    parts.wrap(Scheduler, "plan", "plan")
    parts.wrap(step_launcher, "build_batch", "build_batch")
    parts.wrap(Scheduler, "settle", "settle")
    engine = Engine(
        IdleRunner(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=args.prompt + 2 * args.steps),
        EngineConfig(
            max_num_batched_tokens=16384, max_num_seqs=args.sequences, max_waiting=args.sequences + 1, look_ahead=True, max_step_s=1.0
        ),
    )
    engine.set_curve(StepCurve(fixed_s=0.004, per_row_s=3e-5, per_sequence_s=1e-5, per_context_s=1e-8, mixed_s=0.006))
    parts.wrap(engine, "step", "engine, all")
    layout = LayoutRecord(model_fingerprint="m", dtype="float32", block_size=BLOCK_SIZE, num_layers=1, num_kv_heads=1, head_dim=4)
    sequences = Sequences(_Port(engine), None, SequencesConfig(), secret=DeploymentSecret(b"s"), layout=layout)  # type: ignore[arg-type]
    parts.wrap(sequences, "on_step", "edge, on_step")
    outbox, connection = sequences.connect("router", ())
    rng = np.random.default_rng(0)
    for i in range(args.sequences):
        request = EngineRequest(
            seq_id=f"request-{i:04}-of-a-client/1",
            token_ids=rng.integers(0, 1000, args.prompt).tolist(),
            num_prompt_tokens=args.prompt,
            sampling=SamplingParams(max_tokens=2 * args.steps, temperature=1.0, seed=i),
            eos_token_ids=frozenset((999,)),
            prefix_key=b"key",
            tpot_s=10.0 if args.promised else None,
        )
        # Trees before the engine had a port answer at once.
        reserved: Any = sequences.reserve(request, request_id=request.seq_id[:-2], attempt=1, router_id="router", prefill_here=True)
        if inspect.isawaitable(reserved):
            await reserved
    if args.promised:
        # No seat is free for it, so that each step is bounded for its sake and none is another than without it.
        engine.submit(replace(request, seq_id="waits"))
    gc.collect()
    gc.freeze()
    sent = parts.spent["edge, serialized"] = []
    num_measured = 0
    while num_measured < args.steps:
        output = engine.step()
        if not output.tokens and not output.progress:
            continue
        sequences.on_step(output)
        if output.tokens:
            message = await outbox.next(connection)
            assert message is not None
            began = time.perf_counter()
            message.SerializeToString()
            sent.append((time.perf_counter() - began) * 1e6)
        num_measured += len(output.tokens) == args.sequences
    await sequences.close()
    # The last steps: all of them decode all sequences.
    return {part: statistics.median(spent[-num_measured + 8 :]) for part, spent in parts.spent.items()}


def main() -> None:
    args = parse_args()
    if args.child:
        print(json.dumps(asyncio.run(measure(args))))
        return
    trees = {"this": Path(__file__).parents[1].resolve()} | ({"against": args.against.resolve()} if args.against else {})
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(args.repeats):
        for name, tree in trees.items():
            command = [sys.executable, __file__, "--child", *(f"--{key}={getattr(args, key)}" for key in ("sequences", "prompt", "steps"))]
            command += ["--promised"] if args.promised else []
            done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tree)}, check=True, capture_output=True, text=True)
            figures[name].append(json.loads(done.stdout))
    print(f"{args.sequences} decodes, prompts of {args.prompt}, {args.repeats} turns; µs a step, medians")
    for part in figures["this"][0]:
        values = {name: statistics.median(each[part] for each in some) for name, some in figures.items()}
        ratio = f"  {values['this'] / values['against']:.2f}" if args.against else ""
        print(f"{part:18}" + "".join(f"{name:>10} {value:7.0f}" for name, value in values.items()) + ratio)


def parse_args() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=2600)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--promised", action="store_true", help="all have a TPOT, and a prompt waits: each step's bound is reckoned")
    parser.add_argument("--against", type=Path, help="another tree, to be measured in turns with this one")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
