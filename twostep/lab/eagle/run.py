"""The whole of `twostep lab eagle`, over a model that is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from twostep.errors import SetupError
from twostep.lab.eagle.acceptance import Acceptance, measure
from twostep.lab.eagle.answers import AT_ONCE, LearntAnswer, LearntPrompt, make_answers
from twostep.lab.eagle.folder import TrainingFolder
from twostep.lab.eagle.target import Looked, Target, new_head
from twostep.lab.eagle.training import Trainer, TrainingPlan
from twostep.model.runner.model_runner import ModelRunner
from twostep.process.startup import Progress
from twostep.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Trained:
    """Of the answers held back: those that were greedy, and those that were drawn."""

    greedy: Acceptance
    drawn: Acceptance
    num_learned: int  # tokens of answers
    num_held_back: int


def num_blocks(prompts: Sequence[LearntPrompt], max_tokens: int, block_size: int) -> int:
    """Returns how many blocks hold as many answers as are made at once."""
    return AT_ONCE * -(-longest(prompts, max_tokens) // block_size)


def longest(prompts: Sequence[LearntPrompt], max_tokens: int) -> int:
    return max(len(prompt.token_ids) for prompt in prompts) + max_tokens


def train_head(
    runner: ModelRunner,
    prompts: Sequence[LearntPrompt],
    sampling: Callable[[int], SamplingParams],
    eos_token_ids: frozenset[int],
    plan: TrainingPlan,
    draft_vocab_size: int,
    folder: TrainingFolder,
    progress: Progress,
) -> Trained:
    """Blocks for minutes to hours. May be interrupted at any time: called again with the same folder, it goes on."""
    answers = folder.answers()
    progress.phase("answers")

    def keep(more: Sequence[LearntAnswer]) -> None:
        folder.keep_answers(more)
        answers.extend(more)
        progress.advance(len(answers), len(prompts), "answers")

    make_answers(runner, prompts, sampling, eos_token_ids, keep, first=len(answers))
    # There is nothing to propose in one of a single token.
    learned = [answer for answer in answers if not answer.held_back and len(answer.token_ids) > 1]
    held_back = [answer for answer in answers if answer.held_back]
    if not learned:
        raise SetupError("the model's answers are empty: it ends them at once; give other texts, or --prompts text")
    ids = draft_tokens(learned, draft_vocab_size, runner.vocab_size)
    trainer = Trainer(new_head(runner, ids, plan.seed), plan)
    folder.restore(trainer)
    target = Target(runner, trainer.head)

    def look_at(which: Sequence[LearntAnswer], first: int, number: int) -> Looked:
        return target.look(first + number, which[number].whole)

    trainer.train(learned, partial(look_at, learned, 0), partial(folder.save, trainer), progress)
    progress.phase("held back")
    trainer.head.eval()
    found = {}
    for greedy in (True, False):
        some = [answer for answer in held_back if answer.sampling.greedy is greedy]
        found[greedy] = measure(trainer.head, some, partial(look_at, some, (1 + greedy) * len(prompts)), plan.num_steps)
    return Trained(found[True], found[False], _num_tokens(learned), _num_tokens(held_back))


def draft_tokens(answers: Sequence[LearntAnswer], count: int, vocab_size: int) -> torch.Tensor:
    """Returns int64 [count], ascending: the tokens that the answers have most often, then those of the lowest numbers, which are the most
    usual ones in most vocabularies."""
    seen = Counter(token for answer in answers for token in answer.token_ids)
    # The order of what is equally often is the numbers'.
    often = sorted(seen, key=lambda token: (-seen[token], token))
    rest = (token for token in range(vocab_size) if token not in seen)
    chosen = [*often, *rest][: min(count, vocab_size)]
    return torch.tensor(sorted(chosen))


def _num_tokens(answers: Sequence[LearntAnswer]) -> int:
    return sum(len(answer.token_ids) for answer in answers)
