"""`twostep bench quality`: how far the answers of a checkpoint in fewer bits, or over lossy KV, are from those of a reference.

    the text    in windows, each a prompt of its own, whose logits are all looked at    perplexity, divergence, best tokens
    answers     parts of the text, continued greedily by the engine                     tokens up to the first that differs

The reference's logits are kept in memory, as they came, so that the models need not be loaded at the same time.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.errors import SetupError
from twostep.lab.one_prompt import prompt_batch
from twostep.model.runner.model_runner import ModelRunner
from twostep.process.startup import Progress
from twostep.sampling_params import SamplingParams

# Loads a model with a pool for the task (Task.num_blocks), of whose steps none with prompts is captured: all their rows are sampled.
Load = Callable[[], ModelRunner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What each model is asked. `windows`: token ids of prompts whose every next token is scored; `prompts`: of those that are continued,
    all equally long."""

    windows: Sequence[Sequence[int]]
    prompts: Sequence[Sequence[int]]
    answer_tokens: int

    @property
    def num_scored(self) -> int:
        return sum(len(window) - 1 for window in self.windows)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(self.prompts[0]) + self.answer_tokens, *(len(window) for window in self.windows))

    def num_blocks(self, block_size: int) -> int:
        """Returns how many blocks hold one window, or all answers at once."""
        of_answer = -(-(len(self.prompts[0]) + self.answer_tokens) // block_size)
        return max(len(self.prompts) * of_answer, -(-self.longest // block_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Means over the scored tokens. `perplexity`: exp of the mean negative log likelihood."""

    perplexity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Quality):
    """What is different from the reference.

    divergence    KL(reference ‖ this) of a next token's distribution, in nats
    same_best     share of the tokens after which both think the same one likeliest, given the text's own tokens up to there
    same_tokens   mean number of an answer's first tokens that both have
    same_answers  how many answers are the same to their ends, of `num_answers` of `answer_tokens` each
    """

    divergence: float
    same_best: float
    same_tokens: float
    same_answers: int
    num_answers: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Reference:
    """`logits` [T, vocab_size] of each window in the model's dtype, in host memory; `answers`: token ids of each prompt's."""

    quality: Quality
    dtype: str
    device: str
    logits: Sequence[torch.Tensor]
    answers: Sequence[Sequence[int]]


def cut(token_ids: Sequence[int], begin: Sequence[int], *, window: int, num_prompts: int, prompt_tokens: int, answer_tokens: int) -> Task:
    """Makes a task of a text. `begin`: what each prompt begins with (<s>), if the model's do. Raises SetupError for too short a text."""
    fresh = window - len(begin)
    if fresh < 1 or len(token_ids) <= max(prompt_tokens, 1):
        raise SetupError(
            f"a text of {len(token_ids)} tokens gives no windows of {window} and prompts of {prompt_tokens}; give a longer --text or "
            "--max-tokens, another --window, or a smaller --prompt-tokens"
        )
    windows = [[*begin, *token_ids[start : start + fresh]] for start in range(0, len(token_ids), fresh)]
    starts = [i * (len(token_ids) - prompt_tokens) // num_prompts for i in range(num_prompts)]
    return Task(
        windows=[ids for ids in windows if len(ids) > 1],
        prompts=[[*begin, *token_ids[start : start + prompt_tokens]] for start in starts],
        answer_tokens=answer_tokens,
    )


def measure_reference(load: Load, task: Task, progress: Progress) -> Reference:
    """Raises SetupError."""
    with _loaded(load) as runner:
        logits = [_logits(runner, window).cpu().clone() for window in _counted(task.windows, progress)]
        answers = _answers(runner, task, progress)
        dtype, device = runner.kv_shape.dtype, str(runner.kv_cache.tensor.device)
    lost = sum(_lost(_log_softmax(rows), window) for rows, window in zip(logits, task.windows, strict=True))
    return Reference(Quality(perplexity=_perplexity(lost, task)), dtype, device, logits, answers)


def measure_difference(load: Load, task: Task, reference: Reference, progress: Progress) -> Difference:
    """Of a model with the reference's vocabulary. Raises SetupError."""
    lost = divergence = 0.0
    same_best = 0
    with _loaded(load) as runner:
        for window, rows in zip(_counted(task.windows, progress), reference.logits, strict=True):
            want, got = _log_softmax(rows), _log_softmax(_logits(runner, window).cpu())
            lost += _lost(got, window)
            divergence += float((want.exp() * (want - got))[:-1].sum(dtype=torch.float64))
            same_best += int((want.argmax(-1) == got.argmax(-1))[:-1].sum())
        answers = _answers(runner, task, progress)
    same = [_num_same(ours, theirs) for ours, theirs in zip(answers, reference.answers, strict=True)]
    return Difference(
        perplexity=_perplexity(lost, task),
        divergence=divergence / task.num_scored,
        same_best=same_best / task.num_scored,
        same_tokens=sum(same) / len(same),
        same_answers=same.count(task.answer_tokens),
        num_answers=len(same),
        answer_tokens=task.answer_tokens,
    )


@contextmanager
def _loaded(load: Load) -> Iterator[ModelRunner]:
    """Its model, gone at the end."""
    runner = load()
    try:
        yield runner
    finally:
        runner.close()
        del runner
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _counted(windows: Sequence[Sequence[int]], progress: Progress) -> Iterator[Sequence[int]]:
    progress.phase("windows")
    for number, window in enumerate(windows):
        progress.advance(number, len(windows))
        yield window


def _logits(runner: ModelRunner, token_ids: Sequence[int]) -> torch.Tensor:
    """[T, vocab_size], valid until the next step."""
    return runner.forward(prompt_batch(token_ids, runner.kv_shape))


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """float32. Raises SetupError if there is no such thing."""
    result = logits.float().log_softmax(-1)
    if not math.isfinite(float(result.sum(dtype=torch.float64))):
        raise SetupError("logits over the text are not finite: another --dtype may hold the model's values; else its files are damaged")
    return result


def _lost(log_probs: torch.Tensor, window: Sequence[int]) -> float:
    """Sum of the negative log likelihoods of a window's tokens after the first, in nats."""
    return -float(log_probs[:-1].gather(1, torch.tensor(window[1:])[:, None]).sum(dtype=torch.float64))


def _perplexity(lost: float, task: Task) -> float:
    return math.exp(lost / task.num_scored)


def _answers(runner: ModelRunner, task: Task, progress: Progress) -> list[list[int]]:
    progress.phase("answers")
    engine = Engine(
        runner,
        EngineConfig(
            max_num_batched_tokens=max(512, len(task.prompts)),
            max_num_seqs=len(task.prompts),
            max_waiting=len(task.prompts),
            enable_prefix_caching=False,
            hash_unit=runner.kv_shape.block_size,
        ),
    )
    greedy = SamplingParams(max_tokens=task.answer_tokens, temperature=0.0, ignore_eos=True)
    requests = [
        EngineRequest(seq_id=f"quality-{i}", token_ids=prompt, num_prompt_tokens=len(prompt), sampling=greedy)
        for i, prompt in enumerate(task.prompts)
    ]
    return [[token.token_id for token in answer] for answer in generate(engine, requests)]


def _num_same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
