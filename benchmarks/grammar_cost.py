"""What answers in a grammar cost: masks of a vocabulary of 128,000 tokens, and the engine's thread beside them.

    PYTHONPATH=. python benchmarks/grammar_cost.py

The vocabulary is made up: words of letters as often as English has them, with blanks, quotes and digits. Answers are random walks through
the grammar, which meet more of it than a model's do.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from twostep.engine.batch import Batch, FinishedStep, InFlight, Sampled
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.fake import FakeRunner
from twostep.engine.grammar import GrammarCompiler, GrammarState, LiveGrammar, advance_all
from twostep.engine.types import EngineRequest
from twostep.sampling_params import Grammar, GrammarKind, SamplingParams

EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 40}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json_schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "json_object": Grammar(GrammarKind.JSON_OBJECT),
    "regex [a-z ]{1,200}": Grammar(GrammarKind.REGEX, "[a-z ]{1,200}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=128_000)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(directory)
        (model_dir / "tokenizer.json").write_text(json.dumps(tokenizer(args.vocab_size)))
        compiler = GrammarCompiler(model_dir, vocab_size=args.vocab_size, eos_token_ids=frozenset({EOS}))
        started = time.perf_counter()
        compiler.compile(Grammar(GrammarKind.REGEX, "a"))
        print(f"the first grammar, with the tokenizer: {time.perf_counter() - started:.2f} s")
        for name, grammar in GRAMMARS.items():
            masks(name, compiler, grammar, args.steps)
        for count in (1, 16, 64, 256):
            side_by_side(compiler.compile(GRAMMARS["json_schema"]), count)
        for constrained in (0, 1, 32, 0):
            steps(compiler, args.vocab_size, constrained, args.steps)


def tokenizer(vocab_size: int) -> dict[str, object]:
    """A tokenizer.json as byte-level BPE models have it."""
    rng = random.Random(0)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in alphabet)}
    vocab = {"<|end|>": EOS}
    for byte in range(256):
        vocab.setdefault(alphabet[byte], len(vocab))
    letters, weights = "etaoinshrdlucmfwypvbgkjqxz", [1 / (i + 1) for i in range(26)]
    while len(vocab) < vocab_size:
        word = "".join(rng.choices(letters, weights, k=rng.randrange(2, 11)))
        kind = rng.random()
        if kind < 0.5:
            word = " " + word
        elif kind < 0.6:
            word = word.capitalize()
        elif kind < 0.65:
            word = rng.choice(['"', '{"', '": "', '",', ', "', "}", "\n  "]) + word
        elif kind < 0.68:
            word += rng.choice(['"', '":', '",'])
        elif kind < 0.7:
            word = str(rng.randrange(10_000))
        vocab.setdefault("".join(alphabet[byte] for byte in word.encode()), len(vocab))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": EOS, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def masks(name: str, compiler: GrammarCompiler, grammar: Grammar, count: int) -> None:
    started = time.perf_counter()
    state = compiler.compile(grammar)
    compiled = time.perf_counter() - started
    rng, times, walked = random.Random(1), list[float](), list[int]()
    while len(times) < count:
        live, step, tokens = LiveGrammar(state), state.allowed, list[int]()
        while step.bits.any() and len(tokens) < 60:
            allowed = np.flatnonzero(np.unpackbits(step.bits.view(np.uint8), bitorder="little"))
            tokens.append(int(rng.choice(allowed)))
            started = time.perf_counter()
            step = live.advance(tokens[-1:])
            times.append(time.perf_counter() - started)
        walked = max(walked, tokens, key=len)
    times.sort()
    started = time.perf_counter()
    state.after(walked)
    replay = time.perf_counter() - started
    print(
        f"{name:20} compiled in {compiled * 1e3:.1f} ms; a token and its mask: median {statistics.median(times) * 1e6:.0f} µs, 99 % under "
        f"{times[int(len(times) * 0.99)] * 1e6:.0f}; replay of {len(walked)} tokens {replay * 1e3:.2f} ms"
    )


def side_by_side(state: GrammarState, count: int) -> None:
    lives = [LiveGrammar(state) for _ in range(count)]
    rng, steps, wall, thread = random.Random(2), [state.allowed] * count, list[float](), list[float]()
    for _ in range(10):
        tokens = [_some(step.bits, rng) for step in steps]
        going = [(live, [token]) for live, token in zip(lives, tokens, strict=True) if token]
        if not going:
            break
        began, busy = time.perf_counter(), time.thread_time()
        steps = list(advance_all(going))
        wall.append(time.perf_counter() - began)
        thread.append(time.thread_time() - busy)
        lives = [live for live, _ in going]
    times = statistics.median(wall) * 1e3, statistics.median(thread) * 1e3
    print(f"{count:4} sequences' masks: {times[0]:.2f} ms, of the calling thread {times[1]:.2f} ms")


def _some(bits: np.ndarray[tuple[int, ...], np.dtype[np.int32]], rng: random.Random) -> int:
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return int(rng.choice(allowed)) if len(allowed) else 0


class NoDevice(FakeRunner):
    """Samples token 70, or of a mask the first that it allows."""

    overlaps = True

    def launch(self, batch: Batch) -> InFlight:
        tokens = [70] * len(batch.sample_rows)
        if batch.masks is not None:
            for row, bits in zip(batch.masks.rows.tolist(), batch.masks.bits, strict=True):
                word = int(np.flatnonzero(bits)[0])
                value = int(bits.view(np.uint32)[word])
                tokens[row] = word * 32 + (value & -value).bit_length() - 1
        rows = len(tokens)
        return FinishedStep(Sampled(token_ids=tokens, logprobs=[None] * rows, top_logprobs=[()] * rows))


def steps(compiler: GrammarCompiler, vocab_size: int, constrained: int, count: int) -> None:
    """The engine's thread, with 256 sequences that decode."""
    batch = 256
    runner = NoDevice(num_blocks=batch * 90, block_size=16, vocab_size=vocab_size)
    engine = Engine(runner, EngineConfig(max_num_batched_tokens=8192, max_num_seqs=batch))
    state = compiler.compile(Grammar(GrammarKind.JSON_OBJECT))
    for i in range(batch):
        params = SamplingParams(max_tokens=count + batch + 64, temperature=0.0, ignore_eos=True)
        engine.submit(
            EngineRequest(
                seq_id=f"{i}",
                token_ids=[5 + i] * 1000,
                num_prompt_tokens=1000,
                sampling=params,
                eos_token_ids=frozenset({EOS}),
                grammar=state if i < constrained else None,
            )
        )
    for _ in range(batch + 8):
        engine.step()
    times, tokens = list[float](), list[int]()
    for _ in range(count):
        busy = time.thread_time()
        output = engine.step()
        times.append(time.thread_time() - busy)
        tokens.append(len(output.tokens))
    engine.settle_launched()
    print(
        f"{constrained:4} of {batch} constrained: the engine's thread is busy for {_low(times):.2f} ms a step (median "
        f"{statistics.median(times) * 1e3:.2f}), {statistics.mean(tokens):.0f} tokens a step"
    )


def _low(times: Sequence[float]) -> float:
    """The tenth percentile in milliseconds: what the machine's other work has least to do with."""
    return sorted(times)[len(times) // 10] * 1e3


if __name__ == "__main__":
    main()
