"""Drafts on one GPU: what a step with them costs, and the tokens a second of the whole engine at acceptance that is set beforehand.

    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_drafts.py                      # Llama-3.1-8B's shape, random weights, bfloat16
    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_drafts.py --device cpu --tiny  # a dry run

Whatever the model samples, the engine is told one token again and again, and so is the next step on the device, so that a script knows
what is right: each token that it says may follow is so with a given probability, those before it being so. What it says behind a wrong
one is right as often (as where one word of a text is another), or never, with `--lost` (as where an answer goes another way): that tells
drafts that are planned before the last token is known from those that are not. `always`: four are drafted in every step, whatever they
bring. `chosen`: as many as the engine chooses by its step curve, which is measured as a worker does; `ahead`: the share of its steps that
were launched while another ran. `plain`: without drafts, and with look-ahead. A time is that from one output to the next, median; contexts
from 1024 on. `launch` and `wait` are the host's share: building and queueing a step, and waiting for one in flight. Each is measured in
turn, `--rounds` times; the medians of rounds.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from gpu_step_loop import BLOCK_SIZE, CONTEXT, SMALL, TimedRunner, make

from twostep.engine.batch import Batch, InFlight, LayerMark, Sampled
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.proposer import Proposer
from twostep.engine.types import EngineRequest
from twostep.lab.bench.shapes import LLAMA_8B
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser
from twostep.settings.speculative import SpeculativeConfig
from twostep.worker.calibration import calibrate

TOKEN, OTHER = 7, 8


class OneToken(TimedRunner):
    """Whose every row samples TOKEN, as far as the engine and the next step know."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.num_in_flight = 0
        # Of each step, whether it was launched while another was in flight.
        self.ahead: list[bool] = []

    def launch(self, batch: Batch) -> InFlight:
        self.ahead.append(self.num_in_flight > 0)
        step = super().launch(batch)
        self.num_in_flight += 1
        if self._runner.overlaps:
            with torch.inference_mode():
                self._runner.sampled(len(batch.sample_rows)).fill_(TOKEN)
        return _OneTokenStep(self, step)


class _OneTokenStep:
    def __init__(self, runner: OneToken, step: InFlight) -> None:
        self._runner = runner
        self._step = step

    @property
    def layer_marks(self) -> Sequence[LayerMark]:
        return self._step.layer_marks

    def result(self) -> Sampled:
        sampled = self._step.result()
        self._runner.num_in_flight -= 1
        return replace(sampled, token_ids=[TOKEN] * len(sampled.token_ids))


class Scripted(Proposer):
    """A Proposer of answers that hold nothing but TOKEN."""

    def __init__(self, *, lost: bool) -> None:
        """`lost`: behind a wrong token all are."""
        self.acceptance = 0.0
        self._lost = lost
        self._random = random.Random(0)

    def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        right = [self._random.random() < self.acceptance for _ in range(most)]
        if self._lost and False in right:
            first = right.index(False)
            right[first:] = [False] * (most - first)
        return [TOKEN if each else OTHER for each in right]

    def forget(self, seq_id: str) -> None:
        pass


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.5, 0.8])
    parser.add_argument("--drafts", type=int, default=4, help="tokens drafted in a sequence and step")
    parser.add_argument("--tokens", type=int, default=300, help="of each answer that are timed, at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lost", action="store_true", help="behind a wrong token all that was said to follow is wrong")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    context = 40 if args.tiny else CONTEXT
    if args.tiny:
        args.batch, args.tokens = [1, 4], 12
    largest = max(args.batch)
    # A row of a draft takes a place in a step as a sequence does.
    rows = max((1 + args.drafts) * min(largest, 64), largest)
    length = context + 2 * args.tokens + largest + 64
    num_blocks = largest * (-(-length // BLOCK_SIZE) + 1) + 1024
    model = make(SMALL if args.tiny else LLAMA_8B, num_blocks=num_blocks, max_num_seqs=rows, max_model_len=2048, device=args.device)
    if args.device != "cpu":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    curve = calibrate(model, step_tokens=2048, max_num_seqs=rows)
    print(f"curve {curve}", flush=True)
    bounds = EngineConfig(max_num_batched_tokens=8192, max_num_seqs=rows, max_waiting=largest, hash_unit=BLOCK_SIZE, look_ahead=True)
    drafting = replace(bounds, speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=args.drafts))
    script, runner = Scripted(lost=args.lost), OneToken(model)
    always, chosen = (Engine(runner, drafting, proposer=script) for _ in range(2))
    chosen.set_curve(curve)
    plain = Engine(runner, bounds)
    plain.set_curve(curve)
    columns = f"{'ms a step':>11}{'p99':>8}{'launch':>8}{'wait':>8}{'tokens/s':>10}{'/ plain':>9}{'drafted':>9}{'ahead':>7}"
    print(f"{'':10}{'batch':>6}{'accepted':>9}{columns}", flush=True)
    for batch in args.batch:
        prompts = np.random.default_rng(0).integers(0, 5000, (batch, context)).tolist()
        cases = [("plain", plain, 0.0)] + [(n, e, a) for a in args.acceptance for n, e in (("always", always), ("chosen", chosen))]
        seen: dict[tuple[str, float], list[Measured]] = {}
        for turn in range(args.rounds):
            for name, engine, acceptance in cases:
                script.acceptance = acceptance
                seen.setdefault((name, acceptance), []).append(measure(engine, f"{name} {batch} {turn} {acceptance}", prompts, args.tokens))
        base = statistics.median(each.rate for each in seen["plain", 0.0])
        for (name, acceptance), each in seen.items():
            m = Measured(*(statistics.median(column) for column in zip(*map(astuple, each), strict=True)))
            times = f"{m.step_ms:11.3f}{m.high_ms:8.2f}{m.launch_ms:8.3f}{m.wait_ms:8.3f}"
            print(f"{name:10}{batch:6}{acceptance:9.1f}{times}{m.rate:10.0f}{m.rate / base:9.3f}{m.drafted:9.2f}{m.ahead:7.2f}", flush=True)


@dataclass(frozen=True)
class Measured:
    """`rate` in tokens a second, `drafted` in tokens for a sequence and step, `ahead` of steps, those launched while another ran."""

    step_ms: float
    high_ms: float
    launch_ms: float
    wait_ms: float
    rate: float
    drafted: float
    ahead: float


def measure(engine: Engine, name: str, prompts: Sequence[Sequence[int]], num_tokens: int) -> Measured:
    """Submits the prompts and steps until each of them has so many tokens, from when all of them decode."""
    ids = [f"{name} {i}" for i in range(len(prompts))]
    for seq_id, prompt in zip(ids, prompts, strict=True):
        params = SamplingParams(max_tokens=3 * num_tokens + len(prompts), temperature=0.0, ignore_eos=True)
        engine.submit(
            EngineRequest(seq_id=seq_id, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params, prefix_key=b"benchmark")
        )
    for _ in outputs(engine, len(prompts), num_tokens=4 * len(prompts)):
        pass
    before = sum(engine.stats().num_drafted)
    runner = engine.runner
    assert isinstance(runner, OneToken)
    runner.launches.clear()
    runner.waits.clear()
    runner.ahead.clear()
    times, counts = [], []
    for count in outputs(engine, len(prompts), num_tokens=num_tokens * len(prompts)):
        times.append(time.perf_counter())
        counts.append(count)
    drafted = (sum(engine.stats().num_drafted) - before) / len(times) / len(prompts)
    ahead = statistics.mean(runner.ahead)
    launch, wait = (statistics.median(part) * 1e3 for part in (runner.launches, runner.waits))
    for seq_id in ids:
        engine.cancel(seq_id)
    engine.settle_launched()
    gaps = sorted(after - earlier for earlier, after in itertools.pairwise(times))
    middle, high = statistics.median(gaps) * 1e3, gaps[int(len(gaps) * 0.99)] * 1e3
    return Measured(middle, high, launch, wait, sum(counts[1:]) / (times[-1] - times[0]), drafted, ahead)


def outputs(engine: Engine, batch: int, *, num_tokens: int) -> Iterator[int]:
    """Yields the tokens of each step in which every sequence got some, until there were so many."""
    total = 0
    while total < num_tokens:
        output = engine.step()
        assert not output.failures, output.failures
        assert output.workload.decodes or output.num_prefill_tokens, "nothing is left to step"
        assert set(output.tokens.token_ids) <= {TOKEN}
        if len(set(output.tokens.seq_ids)) == batch and not output.num_prefill_tokens:
            total += len(output.tokens)
            yield len(output.tokens)


if __name__ == "__main__":
    main()
