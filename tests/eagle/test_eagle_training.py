"""Training teaches a head what the model says, is the same whether or not it is interrupted, and says how good the head is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_cases import VOCAB, drawn, likeliest, propose, random_head

from twostep.lab.eagle.acceptance import measure
from twostep.lab.eagle.answers import LearntAnswer
from twostep.lab.eagle.folder import TrainingFolder
from twostep.lab.eagle.run import draft_tokens
from twostep.lab.eagle.target import Looked, Target, new_head
from twostep.lab.eagle.training import Trainer, TrainingPlan, loss_of, rate_at
from twostep.model.eagle.files import load_head
from twostep.model.eagle.head import EagleHead
from twostep.model.runner.model_runner import ModelRunner
from twostep.process.startup import NoProgress
from twostep.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def case(head: EagleHead, prompt: int, answer: int, seed: int, sampling: SamplingParams = GREEDY) -> tuple[LearntAnswer, Looked]:
    """An answer of random tokens, and a model that has random states and thinks random things of it."""
    generator = torch.Generator().manual_seed(seed)
    length, own = prompt + answer, len(head.target_ids)
    tokens = torch.randint(VOCAB, (length,), generator=generator).tolist()
    states = torch.randn(length, 3 * head.config.target_hidden_size, generator=generator)
    best = torch.randn(length, own, generator=generator).softmax(-1).topk(5)
    return LearntAnswer(tokens[:prompt], tokens[prompt:], sampling, False), Looked(states, best.indices.int(), best.values)


def plain_loss(head: EagleHead, cases: list[tuple[LearntAnswer, Looked]], num_steps: int) -> float:
    """The loss, one proposal at a time: what the head says when it is led along the answer."""
    lost: list[list[float]] = [[] for _ in range(num_steps)]
    for answer, looked in cases:
        whole, prompt = answer.whole, len(answer.prompt)
        for last in range(prompt, len(whole) - 1):  # the last known token of the answer
            said: list[torch.Tensor] = []

            def lead(logits: torch.Tensor, number: int, said: list[torch.Tensor] = said, last: int = last) -> int:
                said.append(logits)
                return answer_token(last + 1 + number)

            def answer_token(place: int, whole: list[int] = whole) -> int:
                return whole[place] if place < len(whole) else 0

            propose(head, looked.states[:last], whole[: last + 1], num_steps, lead)
            for number, logits in enumerate(said):
                place = last + number  # the model's thoughts after this token
                if place + 1 >= len(whole):
                    break
                log_shares = logits.log_softmax(-1)[head.target_ids[looked.labels[place].long()]]
                lost[number].append(-float((looked.shares[place] * log_shares).sum()))
    weights = [0.8**number for number in range(num_steps)]
    return sum(weight * sum(each) / len(each) for weight, each in zip(weights, lost, strict=True)) / sum(weights)


def test_the_loss_is_that_of_proposals_led_along_the_answer() -> None:
    head = random_head()
    cases = [case(head, prompt, answer, seed) for seed, (prompt, answer) in enumerate([(4, 7), (1, 5), (6, 2)])]
    loss = loss_of(head, [answer for answer, _ in cases], [looked for _, looked in cases], 3)
    assert float(loss) == pytest.approx(plain_loss(head, cases, 3), rel=1e-4)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=9, temperature=1.5, top_p=0.9, seed=7)])
def test_acceptance_is_that_of_proposals_along_the_answer(params: SamplingParams) -> None:
    head = random_head()
    cases = [case(head, prompt, answer, seed, params) for seed, (prompt, answer) in enumerate([(4, 12), (1, 9), (6, 1), (3, 2)])]
    # Answers that the head knows in part: each goes on as it proposes, now and then.
    known = []
    for answer, looked in cases:
        tokens = answer.whole
        for place in range(len(answer.prompt) + 1, len(tokens) - 1, 4):
            choose = likeliest if params.greedy else drawn(params, place + 1 - len(answer.prompt))
            tokens[place + 1 : place + 3] = propose(
                head, looked.states[:place], tokens[: place + 1], len(tokens[place + 1 : place + 3]), choose
            )
        known.append((LearntAnswer(answer.prompt, tokens[len(answer.prompt) :], params, False), looked))
    found = measure(head, [answer for answer, _ in known], lambda number: known[number][1], 3)
    proposed, accepted = [0] * 3, [0] * 3
    for answer, looked in known:
        tokens, prompt = answer.whole, len(answer.prompt)
        for last in range(prompt, len(tokens)):
            choose = likeliest if params.greedy else drawn(params, last + 1 - prompt)
            drafts = propose(head, looked.states[:last], tokens[: last + 1], 3, choose)
            right = True
            for number, (draft, token) in enumerate(zip(drafts, tokens[last + 1 :], strict=False)):
                right = right and draft == token
                proposed[number] += 1
                accepted[number] += right
    assert (list(found.proposed), list(found.accepted)) == (proposed, accepted)
    assert 0 < accepted[1] <= accepted[0] < proposed[0]
    assert found.tokens_per_step == pytest.approx(1 + sum(a / p for a, p in zip(accepted, proposed, strict=True)))


class Interrupted(Exception):
    pass


class Stopping(NoProgress):
    """Ends the work when so many batches are done."""

    def __init__(self, after: int | None) -> None:
        self._after = after

    def advance(self, done: int, total: int, unit: str = "") -> None:
        if done == self._after:
            raise Interrupted


@pytest.fixture(scope="module")
def runner(tiny_llama_dir: Path) -> ModelRunner:
    return ModelRunner(tiny_llama_dir, num_blocks=16)


PLAN = TrainingPlan(num_rounds=8, num_steps=3, batch_size=2, learning_rate=5e-3, seed=0, save_every=3)


def model_answers(runner: ModelRunner) -> list[LearntAnswer]:
    """Greedy, as if the engine had made them."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for _ in range(5):
        prompt = torch.randint(runner.vocab_size, (6,), generator=generator).tolist()
        found.append(LearntAnswer(prompt, torch.randint(40, (20,), generator=generator).tolist(), GREEDY, False))
    return found


def train(runner: ModelRunner, directory: Path, stop_after: int | None = None, **changes: Any) -> Trainer:
    answers = model_answers(runner)
    folder = TrainingFolder(directory, {"seed": 0} | changes)
    trainer = Trainer(new_head(runner, draft_tokens(answers, 60, runner.vocab_size), 0), PLAN)
    folder.restore(trainer)
    target = Target(runner, trainer.head)
    trainer.train(answers, lambda number: target.look(number, answers[number].whole), lambda: folder.save(trainer), Stopping(stop_after))
    return trainer


def test_training_on_a_small_model_lowers_the_loss(runner: ModelRunner, tmp_path: Path) -> None:
    trainer = train(runner, tmp_path)
    assert len(trainer.losses) == trainer.num_done == PLAN.num_batches(5) == 24
    assert sum(trainer.losses[-3:]) < 0.8 * sum(trainer.losses[:3])
    # What was saved last is the head, and can be read as any other.
    head = load_head(tmp_path, runner.config, runner.model.embedding, torch.float32)
    for name, tensor in trainer.head.state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor), name


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(runner: ModelRunner, tmp_path: Path) -> None:
    whole = train(runner, tmp_path / "whole")
    for stop_after in (4, 10):
        with pytest.raises(Interrupted):
            train(runner, tmp_path / "parts", stop_after)
        assert (tmp_path / "parts" / "model.safetensors").exists()
    rest = train(runner, tmp_path / "parts")
    # From the last head that was saved on, which is that of batch 9.
    assert len(rest.losses) == 24 - 9
    for name, tensor in whole.head.state_dict().items():
        assert torch.equal(rest.head.state_dict()[name], tensor), name
    again = train(runner, tmp_path / "parts")
    assert again.losses == []


def test_the_head_begins_with_what_the_model_says(runner: ModelRunner) -> None:
    """Its output layer has the rows of the model's."""
    ids = draft_tokens(model_answers(runner), 60, runner.vocab_size)
    head = new_head(runner, ids, 0)
    x = torch.randn(3, 64)
    with torch.inference_mode():
        want = runner.model.logits(runner.model.last_norm(x))[:, ids]
    torch.testing.assert_close(head.logits(x), want, rtol=0, atol=1e-4)


def test_what_the_model_thinks_is_its_logits(runner: ModelRunner) -> None:
    head = new_head(runner, torch.arange(0, runner.vocab_size, 3), 0)
    tokens = model_answers(runner)[0].whole
    looked = Target(runner, head).look(0, tokens)
    from twostep.lab.one_prompt import prompt_batch  # noqa: PLC0415

    shares = runner.forward(prompt_batch(tokens, runner.kv_shape)).softmax(-1)
    assert looked.states.shape == (len(tokens), 3 * 64)
    for place in range(len(tokens)):
        torch.testing.assert_close(looked.shares[place], shares[place, head.target_ids[looked.labels[place].long()]])
        assert float(looked.shares[place, 0]) == float(shares[place, ::3].max())


def test_tokens_to_propose_are_the_answers_and_then_the_first() -> None:
    answers = [LearntAnswer([1], [50, 50, 9, 7], GREEDY, False), LearntAnswer([2], [50, 9, 60], GREEDY, False)]
    assert draft_tokens(answers, 2, VOCAB).tolist() == [9, 50]
    assert draft_tokens(answers, 3, VOCAB).tolist() == [7, 9, 50]
    assert draft_tokens(answers, 7, VOCAB).tolist() == [0, 1, 2, 7, 9, 50, 60]
    assert draft_tokens(answers, 1000, VOCAB).tolist() == list(range(VOCAB))


def test_the_rate_rises_and_falls() -> None:
    rates = [rate_at(number, 100) for number in range(100)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] < 0.001
