"""What an EAGLE-3 head saves on a CPU: one user's answers with and without it, in turns, over the prompts that its training held back.

    python benchmarks/cpu_eagle.py --model smollm2-135m-instruct --head DIR [--threads 1] [--tokens 3] [--rounds 2] [--prompts 8]

DIR is of `twostep lab eagle`, with its folder `training`. Processor time is told beside the clock's: other work on the machine hardly
changes it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from twostep.engine.engine import Engine
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.model.loading.store import default_cache_dir
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser
from twostep.step_curve import StepCurve, StepWorkload
from twostep.text.model_card import ModelCard
from twostep.worker.config import WorkerConfig
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import load_model, settle


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=0, help="so many of them; 0: all")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = (args.head / "training" / "answers.jsonl").read_text().splitlines()
    asked = [each for each in map(json.loads, lines) if each["held_back"]]
    asked = asked[: args.prompts or None]
    config = WorkerConfig(
        role="decode",
        model=args.model,
        dtype=args.dtype,
        device="cpu",
        num_blocks=512,
        cpu_threads=args.threads,
        cache_dir=default_cache_dir(os.environ),
    )
    head = json.dumps({"method": "eagle3", "model": str(args.head), "num_speculative_tokens": args.tokens})
    engines = {name: _engine(replace(config, speculative_config=given)) for name, given in (("plain", ""), ("head", head))}
    eos = engines["plain"][1]
    if (curve := engines["head"][2]) is not None:
        works = [StepWorkload(prompt_tokens=0, pairs=0, decodes=1 + drafts, context=150 * (1 + drafts)) for drafts in range(4)]
        shown = ", ".join(f"{curve.step_s(work) * 1e3:.1f}" for work in works)
        print(f"by the worker's own curve, ms of a step with 0 to 3 drafts at 150 tokens: {shown}")
    found: dict[tuple[str, str], list[tuple[float, float, int, int]]] = defaultdict(list)
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    same = 0
    for turn in range(args.rounds):
        for number, each in enumerate(asked):
            kind = "greedy" if each["sampling"]["temperature"] == 0 else "drawn"
            answers, seconds = {}, {}
            for name in sorted(engines, reverse=bool((turn + number) % 2)):
                engine = engines[name][0]
                request = EngineRequest(
                    seq_id=f"{turn}-{number}",
                    token_ids=each["prompt"],
                    num_prompt_tokens=len(each["prompt"]),
                    sampling=SamplingParams(**each["sampling"]),
                    eos_token_ids=eos,
                )
                steps, cpu, clock = engine.steps, time.process_time(), time.perf_counter()
                answers[name] = [token.token_id for token in generate(engine, [request])[0]]
                seconds[name] = time.perf_counter() - clock, time.process_time() - cpu
                found[kind, name].append((*seconds[name], len(answers[name]), engine.steps - steps))
            same += answers["plain"] == answers["head"]
            if len(answers["plain"]) == len(answers["head"]):
                for place, what in enumerate(("clock", "CPU")):
                    ratios[kind, what].append(seconds["plain"][place] / seconds["head"][place])
    print(f"torch {torch.__version__}, {args.threads} threads, {len(asked)} prompts, {args.rounds} rounds; same answers: {same}")
    for (kind, name), rows in found.items():
        clock, cpu, tokens, steps = map(sum, zip(*rows, strict=True))
        print(f"{kind:<7} {name:<6} {tokens / clock:6.1f} tokens/s, {tokens / cpu:6.1f} per CPU second, {tokens / steps:.2f} tokens a step")
    for (kind, what), values in ratios.items():
        print(f"{kind:<7} times as fast by the {what}, of an answer: median {statistics.median(values):.2f}")
    stats = engines["head"][0].stats()
    pairs = zip(stats.num_accepted, stats.num_drafted, strict=True)
    print("accepted of drafted, by position: " + ", ".join(f"{right} of {drafted}" for right, drafted in pairs))


def _engine(config: WorkerConfig) -> tuple[Engine, frozenset[int], StepCurve | None]:
    config = settle(config)
    model = load_model(config)
    assert model.tokenizer_dir is not None
    return LocalEngine(config, model).engine, ModelCard.load(model.tokenizer_dir).eos_token_ids, model.curve


if __name__ == "__main__":
    main()
