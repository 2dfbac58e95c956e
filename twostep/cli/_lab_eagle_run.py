"""`twostep lab eagle`: loads the model, trains, and shows what came of it."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from twostep.checkpoint.agreement import check_formats
from twostep.checkpoint.fingerprint import model_fingerprint
from twostep.errors import SetupError
from twostep.lab.eagle.acceptance import Acceptance
from twostep.lab.eagle.answers import AT_ONCE, cut_prompts, sampling_of
from twostep.lab.eagle.folder import TrainingFolder
from twostep.lab.eagle.run import Trained, longest, num_blocks, train_head
from twostep.lab.eagle.training import TrainingPlan
from twostep.model.eagle.config import usual_layers
from twostep.model.families.registry import parse_config
from twostep.model.loading.store import resolve
from twostep.model.runner.model_runner import ModelRunner
from twostep.process.startup import StartUp
from twostep.text.chat_template import ChatTemplate
from twostep.text.model_card import ModelCard
from twostep.text.tokenizer import Tokenizer
from twostep.worker.config import WorkerConfig
from twostep.worker.model import load_model, resolve_config

_HELD_BACK = 0.1


def lab_eagle(args: argparse.Namespace, config: WorkerConfig, texts: Sequence[str]) -> int:
    """Trains and shows; returns the exit status. Raises SetupError."""
    model_dir = resolve(config.model, cache_dir=config.cache_dir)
    check_formats(model_dir, config)
    card, tokenizer, shape = ModelCard.load(model_dir), Tokenizer.load(model_dir), parse_config(model_dir)
    usual_layers(shape.num_layers)
    template = ChatTemplate.of(card)
    if args.prompts == "chat" and not template.available:
        raise SetupError("--prompts chat: the model has no chat template; give --prompts text")
    prompts = cut_prompts(
        texts,
        tokenizer,
        template if template.available and args.prompts != "text" else None,
        num_prompts=args.num_prompts,
        prompt_tokens=args.prompt_tokens,
        held_back_share=_HELD_BACK,
    )
    max_len = longest(prompts, args.answer_tokens)
    if max_len > shape.max_model_len:
        raise SetupError(
            f"the model takes {shape.max_model_len} tokens, and {max_len} are asked of it; lower --prompt-tokens or --answer-tokens"
        )
    plan = TrainingPlan(
        num_rounds=args.rounds,
        num_steps=args.num_speculative_tokens,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )
    config = resolve_config(config)
    folder = TrainingFolder(args.out, _depends_on(args, config, model_fingerprint(model_dir), texts))
    progress = StartUp(
        since=time.monotonic(),
        line=lambda line: print(line, file=sys.stderr, flush=True),
        terminal=sys.stderr if sys.stderr.isatty() else None,
    )
    try:
        block_size = config.block_size
        runner = load_model(
            replace(
                config,
                num_blocks=num_blocks(prompts, args.answer_tokens, block_size),
                max_model_len=max_len,
                max_num_seqs=AT_ONCE,
                max_cudagraph_capture_size=0,
                calibrate=False,
            ),
            progress,
        ).runner
        assert isinstance(runner, ModelRunner), "neither fake nor of several ranks"
        sampling = partial(sampling_of, defaults=card.generation, max_tokens=args.answer_tokens, seed=args.seed)
        trained = train_head(runner, prompts, sampling, card.eos_token_ids, plan, args.draft_vocab_size, folder, progress)
        runner.close()
    except KeyboardInterrupt:
        progress.say(f"{args.out} keeps the answers and the head as it was saved last; the same command goes on with them")
        raise
    finally:
        progress.finish()
    if args.json:
        print(json.dumps(_report(trained, args), indent=2))
    else:
        _show(trained, args)
    return 0


def _depends_on(args: argparse.Namespace, config: WorkerConfig, fingerprint: str, texts: Sequence[str]) -> dict[str, Any]:
    """Returns all that the head is a function of."""
    names = (
        "prompts", "num_prompts", "prompt_tokens", "answer_tokens", "num_speculative_tokens", "draft_vocab_size", "rounds", "batch_size",
        "learning_rate", "seed",
    )  # fmt: skip
    sums = hashlib.sha256()
    for text in texts:
        sums.update(hashlib.sha256(text.encode()).digest())
    return {"model": fingerprint, "texts": sums.hexdigest(), "dtype": config.dtype} | {name: getattr(args, name) for name in names}


def _report(trained: Trained, args: argparse.Namespace) -> dict[str, Any]:
    def of(kind: Acceptance) -> dict[str, Any]:
        return {
            "proposed": list(kind.proposed),
            "accepted": list(kind.accepted),
            "rates": kind.rates,
            "tokens_per_step": kind.tokens_per_step,
        }

    return {
        "head": str(args.out),
        "answer_tokens": {"learned": trained.num_learned, "held_back": trained.num_held_back},
        "greedy": of(trained.greedy),
        "drawn": of(trained.drawn),
    }


def _show(trained: Trained, args: argparse.Namespace) -> None:
    print(
        f"{args.out}: learned from {trained.num_learned:,} tokens of answers; of {trained.num_held_back:,} held back, accepted by position"
    )
    places = "".join(f"{place + 1:>8}" for place in range(len(trained.greedy.rates)))
    print(f"{'':<7}{places}   tokens per step")
    for name, kind in (("greedy", trained.greedy), ("drawn", trained.drawn)):
        print(f"{name:<7}" + "".join(f"{rate:>8.1%}" for rate in kind.rates) + f"   {kind.tokens_per_step:>15.2f}")
