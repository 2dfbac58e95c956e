"""`twostep bench quality`: measures one model after the other, and shows them below each other."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from twostep.checkpoint.model_name import name_of
from twostep.errors import SetupError
from twostep.lab.bench import quality as bench
from twostep.model.loading.store import resolve
from twostep.model.runner.model_runner import ModelRunner
from twostep.text.model_card import ModelCard
from twostep.text.tokenizer import Tokenizer
from twostep.worker.config import WorkerConfig
from twostep.worker.model import load_model

_COLUMNS = ("perplexity", "divergence", "same best", "same tokens", "same answers")


def bench_quality(args: argparse.Namespace, reference: WorkerConfig, others: Sequence[tuple[str, WorkerConfig]], text: str) -> int:
    """Measures and shows; returns the exit status. Raises SetupError."""
    tokenizer = Tokenizer.load(_directory(reference))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.encode(text)
    begin = whole[: -len(token_ids)] if token_ids and whole[-len(token_ids) :] == token_ids else []
    task = bench.cut(
        token_ids[: args.max_tokens],
        begin,
        window=args.window,
        num_prompts=args.num_prompts,
        prompt_tokens=args.prompt_tokens,
        answer_tokens=args.answer_tokens,
    )
    vocab_size = ModelCard.load(_directory(reference)).vocab_size
    for words, config in others:
        directory = _directory(config)
        if ModelCard.load(directory).vocab_size != vocab_size or Tokenizer.load(directory).encode(text) != whole:
            raise SetupError(f"--against {words}: it has other tokens, which cannot be compared one by one; give checkpoints of one model")
    names = ["reference", *(_name(words) for words, _ in others)]
    width = max(map(len, names))
    found = bench.measure_reference(partial(_load, reference, task), task)
    results: list[bench.Quality] = [found.quality]
    if not args.json:
        windows = f"{task.num_scored:,} tokens in {len(task.windows)} windows, {len(task.prompts)} answers of {task.answer_tokens}"
        print(f"reference: {name_of(reference.model)}, {found.dtype} on {found.device}; {windows}")
        print(f"{'':<{width}}" + "".join(f"  {column:>12}" for column in _COLUMNS))
        print(f"{names[0]:<{width}}  {found.quality.perplexity:>12.3f}", flush=True)
    for name, (_, config) in zip(names[1:], others, strict=True):
        result = bench.measure_difference(partial(_load, config, task), task, found)
        results.append(result)
        if not args.json:
            print(f"{name:<{width}}{_row(result)}", flush=True)
    if args.json:
        shown = {"tokens": task.num_scored, "windows": len(task.windows), "dtype": found.dtype, "device": found.device}
        rows = [{"name": name, **asdict(result)} for name, result in zip(names, results, strict=True)]
        print(json.dumps(shown | {"results": rows}, indent=2))
    return 0


def _directory(config: WorkerConfig) -> Path:
    return resolve(config.model, revision=config.model_revision, cache_dir=config.cache_dir)


def _load(config: WorkerConfig, task: bench.Task) -> ModelRunner:
    config = replace(
        config,
        num_blocks=task.num_blocks(config.block_size),
        max_model_len=task.longest,
        max_num_seqs=len(task.prompts),
        max_cudagraph_capture_size=0,
        calibrate=False,
    )
    runner = load_model(config).runner
    assert isinstance(runner, ModelRunner), "neither fake nor of several ranks"
    return runner


def _name(words: str) -> str:
    """Directories by their last part."""
    return ",".join(word if "=" in word else Path(word).name or word for word in words.split(","))


def _row(result: bench.Difference) -> str:
    cells = (
        f"{result.perplexity:.3f}",
        f"{result.divergence:.5f}",
        f"{result.same_best:.1%}",
        f"{result.same_tokens:.1f} of {result.answer_tokens}",
        f"{result.same_answers} of {result.num_answers}",
    )
    return "".join(f"  {cell:>12}" for cell in cells)
