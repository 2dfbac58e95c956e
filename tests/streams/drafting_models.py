"""A small random model that can be drafted for, and what drafts for it: a model much like it, and a head that has seen some of its answers.

Its next token hangs mostly on the last one and is one of some fifty, so that answers repeat themselves and a head learns in seconds: all
proposers are right often, and wrong often."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import IM_END, save_tiny_model

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.lab.eagle.answers import LearntAnswer
from twostep.lab.eagle.target import Target, new_head
from twostep.lab.eagle.training import Trainer, TrainingPlan
from twostep.model.eagle.files import save_head
from twostep.model.eagle.head import EagleHead
from twostep.model.heads.source import HeadSource
from twostep.model.runner.model_runner import ModelRunner
from twostep.process.startup import NoProgress
from twostep.sampling_params import SamplingParams
from twostep.settings.speculative import DRAFT_MODEL, EAGLE3, NGRAM

NUM_USUAL = 48
# A draft model's weights differ from the model's by so much of their spread.
_NOISE = 0.1
_NUM_ANSWERS, _NUM_ROUNDS = 48, 8


@dataclass(frozen=True)
class DraftedModel:
    """`usual`: the tokens that its answers mostly have, the end of an answer among them."""

    model_dir: Path
    draft_dir: Path
    head_dir: Path
    usual: list[int]

    def runner(self, num_blocks: int, block_size: int, method: str = NGRAM, most: int = 0) -> ModelRunner:
        """`method`, `most`: those of `drafting`."""
        head = HeadSource(method=EAGLE3, head_dir=self.head_dir, most_tokens=most) if method == EAGLE3 else None
        return runner_of(self.model_dir, num_blocks, block_size, head)

    def drafting(self, method: str, most: int, draft_blocks: int) -> dict[str, Any]:
        """Returns the options of a whole system whose workers draft like that, at most `most` tokens."""
        config = {"method": method, "num_speculative_tokens": most}
        config |= {NGRAM: {"prompt_lookup_min": 1}, DRAFT_MODEL: {"model": "draft"}, EAGLE3: {"model": "head"}}[method]
        options: dict[str, Any] = {"worker_options": {"speculative_config": json.dumps(config)}}
        if method == DRAFT_MODEL:
            options["make_draft"] = lambda: runner_of(self.draft_dir, draft_blocks, 16)
        return options | {"has_head": method == EAGLE3}


def runner_of(directory: Path, num_blocks: int, block_size: int, head: HeadSource | None = None) -> ModelRunner:
    return ModelRunner(directory, dtype="float32", num_blocks=num_blocks, block_size=block_size, num_threads=1, head=head)


def save_drafted_model(directory: Path) -> DraftedModel:
    """Blocks for some seconds, in which the head learns."""
    model_dir, draft_dir = (save_tiny_model(directory / name) for name in ("model", "draft"))
    usual = [*torch.randperm(300, generator=torch.Generator().manual_seed(3))[: NUM_USUAL - 1].add_(3).tolist(), IM_END]

    def settle(weights: Mapping[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.1)
        weights["model.embed_tokens.weight"].mul_(5.0)
        weights["lm_head.weight"][usual] *= 3.0

    def shake(weights: Mapping[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for weight in weights.values():
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * _NOISE)

    for path in (model_dir, draft_dir):
        _change(path, settle)
    _change(draft_dir, shake)
    head_dir = directory / "head"
    save_head(_learned(runner_of(model_dir, 300, 16)), head_dir)
    return DraftedModel(model_dir, draft_dir, head_dir, usual)


def _change(model_dir: Path, change: Callable[[Mapping[str, torch.Tensor]], None]) -> None:
    file = model_dir / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def _learned(runner: ModelRunner) -> EagleHead:
    """Returns a head that has learned from answers to a token each."""
    requests = []
    for i in range(_NUM_ANSWERS):
        params = SamplingParams(max_tokens=40, temperature=(0.0, 0.8)[i % 2], seed=i, ignore_eos=True)
        requests.append(EngineRequest(seq_id=f"{i}", token_ids=[3 + 7 * i, 5], num_prompt_tokens=2, sampling=params))
    answers = [
        LearntAnswer(request.token_ids, [token.token_id for token in tokens], request.sampling, False)
        for request, tokens in zip(requests, generate(Engine(runner, EngineConfig()), requests), strict=True)
    ]
    plan = TrainingPlan(num_rounds=_NUM_ROUNDS, num_steps=2, batch_size=8, learning_rate=1e-2, seed=0)
    trainer = Trainer(new_head(runner, torch.arange(runner.vocab_size), 0), plan)
    look = Target(runner, trainer.head).look
    trainer.train(answers, lambda number: look(number, answers[number].whole), lambda: None, NoProgress())
    return trainer.head.eval().requires_grad_(False)
