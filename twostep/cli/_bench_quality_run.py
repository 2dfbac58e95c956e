"""`twostep bench quality`: measures one model after the other, and shows them below each other."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from twostep.checkpoint.agreement import check_formats
from twostep.checkpoint.model_name import name_of
from twostep.errors import SetupError
from twostep.lab.bench import quality as bench
from twostep.model.families.registry import parse_config
from twostep.model.loading.store import resolve
from twostep.model.runner.model_runner import ModelRunner
from twostep.process.startup import Progress, StartUp
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
    # Whatever is wrong with the last is said before the first is measured.
    _check("--model", reference, task)
    for words, config in others:
        _check(f"--against {words}", config, task)
        directory = _directory(config)
        if ModelCard.load(directory).vocab_size != vocab_size or Tokenizer.load(directory).encode(text) != whole:
            raise SetupError(f"--against {words}: it has other tokens, which cannot be compared one by one; give checkpoints of one model")
    names = ["reference", *(_name(words) for words, _ in others)]
    width = max(map(len, names))
    with _progress(names[0]) as progress:
        found = bench.measure_reference(partial(_load, reference, task, progress), task, progress)
    results: list[bench.Quality] = [found.quality]
    if not args.json:
        windows = f"{task.num_scored:,} tokens in {len(task.windows)} windows, {len(task.prompts)} answers of {task.answer_tokens}"
        print(f"reference: {name_of(reference.model)}, {found.dtype} on {found.device}; {windows}")
        print(f"{'':<{width}}" + "".join(f"  {column:>12}" for column in _COLUMNS))
        print(f"{names[0]:<{width}}  {found.quality.perplexity:>12.3f}", flush=True)
    for name, (_, config) in zip(names[1:], others, strict=True):
        with _progress(name) as progress:
            result = bench.measure_difference(partial(_load, config, task, progress), task, found, progress)
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


def _check(where: str, config: WorkerConfig, task: bench.Task) -> None:
    """Raises SetupError for what loading would refuse, by the files' words alone."""
    directory = _directory(config)
    try:
        check_formats(directory, config)
        longest = parse_config(directory).max_model_len
    except SetupError as error:
        raise SetupError(f"{where}: {error.message}") from error
    if task.longest > longest:
        raise SetupError(
            f"{where}: the model takes {longest} tokens, and {task.longest} are asked of it; lower --window, or --answer-tokens"
        )


@contextmanager
def _progress(name: str) -> Iterator[Progress]:
    """On standard error, which has a bar where it is a terminal, and a line now and then elsewhere."""
    progress = StartUp(
        since=time.monotonic(),
        line=lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True),
        terminal=sys.stderr if sys.stderr.isatty() else None,
    )
    try:
        yield progress
    finally:
        progress.finish()


def _load(config: WorkerConfig, task: bench.Task, progress: Progress) -> ModelRunner:
    config = replace(
        config,
        num_blocks=task.num_blocks(config.block_size),
        max_model_len=task.longest,
        max_num_seqs=len(task.prompts),
        max_cudagraph_capture_size=0,
        calibrate=False,
    )
    runner = load_model(config, progress).runner
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
