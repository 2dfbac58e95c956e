"""Prefill and decode rates of the engine on CPU, beside transformers with the same model, prompts and threads in the same run.

    python benchmarks/cpu.py --threads 2 --json cpu.json
    python benchmarks/cpu.py --threads 1 --clock process --quantization none int8 int4

Each repeat measures the engine (submit and step, as a worker drives it), with each quantization, and then transformers (forward passes
with its KV cache, greedy, dense), on prompts of that repeat; the medians of the repeats and their ratio are printed. Prefill is prompt
tokens over the time to the last first token, decode is generated tokens over the time of the decode steps alone. With --clock process
time is what the processor spent on this process, for one thread on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.types import EngineRequest
from twostep.model.loading.store import DEFAULT_MODEL, default_cache_dir, resolve
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.kv_cache import DTYPES
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser
from twostep.settings.worker import QUANTIZATIONS

BLOCK_SIZE = 16
THEIRS = "transformers"
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens per second."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians of the repeats, tokens per second."""

    step: str
    quantization: str
    batch: int
    twostep: float
    transformers: float
    ratio: float


def main() -> None:
    args = parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    directory = resolve(args.model, cache_dir=default_cache_dir(os.environ), progress=lambda text: print(text, file=sys.stderr))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[args.dtype]).eval()
    num_blocks = max(args.batch) * -(-(args.prompt_tokens + args.decode_steps + 1) // BLOCK_SIZE)
    ours = {
        name: ModelRunner(
            directory, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=args.dtype, num_threads=args.threads, quantization=name
        )
        for name in args.quantization
    }
    rows = [row for batch in args.batch for row in compare(args, ours, theirs, batch)]

    print(f"\n{args.model}, {args.dtype}, {args.threads} threads, {args.prompt_tokens}-token prompts, {args.decode_steps} decode steps,")
    print(f"median of {args.repeats} alternating repeats, tokens/s")
    print(f"{'':10}{'':6}{'batch':>6}{'twostep':>10}{'transformers':>14}{'ratio':>8}")
    for row in rows:
        print(f"{row.step:10}{row.quantization:6}{row.batch:>6}{row.twostep:>10.1f}{row.transformers:>14.1f}{row.ratio:>8.2f}")
    if args.json is not None:
        setting = {key: value for key, value in vars(args).items() if key != "json"}
        args.json.write_text(json.dumps({"setting": setting, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


def compare(args: argparse.Namespace, ours: dict[str, ModelRunner], theirs: transformers.PreTrainedModel, batch: int) -> list[Row]:
    rng = random.Random(batch)
    clock = CLOCKS[args.clock]
    measured: dict[str, list[Rates]] = {}
    vocab_size = next(iter(ours.values())).vocab_size
    for repeat in range(args.repeats + 1):
        prompts = [[rng.randrange(vocab_size) for _ in range(args.prompt_tokens)] for _ in range(batch)]
        rates = {name: measure_engine(runner, prompts, args.decode_steps, clock) for name, runner in ours.items()}
        rates[THEIRS] = measure_transformers(theirs, prompts, args.decode_steps, clock)
        if repeat:  # the first one warms up
            for name, each in rates.items():
                measured.setdefault(name, []).append(each)
            print(f"batch {batch}, repeat {repeat}: {rates}", file=sys.stderr)
    rows = []
    for step in ("prefill", "decode"):
        medians = {name: statistics.median(getattr(each, step) for each in all_of) for name, all_of in measured.items()}
        reference = medians.pop(THEIRS)
        for name, rate in medians.items():
            rows.append(Row(step=step, quantization=name, batch=batch, twostep=rate, transformers=reference, ratio=rate / reference))
    return rows


def measure_engine(runner: ModelRunner, prompts: Sequence[Sequence[int]], decode_steps: int, clock: Callable[[], float]) -> Rates:
    engine = Engine(runner, EngineConfig(enable_prefix_caching=False))
    sampling = SamplingParams(max_tokens=decode_steps + 1, temperature=0.0, ignore_eos=True)
    start = clock()
    for i, prompt in enumerate(prompts):
        engine.submit(EngineRequest(seq_id=str(i), token_ids=prompt, num_prompt_tokens=len(prompt), sampling=sampling))
    started: set[str] = set()
    while len(started) < len(prompts):
        step = engine.step()
        if step.failures:
            raise SystemExit(step.failures[0].message)
        started.update(token.seq_id for token in step.tokens)
    first_tokens = last = clock()
    num_decoded = 0
    # The first sequences decoded a little while the last ones were prefilled: count only steps of the whole batch.
    while (step := engine.step()).num_decode_tokens == len(prompts):
        num_decoded += len(step.tokens)
        last = clock()
    while step.num_decode_tokens:
        step = engine.step()
    if not num_decoded:
        raise SystemExit("no step decoded the whole batch; give more --decode-steps")
    return Rates(prefill=sum(map(len, prompts)) / (first_tokens - start), decode=num_decoded / (last - first_tokens))


@torch.inference_mode()
def measure_transformers(
    model: transformers.PreTrainedModel, prompts: Sequence[Sequence[int]], decode_steps: int, clock: Callable[[], float]
) -> Rates:
    start = clock()
    out = model(input_ids=torch.tensor(prompts), use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1].argmax(-1, keepdim=True)
    first_tokens = clock()
    for _ in range(decode_steps):
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
    end = clock()
    return Rates(prefill=sum(map(len, prompts)) / (first_tokens - start), decode=len(prompts) * decode_steps / (end - first_tokens))


def parse_args() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a known name or a Hugging Face directory")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--quantization", nargs="+", default=["none"], choices=QUANTIZATIONS, help="of the engine; several alternate")
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--decode-steps", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
